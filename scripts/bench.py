# SPDX-License-Identifier: Apache-2.0
"""Step time of every stage and partitioner, beside one device and a naive sharding baseline.

All programs train the same model on the same batch; they are timed in turn, one step each, round
after round, so that a noisy machine disturbs all alike. What counts are the ratios.

  make bench ARGS="--rounds 30 --batch 64"
"""

from __future__ import annotations

import dataclasses
import functools
import statistics
import time

import jax
import numpy as np
import optax
import tyro
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import zerojax as zj
from models import transformer
from zerojax.memory import live_bytes
from zerojax.table import format_bytes, format_table


@dataclasses.dataclass(frozen=True)
class Options:
    """What to time."""

    model: str = "tiny"
    """A preset of models/transformer.py."""
    devices: int = 8
    """Devices to use; simulated on a host without accelerators."""
    batch: int = 32
    """Rows of the global batch."""
    rounds: int = 20
    """Timed rounds; each runs every program once."""


def unsharded_step(loss_fn, optimizer):
    """The plain step of one device: what the ratios are measured against."""

    @functools.partial(jax.jit, donate_argnums=(0, 1))
    def step(params, opt_state, batch):
        def total(params):
            loss_sum, weight = loss_fn(params, batch, None)
            return loss_sum / weight

        loss, grads = jax.value_and_grad(total)(params)
        updates, opt_state = optimizer.update(grads, opt_state, params)
        return optax.apply_updates(params, updates), opt_state, loss

    return step


def naive_step(loss_fn, optimizer, mesh, params):
    """ZeRO-3 as one writes it first: shard every array by NamedSharding, shard the batch, jit.

    Nothing says what should be gathered, so XLA may move activations instead of weights.
    """
    num_devices = mesh.shape["data"]

    def spec(x):
        fits = [d for d in range(x.ndim) if x.shape[d] % num_devices == 0]
        if not fits:
            return P()
        dim = max(fits, key=lambda d: x.shape[d])
        return P(*[None] * dim, "data")

    def shardings(tree):
        return jax.tree.map(lambda x: NamedSharding(mesh, spec(x)), tree)

    opt_state = jax.eval_shape(optimizer.init, params)
    places = shardings(params), shardings(opt_state)
    step = jax.jit(
        unsharded_step(loss_fn, optimizer),
        in_shardings=(*places, NamedSharding(mesh, P("data"))),
        out_shardings=(*places, NamedSharding(mesh, P())),
        donate_argnums=(0, 1),
    )
    return (
        step,
        jax.device_put(params, places[0]),
        jax.jit(optimizer.init, out_shardings=places[1])(params),
    )


def make_programs(options: Options):
    """Yields (name, a function that runs one step, bytes of state on each device)."""
    config = transformer.PRESETS[options.model]
    init = functools.partial(transformer.init_params, config)
    loss_fn = functools.partial(transformer.loss_fn, config)
    optimizer = optax.adamw(1e-3)
    mesh = zj.make_mesh(options.devices)
    tokens = np.random.default_rng(0).integers(
        0, config.vocab_size, (options.batch, config.seq_len + 1), np.int32
    )

    def loop(step, *state):
        """Closes over the state, which every step replaces."""
        state = list(state)

        def run():
            *state[:], loss = step(*state)
            return state, loss

        return run

    def plain(name, step, params, opt_state, batch):
        size = live_bytes((params, opt_state))
        return name, loop(lambda *state: step(*state, batch), params, opt_state), size

    params = jax.jit(init)(jax.random.key(0))
    host = {"tokens": tokens}
    yield plain(
        "one device, unsharded",
        unsharded_step(loss_fn, optimizer),
        jax.tree.map(jax.numpy.copy, params),
        jax.jit(optimizer.init)(params),
        jax.device_put(host),
    )
    sharded = jax.device_put(host, NamedSharding(mesh, P("data")))
    yield plain("naive NamedSharding", *naive_step(loss_fn, optimizer, mesh, params), sharded)
    for partitioner in ("manual", "auto"):
        for stage in range(4):
            plan = zj.make_plan(
                init, optimizer, mesh, stage=stage, layers=("blocks",), partitioner=partitioner
            )
            step, batch = zj.make_train_step(loss_fn, plan), zj.shard_batch(host, plan)
            state = zj.init_state(plan, jax.random.key(0))
            size = live_bytes(state._replace(key=None))
            run = loop(lambda state, step=step, batch=batch: step(state, batch), state)
            yield f"stage {stage}, {partitioner}", run, size


def main(options: Options) -> dict[str, float]:
    """Prints the table; returns the median ratio of each program to the unsharded step."""
    jax.config.update("jax_num_cpu_devices", options.devices)
    names, programs, sizes = zip(*make_programs(options), strict=True)
    for run in programs:
        run()
        jax.block_until_ready(run())
    times = []
    for _ in range(options.rounds):
        row = []
        for run in programs:
            start = time.perf_counter()
            jax.block_until_ready(run())
            row.append(time.perf_counter() - start)
        times.append(row)
    ratios = [[seconds / row[0] for seconds in row] for row in times]
    medians = [statistics.median(column) for column in zip(*ratios, strict=True)]
    rows = []
    for name, ratio, column, size in zip(
        names, medians, zip(*ratios, strict=True), sizes, strict=True
    ):
        low, _, high = statistics.quantiles(column, n=4)
        rows.append([name, f"{ratio:.2f}", f"{low:.2f} - {high:.2f}", format_bytes(size)])
    print(
        f"{options.model}, {options.batch} rows, {options.devices} devices "
        f"({jax.devices()[0].device_kind}), median of {options.rounds} interleaved rounds\n"
    )
    header = ["program", "time / unsharded", "middle half", "state per device"]
    print(format_table(header, rows, right=[1, 2, 3]))
    return dict(zip(names, medians, strict=True))


if __name__ == "__main__":
    main(tyro.cli(Options, description=__doc__))
