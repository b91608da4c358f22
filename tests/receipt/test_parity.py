# SPDX-License-Identifier: Apache-2.0
"""The tool for those who do not trust a sharded loss: silent where all is well, right where not."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import zerojax as zj
from models import transformer
from tests import toy

BATCH = next(toy.batches("unequal"))


@pytest.mark.parametrize(
    ("num_devices", "stage", "partitioner", "precision", "microbatches"),
    [
        (8, 0, "manual", "fp32", 1),
        (8, 1, "auto", "fp32", 2),
        (4, 2, "manual", "fp32", 2),
        (8, 3, "manual", "fp32", 1),
        (8, 3, "auto", "bf16_master", 1),
        (2, 3, "manual", "bf16", 4),
    ],
)
def test_own_steps_are_the_same(num_devices, stage, partitioner, precision, microbatches):
    how = {"stage": stage, "partitioner": partitioner, "precision": precision}
    plan = toy.make_plan(num_devices, **how)
    state = zj.init_state(plan, jax.random.key(1))
    before = jax.device_get(state.params)
    found = zj.check_against_unsharded(
        toy.loss_fn, plan, BATCH, state=state, microbatches=microbatches
    )
    assert found.check() is found
    assert found.first is None
    assert [leaf.path for leaf in found.grads] == [leaf.path for leaf in plan.grads]
    assert max(leaf.error for leaf in found.grads) > 0  # two programs, not one compared with itself
    printed = str(found)
    assert f"stage {stage} over {num_devices} devices, beside one device" in printed
    assert "All 10 gradients agree; the worst is " in printed
    assert max(map(len, printed.splitlines())) <= 100
    jax.tree.map(np.testing.assert_array_equal, jax.device_get(state.params), before)


def test_the_layer_engine_is_compared_with_a_plain_scan():
    config = transformer.PRESETS["tiny"]
    plan = zj.make_plan(
        functools.partial(transformer.init_params, config),
        optax.adamw(1e-3),
        zj.make_mesh(8),
        stage=3,
        layers=("blocks",),
    )
    tokens = np.random.default_rng(0).integers(0, 256, (8, config.seq_len + 1), np.int32)
    loss_fn = functools.partial(transformer.eval_loss_fn, config)
    zj.check_against_unsharded(loss_fn, plan, {"tokens": tokens}).check()


def init(key):
    return {"a": jax.random.normal(key, (8, 8)), "b": jnp.ones(8), "blocks": jnp.ones((3, 8))}


def outputs(params, batch):
    return batch["x"] @ params["a"] * params["b"] * params["blocks"][1]


def sum_over_rows(params, batch, key):
    return jnp.sum(batch["weight"] * jnp.mean(outputs(params, batch) ** 2, 1)), batch[
        "weight"
    ].sum()


def weight_is_one(params, batch, key):
    return sum_over_rows(params, batch, key)[0], 1


def mean_of_means(params, batch, key):
    loss_sum, weight = sum_over_rows(params, batch, key)
    return loss_sum / weight, 1


def batch_statistics(params, batch, key):
    y = outputs(params, batch)
    return jnp.sum((y - y.mean(0)) ** 2), y.size


def knows_the_devices(params, batch, key):
    loss_sum, weight = sum_over_rows(params, batch, key)
    return loss_sum / batch["x"].shape[0], weight


def wrong_leaf(params, batch, key):
    scale = 1.0 + 1e-3 * (batch["x"].shape[0] < 16)
    return sum_over_rows({**params, "b": params["b"] ** scale}, batch, key)


@pytest.fixture(scope="module")
def plan():
    return zj.make_plan(init, optax.adam(1e-3), zj.make_mesh(8), stage=3, layers=("blocks",))


@pytest.fixture(scope="module")
def batch():
    random = np.random.default_rng(0)
    return {"x": random.normal(size=(16, 8)).astype("f4"), "weight": random.random(16, "f4")}


@pytest.mark.parametrize(
    ("loss_fn", "first", "said"),
    [
        (weight_is_one, "a", "All by one factor|weights differ"),
        (mean_of_means, "a", "weights differ: return as weight the number of rows"),
        (batch_statistics, "a", "depends on others"),
        (knows_the_devices, "a", "All by one factor, 8: the weight does not count"),
        (wrong_leaf, "b", "knows the number of devices"),
    ],
)
def test_what_differs_is_named(plan, batch, loss_fn, first, said):
    zj.check_against_unsharded(sum_over_rows, plan, batch).check()
    found = zj.check_against_unsharded(loss_fn, plan, batch)
    assert found.first is not None
    assert found.first.path == first
    with pytest.raises(ValueError, match=said) as error:
        found.check()
    printed = str(error.value)
    assert f"gradients differ (limit 2.0e-05), first {first!r}:" in printed
    assert max(map(len, printed.splitlines())) <= 100


def test_the_layer_that_differs_is_named(plan, batch):
    found = zj.check_against_unsharded(batch_statistics, plan, batch)
    stack = next(leaf for leaf in found.grads if leaf.path == "blocks")
    assert stack.at[0] == 1
    assert stack.error > 1e-3


def test_what_it_refuses(plan, batch):
    def drops(params, batch, key):
        keep = jax.random.bernoulli(key, 0.5, batch["weight"].shape)
        return sum_over_rows(params, {**batch, "weight": batch["weight"] * keep}, key)

    with pytest.raises(ValueError, match=r"draws random numbers, .* Pass the variant without drop"):
        zj.check_against_unsharded(drops, plan, batch)
    rows = jax.tree.map(lambda x: x[:12], batch)
    with pytest.raises(ValueError, match="has 12 rows, not a multiple of 8 data-parallel devices"):
        zj.check_against_unsharded(sum_over_rows, plan, rows)
    absent = zj.make_plan(init, optax.adam(1e-3), zj.make_mesh(target="simulated:8"), stage=3)
    assert zj.check_against_unsharded(sum_over_rows, absent, batch).same
