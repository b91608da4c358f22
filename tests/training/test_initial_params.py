# SPDX-License-Identifier: Apache-2.0
"""Given weights: the same state as init_params would make of them, read in slices, left alone."""

from __future__ import annotations

import os
import socket
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import zerojax as zj
from tests import ROOT, toy

KEY = jax.random.key(toy.KEY)


class Recorder:
    """A leaf that remembers which slices were asked of it."""

    def __init__(self, array, twin=lambda index: index):
        self.array, self.twin, self.asked = array, twin, []
        self.shape, self.dtype = array.shape, array.dtype

    def __getitem__(self, index):
        self.asked.append(index)
        return self.array[self.twin(index)]

    def elements(self):
        return [self.array[index].size for index in self.asked]


@pytest.fixture(scope="module")
def given():
    """Weights of the toy model on the host, none of them a constant."""
    params = jax.device_get(zj.init_state(toy.make_plan(), jax.random.key(5)).params)
    leaves, treedef = jax.tree.flatten(params)
    random = np.random.default_rng(0)
    new = [x if x.dtype == np.int32 else x + random.random(x.shape, np.float32) for x in leaves]
    return treedef.unflatten(new)


def assert_equal(found, expected):
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        assert a.dtype == b.dtype
        if jnp.issubdtype(a.dtype, jax.dtypes.prng_key):
            a, b = jax.random.key_data(a), jax.random.key_data(b)
        np.testing.assert_array_equal(np.asarray(a), np.asarray(b))


def plans(given, num_devices=8, **kwargs):
    """The plan of the toy model, and the one whose init_params returns what is given."""
    plan = toy.make_plan(num_devices, **kwargs)
    how = {"layers": ("blocks",), "max_unsharded": 1.0, "stage": 3, **kwargs}
    optimizer = toy.OPTIMIZERS[how.pop("optimizer", "adamw")]()
    constant = jax.tree.map(jnp.asarray, given)
    return plan, zj.make_plan(lambda key: constant, optimizer, zj.make_mesh(num_devices), **how)


@pytest.mark.parametrize("precision", ["fp32", "bf16_master"])
@pytest.mark.parametrize("num_devices", [1, 8])
@pytest.mark.parametrize("stage", [0, 1, 3])
def test_the_state_is_that_of_an_init_params_that_returns_them(
    given, stage, num_devices, precision
):
    plan, constant = plans(given, num_devices, stage=stage, precision=precision)
    state, expected = zj.init_state(plan, KEY, given), zj.init_state(constant, KEY)
    assert_equal(state, expected)
    for x, y in zip(jax.tree.leaves(state), jax.tree.leaves(expected), strict=True):
        assert x.sharding == y.sharding
        assert getattr(x, "weak_type", False) == getattr(y, "weak_type", False)
    for row in zj.memory_report(plan, state):
        assert row.live in (row.planned, None)


def test_training_goes_on_as_from_init_params(given):
    plan, constant = plans(given)
    step = zj.make_train_step(toy.loss_fn, plan)
    found = toy.run(step, zj.init_state(plan, KEY, given), "equal")
    expected = toy.run(
        zj.make_train_step(toy.loss_fn, constant), zj.init_state(constant, KEY), "equal"
    )
    assert_equal(found[2], expected[2])
    assert found[:2] == expected[:2]


def test_an_optimizer_that_reads_the_parameters_starts_from_the_given_ones(given):
    """Its state is a copy, too: one that shared its memory could not be donated with them."""

    def init(params):
        return jax.tree.map(lambda x: x, params)

    def update(updates, state, params=None):
        del params
        return jax.tree.map(lambda u, s: -0.01 * u - 0.001 * s, updates, state), state

    plan = toy.make_plan(optimizer=optax.GradientTransformation(init, update))
    state = zj.init_state(plan, KEY, given)
    trained = {name: x for name, x in given.items() if name != "ids"}
    assert_equal(jax.tree.leaves(state.opt_state), jax.tree.leaves(trained))
    step = zj.make_train_step(toy.loss_fn, plan)
    for batch in toy.batches():
        state, _ = step(state, zj.shard_batch(batch, plan))


@pytest.mark.parametrize("stage", [2, 3])
def test_each_device_reads_its_slices_alone(given, stage):
    """At stage 3 no read is larger than a shard; at stage 2 it must be (the twin)."""
    plan = toy.make_plan(stage=stage)
    lazy = jax.tree.map(Recorder, given)
    assert_equal(zj.init_state(plan, KEY, lazy).params, given)
    leaves = jax.tree.leaves(lazy)
    for leaf, recorder in zip(plan.params, leaves, strict=True):
        shard = plan.bytes_per_device(leaf) // leaf.array.dtype.itemsize
        reads = 8 if any(leaf.rest) else 1
        assert recorder.elements() == [shard] * reads
    split = [r for r, leaf in zip(leaves, plan.params, strict=True) if leaf.split.dim is not None]
    whole = [max(recorder.elements()) == recorder.array.size for recorder in split]
    assert whole == [stage == 2] * len(split)


def test_a_leaf_that_gives_other_slices_is_noticed(given):
    """The twin of the tests above: rows of another device are not the given weights."""

    def shifted(index):
        first = index[0]
        return (slice((first.start + 2) % 16, (first.start + 2) % 16 + 2), *index[1:])

    plan = zj.make_plan(
        lambda key: {"w": jnp.zeros((16, 4))}, optax.sgd(1.0), zj.make_mesh(), stage=3
    )
    weights = {"w": np.arange(64, dtype=np.float32).reshape(16, 4)}
    lazy = {"w": Recorder(weights["w"], shifted)}
    assert_equal(zj.init_state(plan, KEY, weights).params, weights)
    with pytest.raises(AssertionError):
        assert_equal(zj.init_state(plan, KEY, lazy).params, weights)


def test_the_master_is_taken_from_what_was_given(given):
    state = zj.init_state(toy.make_plan(precision="bf16_master"), KEY, given)
    np.testing.assert_array_equal(state.master["embed"], given["embed"])
    np.testing.assert_array_equal(state.params["embed"], given["embed"].astype("bfloat16"))
    assert np.any(given["embed"].astype("bfloat16").astype(np.float32) != given["embed"])


def test_numbers_are_cast_to_the_dtype_at_rest(given):
    def as_given(x):
        return x.astype(np.int8 if x.dtype == np.int32 else np.float64)

    plan = toy.make_plan()
    assert_equal(zj.init_state(plan, KEY, jax.tree.map(as_given, given)).params, given)
    rounded = jax.tree.map(lambda x: x if x.dtype == np.int32 else x.astype("bfloat16"), given)
    state = zj.init_state(plan, KEY, jax.tree.map(jnp.asarray, rounded))
    expected = jax.tree.map(lambda x, y: x.astype(y.dtype), rounded, given)
    assert_equal(state.params, expected)


def test_memory_maps_and_flat_paths_are_taken(given, tmp_path):
    paths = {}
    for keys, x in jax.tree.leaves_with_path(given):
        path = jax.tree_util.keystr(keys, simple=True, separator="/")
        name = tmp_path / f"{path.replace('/', '.')}.npy"
        np.save(name, x)
        paths[path] = np.load(name, mmap_mode="r")
    assert_equal(zj.init_state(toy.make_plan(), KEY, paths).params, given)


def placements(plan, given):
    """The weights as arrays of JAX in places where a user may have them."""
    one, mesh = jax.devices()[0], plan.mesh
    four = NamedSharding(zj.make_mesh(4), P())
    return {
        "where the plan wants them": zj.init_state(plan, KEY, given).params,
        "replicated": jax.device_put(given, NamedSharding(mesh, P())),
        "on one device": jax.device_put(given, one),
        "on four devices": jax.device_put(given, four),
    }


@pytest.mark.parametrize("stage", [0, 3])
def test_given_arrays_outlive_the_donated_state(given, stage):
    plan = toy.make_plan(stage=stage)
    step = zj.make_train_step(toy.loss_fn, plan)
    for where, params in placements(plan, given).items():
        state = zj.init_state(plan, KEY, params)
        assert_equal(state.params, given)
        for batch in toy.batches():
            state, _ = step(state, zj.shard_batch(batch, plan))
        assert not any(x.is_deleted() for x in jax.tree.leaves(params)), where
        assert_equal(params, given)
    host = jax.tree.map(np.copy, given)
    state = zj.init_state(plan, KEY, host)
    state, _ = step(state, zj.shard_batch(next(toy.batches()), plan))
    assert_equal(host, given)


def test_what_is_none_is_drawn_as_without_params(given):
    for precision in ("fp32", "bf16_master"):
        plan = toy.make_plan(precision=precision)
        fresh, full = zj.init_state(plan, KEY), zj.init_state(plan, KEY, given)
        state = zj.init_state(plan, KEY, {**given, "blocks": None, "head": None})
        for found, drawn, taken in zip(
            (state.params, state.master),
            (fresh.params, fresh.master),
            (full.params, full.master),
            strict=True,
        ):
            if found is not None:
                assert_equal([found["blocks"], found["head"]], [drawn["blocks"], drawn["head"]])
                assert_equal([found["embed"], found["odd"]], [taken["embed"], taken["odd"]])
        assert_equal((state.key, state.opt_state), (fresh.key, fresh.opt_state))


@pytest.mark.parametrize(
    ("change", "parts"),
    [
        (
            lambda given: {name: x for name, x in given.items() if name != "blocks"},
            ["lack 3 of the plan's 11 leaves: 'blocks/down' float32[3, 24, 16]", "None in their"],
        ),
        (lambda given: {}, ["lack 11 of", "; and 8 more", "draw them"]),
        (
            lambda given: given | {"bias": np.ones(3), "norm": np.ones(2, np.int8)},
            ["2 leaves more than the plan's 11: 'bias' float64[3]; 'norm' int8[2]", "Leave them"],
        ),
        (
            lambda given: {"model": given},
            ["11 of the plan's 11", "'blocks/down'", "'model/blocks/down'", "by its path in what"],
        ),
        (
            lambda given: given | {"head": given["head"][1:], "embed": given["embed"].T},
            ["2 of params' 11", "'embed' is float32[16, 33] for float32[33, 16]", "Plan for the"],
        ),
        (
            lambda given: given | {"ids": given["ids"].astype(np.int64)},
            ["1 of params' 11", "'ids' is int64[17] for int32[17]", "hold them all"],
        ),
        (lambda given: given | {"ids": np.ones(17)}, ["'ids' is float64[17] for int32[17]"]),
        (lambda given: given | {"head": np.ones((17, 17), np.int8)}, ["'head' is int8[17, 17]"]),
        (lambda given: given | {"head": np.ones((17, 17), complex)}, ["'head' is complex128"]),
        (lambda given: given | {"temperature": 1.0}, ["'temperature' is a float, not an array"]),
        (lambda given: given | {"head": [[1.0]]}, ["'head/0/0' is a float"]),
        (lambda given: toy.init_params, ["is a function, not an array"]),
        (lambda given: given | {"blocks/up": given["head"]}, ["2 leaves of params", "'blocks/up'"]),
    ],
)
def test_what_does_not_fit_is_named(given, change, parts):
    with pytest.raises(ValueError) as error:
        zj.init_state(toy.make_plan(), KEY, change(given))
    for part in parts:
        assert part in str(error.value)


PROCESS = """
import sys
import jax, numpy as np
jax.distributed.initialize(f"localhost:{sys.argv[2]}", 2, int(sys.argv[1]))
import zerojax as zj
from tests.training import test_initial_params as test_given
from tests import toy
from jax.experimental.multihost_utils import process_allgather

plan = toy.make_plan(None, precision="bf16_master")
host = process_allgather(zj.init_state(toy.make_plan(None), jax.random.key(3)).params, tiled=True)
lazy = jax.tree.map(test_given.Recorder, host)
state = zj.init_state(plan, jax.random.key(3), lazy)
assert sum(lazy["blocks"]["up"].elements()) == host["blocks"]["up"].size  # half, read twice
test_given.assert_equal(process_allgather(state.master["embed"], tiled=True), host["embed"])
fresh = zj.init_state(plan, jax.random.key(3))
for params in (host, fresh.master | {"ids": fresh.params["ids"]}):
    state = zj.init_state(plan, jax.random.key(3), params)
    for a, b in zip(jax.tree.leaves(state), jax.tree.leaves(fresh), strict=True):
        shards = zip(a.addressable_shards, b.addressable_shards, strict=True)
        test_given.assert_equal(*zip(*((x.data, y.data) for x, y in shards), strict=True))
zj.make_train_step(toy.loss_fn, plan)(state, zj.shard_batch(next(toy.batches()), plan))
"""


def run_two_processes(script, *args):
    """Run it in two processes of two devices each; it is given its number and a free port."""
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = str(free.getsockname()[1])
    flags = "--xla_force_host_platform_device_count=2"
    environment = os.environ | {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": flags}
    how = {"cwd": ROOT, "env": environment, "stderr": subprocess.PIPE}
    processes = [
        subprocess.Popen([sys.executable, "-c", script, str(i), port, *args], text=True, **how)
        for i in range(2)
    ]
    try:
        errors = [process.communicate(timeout=240)[1] for process in processes]
    finally:
        for process in processes:
            process.kill()
    assert [process.returncode for process in processes] == [0, 0], errors


@pytest.mark.full
def test_each_process_makes_its_own_shards():
    run_two_processes(PROCESS)
