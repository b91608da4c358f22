# SPDX-License-Identifier: Apache-2.0
"""What `test_hosts.py` runs in each of several processes: `python -m tests.hosts_program WHAT ...`.

`train OUT`: the toy model; each process writes OUT.INDEX.npz. The rest add numbers, but for
the last process, which raises (`raise`), or the others, which sleep while it waits (`idle`).
"""

import sys
import time

import jax
import numpy as np
from jax.experimental.multihost_utils import process_allgather

import zerojax as zj
from tests import toy
from zerojax import hosts

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
    if what != "train":
        hosts.HEARTBEAT_S = 3
    zj.start_hosts()
    zj.simulate_devices(4)
    if what == "train":
        train(*more)
    else:
        reduce_for_ever(jax.process_index() == jax.process_count() - 1, what)
