# SPDX-License-Identifier: Apache-2.0
"""Saves: every leaf bit for bit, onto any plan; and the run goes on as if it had never stopped."""

from __future__ import annotations

import functools
import itertools
import json
import os
import pathlib
import shutil
import signal
import subprocess
import sys
import time

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import zerojax as zj
from tests import toy
from zerojax.checkpoint import folder as saves
from zerojax.checkpoint.items import saved_arrays

OPTIMIZERS = {
    **{name: toy.OPTIMIZERS[name] for name in ("adamw", "adafactor", "multisteps", "masked")},
    "injected": lambda: optax.inject_hyperparams(optax.adamw)(
        learning_rate=optax.linear_schedule(1e-2, 0.0, 20)
    ),
}
SOURCES = list(itertools.product((8, 4, 1), range(4)))
TARGETS = list(itertools.product((1, 2, 4, 8), range(4), ("manual", "auto")))
LIMIT = 2e-5  # as in test_equivalence.py: other orders of summation, fp32


def make_plan(optimizer, num_devices, stage, partitioner="manual", **kwargs):
    optimizer = OPTIMIZERS[optimizer]()
    return toy.make_plan(num_devices, optimizer, stage=stage, partitioner=partitioner, **kwargs)


def go_on(plan, state, data):
    """Losses, gradient norms and final parameters of the steps."""
    step = zj.make_train_step(toy.loss_fn, plan)
    losses, norms = [], []
    for batch in data:
        state, metrics = step(state, zj.shard_batch(batch, plan))
        losses.append(float(metrics["loss"]))
        norms.append(float(metrics["grad_norm"]))
    return (losses, norms, jax.device_get(state.params)), state


def host_leaves(plan, state):
    """Every array of the state by its place in a save, on the host."""

    def fetch(x):  # jax 0.11 cannot fetch an array without elements that is split
        return np.asarray(jax.device_get(x)) if x.size else np.zeros(x.shape, x.dtype)

    return {entry[:2]: fetch(entry.array) for entry in saved_arrays(plan, state)}


def assert_same(plan, state, expected):
    found = host_leaves(plan, state)
    assert found.keys() == expected.keys()
    for name, x in found.items():
        assert x.dtype == expected[name].dtype, name
        np.testing.assert_array_equal(x, expected[name], err_msg=str(name))


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """A function from (optimizer, devices, stage) to a save after 5 steps, and what came next."""
    root = tmp_path_factory.mktemp("saves")
    data = list(toy.batches("unequal", num_steps=10))

    @functools.cache
    def make(optimizer, num_devices, stage):
        plan = make_plan(optimizer, num_devices, stage)
        _, state = go_on(plan, zj.init_state(plan, jax.random.key(toy.KEY)), data[:5])
        folder = root / f"{optimizer}-{num_devices}-{stage}"
        leaves = host_leaves(plan, state)
        with zj.Checkpointer(folder, plan) as checkpoints:
            checkpoints.save(state)
        never_stopped, _ = go_on(plan, state, data[5:])
        return folder, leaves, never_stopped

    return make


def check_restore(saved, optimizer, sources, target):
    data = list(toy.batches("unequal", num_steps=10))[5:]
    plan = make_plan(optimizer, *target)
    step = zj.make_train_step(toy.loss_fn, plan)
    for source in sources:
        folder, leaves, expected = saved(optimizer, *source)
        state = zj.restore(folder, plan)
        assert_same(plan, state, leaves)
        for (_, want), (_, have) in zip(
            jax.tree.leaves_with_path(plan.abstract_state),
            jax.tree.leaves_with_path(state),
            strict=True,
        ):
            assert have.sharding.is_equivalent_to(want.sharding, have.ndim)
        losses, norms = [], []
        for batch in data:
            state, metrics = step(state, zj.shard_batch(batch, plan))
            losses.append(float(metrics["loss"]))
            norms.append(float(metrics["grad_norm"]))
        found = losses, norms, jax.device_get(state.params)
        assert toy.worst_error(found, expected) < LIMIT
        if (*source, "manual") == target:
            assert losses == expected[0]
            assert norms == expected[1]
            jax.tree.map(np.testing.assert_array_equal, found[2], expected[2])
    assert step.jitted._cache_size() == 1


# Every source and every kind of target once; `make test-full` has all 1,920 pairs.
COVERING = [
    ("adamw", (8, 3), (8, 3, "manual")),
    ("adamw", (8, 2), (1, 0, "auto")),
    ("adafactor", (8, 1), (4, 3, "auto")),
    ("adafactor", (1, 0), (8, 2, "manual")),
    ("multisteps", (4, 3), (2, 1, "manual")),
    ("masked", (4, 2), (8, 1, "auto")),
    ("injected", (1, 3), (4, 2, "auto")),
    ("injected", (4, 0), (2, 3, "manual")),
]


@pytest.mark.parametrize(("optimizer", "source", "target"), COVERING)
def test_restored_onto_another_plan(saved, optimizer, source, target):
    check_restore(saved, optimizer, [source], target)


@pytest.mark.full
@pytest.mark.parametrize("target", TARGETS, ids=str)
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_every_save_onto_every_plan(saved, optimizer, target):
    check_restore(saved, optimizer, SOURCES, target)


def test_a_leaf_that_differs_is_noticed(saved):
    folder, leaves, _ = saved("adamw", 8, 3)
    plan = make_plan("adamw", 8, 3)
    state = zj.restore(folder, plan)
    wrong = {**leaves, ("params", "head"): np.nextafter(leaves["params", "head"], 9, dtype="f4")}
    with pytest.raises(AssertionError, match="head"):
        assert_same(plan, state, wrong)
    wrong = {**leaves, ("optimizer", "step"): np.int64(5)}
    with pytest.raises(AssertionError, match="step"):
        assert_same(plan, state, wrong)


def save_one(folder, plan, state, **kwargs):
    with zj.Checkpointer(folder, plan, **kwargs) as checkpoints:
        checkpoints.save(state)
    return folder


@pytest.fixture
def plan():
    return make_plan("adamw", 8, 3)


@pytest.fixture
def state(plan):
    return zj.init_state(plan, jax.random.key(0))


def steps(plan, state, numbers):
    """The state as it would be after so many updates; only the counter differs."""
    for number in numbers:
        step = jax.device_put(jnp.int32(number), plan.abstract_state.step.sharding)
        yield state._replace(step=step)


class Reader:
    """An iterator of batches that counts."""

    def __init__(self, at=0):
        self.at = at

    def get_state(self):
        return {"at": self.at}

    def set_state(self, state):
        self.at = state["at"]


def test_the_manifest_says_what_was_saved(tmp_path, state, plan):
    with zj.Checkpointer(tmp_path, plan) as checkpoints:
        checkpoints.save(state, data=Reader(7), metrics={"val_loss": 1.5})
    said = json.loads((tmp_path / "0" / "manifest.json").read_text())
    assert (said["format"], said["step"], said["metrics"]) == (1, 0, {"val_loss": 1.5})
    assert said["plan"]["stage"] == 3
    assert said["plan"]["mesh"] == {"data": 8}
    assert said["plan"]["precision"]["params"] == "float32"
    assert said["versions"]["jax"] == jax.__version__
    assert said["leaves"]["params"]["blocks/up"] == {
        "shape": [3, 16, 24],
        "dtype": "float32",
        "spec": [None, "data"],
    }
    assert said["data"] == [{"at": 7}]
    done = subprocess.run(
        ["sha256sum", "--check", "--quiet", "SHA256SUMS"], cwd=tmp_path / "0", check=False
    )
    assert done.returncode == 0


def test_the_data_goes_on_where_it_was(tmp_path, state, plan):
    with zj.Checkpointer(tmp_path, plan) as checkpoints:
        checkpoints.save(state, data=Reader(7))
        fresh = Reader()
        assert checkpoints.restore(data=fresh) is not None
        assert fresh.at == 7
    fresh = Reader()
    zj.restore(tmp_path, plan, data=fresh)
    assert fresh.at == 7


def test_the_state_may_be_donated_while_it_is_saved(tmp_path):
    """The arrays that are being written are given to steps, which write into their memory."""
    init = lambda key: {"w": jax.random.normal(key, (1024, 1024))}
    plan = zj.make_plan(init, optax.adamw(1e-3), zj.make_mesh(8), stage=3)
    state = zj.init_state(plan, jax.random.key(0))
    add = jax.jit(
        lambda s: s._replace(
            step=s.step + 1, params={"w": s.params["w"] + 1}, opt_state=s.opt_state
        ),
        donate_argnums=0,
    )
    expected = []
    with zj.Checkpointer(tmp_path, plan, keep_latest=9) as checkpoints:
        for _ in range(4):
            expected.append(np.array(state.params["w"]))
            checkpoints.save(state)
            for _ in range(3):
                state = add(state)
    for number, w in zip((0, 3, 6, 9), expected, strict=True):
        found = zj.restore(tmp_path / str(number), plan)
        np.testing.assert_array_equal(found.params["w"], w)


def test_a_state_restored_or_given_is_donated_by_its_first_step(tmp_path):
    """Into its own memory, whatever the size: an array of NumPy's memory would be copied."""

    def init(key):
        return {f"w{n}": jax.random.normal(key, (8 * n, 8 * n)) for n in range(1, 40, 4)}

    def pointers(params):
        return {
            name: [shard.data.unsafe_buffer_pointer() for shard in w.addressable_shards]
            for name, w in params.items()
        }

    plan = zj.make_plan(init, optax.sgd(0.1), zj.make_mesh(8), stage=3)
    fresh = zj.init_state(plan, jax.random.key(0))
    given = {name: np.asarray(w).copy() for name, w in fresh.params.items()}
    save_one(tmp_path, plan, fresh)
    restored, begun = zj.restore(tmp_path, plan), zj.init_state(plan, jax.random.key(0), given)
    grow = jax.jit(lambda params: jax.tree.map(lambda w: w + 1, params), donate_argnums=0)
    for state in (fresh, restored, begun):
        before = pointers(state.params)
        after = pointers(grow(state.params))
        assert all(w.is_deleted() for w in state.params.values())
        assert {name for name in before if before[name] != after[name]} == set()
    for name, w in given.items():
        np.testing.assert_array_equal(w, zj.restore_params(tmp_path)[name])  # not written into


def test_kept_are_the_latest_and_the_best(tmp_path, state, plan):
    losses = {10: 3.0, 20: 1.0, 30: float("nan"), 40: 2.0, 50: 4.0}
    with zj.Checkpointer(tmp_path, plan, keep_latest=2, keep_best="val_loss") as checkpoints:
        for one, loss in zip(steps(plan, state, losses), losses.values(), strict=True):
            checkpoints.save(one, metrics={"val_loss": loss})
        checkpoints.wait()
        assert [save.step for save in checkpoints.saves()] == [50, 40, 20]
    assert sorted(x.name for x in tmp_path.iterdir()) == [".lock", "20", "40", "50"]
    with zj.Checkpointer(tmp_path, plan, keep_latest=1) as checkpoints:
        checkpoints.save(next(steps(plan, state, [60])))
        checkpoints.wait()
        assert [save.step for save in checkpoints.saves()] == [60]


def test_a_step_is_saved_once_and_time_does_not_run_back(tmp_path, state, plan):
    with zj.Checkpointer(tmp_path, plan) as checkpoints:
        checkpoints.save(next(steps(plan, state, [5])))
        checkpoints.wait()
        before = (tmp_path / "5" / "SHA256SUMS").stat().st_mtime_ns
        checkpoints.save(next(steps(plan, state, [5])))
        checkpoints.wait()
        assert (tmp_path / "5" / "SHA256SUMS").stat().st_mtime_ns == before
        with pytest.raises(ValueError, match=r"a save of step 5, newer than this one of step 4:"):
            checkpoints.save(next(steps(plan, state, [4])))
    with zj.Checkpointer(tmp_path, plan) as checkpoints:  # a run that restored nothing
        with pytest.raises(ValueError, match=r"step 5, made by another run than this one of step"):
            checkpoints.save(next(steps(plan, state, [5])))
        checkpoints.restore()
        checkpoints.save(next(steps(plan, state, [5])))


def test_folders_of_others_are_left_alone(tmp_path, state, plan):
    (tmp_path / "3" / "of another program").mkdir(parents=True)
    with zj.Checkpointer(tmp_path, plan, keep_latest=1) as checkpoints:
        for one in steps(plan, state, [4, 6, 8]):
            checkpoints.save(one)
    assert sorted(x.name for x in tmp_path.iterdir()) == [".lock", "3", "8"]


def test_a_save_that_was_moved_and_linked(tmp_path, state, plan):
    save_one(tmp_path / "run", plan, state)
    shutil.move(tmp_path / "run" / "0", tmp_path / "elsewhere")
    (tmp_path / "run" / "0").symlink_to(tmp_path / "elsewhere")
    with zj.Checkpointer(tmp_path / "run", plan, keep_latest=1) as checkpoints:
        assert checkpoints.restore() is not None
        checkpoints.save(next(steps(plan, state, [1])))
    assert sorted(x.name for x in (tmp_path / "run").iterdir()) == [".lock", "1"]
    assert int(zj.restore(tmp_path / "elsewhere", plan).step) == 0  # the link is gone, no more


def test_what_cannot_be_removed_ends_no_run(tmp_path, state, plan, monkeypatch):
    def busy(path):
        raise OSError(39, "Directory not empty", str(path))  # a file of it is open, on NFS

    with zj.Checkpointer(tmp_path, plan, keep_latest=1) as checkpoints:
        first, second = steps(plan, state, [1, 2])
        checkpoints.save(first)
        checkpoints.save(second)
        with monkeypatch.context() as patch:
            patch.setattr(saves.shutil, "rmtree", busy)
            with pytest.warns(UserWarning, match=r"1\.deleting could not be removed .*not empty"):
                checkpoints.wait()
        assert [save.step for save in checkpoints.saves()] == [2]
    zj.Checkpointer(tmp_path, plan).close()  # tries again
    assert sorted(x.name for x in tmp_path.iterdir()) == [".lock", "2"]


def test_a_manifest_without_metrics_is_the_worst_save(tmp_path, state, plan):
    save_one(tmp_path, plan, state)
    manifest = tmp_path / "0" / "manifest.json"
    manifest.write_text(json.dumps({**json.loads(manifest.read_text()), "metrics": None}))
    with zj.Checkpointer(tmp_path, plan, keep_latest=1, keep_best="val_loss") as checkpoints:
        checkpoints.save(next(steps(plan, state, [1])), metrics={"val_loss": 2.0})
        checkpoints.wait()
        assert [save.step for save in checkpoints.saves()] == [1]


def test_a_first_save_that_fails_says_why(tmp_path, state, plan, monkeypatch):
    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(saves, "finalize", full)
    checkpoints = zj.Checkpointer(tmp_path, plan)
    checkpoints.save(state)

    def check_on():  # as a loop of steps does
        for _ in range(6000):
            checkpoints.check()
            time.sleep(0.01)

    with pytest.raises(OSError, match="No space left"):
        check_on()
    with pytest.raises(OSError, match="No space left"):  # still, and not that there is no save
        checkpoints.close()
    monkeypatch.undo()
    save_one(tmp_path, plan, state)
    assert int(zj.restore(tmp_path, plan).step) == 0


def test_ctrl_c_while_waiting_loses_no_save(tmp_path, state, plan, monkeypatch):
    seal = saves.finalize

    def slow(*args):
        os.kill(os.getpid(), signal.SIGINT)
        time.sleep(1)
        seal(*args)

    monkeypatch.setattr(saves, "finalize", slow)
    checkpoints = zj.Checkpointer(tmp_path, plan)
    checkpoints.save(state)
    with pytest.raises(KeyboardInterrupt):
        checkpoints.wait()
    checkpoints.close()
    assert int(zj.restore(tmp_path, plan).step) == 0


FORGETS = """
import sys
import jax, optax
import zerojax as zj

zj.simulate_devices(2)
init = lambda key: {"w": jax.random.normal(key, (1024, 1024))}
plan = zj.make_plan(init, optax.adamw(1e-3), zj.make_mesh(), stage=3)
checkpoints = zj.Checkpointer(sys.argv[1], plan)
checkpoints.save(zj.init_state(plan, jax.random.key(0)))
"""


def test_a_program_that_forgets_to_close_is_told(tmp_path):
    """The save may be complete in time; if not, that is said, and nothing hangs."""
    command = [sys.executable, "-c", FORGETS, str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=60)
    lost = f"the last save to {tmp_path} is lost: the program ended before" in done.stderr
    assert lost is not (tmp_path / "0").exists()


def test_what_was_left_unfinished_is_removed_and_never_seen(tmp_path, state, plan):
    save_one(tmp_path, plan, state)
    shutil.copytree(tmp_path / "0", tmp_path / "7.orbax-checkpoint-tmp")
    shutil.copytree(tmp_path / "0", tmp_path / "3.deleting")
    (tmp_path / "notes.orbax-checkpoint-tmp").mkdir()  # not ours
    assert int(zj.restore(tmp_path, plan).step) == 0
    assert (tmp_path / "7.orbax-checkpoint-tmp").exists()  # reading changes nothing
    with zj.Checkpointer(tmp_path, plan) as checkpoints:
        assert [save.step for save in checkpoints.saves()] == [0]
    assert sorted(x.name for x in tmp_path.iterdir()) == [
        ".lock",
        "0",
        "notes.orbax-checkpoint-tmp",
    ]


def flip(path):
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


def truncate(path):
    path.write_bytes(path.read_bytes()[:-9])


@pytest.fixture(scope="module")
def two_saves(tmp_path_factory):
    folder, plan = tmp_path_factory.mktemp("two") / "saves", make_plan("adamw", 8, 3)
    state = zj.init_state(plan, jax.random.key(0))
    with zj.Checkpointer(folder, plan) as checkpoints:
        for one in steps(plan, state, [1, 2]):
            checkpoints.save(one)
    return folder


@pytest.mark.parametrize("harm", [flip, truncate, pathlib.Path.unlink])
@pytest.mark.parametrize("what", ["params/d/*", "optimizer/ocdbt*/d/*", "manifest.json", "SHA*"])
def test_a_damaged_file_is_named_and_the_save_before_is_used(
    tmp_path, two_saves, state, plan, what, harm
):
    shutil.copytree(two_saves, tmp_path, dirs_exist_ok=True)
    harmed = sorted((tmp_path / "2").glob(what))[0]
    harm(harmed)
    said = rf"{harmed.parent}.*using the save of step 1 in its place"
    with pytest.warns(UserWarning, match=said) as warned:
        assert int(zj.restore(tmp_path, plan).step) == 1
    if not what.startswith("SHA") or harm is pathlib.Path.unlink:
        assert str(harmed) in str(warned[0].message)
    with zj.Checkpointer(tmp_path, plan) as checkpoints:
        with pytest.warns(UserWarning, match=r"the save is now 2\.damaged"):
            restored = checkpoints.restore()
        assert int(restored.step) == 1
        checkpoints.save(next(steps(plan, state, [2])))  # the run makes that step again
    assert int(zj.restore(tmp_path, plan).step) == 2
    assert (tmp_path / "2.damaged").is_dir()


def test_every_file_of_a_save_is_under_the_sums(tmp_path, state, plan):
    """All but Orbax's own marks, of which nothing is read."""
    save_one(tmp_path, plan, state)
    files = {str(x.relative_to(tmp_path / "0")) for x in (tmp_path / "0").rglob("*") if x.is_file()}
    sums = (tmp_path / "0" / "SHA256SUMS").read_text().splitlines()
    left = files - {line.split("  ")[1] for line in sums}
    assert left == {"SHA256SUMS", "_CHECKPOINT_METADATA", "commit_success.txt"}


def test_no_whole_save_left(tmp_path, state, plan):
    save_one(tmp_path, plan, state)
    flip(next((tmp_path / "0" / "params" / "d").iterdir()))
    with pytest.raises(saves.DamagedError, match=r"0/params/d/.* does not match .*; no older save"):
        zj.restore(tmp_path, plan)


def test_parameters_are_read_without_the_optimizer(tmp_path, state, plan):
    save_one(tmp_path, plan, state)
    shutil.rmtree(tmp_path / "0" / "optimizer")
    other = toy.make_plan(4, optax.sgd(0.1), stage=1)
    params = zj.restore_params(tmp_path, other)
    jax.tree.map(np.testing.assert_array_equal, params, state.params)
    assert params["embed"].sharding.is_equivalent_to(
        other.abstract_state.params["embed"].sharding, 2
    )
    flat = zj.restore_params(tmp_path)
    np.testing.assert_array_equal(flat["blocks/up"], state.params["blocks"]["up"])
    assert flat["blocks/up"].addressable_shards[0].data.shape == (3, 2, 24)
    with pytest.raises(ValueError, match="optimizer/"):
        zj.restore(tmp_path, plan)


@pytest.mark.parametrize("before", ["fp32", "bf16_master"])
@pytest.mark.parametrize("after", ["fp32", "bf16_master", "all_bf16"])
def test_onto_another_precision(tmp_path, before, after):
    narrow = zj.Precision(jnp.bfloat16, jnp.bfloat16, jnp.bfloat16)
    precision = {"all_bf16": narrow}
    here = make_plan("adamw", 8, 3, precision=precision.get(before, before))
    there = make_plan("adamw", 4, 2, precision=precision.get(after, after))
    state = zj.init_state(here, jax.random.key(0))
    save_one(tmp_path, here, state)
    wide = state.params if state.master is None else {**state.master, "ids": state.params["ids"]}
    if after == "all_bf16":
        with pytest.warns(UserWarning, match=r"leaves are rounded, first 'blocks/down' from float"):
            restored = zj.restore(tmp_path, there)
    else:
        restored = zj.restore(tmp_path, there)
    kind = jnp.float32 if after == "fp32" else jnp.bfloat16
    for path, x in jax.tree.leaves_with_path(restored.params):
        expected = functools.reduce(lambda tree, key: tree[key.key], path, wide)
        expected = expected if path[0].key == "ids" else expected.astype(kind)
        assert x.dtype == expected.dtype
        np.testing.assert_array_equal(x, expected)
    if after == "bf16_master":
        del wide["ids"]
        master = {key: x for key, x in restored.master.items() if key != "ids"}
        jax.tree.map(np.testing.assert_array_equal, master, wide)
    flat = zj.restore_params(tmp_path, dtype=jnp.float32)
    np.testing.assert_array_equal(flat["head"], wide["head"])


def test_odd_leaves(tmp_path):
    """Empty, scalar, complex, boolean, typed keys, names with dots and spaces, frozen ones."""

    def init(key):
        return {
            "a b/c.d": jnp.ones((8, 8)),
            "empty": jnp.zeros((0, 8)),
            "scalar": jnp.float32(3),
            "complex": jax.random.normal(key, (8, 8), jnp.complex64),
            "flag": jnp.array(True),
            "keys": jax.random.split(key, 8),
            "frozen": jnp.full((8,), 2, jnp.bfloat16),
            "list": [jnp.ones(16), (jnp.zeros(8), None)],
        }

    optimizer = optax.chain(optax.add_noise(0.1, 0.5, jax.random.key(4)), optax.sgd(0.1, 0.9))
    build = functools.partial(zj.make_plan, init, optimizer, frozen=("frozen",), max_unsharded=1.0)
    here, there = build(zj.make_mesh(8), stage=3), build(zj.make_mesh(2), stage=1)
    state = zj.init_state(here, jax.random.key(0))
    save_one(tmp_path, here, state)
    assert_same(there, zj.restore(tmp_path, there), host_leaves(here, state))
    assert zj.restore(tmp_path, there).params["keys"].dtype == state.params["keys"].dtype
    assert zj.restore_params(tmp_path)["empty"].shape == (0, 8)


def test_keys_of_another_kind_are_refused(tmp_path, plan):
    with jax.default_prng_impl("rbg"):
        other = make_plan("adamw", 8, 3)
        save_one(tmp_path, other, zj.init_state(other, jax.random.key(0)))
    with pytest.raises(ValueError, match=r"PRNG keys of type key<rbg>, .* are key<fry>\. Set jax_"):
        zj.restore(tmp_path, plan)


def test_two_leaves_of_one_path_are_refused(tmp_path):
    init = lambda key: {"a/b": jnp.ones(8), "a": {"b": jnp.zeros(8)}}
    plan = zj.make_plan(init, optax.sgd(0.1), zj.make_mesh(8), stage=3)
    with pytest.raises(ValueError, match=r"two leaves have the path 'a/b': .* Rename it"):
        zj.Checkpointer(tmp_path, plan)


def change(init, **leaves):
    return lambda key: {**init(key), **leaves}


def plan_of(init):
    return zj.make_plan(init, OPTIMIZERS["adamw"](), zj.make_mesh(8), stage=3, max_unsharded=1.0)


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (
            lambda: plan_of(change(toy.init_params, head=jnp.ones((17, 9)))),
            r"0 is of another model: 1 of 11 parameters differ: 'head' is \[17, 17\], in the plan "
            r"\[17, 9\]\. Plan the model that was saved\.",
        ),
        (
            lambda: plan_of(change(toy.init_params, more=jnp.ones(8))),
            r"1 of 12 parameters differ: 'more' is only in the plan",
        ),
        (
            lambda: plan_of(lambda key: {"head": jnp.ones((17, 17))}),
            r"10 of 1 parameters differ: 'blocks/down' is only in the save; .* is only in the save",
        ),
        (
            lambda: plan_of(change(toy.init_params, ids=jnp.ones(17))),
            r"'ids' is int32, in the plan float32",
        ),
        (
            lambda: make_plan("adafactor", 8, 3),
            r"is of another optimizer \(or other frozen leaves\): .* begin with its parameters "
            r"alone: zerojax\.init_state\(plan, key, params=zerojax\.restore_params",
        ),
        (
            lambda: make_plan("adamw", 8, 3, frozen=("head",)),
            r"is of another optimizer \(or other frozen leaves\): .*/head' is only in the save",
        ),
    ],
)
def test_a_save_of_something_else(tmp_path, state, plan, build, message):
    save_one(tmp_path, plan, state)
    with pytest.raises(ValueError, match=message):
        zj.restore(tmp_path, build())


def test_paths_that_hold_no_save(tmp_path, state, plan):
    with pytest.raises(FileNotFoundError, match=r"nothing is no folder; pass the folder"):
        zj.restore(tmp_path / "nothing", plan)
    with pytest.raises(FileNotFoundError, match=r" holds no save; pass the folder"):
        zj.restore(tmp_path, plan)
    (tmp_path / "5.orbax-checkpoint-tmp").mkdir()
    with pytest.raises(FileNotFoundError, match=r"\(5\.orbax-checkpoint-tmp was never completed\)"):
        zj.restore(tmp_path, plan)
    (tmp_path / "2024").mkdir()
    with pytest.raises(saves.DamagedError, match=r"2024/SHA256SUMS cannot be read"):
        zj.restore(tmp_path, plan)
    with pytest.raises(ValueError, match=r"saves are read and written on file systems"):
        zj.restore("gs://bucket/run", plan)
    with pytest.raises(ValueError, match=r"saves are read and written on file systems"):
        zj.Checkpointer("gs://bucket/run", plan)
    assert not pathlib.Path("gs:").exists()


def test_a_newer_format(tmp_path, state, plan, monkeypatch):
    monkeypatch.setattr(saves, "FORMAT", 2)
    save_one(tmp_path, plan, state)
    monkeypatch.undo()
    message = r"its format is 2, and this zerojax reads 1\. Use the zerojax that wrote it \("
    with pytest.raises(ValueError, match=message):
        zj.restore(tmp_path, plan)


def test_arguments(tmp_path, state, plan):
    save_one(tmp_path, plan, state)
    with pytest.raises(ValueError, match="has no data: it was saved without data="):
        zj.restore(tmp_path, plan, data=Reader())
    with pytest.raises(ValueError, match="keep_latest is 0; keep 1 save or more"):
        zj.Checkpointer(tmp_path, plan, keep_latest=0)
    with pytest.raises(ValueError, match="the plan is a PosixPath"):
        zj.restore(plan, tmp_path)
    with pytest.raises(ValueError, match="leave out dtype"):
        zj.restore_params(tmp_path, plan, dtype=jnp.float32)
    other = make_plan("adamw", 4, 3)
    with pytest.raises(ValueError, match="Use the plan that made the state"):
        save_one(tmp_path, other, state)

    class Numbered(Reader):
        def get_state(self):
            return {"workers": [{0: 7}]}

    with (
        zj.Checkpointer(tmp_path / "numbered", plan) as checkpoints,
        pytest.raises(ValueError, match=r"not for JSON \(the key 0 is a int\); .* strings as keys"),
    ):
        checkpoints.save(state, data=Numbered())
    with pytest.raises(ValueError, match=r"is closed; make another of the same folder"):
        checkpoints.save(state)
    with pytest.raises(OSError, match=r"this process does not see the folder .*reach"):
        saves.check_shared(tmp_path / "of another host")

    class Odd(Reader):
        def get_state(self):
            return object()

    with (
        zj.Checkpointer(tmp_path / "odd", plan) as checkpoints,
        pytest.raises(ValueError, match=r"data\.get_state\(\) of a Odd is not for JSON"),
    ):
        checkpoints.save(state, data=Odd())


def test_one_run_at_a_time(tmp_path, state, plan):
    with zj.Checkpointer(tmp_path, plan) as checkpoints:
        checkpoints.save(state)
        with pytest.raises(BlockingIOError, match=r"another run is saving to .*; wait until"):
            zj.Checkpointer(tmp_path, plan)
    zj.Checkpointer(tmp_path, plan).close()


def test_a_forked_child_does_not_keep_the_folder(tmp_path, plan):
    checkpoints = zj.Checkpointer(tmp_path, plan)
    child = os.dup(checkpoints._lock.fileno())  # what a fork copies
    checkpoints.close()
    zj.Checkpointer(tmp_path, plan).close()
    os.close(child)


def test_a_donated_state_is_refused(tmp_path, state, plan):
    step = zj.make_train_step(toy.loss_fn, plan)
    step(state, zj.shard_batch(next(toy.batches()), plan))
    with (
        zj.Checkpointer(tmp_path, plan) as checkpoints,
        pytest.raises(ValueError, match="this state was given to an earlier step"),
    ):
        checkpoints.save(state)


def test_a_folder_that_cannot_be_written(tmp_path, plan):
    (tmp_path / "file").write_text("")
    with pytest.raises(OSError, match=r"cannot write to the folder .*file/run \(Not a directory\)"):
        zj.Checkpointer(tmp_path / "file" / "run", plan)


FULL = """
import resource, signal, sys
import jax, jax.numpy as jnp, optax
import zerojax as zj

zj.simulate_devices(2)
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
init = lambda key: {"w": jax.random.normal(key, (1024, 1024))}
plan = zj.make_plan(init, optax.adamw(1e-3), zj.make_mesh(), stage=3)
state = zj.init_state(plan, jax.random.key(0))
checkpoints = zj.Checkpointer(sys.argv[1], plan)
checkpoints.save(state)
checkpoints.wait()
resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, resource.RLIM_INFINITY))
checkpoints.save(state._replace(step=state.step + 1))
try:
    checkpoints.close()
except OSError as error:
    print(error)
resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
print(int(zj.restore(sys.argv[1], plan).step), sorted(x.name for x in checkpoints.folder.iterdir()))
"""


def test_a_disk_that_is_full(tmp_path):
    """A limit on the size of files stands for it: writing fails in the same way."""
    done = subprocess.run(
        [sys.executable, "-c", FULL, str(tmp_path)], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    *said, last = done.stdout.splitlines()
    assert f"{tmp_path}/1: this save could not be written (" in "\n".join(said)
    assert "earlier saves are as they were. Make room or permission there" in "\n".join(said)
    assert last == "0 ['.lock', '0']"


HOOK = """
import sys
import jax, jax.numpy as jnp, optax
import zerojax as zj

zj.simulate_devices(2)
init = lambda key: {"w": jax.random.normal(key, (64, 64))}
plan = zj.make_plan(init, optax.adamw(1e-3), zj.make_mesh(), stage=3)
with zj.Checkpointer(sys.argv[1], plan) as checkpoints:
    checkpoints.save(zj.init_state(plan, jax.random.key(0)))
zj.restore(sys.argv[1], plan)  # modules are imported once
seen = set()
sys.addaudithook(lambda event, args: seen.add(event))
zj.restore(sys.argv[1], plan)
zj.restore_params(sys.argv[1])
executed = {"pickle.find_class", "exec", "compile", "marshal.loads", "import", "os.system"}
print(sorted(seen & executed), "open" in seen)
import pickle
pickle.loads(pickle.dumps(zj.Precision))
eval("1")
print(sorted(seen & executed))
"""


def test_loading_executes_nothing(tmp_path):
    """No unpickling, no eval, no import of what a file names; the hook would see it."""
    done = subprocess.run(
        [sys.executable, "-c", HOOK, str(tmp_path)], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    first, second = done.stdout.splitlines()
    assert first == "[] True"
    assert "pickle.find_class" in second
    assert "exec" in second


MEMORY = """
import gc, resource, sys, threading, time
import jax, jax.numpy as jnp, optax
import zerojax as zj

zj.simulate_devices(8)
NUM = 12  # leaves of 8 MB, and two moments of each


def init(key):
    keys = jax.random.split(key, NUM)
    return {f"w{i}": jax.random.normal(keys[i], (2048, 1024)) for i in range(NUM)}


def resident():
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * resource.getpagesize() / 1e6


plan = zj.make_plan(init, optax.adamw(1e-3), zj.make_mesh(), stage=int(sys.argv[2]))
if sys.argv[3] == "save":
    with zj.Checkpointer(sys.argv[1], plan) as checkpoints:
        checkpoints.save(zj.init_state(plan, jax.random.key(0)))
    sys.exit()
one = lambda key: {"w": jnp.ones((8, 8))}
small = zj.make_plan(one, optax.adamw(1e-3), zj.make_mesh(), stage=3)
with zj.Checkpointer("".join(sys.argv[1:]), small) as checkpoints:
    checkpoints.save(zj.init_state(small, jax.random.key(0)))
zj.restore("".join(sys.argv[1:]), small)  # what the libraries need
gc.collect()
before, most, done = resident(), [0.0], threading.Event()


def watch():
    while not done.is_set():
        most[0] = max(most[0], resident())
        time.sleep(0.001)


thread = threading.Thread(target=watch)
thread.start()
state = zj.restore(sys.argv[1], plan)
if sys.argv[3] == "twice":  # the sabotaged twin: a whole copy beside the shards
    host = jax.tree.map(lambda x: jnp.array(x, copy=True), (state.params, state.opt_state))
    jax.block_until_ready(host)
done.set()
thread.join()
planned = sum(row.planned for row in zj.memory_report(plan) if row.kind != "grads") * 8 / 1e6
print(planned, most[0] - before)
"""


def test_restoring_holds_the_plan_and_about_a_leaf(tmp_path):
    """Resident memory of the process, in which the devices are simulated; a leaf has 8 MB."""

    def measure(stage, how):
        command = [sys.executable, "-c", MEMORY, str(tmp_path / "run"), str(stage), how]
        done = subprocess.run(command, capture_output=True, text=True, check=True)
        return [float(x) for x in done.stdout.split()]

    measure(3, "save")
    for stage in (3, 1):
        planned, held = measure(stage, "once")
        assert held < planned + 8 * 8 + 30
    planned, held = measure(3, "twice")
    assert held > planned + 8 * 8 + 30
