# SPDX-License-Identifier: Apache-2.0
"""How long a save keeps the training step waiting: `python -m scripts.bench --checkpoint`."""

import shutil
import tempfile
import time
from pathlib import Path

import jax
import numpy as np
import optax
from jax.sharding import Mesh

import zerojax as zj
from zerojax.table import format_table


def settle(state: zj.TrainState) -> None:
    """Wait for a step, and for its threads: on a CPU they are busy for a while after its end."""
    jax.block_until_ready(state)
    time.sleep(0.5)


def time_saves(mesh: Mesh, params_mb: int, rounds: int, folder: Path | None = None) -> np.ndarray:
    """Return seconds [rounds, 4]: asynchronous save, until it is complete, synchronous, restore.

    Args:
        mesh: The devices.
        params_mb: MB of fp32 parameters; Adam's moments are twice as much again.
        rounds: How often each is done, in turn.
        folder: Where to save; None: a temporary folder, removed at the end.
    """
    size = params_mb * 10**6 // 4 // 16 // 1024 // mesh.size * mesh.size

    def init_params(key):
        return {
            f"w{i}": jax.random.normal(jax.random.fold_in(key, i), (size, 1024)) for i in range(16)
        }

    plan = zj.make_plan(init_params, optax.adamw(1e-3), mesh, stage=3)
    step = zj.make_train_step(
        lambda params, batch, key: (
            sum((w * w).sum() * batch.mean() for w in params.values()),
            1.0,
        ),
        plan,
    )
    batch = zj.shard_batch(np.ones((mesh.size, 1), np.float32), plan)
    state, _ = step(zj.init_state(plan, jax.random.key(0)), batch)  # moments that do not compress
    root = Path(tempfile.mkdtemp()) if folder is None else folder
    seconds = np.zeros((rounds, 4))
    try:
        with zj.Checkpointer(root, plan, keep_latest=1) as checkpoints:
            for i in range(rounds):
                state, _ = step(state, batch)
                settle(state)
                start = time.perf_counter()
                checkpoints.save(state)
                seconds[i, 0] = time.perf_counter() - start
                while not (root / str(int(state.step))).exists():
                    time.sleep(0.001)
                seconds[i, 1] = time.perf_counter() - start
                state, _ = step(state, batch)
                settle(state)
                start = time.perf_counter()
                checkpoints.save(state)
                checkpoints.wait()
                seconds[i, 2] = time.perf_counter() - start
                start = time.perf_counter()
                jax.block_until_ready(zj.restore(root, plan).params)
                seconds[i, 3] = time.perf_counter() - start
    finally:
        if folder is None:
            shutil.rmtree(root)
    return seconds


def print_saves(seconds: np.ndarray, params_mb: int) -> float:
    """Print the table; return the median of what a save blocks, over a synchronous one."""
    ratios = seconds / seconds[:, 2:3]
    what = [
        "the step waits for a save",
        "until it is complete",
        "a save that is waited for",
        "restore",
    ]
    rows = [
        [name, f"{np.median(seconds[:, j]):.3f} s", f"{100 * np.median(ratios[:, j]):.1f} %"]
        for j, name in enumerate(what)
    ]
    print(f"{3 * params_mb} MB of state (fp32, Adam), medians of {len(seconds)} rounds\n")
    print(format_table(["", "time", "of a synchronous save"], rows, right=[1, 2]))
    return float(np.median(ratios[:, 0]))
