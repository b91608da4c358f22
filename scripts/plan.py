# SPDX-License-Identifier: Apache-2.0
"""Plan before you rent: which ZeRO stage fits and is fastest on GPUs that need not be here.

  make plan ARGS="--model llama2-7b --gpus h100:8 --batch 2 --seq 4096"

Prints bytes at rest, peak memory, traffic, exposed communication, step time and MFU of each way to
train, and recommends one. Every peak is predicted by formula; the most promising are compiled.
"""

from __future__ import annotations

import dataclasses
import functools
import importlib
import json
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Literal

import jax
import jax.numpy as jnp
import optax
import tyro

import zerojax as zj
from models import transformer
from scripts import paper
from scripts.bench import announce
from scripts.cases import RESERVE, Case, Row, compile_case, global_batch, num_params, predict
from scripts.train import check_least
from zerojax.precision import get_precision
from zerojax.table import format_bytes, format_table
from zerojax.targets import Target

# For each stage, (remat, prefetch): prefetch is a choice only where layers are gathered.
BOTH, ALL = (("none", 0), ("full", 0)), (("none", 1), ("full", 1), ("full", 2), ("full", 0))
CHOICES = {0: BOTH, 1: BOTH, 2: BOTH, 3: ALL}
FAR_TOO_LARGE = 1.05  # times the memory, by formula: not compiled unless asked


@dataclasses.dataclass(frozen=True)
class Options:
    """Plan a training run on GPUs that need not be here."""

    model: Literal[*transformer.PRESETS] = "llama2-7b"  # pyright: ignore[reportInvalidTypeForm]
    """Preset of models/transformer.py."""
    gpus: str = "h100:8"
    """GPU:COUNT or GPU:HOSTSxCOUNT, such as h100:64x8."""
    batch: int = 2
    """Rows of each GPU in an update, over all its microbatches."""
    seq: int | None = None
    """Tokens in a row (None: the preset's)."""
    layers: int | None = None
    """Layers (None: the preset's)."""
    microbatches: int = 1
    """Slices that each GPU makes of its rows, one after another."""
    precision: Literal["fp32", "bf16", "bf16_master"] = "bf16_master"
    """Number formats at rest, in compute and on the wire."""
    optimizer: Literal["adamw"] = "adamw"
    """With --fn, what the function returns."""
    fn: str | None = None
    """package.module:make in place of a model; make() returns (init_params, loss_fn, optimizer,
    shapes of one GPU's rows[, paths of stacked layers])."""
    link_bandwidth: float | None = None
    """GB/s of each GPU in collectives inside a host (None: 7/9 of the data sheet's)."""
    network_bandwidth: float | None = None
    """GB/s of each GPU's network card in collectives between hosts (None: 9/10 of it)."""
    compile_seconds: float = 12
    """Compile one program after another, the most promising first, and start none after this."""
    compile_large: bool = False
    """Compile also what the formula says is far too large."""
    json: Path | None = None
    """Write all figures there too."""
    paper: bool = False
    """Print Table I of the ZeRO paper instead, by formula and from compiled programs."""


def find_target(options: Options) -> Target:
    """The GPUs, at the bandwidths asked for."""
    rates = {name: getattr(options, name) for name in ("link_bandwidth", "network_bandwidth")}
    given = {name: rate * 1e9 for name, rate in rates.items() if rate is not None}
    target = zj.target(options.gpus, **given)
    if target.gpu is None:
        raise ValueError(f"--gpus: {options.gpus!r} has no GPU to plan for; give one as in h100:8")
    return target


def model_cases(options: Options, target: Target) -> Iterator[Case]:
    """The ways to train a preset."""
    mesh, precision = zj.make_mesh(target=target), get_precision(options.precision)
    is_short = jnp.dtype(precision.compute).itemsize == 2
    # The model would choose by the devices that are here.
    attention = "cudnn" if is_short else "xla"
    changes = {"num_layers": options.layers, "seq_len": options.seq, "attention": attention}
    given = {name: value for name, value in changes.items() if value is not None}
    config = dataclasses.replace(transformer.PRESETS[options.model], **given)
    rows = {"tokens": jax.ShapeDtypeStruct((options.batch, config.seq_len + 1), jnp.int32)}
    flops = transformer.flops_per_token(config) * options.batch * config.seq_len
    for stage, choices in CHOICES.items():
        plan = zj.make_plan(
            functools.partial(transformer.init_params, config),
            optax.adamw(1e-3),
            mesh,
            stage=stage,
            layers=("blocks",),
            precision=precision,
        )
        for remat, prefetch in choices:
            how = dataclasses.replace(config, remat=remat, prefetch=prefetch)
            loss_fn = functools.partial(transformer.loss_fn, how)
            batch = global_batch(rows, mesh.size)
            yield Case(
                stage,
                remat,
                prefetch if stage == 3 else None,
                loss_fn,
                plan,
                batch,
                options.microbatches,
                flops,
            )


def fn_cases(options: Options, target: Target) -> Iterator[Case]:
    """The stages of the user's own model."""
    init_params, loss_fn, optimizer, rows, *layers = load(str(options.fn))
    mesh = zj.make_mesh(target=target)
    for stage in CHOICES:
        plan = zj.make_plan(
            init_params,
            optimizer,
            mesh,
            stage=stage,
            layers=layers[0] if layers else (),
            precision=options.precision,
        )
        batch = global_batch(rows, mesh.size)
        yield Case(stage, None, None, loss_fn, plan, batch, options.microbatches, None)


def load(name: str) -> tuple:
    """What the user's function returns."""
    module, _, function = name.partition(":")
    try:
        make = getattr(importlib.import_module(module), function)
    except (ImportError, AttributeError, ValueError) as error:
        raise ValueError(f"--fn: {name!r}: {error}; give it as package.module:make") from error
    made = make()
    if not isinstance(made, tuple) or len(made) not in (4, 5):
        raise ValueError(
            f"--fn: {name!r} returned {type(made).__name__}; return a tuple of (init_params, "
            "loss_fn, optimizer, shapes of one GPU's rows[, layers])"
        )
    return made


def make_rows(options: Options, target: Target) -> list[Row]:
    """Predict every case; compile the most promising that fit, one at a time."""
    assert target.gpu is not None
    start = time.perf_counter()
    usable = target.gpu.memory_bytes * (1 - RESERVE)
    rows = []
    for case in (fn_cases if options.fn else model_cases)(options, target):
        announce(f"predicting stage {case.stage}")
        rows.append(predict(case))
    chosen = sorted(rows, key=lambda row: row.case.least_seconds(target))
    if not options.compile_large:
        chosen = [x for x in chosen if x.peak.num_bytes <= FAR_TOO_LARGE * usable]
    for number, row in enumerate(chosen, start=1):
        if time.perf_counter() - start >= options.compile_seconds:
            break
        announce(f"compiling {number} of at most {len(chosen)}: {describe(row.case)}")
        row.compiled = compile_case(row.case, target)
    announce("")
    return rows


def describe(case: Case) -> str:
    """The choices of a case in words."""
    parts = [f"stage {case.stage}"]
    parts += [f"remat {case.remat}"] if case.remat else []
    parts += [f"prefetch {case.prefetch}"] if case.prefetch is not None else []
    return ", ".join(parts)


def show(rows: list[Row], usable: float) -> str:
    """The table, at most 100 columns wide."""
    lines = []
    for row in rows:
        case, made = row.case, row.compiled
        cells = [str(case.stage), case.remat or "own"]
        cells += ["-" if case.prefetch is None else str(case.prefetch)]
        cells += [format_bytes(case.rest_bytes), format_bytes(row.peak.num_bytes)]
        fits = "yes" if row.fits(usable) else "no"
        if made is None:
            theory = format_bytes(case.theory_bytes)
            cells += ["-", f"predicted {fits}", f"~{theory}", *["-"] * 4]
        else:
            cells += [format_bytes(made.peak_bytes), fits, format_bytes(made.wire_bytes)]
            cells += [f"{made.wire_bytes / case.theory_bytes:.2f}" if case.theory_bytes else "-"]
            cells += [f"{1e3 * made.exposed_seconds:.0f} ms", f"{1e3 * made.seconds:,.0f} ms"]
            cells += ["-" if made.mfu is None else f"{made.mfu:.0%}"]
        lines.append(cells)
    header = ["stage", "remat", "ahead", "at rest", "formula", "peak", "fits", "wire", "x theory"]
    header += ["exposed", "step", "MFU"]
    return format_table(header, lines, right=[0, 2, 3, 4, 5, 7, 8, 9, 10, 11])


def recommend(rows: list[Row], target: Target) -> str:
    """One sentence: what to take, and why."""
    assert target.gpu is not None
    usable = target.gpu.memory_bytes * (1 - RESERVE)
    fit = [row for row in rows if row.fits(usable)]
    if not fit:
        least = min(rows, key=lambda row: row.peak.num_bytes)
        size = format_bytes(least.peak.num_bytes)
        return (
            f"Nothing fits: {describe(least.case)} takes least, {size} of {format_bytes(usable)}. "
            "Give each GPU fewer or shorter rows, or take more GPUs."
        )
    timed = [(row.compiled.seconds, i) for i, row in enumerate(fit) if row.compiled]
    if not timed:
        best = min(fit, key=lambda row: row.case.least_seconds(target))
        size = format_bytes(best.peak.num_bytes)
        why = f"the least work and traffic of what fits, {size} by formula; none was compiled"
        return f"Take {describe(best.case)}: {why}."
    seconds, index = min(timed)
    best = fit[index].compiled
    assert best is not None
    why = f"of {len(timed)} compiled that fit, " if len(timed) > 1 else "compiled, it fits: "
    why += f"the fastest, {1e3 * seconds:,.0f} ms a step, in " if len(timed) > 1 else ""
    room = f"{format_bytes(best.allocated_bytes)} of {format_bytes(usable)}"
    return f"Take {describe(fit[index].case)}: {why}{room}."


def main(options: Options) -> list[Row]:
    """Print the plan; raises ValueError or OSError for a user's mistake."""
    if options.paper:
        paper.main(announce)
        return []
    check_least(options, {"batch": 1, "seq": 1, "layers": 1, "microbatches": 1})
    if options.batch % options.microbatches and not options.fn:
        raise ValueError(
            f"--batch: {options.batch} rows of a GPU are not a multiple of "
            f"{options.microbatches} microbatches; give --batch "
            f"{options.batch + -options.batch % options.microbatches}"
        )
    target = find_target(options)
    assert target.gpu is not None
    rows = make_rows(options, target)
    gpu, usable = target.gpu, target.gpu.memory_bytes * (1 - RESERVE)
    tokens = ", ".join(str(list(x.shape)) for x in jax.tree.leaves(rows[0].case.batch))
    rates = f"{target.link_bandwidth / 1e9:.0f} GB/s in a host"
    if target.hosts > 1:
        rates += f", {target.network_bandwidth / 1e9:.0f} GB/s a card between hosts"
    print(
        f"{options.fn or options.model}: {num_params(rows[0].case.plan):,} parameters, "
        f"{options.precision}, {'own optimizer' if options.fn else options.optimizer}, "
        f"global batch {tokens}, {options.microbatches} microbatch(es)\n"
        f"{target.num_devices} x {gpu.kind}: {format_bytes(usable)} of memory, after "
        f"{RESERVE:.0%} for CUDA, NCCL and gaps\n"
        f"rates: {rates}; matmuls at {target.matmul_efficiency:.0%} of "
        f"{gpu.matmul_flops / 1e12:,.0f} TFLOP/s, attention at {target.attention_efficiency:.0%}, "
        f"memory at {target.memory_efficiency:.0%}\n"
        "GB = 1e9 bytes, each for one GPU and step; ahead: layers gathered ahead (prefetch); "
        "~: theory\n"
    )
    print(f"{show(rows, usable)}\n\n{recommend(rows, target)}")
    if options.json:
        figures = {
            "options": {name: value for name, value in vars(options).items() if name != "json"},
            "target": {**dataclasses.asdict(target), "usable_bytes": usable},
            "rows": [row.as_json(usable) for row in rows],
            "recommendation": recommend(rows, target),
        }
        options.json.write_text(json.dumps(figures, indent=1) + "\n")
    return rows


if __name__ == "__main__":
    try:
        main(tyro.cli(Options, prog="python -m scripts.plan", description=__doc__))
    except KeyboardInterrupt:
        sys.exit(130)
    except (ValueError, OSError) as error:
        announce("")
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)
