# SPDX-License-Identifier: Apache-2.0
"""Step time of every stage and partitioner, beside one device and a naive sharding baseline.

All programs train the same model on the same batch; they are timed in turn, one step each, round
after round, so that a noisy machine disturbs all alike. What counts are the ratios.

  make bench ARGS="--rounds 30 --batch 64"
  make bench ARGS="--out out/bench"
  make bench ARGS=--checkpoint
"""

from __future__ import annotations

import dataclasses
import functools
import statistics
import sys
from pathlib import Path
from typing import Literal

import jax
import numpy as np
import optax
import tyro
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import zerojax as zj
from models import transformer
from models.transformer import TransformerConfig
from scripts.parts.bench_saves import print_saves, time_saves
from scripts.parts.bench_sweep import sweep
from scripts.parts.mesh import make_mesh
from scripts.parts.model import make_plan
from scripts.parts.options import check_least
from scripts.parts.text import check_batch
from scripts.parts.timing import Program, announce, repeat, time_steps, unsharded_step
from zerojax.receipt.memory import live_bytes
from zerojax.sharding.axes import num_batch_shards
from zerojax.table import format_bytes, format_table


@dataclasses.dataclass(frozen=True)
class Options:
    """What to time."""

    model: Literal[*transformer.PRESETS] = "tiny"  # pyright: ignore[reportInvalidTypeForm]
    """Preset of models/transformer.py."""
    layers: int | None = None
    """Layers (None: the preset's)."""
    seq: int | None = None
    """Tokens in a row (None: the preset's)."""
    devices: int | None = None
    """Devices to use (None: all accelerators, or 8 simulated CPU devices)."""
    batch: int = 32
    """Rows of the global batch, a multiple of devices."""
    rounds: int = 20
    """Timed rounds, 2 or more; each runs every program once."""
    out: Path | None = None
    """Folder for bench.md and bench.png: stages, devices, prefetch and microbatches, in minutes."""
    checkpoint: bool = False
    """Time saves of --params-mb of parameters in place of steps."""
    params_mb: int = 256
    """MB of fp32 parameters that --checkpoint saves, with Adam's moments of twice as much."""


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


def make_programs(config: TransformerConfig, mesh: Mesh, rows: int) -> list[Program]:
    """Make all programs; nothing of their steps is compiled yet."""
    init = functools.partial(transformer.init_params, config)
    loss_fn = functools.partial(transformer.loss_fn, config)
    optimizer = optax.adamw(1e-3)
    plans = {
        f"stage {stage}, {partitioner}": make_plan(
            config, optimizer, mesh, stage=stage, partitioner=partitioner
        )
        for partitioner in ("manual", "auto")
        for stage in range(4)
    }
    announce("making the state of every program")
    shape = rows, config.seq_len + 1
    host = {"tokens": np.random.default_rng(0).integers(0, config.vocab_size, shape, np.int32)}

    def plain(name: str, step, params, opt_state, batch) -> Program:
        run = repeat(lambda *state: step(*state, batch), params, opt_state)
        return Program(name, run, live_bytes((params, opt_state)))

    params = jax.jit(init)(jax.random.key(0))
    whole = jax.tree.map(jax.numpy.copy, params), jax.jit(optimizer.init)(params)
    unsharded = unsharded_step(loss_fn, optimizer), *whole, jax.device_put(host)
    sharded = jax.device_put(host, NamedSharding(mesh, P("data")))
    programs = [
        plain("one device, unsharded", *unsharded),
        plain("naive NamedSharding", *naive_step(loss_fn, optimizer, mesh, params), sharded),
    ]
    late = functools.partial(transformer.loss_fn, dataclasses.replace(config, prefetch=0))
    cases = [(name, plan, loss_fn) for name, plan in plans.items()]
    cases += [
        (f"{name}, prefetch 0", plan, late) for name, plan in plans.items() if "stage 3" in name
    ]
    for name, plan, loss in cases:
        step, batch = zj.make_train_step(loss, plan), zj.shard_batch(host, plan)
        state = zj.init_state(plan, jax.random.key(0))
        run = repeat(lambda state, step=step, batch=batch: step(state, batch), state)
        programs.append(Program(name, run, live_bytes(state._replace(key=None))))
    return programs


def main(options: Options) -> dict[str, float]:
    """Print the table; return the median ratio of each program to the unsharded step.

    Raises ValueError for a user's mistake.
    """
    least = {"layers": 1, "seq": 1, "devices": 1, "batch": 1, "rounds": 2, "params_mb": 1}
    check_least(options, least)
    if options.checkpoint:
        seconds = time_saves(make_mesh(options.devices), options.params_mb, options.rounds)
        return {"blocked": print_saves(seconds, options.params_mb)}
    config = transformer.preset(options.model, num_layers=options.layers, seq_len=options.seq)
    mesh = make_mesh(options.devices)
    check_batch(options.batch, num_batch_shards(mesh))
    if options.out is not None:
        return sweep(config, mesh.size, options.batch, options.rounds, options.model, options.out)
    programs = make_programs(config, mesh, options.batch)
    seconds = time_steps(programs, options.rounds)

    to_unsharded = seconds / seconds[:, :1]
    to_naive = seconds / seconds[:, 1:2]
    medians = np.median(to_unsharded, axis=0)
    rows = []
    for j, program in enumerate(programs):
        low, _, high = statistics.quantiles(to_unsharded[:, j], n=4)
        ratios = f"{medians[j]:.2f}", f"{low:.2f} - {high:.2f}", f"{np.median(to_naive[:, j]):.2f}"
        rows.append([program.name, *ratios, format_bytes(program.state_bytes)])
    kind = jax.devices()[0].device_kind
    print(
        f"{options.model}, {options.batch} rows of {config.seq_len} tokens, {mesh.size} devices "
        f"({kind})\nmedians of {options.rounds} interleaved rounds; state: bytes on each device\n"
    )
    header = ["program", "time / unsharded", "middle half", "time / naive", "state"]
    print(format_table(header, rows, right=[1, 2, 3, 4]))
    if jax.default_backend() == "cpu":
        share = "Simulated devices share this machine's cores"
        print(f"\n{share}: a ratio below 1.00 is not a speed-up by ZeRO.")
    return {program.name: float(x) for program, x in zip(programs, medians, strict=True)}


if __name__ == "__main__":
    try:
        main(tyro.cli(Options, prog="python -m scripts.bench", description=__doc__))
    except KeyboardInterrupt:
        sys.exit(130)
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)
