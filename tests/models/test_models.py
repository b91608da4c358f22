# SPDX-License-Identifier: Apache-2.0
"""Flax NNX, Flax Linen and a dict of arrays train through one step, as plain optax does."""

from __future__ import annotations

import functools

import flax.linen
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import zerojax as zj
from models import mlp, transformer


def regression(apply):
    def loss_fn(params, batch, key):
        error = (apply(params, batch["x"]) - batch["y"]) ** 2
        return jnp.sum(error * batch["weight"][:, None]), jnp.sum(batch["weight"])

    return loss_fn


def nnx_model():
    """The parameters are an nnx.State, as `nnx.split` gives it."""

    class Net(nnx.Module):
        def __init__(self, rngs):
            self.up = nnx.Linear(16, 32, rngs=rngs)
            self.down = nnx.Linear(32, 8, rngs=rngs)

        def __call__(self, x):
            return self.down(nnx.relu(self.up(x)))

    graph = nnx.graphdef(nnx.eval_shape(lambda: Net(nnx.Rngs(0))))
    init = lambda key: nnx.state(Net(nnx.Rngs(key)), nnx.Param)
    return init, regression(lambda params, x: nnx.merge(graph, params)(x))


def linen_model():
    class Net(flax.linen.Module):
        @flax.linen.compact
        def __call__(self, x):
            return flax.linen.Dense(8)(jnp.tanh(flax.linen.Dense(32)(x)))

    net = Net()
    return lambda key: net.init(key, jnp.zeros((1, 16))), regression(net.apply)


def dict_model():
    return mlp.init_params, mlp.loss_fn


def tiny_transformer():
    config = transformer.TransformerConfig(
        32, 16, 2, 4, 2, 16, 32, norm="rmsnorm", positions="rope", mlp="swiglu", remat="full"
    )
    return (
        functools.partial(transformer.init_params, config),
        functools.partial(transformer.loss_fn, config),
    )


def batch_of(loss_fn):
    random = np.random.default_rng(0)
    if isinstance(loss_fn, functools.partial):
        mask = random.uniform(size=(16, 16)) > np.linspace(0, 1, 16)[:, None]  # unequal rows
        return {
            "tokens": random.integers(0, 32, (16, 17), np.int32),
            "mask": mask.astype(np.float32),
        }
    weight = random.uniform(size=16).astype(np.float32)
    x = random.normal(size=(16, 16)).astype(np.float32)
    return {"x": x, "y": np.sin(x[:, :8]), "weight": weight}


def plain_losses(init, loss_fn, optimizer, batch):
    params = init(jax.random.split(jax.random.key(0))[0])
    opt_state, losses = optimizer.init(params), []

    @jax.jit
    def step(params, opt_state):
        def mean(params):
            loss_sum, weight = loss_fn(params, batch, None)
            return loss_sum / weight

        loss, grads = jax.value_and_grad(mean)(params)
        updates, opt_state = optimizer.update(grads, opt_state, params)
        return optax.apply_updates(params, updates), opt_state, loss

    for _ in range(4):
        params, opt_state, loss = step(params, opt_state)
        losses.append(float(loss))
    return losses


@pytest.mark.parametrize("model", [nnx_model, linen_model, dict_model, tiny_transformer])
def test_trains_through_the_same_step(model):
    init, loss_fn = model()
    optimizer, batch = optax.adamw(1e-2), batch_of(loss_fn)
    expected = plain_losses(init, loss_fn, optimizer, batch)
    assert expected[-1] < expected[0]
    for stage, partitioner in ((3, "manual"), (3, "auto"), (1, "manual")):
        layers = ("blocks",) if model in (dict_model, tiny_transformer) else ()
        plan = zj.make_plan(
            init,
            optimizer,
            zj.make_mesh(),
            stage=stage,
            partitioner=partitioner,
            layers=layers,
            max_unsharded=0.05,
        )
        state = zj.init_state(plan, jax.random.key(0))
        step = zj.make_train_step(loss_fn, plan, microbatches=2)
        losses = []
        for _ in range(4):
            state, metrics = step(state, zj.shard_batch(batch, plan))
            losses.append(float(metrics["loss"]))
        np.testing.assert_allclose(losses, expected, rtol=2e-5)
        assert jax.tree.structure(state.params) == jax.tree.structure(
            jax.eval_shape(init, jax.random.key(0))
        )
