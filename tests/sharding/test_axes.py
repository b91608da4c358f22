# SPDX-License-Identifier: Apache-2.0
"""Shards of the state, parts of a batch and devices are three numbers, and nobody mixes them up.

Only "data" may be larger than 1 in this version. Here that refusal is lifted, so that each place
that uses one of the numbers for another computes something wrong.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType

import zerojax as zj
from tests import toy
from zerojax.receipt import theory
from zerojax.sharding import axes, collectives, plan

LIMIT = 2e-5
# Sizes of replica, data and tensor -> shards of the state, parts of a batch.
MESHES = {(2, 4, 1): (4, 8), (4, 2, 1): (2, 8), (1, 4, 2): (4, 4), (2, 2, 2): (2, 4)}


@pytest.fixture(autouse=True)
def any_axis(monkeypatch):
    monkeypatch.setattr(plan, "check_mesh", lambda mesh: None)


def make_mesh(sizes):
    names = ("replica", "data", "tensor")
    return jax.make_mesh(sizes, names, axis_types=(AxisType.Auto,) * 3)


def make_plan(sizes, **kwargs):
    kwargs = {"stage": 3, "layers": ("blocks",), "max_unsharded": 1.0, **kwargs}
    optimizer = toy.OPTIMIZERS["clip_adamw"]()
    return zj.make_plan(toy.init_params, optimizer, make_mesh(sizes), **kwargs)


@pytest.mark.parametrize("sizes", MESHES)
def test_three_numbers(sizes):
    found = make_plan(sizes)
    assert (found.num_shards, found.num_batch_shards) == MESHES[sizes]
    assert found.num_devices == 8
    (up,) = [leaf for leaf in found.params if leaf.path == "blocks/up"]
    assert found.bytes_per_device(up) == up.num_bytes / found.num_shards
    report = zj.memory_report(found, zj.init_state(found, jax.random.key(0)))
    assert all(row.live is None or row.live == row.planned for row in report)
    rows = dict(zip([row.kind for row in report], report, strict=True))
    assert rows["params"].formula == sum(x.num_bytes for x in found.params) / found.num_shards


@pytest.mark.parametrize(
    ("sizes", "stage", "partitioner", "microbatches"),
    [
        ((2, 4, 1), 0, "manual", 1),
        ((2, 2, 2), 1, "auto", 1),
        ((4, 2, 1), 2, "manual", 4),
        ((2, 2, 2), 3, "manual", 1),
        ((2, 4, 1), 3, "auto", 4),
    ],
)
def test_one_device_computes_the_same(sizes, stage, partitioner, microbatches):
    found = make_plan(sizes, stage=stage, partitioner=partitioner)
    trained = toy.train(found, "unequal", microbatches=microbatches)
    assert toy.worst_error(trained, toy.oracle_of("clip_adamw", "unequal")) < LIMIT


def sum_over_shards_only(monkeypatch):
    """Replicas do not add their gradients up."""
    monkeypatch.setattr(collectives, "copy_axes", lambda mesh: ())


def sum_losses_over_shards_only(monkeypatch):
    """Loss and weight are those of one replica."""
    monkeypatch.setattr(collectives, "batch_axes", lambda mesh: ("data",))


@pytest.mark.parametrize("sabotage", [sum_over_shards_only, sum_losses_over_shards_only])
def test_one_number_for_another_is_noticed(sabotage, monkeypatch):
    sabotage(monkeypatch)
    trained = toy.train(make_plan((2, 4, 1)), "unequal")
    assert toy.worst_error(trained, toy.oracle_of("clip_adamw", "unequal")) > 100 * LIMIT


@pytest.mark.parametrize("partitioner", ["manual", "auto"])
@pytest.mark.parametrize("sizes", MESHES)
def test_keys_differ_where_rows_do(sizes, partitioner):
    """Every part of the batch draws numbers of its own, all devices of a part the same."""

    def loss_fn(params, batch, key):
        draw = jax.random.bits(key, (), jnp.uint32)
        seen = (batch["part"][:, None] == jnp.arange(8)) * (draw >> 8).astype(jnp.float32)
        return (jnp.sum(params["embed"]), 1.0), seen.sum(0)

    found = make_plan(sizes, partitioner=partitioner)
    parts = found.num_batch_shards
    batch = zj.shard_batch({"part": np.arange(parts)}, found)
    state = zj.init_state(found, jax.random.key(0))
    drawn = np.asarray(zj.make_eval_step(loss_fn, found)(state, batch)["aux"])[:parts]
    assert len(set(drawn.tolist())) == parts
    key = jax.random.fold_in(state.key, 0)
    bits = [jax.random.bits(jax.random.fold_in(key, i), (), jnp.uint32) for i in range(parts)]
    np.testing.assert_array_equal(drawn * parts, np.asarray(bits) // 256 * np.float32(1))


def test_rows_are_checked_by_the_parts_of_a_batch():
    found = make_plan((1, 4, 2))
    zj.shard_batch({"x": np.ones((4, 1))}, found)
    with pytest.raises(ValueError, match="6 rows, not a multiple of 4 data-parallel"):
        zj.shard_batch({"x": np.ones((6, 1))}, found)


def test_theory_counts_the_devices_of_each_ring():
    """Gathers and scatters go round the shards, sums of what stays whole round the batch."""
    for sizes, (shards, parts) in MESHES.items():
        found = make_plan(sizes, stage=1)
        even = sum(x.array.size for x in found.grads if x.split.dim is not None) * 4
        odd = sum(x.array.size for x in found.grads if x.split.dim is None) * 4
        expected = theory.expected_bytes(found, 1)
        assert expected.parts["optimizer"] == pytest.approx(even * (shards - 1) / shards)
        reduced = even * (shards - 1) / shards + 2 * odd * (parts - 1) / parts
        assert expected.total - expected.parts["optimizer"] == pytest.approx(reduced)


def test_a_spec_names_one_axis_plainly():
    assert axes.batch_spec(zj.make_mesh(8)) == jax.P("data")
    assert axes.batch_spec(make_mesh((2, 4, 1))) == jax.P(("replica", "data"))
