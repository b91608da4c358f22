# SPDX-License-Identifier: Apache-2.0
"""Loss functions are ordinary single-device code: what JAX runs there, both partitioners run."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax import lax

import zerojax as zj
from tests import toy

X = np.random.default_rng(0).normal(size=(16, 5, 8)).astype(np.float32)


def scan_from_zeros(params, batch, key):
    """A recurrent layer as everybody writes it."""
    x_TBD = jnp.swapaxes(batch["x"], 0, 1)
    start = jnp.zeros((x_TBD.shape[1], 8))
    h, _ = lax.scan(lambda h, x: (jnp.tanh(x + h @ params["w"]), None), start, x_TBD)
    return jnp.sum(h**2), h.size


def loop_until(params, batch, key):
    """Without a gradient through the loop, which JAX does not have."""
    grow = lambda state: (state[0] + 1, state[1] * 1.5)
    _, scale = lax.while_loop(lambda state: state[0] < 3, grow, (0, jnp.ones(())))
    return jnp.sum((scale * batch["x"] @ params["w"]) ** 2), batch["x"].size


def branches(params, batch, key):
    x = batch["x"][:, 0]
    h = lax.cond(params["flag"] > 0, lambda: x @ params["w"], lambda: jnp.zeros(x.shape))
    return jnp.sum(h**2), h.size


@jax.custom_vjp
def matmul(x, w):
    return x @ w


matmul.defvjp(lambda x, w: (x @ w, (x, w)), lambda saved, g: (g @ saved[1].T, saved[0].T @ g))


def custom_gradient_of_a_constant(params, batch, key):
    h = matmul(jnp.ones((batch["x"].shape[0], 8)), params["w"]) + batch["x"][:, 0]
    return jnp.sum(h**2), h.size


def checkpointed(params, batch, key):
    layer = jax.checkpoint(lambda x: jnp.tanh(x @ params["w"]))
    return jnp.sum(layer(layer(batch["x"])) ** 2), batch["x"].size


def mapped_over_rows(params, batch, key):
    losses = jax.vmap(lambda x, k: jnp.sum((x @ params["w"]) ** 2))(
        batch["x"], jax.random.split(key, batch["x"].shape[0])
    )
    return losses.sum(), losses.size


def unused_parameters_and_constant_weight(params, batch, key):
    return jnp.sum(batch["x"] @ params["w"][:, :1]), 3


def sorted_and_gathered(params, batch, key):
    h = batch["x"][:, 0] @ params["w"]
    top, index = lax.top_k(h, 3)
    return jnp.sum(top * jnp.take_along_axis(h, index, 1)), h.size


LOSSES = [
    scan_from_zeros,
    loop_until,
    branches,
    custom_gradient_of_a_constant,
    checkpointed,
    mapped_over_rows,
    unused_parameters_and_constant_weight,
    sorted_and_gathered,
]


def init_params(key):
    return {"w": jax.random.normal(key, (8, 8)), "idle": jnp.ones(8), "flag": jnp.ones((), int)}


def make_step(loss_fn, **kwargs):
    plan = zj.make_plan(init_params, optax.sgd(0.1), zj.make_mesh(), **kwargs)
    return zj.make_train_step(loss_fn, plan)


@pytest.mark.parametrize("loss_fn", LOSSES)
def test_any_code_runs_and_equals_one_device(loss_fn):
    params = init_params(jax.random.split(jax.random.key(0))[0])
    flag = params.pop("flag")

    def mean(trained):
        parts = [
            loss_fn({**trained, "flag": flag}, {"x": rows}, jax.random.key(0))
            for rows in np.split(X, 8)
        ]
        loss_sum, weight = map(sum, zip(*parts, strict=True))
        return loss_sum / weight

    loss, grads = jax.value_and_grad(mean)(params)
    for kwargs in ({"stage": 3}, {"stage": 1}, {"stage": 3, "partitioner": "auto"}):
        step = make_step(loss_fn, **kwargs)
        state, metrics = step(zj.init_state(step.plan, jax.random.key(0)), {"x": X})
        np.testing.assert_allclose(metrics["loss"], loss, rtol=2e-6)
        moved = jax.tree.map(
            lambda old, new: (old - new) / 0.1, params, {k: state.params[k] for k in params}
        )
        jax.tree.map(
            lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5), moved, grads
        )


def checks_of(step, batch):
    """The values of check_vma in the program's shard_maps."""
    jaxpr = jax.make_jaxpr(step.jitted)(step.plan.abstract_state, batch)
    inner = jaxpr.jaxpr.eqns[0].params["jaxpr"].jaxpr
    return [e.params["check_vma"] for e in inner.eqns if e.primitive.name == "shard_map"]


def test_jax_checks_replication_wherever_the_code_types():
    """`check_vma=True` for the toy model; only code that does not type goes unchecked."""
    for stage in range(4):
        step = zj.make_train_step(toy.loss_fn, toy.make_plan(stage=stage), microbatches=2)
        assert checks_of(step, next(toy.batches())) == [True]
    assert checks_of(make_step(checkpointed, stage=3), {"x": X}) == [True]
    assert checks_of(make_step(scan_from_zeros, stage=3), {"x": X}) == [False]


def test_other_errors_of_the_loss_function_are_its_own():
    def broken(params, batch, key):
        raise TypeError("mine")

    step = make_step(broken, stage=3)
    with pytest.raises(TypeError, match="mine"):
        step.lower(step.plan.abstract_state, {"x": X})


def test_the_step_runs_inside_a_users_own_jit_and_scan():
    step = make_step(checkpointed, stage=3)
    state = zj.init_state(step.plan, jax.random.key(0))

    @jax.jit
    def run(state, batches):
        return lax.scan(lambda state, batch: step(state, batch), state, batches)

    state, metrics = run(state, {"x": np.stack([X, X, X])})
    assert int(state.step) == 3
    assert np.all(np.diff(metrics["loss"]) < 0)
