# SPDX-License-Identifier: Apache-2.0
"""The birth of the state: every leaf in place, no leaf ever whole, the same values everywhere."""

from __future__ import annotations

import dataclasses
import functools
import math
import re

import jax
import numpy as np
import optax
import pytest

import zerojax as zj
from models import transformer
from tests import toy
from zerojax.training import init as placement

TINY = transformer.PRESETS["tiny"]


@functools.cache
def tiny_plan(stage, precision="fp32", num_devices=8):
    init = functools.partial(transformer.init_params, TINY)
    return zj.make_plan(
        init,
        optax.adamw(1e-3),
        zj.make_mesh(num_devices),
        stage=stage,
        layers=("blocks",),
        precision=precision,
    )


@pytest.mark.parametrize("precision", ["fp32", "bf16_master"])
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_live_bytes_equal_the_plan_and_the_formula(stage, precision):
    plan = tiny_plan(stage, precision)
    report = zj.memory_report(plan, zj.init_state(plan, jax.random.key(0)))
    for row in report:
        assert row.live in (row.planned, None)
        assert row.planned == pytest.approx(row.formula, rel=0.01)
    params, grads, master = plan.precision.bytes_per_param()
    formula = plan.stage.model_state_bytes(
        transformer.num_params(TINY),
        8,
        param_bytes=params,
        grad_bytes=grads,
        optimizer_bytes=master + 8,
    )
    assert sum(row.planned for row in report) == pytest.approx(formula, rel=0.01)


def largest_buffer(plan):
    """Bytes of the largest array in the program that creates the state, per device."""
    text = placement.init_program(plan).lower(jax.random.key(0)).compile().as_text()
    sizes = {"f32": 4, "u32": 4, "s32": 4, "bf16": 2, "u64": 8, "s64": 8, "pred": 1}
    found = re.findall(r"\b(\w+)\[([\d,]+)\]", text)
    return max(math.prod(map(int, s.split(","))) * sizes[t] for t, s in found if t in sizes)


def test_no_leaf_is_ever_whole_on_one_device():
    """No array of the compiled program comes near a whole leaf; at stage 0 it must (the twin)."""
    whole = max(leaf.num_bytes for leaf in tiny_plan(3).params)
    shard = max(map(tiny_plan(3).bytes_per_device, tiny_plan(3).params))
    assert largest_buffer(tiny_plan(0)) >= whole
    assert largest_buffer(tiny_plan(3)) <= 2 * shard < whole  # random bits may take twice a shard


def test_values_depend_on_neither_devices_nor_stage():
    expected = jax.device_get(zj.init_state(toy.make_plan(1, stage=0), jax.random.key(1)).params)
    for num_devices, stage in ((2, 3), (8, 0), (8, 1), (8, 3)):
        state = zj.init_state(toy.make_plan(num_devices, stage=stage), jax.random.key(1))
        jax.tree.map(np.testing.assert_array_equal, jax.device_get(state.params), expected)


def test_the_key_may_be_used_again_and_the_streams_differ():
    key, plan = jax.random.key(1), toy.make_plan(1)
    state = zj.init_state(plan, key)
    step = zj.make_train_step(toy.loss_fn, plan)
    state, _ = step(state, next(toy.batches()))
    assert not key.is_deleted()
    assert not np.array_equal(jax.random.key_data(state.key), jax.random.key_data(key))
    zj.init_state(plan, key)


def test_the_master_is_taken_before_rounding():
    plan = toy.make_plan(precision="bf16_master")
    state = zj.init_state(plan, jax.random.key(1))
    exact = zj.init_state(toy.make_plan(), jax.random.key(1)).params
    np.testing.assert_array_equal(state.master["embed"], exact["embed"])
    np.testing.assert_array_equal(state.params["embed"], exact["embed"].astype("bfloat16"))


def test_batches_are_split_by_rows():
    batch = zj.shard_batch({"x": np.arange(32).reshape(16, 2)}, toy.make_plan())
    assert [s.data.shape for s in batch["x"].addressable_shards] == [(2, 2)] * 8
    np.testing.assert_array_equal(batch["x"], np.arange(32).reshape(16, 2))


def test_a_leaf_used_twice_is_two_arrays():
    """Tied by reference in init_params, apart in the state: donation must not see one twice."""

    def init(key):
        table = jax.random.normal(key, (16, 8))
        return {"a": table, "b": table}

    plan = zj.make_plan(init, optax.sgd(0.1), zj.make_mesh(), stage=3)
    step = zj.make_train_step(lambda p, b, k: ((b["x"] @ p["a"] @ p["b"].T).sum(), 1), plan)
    state = zj.init_state(plan, jax.random.key(0))
    for _ in range(2):
        state, _ = step(state, {"x": np.ones((8, 16), np.float32)})


def test_plans_are_immutable():
    with pytest.raises(dataclasses.FrozenInstanceError):
        toy.make_plan().stage = 0
