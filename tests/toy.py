# SPDX-License-Identifier: Apache-2.0
"""A small model of awkward sizes, and the one oracle: a plain optax loop on one device."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax

import zerojax as zj

VOCAB, TARGETS, ROWS, TOKENS, STEPS = 33, 17, 32, 7, 5  # 33 = 4 * 8 + 1
KEY = 3
RTOL = 2e-5  # of what equals the oracle
ERROR = "relative error"  # under which a test records what it found


def init_params(key):
    """Sizes 3, 5, 17 and 33 divide by nothing; 8, 16 and 24 do; one layer stack; one integer."""
    keys = iter(jax.random.split(key, 8))

    def normal(*shape):
        return jax.random.normal(next(keys), shape) / np.sqrt(shape[-2])

    return {
        "embed": normal(VOCAB, 16),
        "blocks": {"up": normal(3, 16, 24), "scale": jnp.ones((3, 24)), "down": normal(3, 24, 16)},
        "odd": {
            "in": normal(16, 5),
            "mid": normal(5, 3),
            "out": normal(3, 17),
            "bias": jnp.zeros(5),
        },
        "head": normal(17, TARGETS),
        "temperature": jnp.ones(()),
        "ids": jnp.arange(TARGETS, dtype=jnp.int32),
    }


def logits(params, tokens, dropout=lambda x: x):
    x = params["embed"][tokens].mean(axis=1)

    def block(x, p):
        return x + jnp.tanh(dropout(x) @ p["up"] * p["scale"]) @ p["down"], None

    x, _ = jax.lax.scan(block, x, params["blocks"])
    odd = params["odd"]
    x = jnp.tanh(x @ odd["in"] + odd["bias"]) @ odd["mid"] @ odd["out"]
    return (x @ params["head"] * params["temperature"])[:, params["ids"]]


def loss_fn(params, batch, key):
    del key
    losses = optax.softmax_cross_entropy_with_integer_labels(
        logits(params, batch["tokens"]).astype(jnp.float32), batch["target"]
    )
    loss_sum, weight = jnp.sum(losses * batch["weight"]), jnp.sum(batch["weight"])
    return (loss_sum, weight), {"loss_again": loss_sum}


def batches(weights="equal", num_rows=ROWS, num_steps=STEPS):
    """`weights`: "equal", "unequal", or "masked": the first eighth of the rows counts nothing."""
    random = np.random.default_rng(0)
    for _ in range(num_steps):
        weight = {
            "equal": np.ones(num_rows),
            "unequal": random.uniform(0, 2, num_rows) * (random.random(num_rows) > 0.3),
            "masked": np.arange(num_rows) >= num_rows // 8,
        }[weights]
        yield {
            "tokens": random.integers(0, VOCAB, (num_rows, TOKENS), np.int32),
            "target": random.integers(0, TARGETS, num_rows, np.int32),
            "weight": weight.astype(np.float32),
        }


def is_matrix(params):
    return jax.tree.map(lambda x: x.ndim > 1, params)


OPTIMIZERS = {
    "adamw": lambda: optax.adamw(1e-2),
    "clip_adamw": lambda: optax.chain(optax.clip_by_global_norm(0.5), optax.adamw(1e-2)),
    "adafactor": lambda: optax.adafactor(1e-2, min_dim_size_to_factor=4),
    "lamb": lambda: optax.lamb(1e-2),
    "lion": lambda: optax.lion(1e-3),
    "multisteps": lambda: optax.MultiSteps(optax.adamw(1e-2), every_k_schedule=2),
    "masked": lambda: optax.masked(optax.adamw(1e-2), is_matrix),
}


def oracle(init, loss, optimizer, data):
    """Plain optax on one device: losses, gradient norms and the final parameters."""
    params = init(jax.random.split(jax.random.key(KEY))[0])
    trained, ids = {k: v for k, v in params.items() if k != "ids"}, params["ids"]
    opt_state, losses, norms = optimizer.init(trained), [], []

    @jax.jit
    def step(trained, opt_state, batch):
        def total(trained):
            (loss_sum, weight), _ = loss({**trained, "ids": ids}, batch, None)
            return loss_sum, weight

        (loss_sum, weight), grads = jax.value_and_grad(total, has_aux=True)(trained)
        grads = jax.tree.map(lambda g: g / weight, grads)
        updates, opt_state = optimizer.update(grads, opt_state, trained)
        new = optax.apply_updates(trained, updates)
        return new, opt_state, loss_sum / weight, optax.tree.norm(grads)

    for batch in data:
        trained, opt_state, loss_value, norm = step(trained, opt_state, batch)
        losses.append(float(loss_value))
        norms.append(float(norm))
    return losses, norms, jax.device_get({**trained, "ids": ids})


@functools.cache
def oracle_of(optimizer, weights):
    return oracle(init_params, loss_fn, OPTIMIZERS[optimizer](), batches(weights))


def make_plan(num_devices=8, optimizer="adamw", **kwargs):
    """A plan of the toy model; the odd sizes are accepted here, as they are the point."""
    kwargs = {"stage": 3, "layers": ("blocks",), "max_unsharded": 1.0, **kwargs}
    optimizer = OPTIMIZERS[optimizer]() if isinstance(optimizer, str) else optimizer
    return zj.make_plan(init_params, optimizer, zj.make_mesh(num_devices), **kwargs)


def train(plan, weights="equal", loss=loss_fn, **kwargs):
    """Losses, gradient norms and final parameters of the same run through zerojax."""
    state = zj.init_state(plan, jax.random.key(KEY))
    return run(zj.make_train_step(loss, plan, **kwargs), state, weights)


def run(step, state, weights):
    losses, norms = [], []
    for batch in batches(weights):
        state, metrics = step(state, zj.shard_batch(batch, step.plan))
        losses.append(float(metrics["loss"]))
        norms.append(float(metrics["grad_norm"]))
        np.testing.assert_allclose(metrics["aux"]["loss_again"], metrics["loss"], rtol=1e-6)
    return losses, norms, jax.device_get(state.params)


def worst_error(found, expected):
    """The largest error of losses, norms and parameters, relative to each array's largest value."""
    errors = jax.tree.map(
        lambda a, b: np.max(np.abs(np.subtract(a, b, dtype=np.complex128))) / np.max(np.abs(b)),
        (np.asarray(found[0]), np.asarray(found[1]), found[2]),
        (np.asarray(expected[0]), np.asarray(expected[1]), expected[2]),
    )
    return max(map(float, jax.tree.leaves(errors)))
