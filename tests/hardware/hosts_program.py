# SPDX-License-Identifier: Apache-2.0
"""What `test_hosts.py` runs in each of several processes.

`python -m tests.hardware.hosts_program WHAT ...`:

`train OUT`: the toy model; each process writes OUT.INDEX.npz. `saves FOLDER`: restores FOLDER/one,
makes steps, and saves to FOLDER/two; process 0 writes FOLDER/*.npz. The rest add numbers, but for
the last process, which raises (`raise`), or the others, which sleep while it waits (`idle`).
"""

import pathlib
import shutil
import sys
import time
import warnings

import jax
import numpy as np
from jax.experimental import multihost_utils
from jax.experimental.multihost_utils import process_allgather

import zerojax as zj
from tests import toy
from zerojax.checkpoint.items import saved_arrays
from zerojax.hardware import hosts

CASES = [(0, "manual"), (3, "manual"), (3, "auto")]
NAMES = ("losses", "norms", "params", "wrong")
STEPS = 4


def own(batch, index, count):
    """The rows of a process: the index-th of `count` blocks."""
    return jax.tree.map(lambda x: np.split(x, count)[index], batch)


def results(stage, partitioner, index=0, count=1):
    """Losses, gradient norms and final parameters of some steps on this process's rows.

    Then the loss of a step in which every process gives the rows of process 0.
    """
    plan = toy.make_plan(None, stage=stage, partitioner=partitioner)
    state = zj.init_state(plan, jax.random.key(toy.KEY))
    step = zj.make_train_step(toy.loss_fn, plan, microbatches=2)
    losses, norms = [], []
    for batch in toy.batches("unequal", num_steps=STEPS):
        state, metrics = step(state, zj.shard_batch(own(batch, index, count), plan))
        losses.append(float(metrics["loss"]))
        norms.append(float(metrics["grad_norm"]))
    params = process_allgather(state.params, tiled=True) if count > 1 else state.params
    params = np.concatenate([np.ravel(x) for x in jax.tree.leaves(jax.device_get(params))])
    _, metrics = step(state, zj.shard_batch(own(batch, 0, count), plan))
    return losses, norms, params, float(metrics["loss"])


def error_of(function, *args, **kwargs):
    try:
        function(*args, **kwargs)
    except ValueError as error:
        return str(error)
    return "none"


def train(out):
    index, count = jax.process_index(), jax.process_count()
    found = {}
    plan = toy.make_plan(None)
    for name, source in (("rows", index), ("swapped", count - 1 - index)):
        global_batch = zj.shard_batch(own({"x": np.arange(48).reshape(16, 3)}, source, count), plan)
        found[name] = process_allgather(global_batch["x"], tiled=True)
        found[f"{name}_here"] = np.concatenate(
            [shard.data for shard in global_batch["x"].addressable_shards]
        )
    found["devices"] = [jax.device_count(), jax.local_device_count()]
    found["again"] = error_of(zj.start_hosts)
    found["as_another"] = error_of(zj.start_hosts, process_id=count)
    found["fewer"] = error_of(zj.make_mesh, 4)
    found["unequal"] = error_of(zj.make_mesh, 5)
    for stage, partitioner in CASES:
        values = results(stage, partitioner, index, count)
        for name, value in zip(NAMES, values, strict=True):
            found[f"{name}_{stage}_{partitioner}"] = value
    np.savez(f"{out}.{index}.npz", **found)


class Reader:
    """A place in the data, which a process may have for itself."""

    def __init__(self, at):
        self.at = at

    def get_state(self):
        return {"at": self.at}

    def set_state(self, state):
        self.at = state["at"]


def saved_leaves(plan, state):
    """Every array of a save, whole on every process."""
    gathered = {}
    for item, key, x in saved_arrays(plan, state):
        several = jax.process_count() > 1
        gathered[f"{item}:{key}"] = process_allgather(x, tiled=True) if several else np.asarray(x)
    return gathered


def saves(folder):
    """Onto stage 1 of two processes from stage 3 of one; three steps; and saved, twice."""
    index, count = jax.process_index(), jax.process_count()
    plan = toy.make_plan(None, stage=1, precision="bf16_master")
    step = zj.make_train_step(toy.loss_fn, plan)
    reader = Reader(0)
    state = zj.restore(f"{folder}/one", plan, data=reader)
    assert reader.at == 7
    restored = saved_leaves(plan, state)
    with (
        zj.Checkpointer(f"{folder}/two", plan) as two,
        zj.Checkpointer(f"{folder}/apart", plan) as apart,
    ):
        apart.save(state, data=Reader(index))
        for batch in toy.batches("unequal", num_steps=3):
            state, _ = step(state, zj.shard_batch(own(batch, index, count), plan))
            two.save(state, data=Reader(9))
        again = zj.restore(f"{folder}/apart", plan, data=reader)
        assert (reader.at, int(again.step)) == (index, 1)
    last = saved_leaves(plan, state)
    if index == 0:
        np.savez(f"{folder}/restored.npz", **restored)
        np.savez(f"{folder}/last.npz", **last)
    damaged = pathlib.Path(folder, "hurt", "4", "params", "manifest.ocdbt")
    if index == 0:
        shutil.copytree(f"{folder}/two", f"{folder}/hurt")
        damaged.write_bytes(damaged.read_bytes()[:-1])
    multihost_utils.sync_global_devices("damaged")
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        state = zj.restore(f"{folder}/hurt", plan)
    assert int(state.step) == 3
    assert len(said) == 1
    assert str(damaged.parent.parent) in str(said[0].message)


def reduce_for_ever(last, what):
    """Sums over all devices, again and again; process `last` leaves after a few."""
    plan = toy.make_plan(None)
    for number in range(10**9):
        ones = zj.shard_batch(np.ones(len(plan.mesh.local_devices)), plan)
        assert float(ones.sum()) == plan.num_devices
        if number == 3:
            print("running", flush=True)
            if what == "raise" and last:
                raise RuntimeError("the mistake of one process")
            if what == "idle" and not last:
                time.sleep(600)  # outside any collective


if __name__ == "__main__":
    what, *more = sys.argv[1:]
    if what not in ("train", "saves"):
        hosts.HEARTBEAT_S = 3
    zj.start_hosts()
    zj.simulate_devices(4)
    if what == "train":
        train(*more)
    elif what == "saves":
        saves(*more)
    else:
        reduce_for_ever(jax.process_index() == jax.process_count() - 1, what)
