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
import textwrap
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
from scripts.parts import paper
from scripts.parts.options import check_least, find_target
from scripts.parts.timing import announce
from zerojax.hardware.targets import Target
from zerojax.receipt.planner import (
    RESERVE,
    Case,
    Row,
    by_promise,
    compile_row,
    describe,
    global_batch,
    num_params,
    predict,
    recommend,
    show,
    usable_bytes,
)
from zerojax.sharding.precision import get_precision
from zerojax.table import format_bytes
from zerojax.training.checks import near_rows

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
    batch: int | None = None
    """Rows of each GPU in an update, over all its microbatches (None: 2 for each of them)."""
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
    compile_seconds: float = 14
    """Compile the most promising way to train, and others until this is over; 0: none."""
    compile_large: bool = False
    """Compile also what the formula says is far too large."""
    json: Path | None = None
    """Write all figures there too."""
    paper: bool = False
    """Print Table I of the ZeRO paper instead, by formula and from compiled programs."""


def model_cases(options: Options, target: Target) -> Iterator[Case]:
    """The ways to train a preset."""
    mesh, precision = zj.make_mesh(target=target), get_precision(options.precision)
    is_short = jnp.dtype(precision.compute).itemsize == 2
    # The model would choose by the devices that are here.
    attention = "cudnn" if is_short else "xla"
    changes = {"num_layers": options.layers, "seq_len": options.seq, "attention": attention}
    given = {name: value for name, value in changes.items() if value is not None}
    config = dataclasses.replace(transformer.PRESETS[options.model], **given)
    batch = options.batch or 2 * options.microbatches
    rows = {"tokens": jax.ShapeDtypeStruct((batch, config.seq_len + 1), jnp.int32)}
    flops = transformer.flops_per_token(config) * batch * config.seq_len
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
            yield Case(
                stage,
                remat,
                prefetch if stage == 3 else None,
                loss_fn,
                plan,
                global_batch(rows, mesh.size),
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
    usable = usable_bytes(target)
    rows = []
    for case in (fn_cases if options.fn else model_cases)(options, target):
        announce(f"predicting {describe(case)}")
        rows.append(predict(case))
    chosen = by_promise(rows, target)
    if not options.compile_large:
        chosen = [x for x in chosen if x.peak.num_bytes <= FAR_TOO_LARGE * usable]
    for number, row in enumerate(chosen, start=1):
        late = number > 1 and time.perf_counter() - start >= options.compile_seconds
        if late or not options.compile_seconds:
            break
        announce(f"compiling {number} of at most {len(chosen)}: {describe(row.case)}")
        row.compiled = compile_row(row, target)
    announce("")
    return rows


def check_options(options: Options) -> None:
    """Raise ValueError, naming the flag, for what cannot be planned."""
    check_least(options, {"batch": 1, "seq": 1, "layers": 1, "microbatches": 1})
    for name in ("batch", "seq", "layers"):
        if options.fn and getattr(options, name) is not None:
            raise ValueError(
                f"--{name}: with --fn, what the function returns says it; leave it out"
            )
    slices = options.microbatches
    if options.batch and (near := near_rows(options.batch, slices)):
        raise ValueError(
            f"--batch: {options.batch} rows of a GPU are not a multiple of {slices} microbatches; "
            f"give --batch {near[1]}"
        )


def main(options: Options) -> list[Row]:
    """Print the plan; raises ValueError or OSError for a user's mistake."""
    if options.paper:
        paper.main(announce)
        return []
    check_options(options)
    target = find_target(options.gpus, options)
    if target.gpu is None:
        raise ValueError(f"--gpus: {options.gpus!r} has no GPU to plan for; give one as in h100:8")
    rows = make_rows(options, target)
    gpu, usable = target.gpu, usable_bytes(target)
    batch = ", ".join(str(list(x.shape)) for x in jax.tree.leaves(rows[0].case.batch))
    rates = f"{target.link_bandwidth / 1e9:.0f} GB/s in a host"
    if target.hosts > 1:
        rates += f", {target.network_bandwidth / 1e9:.0f} GB/s a card between hosts"
    print(
        f"{options.fn or options.model}: {num_params(rows[0].case.plan):,} parameters, "
        f"{options.precision}, {'own optimizer' if options.fn else options.optimizer}, "
        f"global batch {batch}, microbatches {options.microbatches}\n"
        f"{target.num_devices} x {gpu.kind}: {format_bytes(usable)} of memory, after "
        f"{RESERVE:.0%} for CUDA, NCCL and gaps\n"
        f"rates: {rates}; matmuls {target.matmul_efficiency:.0%}, attention "
        f"{target.attention_efficiency:.0%} of {gpu.matmul_flops / 1e12:,.0f} TFLOP/s\n"
        "each for one GPU and step, GB = 1e9 bytes; formula, compiled: memory at the peak; wire: "
        "bytes\nsent, ~ in theory; exposed: time in which compute waits for the wire\n"
    )
    whole = recommend(rows, target).replace(" GB", "~GB")  # never broken there
    print(f"{show(rows, usable)}\n\n{textwrap.fill(whole, 100).replace('~GB', ' GB')}")
    for row in rows:
        if row.compiled and row.compiled.findings:
            names = ", ".join(row.compiled.findings)
            print(f"{describe(row.case)} has findings: {names}; audit the step to see them")
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
