# SPDX-License-Identifier: Apache-2.0
"""Step time and bytes against stage, devices, prefetch and microbatches: a table and a picture.

`python -m scripts.bench --out FOLDER` writes bench.md and bench.png. One of them is varied at a
time; times are ratios to one device that knows nothing of ZeRO, timed in the same rounds.
"""

from __future__ import annotations

import dataclasses
import functools
import importlib.util
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np
import optax

import zerojax as zj
from models import transformer
from models.transformer import TransformerConfig
from scripts.parts.model import make_plan
from scripts.parts.text import check_batch
from scripts.parts.timing import Program, announce, repeat, time_steps, unsharded_step
from zerojax.table import format_bytes

PREFETCHES, MICROBATCHES = (0, 1, 2), (1, 2, 4)


class Point(NamedTuple):
    """One way to train."""

    stage: int
    devices: int
    prefetch: int = 1
    microbatches: int = 1


class Found(NamedTuple):
    """What was measured at a point: times beside one device, and bytes on each device."""

    time: float  # median of the rounds
    low: float  # a quarter of them were below
    high: float  # a quarter were above
    rest: int
    peak: int


def choose_points(most: int) -> list[Point]:
    """Return each stage on few and on most devices; on most, prefetch and microbatches vary too."""
    points = [Point(s, n) for s in range(4) for n in sorted({max(2, most // 4), most})]
    points += [Point(3, most, prefetch=p) for p in PREFETCHES]
    points += [Point(s, most, microbatches=m) for s in (2, 3) for m in MICROBATCHES]
    return list(dict.fromkeys(points))


def sizes_of(compiled: Any) -> tuple[int, int]:
    """Return bytes of a compiled step on each device: of its arguments, and at its peak."""
    sizes = compiled.memory_analysis()
    outside = sizes.argument_size_in_bytes + sizes.output_size_in_bytes - sizes.alias_size_in_bytes
    return sizes.argument_size_in_bytes, outside + sizes.temp_size_in_bytes


def make_program(config: TransformerConfig, point: Point, host: Any) -> tuple[Program, int]:
    """Compile a step; return it with the bytes at its peak."""
    config = dataclasses.replace(config, prefetch=point.prefetch)
    mesh, optimizer = zj.make_mesh(point.devices), optax.adamw(1e-3)
    plan = make_plan(config, optimizer, mesh, stage=point.stage)
    loss_fn = functools.partial(transformer.loss_fn, config)
    step = zj.make_train_step(loss_fn, plan, microbatches=point.microbatches)
    batch = zj.shard_batch(host, plan)
    compiled = step.lower(plan.abstract_state, batch).compile()
    rest, peak = sizes_of(compiled)
    state = zj.init_state(plan, jax.random.key(0))
    run = repeat(lambda state: compiled(state, batch), state)
    return Program(str(point), run, rest), peak


def make_unsharded(config: TransformerConfig, host: Any) -> tuple[Program, int]:
    """The plain step of one device, in the same way."""
    optimizer = optax.adamw(1e-3)
    params = jax.jit(functools.partial(transformer.init_params, config))(jax.random.key(0))
    state, batch = (params, jax.jit(optimizer.init)(params)), jax.device_put(host)
    step = unsharded_step(functools.partial(transformer.loss_fn, config), optimizer)
    compiled = step.lower(*state, batch).compile()
    rest, peak = sizes_of(compiled)
    return Program("one device", repeat(lambda *x: compiled(*x, batch), *state), rest), peak


def sweep(
    config: TransformerConfig, most: int, rows: int, rounds: int, name: str, out: Path
) -> dict[str, float]:
    """Measure and write; return the time of every point beside one device.

    Raises:
        ValueError: matplotlib is missing, one device only, rows that microbatches cannot share, or
            a folder that cannot be written.
    """
    if importlib.util.find_spec("matplotlib") is None:
        raise ValueError("--out: the picture needs `pip install matplotlib`")
    if most < 2:
        raise ValueError("--devices: a sweep with 1 device shows nothing; give 2 or more")
    points = choose_points(most)
    for point in points:
        check_batch(rows, point.devices, point.microbatches)
    try:
        out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ValueError(f"--out: cannot make the folder {out} ({error.strerror})") from error
    shape = rows, config.seq_len + 1
    host = {"tokens": np.random.default_rng(0).integers(0, config.vocab_size, shape, np.int32)}
    announce("compiling one device without ZeRO")
    made = [make_unsharded(config, host)]
    for number, point in enumerate(points, start=1):
        announce(f"compiling {number} of {len(points)}: {point}")
        made.append(make_program(config, point, host))
    programs, peaks = zip(*made, strict=True)
    seconds = time_steps(programs, rounds)
    ratios = seconds / seconds[:, :1]
    low, middle, high = np.quantile(ratios, [0.25, 0.5, 0.75], axis=0).tolist()
    sizes = [program.state_bytes for program in programs], peaks
    lone, *others = map(Found, middle, low, high, *sizes)
    found = dict(zip(points, others, strict=True))
    kind = jax.devices()[0].device_kind
    what = "simulated devices" if jax.default_backend() == "cpu" else "devices"
    title = f"{name}, {rows} rows of {config.seq_len} tokens, {most} {what} ({kind})"
    (out / "bench.md").write_text("\n".join(make_lines(title, rounds, found, lone)) + "\n")
    draw(title, found, lone, most, out / "bench.png")
    print(f"wrote {out / 'bench.md'} and {out / 'bench.png'}")
    return {str(point): x.time for point, x in found.items()}


def make_lines(title: str, rounds: int, found: dict[Point, Found], lone: Found) -> Iterator[str]:
    """Yield the lines of bench.md."""
    yield f"# Step time and bytes: {title}\n"
    yield f"`python -m scripts.bench --out FOLDER`, JAX {jax.__version__}, fp32, AdamW. Time: that"
    yield f"of a step, divided by that of one device without ZeRO; medians of {rounds} interleaved"
    yield "rounds, and the half of them around it. Bytes are of each device, as compiled: at rest"
    yield "(state and batch), and at the peak. GB = 1e9 bytes.\n"
    if jax.default_backend() == "cpu":
        yield "Simulated devices share this machine's cores: a time below 1.00 is no speed-up by"
        yield "ZeRO, and one above it no cost that GPUs would have.\n"
    yield "| stage | devices | prefetch | microbatches | time | middle half | at rest | at peak |"
    yield "|--:|--:|--:|--:|--:|--:|--:|--:|"
    end = f"{format_bytes(lone.rest)} | {format_bytes(lone.peak)} |"
    yield f"| - | 1 | - | 1 | 1.00 | - | {end}"
    for point, x in sorted(found.items()):
        ahead = str(point.prefetch) if point.stage == 3 else "-"
        left = f"| {point.stage} | {point.devices} | {ahead} | {point.microbatches} |"
        sizes = f"{format_bytes(x.rest)} | {format_bytes(x.peak)} |"
        yield f"{left} {x.time:.2f} | {x.low:.2f} - {x.high:.2f} | {sizes}"
    yield "\n![step time and bytes](bench.png)"


def draw(title: str, found: dict[Point, Found], lone: Found, most: int, path: Path) -> None:
    """Draw time above and bytes below, against what varies from left to right."""
    from matplotlib.figure import Figure
    from matplotlib.lines import Line2D

    figure = Figure(figsize=(13, 7), layout="constrained")
    grid = figure.subplots(2, 4, sharey="row", squeeze=False)
    counts = sorted({point.devices for point in found})
    start = Point(0, 1)  # where every stage begins: one device, nothing to split
    values = found | {start: lone}
    columns = {
        f"stage ({most} devices)": (range(4), {s: {s: Point(s, most)} for s in range(4)}),
        "devices": (
            [1, *counts],
            {s: {1: start} | {n: Point(s, n) for n in counts} for s in range(4)},
        ),
        f"layers gathered ahead ({most} devices)": (
            PREFETCHES,
            {3: {p: Point(3, most, prefetch=p) for p in PREFETCHES}},
        ),
        f"microbatches ({most} devices)": (
            MICROBATCHES,
            {s: {m: Point(s, most, microbatches=m) for m in MICROBATCHES} for s in (2, 3)},
        ),
    }
    for column, (label, (ticks, lines)) in zip(grid.T, columns.items(), strict=True):
        _draw_column(column, list(ticks), lines, values)
        column[1].set_xlabel(label)
    for axes, level in zip(grid.flat, [1.0] * 4 + [lone.peak / 1e6] * 4, strict=True):
        axes.axhline(level, color="gray", linestyle=":", zorder=0)
    grid[0, 0].set_ylim(0, 1.05 * max(x.high for x in values.values()))
    grid[0, 0].set_ylabel("step time / one device without ZeRO")
    grid[1, 0].set_yscale("log")
    grid[1, 0].yaxis.set_major_formatter("{x:g}")
    grid[1, 0].set_ylabel("MB (1e6 bytes) on each device")
    signs = [Line2D([], [], color=f"C{s}", marker="o", label=f"stage {s}") for s in range(4)]
    signs.append(Line2D([], [], color="black", marker="o", label="time (middle half), peak bytes"))
    signs.append(Line2D([], [], color="black", marker="s", linestyle="--", label="bytes at rest"))
    signs.append(Line2D([], [], color="gray", linestyle=":", label="one device: time, peak bytes"))
    figure.legend(handles=signs, loc="outside upper center", ncols=7, frameon=False, title=title)
    figure.savefig(path, dpi=120)


def _draw_column(
    column: Sequence[Any],
    ticks: list[int],
    lines: dict[int, dict[int, Point]],
    values: dict[Point, Found],
) -> None:
    """Draw one line for each stage: time in the upper axes, bytes at peak and at rest below."""
    above, below = column
    for i, (stage, points) in enumerate(lines.items()):
        aside = 0.0 if len(points) == 1 else 0.05 * (i - (len(lines) - 1) / 2)  # none hides another
        places = [ticks.index(tick) + aside for tick in points]
        x, color = [values[point] for point in points.values()], f"C{stage}"
        times = np.array([each.time for each in x])
        half = [times - [each.low for each in x], [each.high for each in x] - times]
        above.errorbar(places, times, np.abs(half), marker="o", capsize=3, color=color)
        below.plot(places, [each.peak / 1e6 for each in x], "-o", color=color)
        below.plot(places, [each.rest / 1e6 for each in x], "--s", color=color)
    for axes in column:
        axes.set_xticks(range(len(ticks)), [str(tick) for tick in ticks])
        axes.set_xmargin(0.12)
        axes.grid(axis="y", alpha=0.3)
