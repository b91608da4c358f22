# SPDX-License-Identifier: Apache-2.0
"""How a receipt is printed, compared and drawn."""

from __future__ import annotations

import collections
import os
import textwrap
from collections.abc import Sequence
from typing import Any

from zerojax.receipt.peak import WHAT
from zerojax.receipt.traffic import PARTS, by_part
from zerojax.table import format_bytes, format_table

WIDTH = 100
BAR_COLORS = {"params": "#08519c", "master": "#3182bd", "opt_state": "#6baed6"}
BAR_COLORS |= {"temporary": "#d9d9d9"}


def describe(receipt: Any) -> str:
    """The text of an Audit, in at most 100 columns."""
    blocks = [
        _headline(receipt),
        _rest(receipt),
        _peak(receipt),
        _moved(receipt),
        _time(receipt),
        _findings(receipt),
    ]
    return "\n\n".join(block for block in blocks if block)


def compare(receipts: Sequence[Any], names: Sequence[str] | None = None) -> str:
    """A table of several Audits, one row each.

    Args:
      receipts: Audits.
      names: what to call them; default their stage and partitioner.

    Returns:
      The table: bytes on each device at rest and at the peak, bytes that each sends per step and
      their ratio to theory, exposed communication and step time (on GPUs), and findings.

    Raises:
      ValueError: there are not as many names as receipts.

    Example:
      >>> import jax, jax.numpy as jnp, optax, zerojax as zj
      >>> init = lambda key: {"w": jnp.zeros((256, 256))}
      >>> loss_fn = lambda params, batch, key: (jnp.sum((batch @ params["w"]) ** 2), batch.size)
      >>> receipts = []
      >>> for stage in (0, 3):
      ...     plan = zj.make_plan(init, optax.adam(1e-3), zj.make_mesh(8), stage=stage)
      ...     step = zj.make_train_step(loss_fn, plan)
      ...     receipts.append(zj.audit(step, plan.abstract_state, jnp.zeros((16, 256))))
      >>> for line in compare(receipts).splitlines():
      ...     print(line[:52].rstrip())
      plan             at rest     peak    wire  / theory
      ---------------  -------  -------  ------  --------
      stage 0, manual   786 kB  1.31 MB  459 kB      1.00
      stage 3, manual  98.3 kB   395 kB  459 kB      1.00
    """
    if names is not None and len(names) != len(receipts):
        raise ValueError(f"compare: {len(receipts)} receipts, {len(names)} names; give one each.")
    rows = []
    for i, receipt in enumerate(receipts):
        line = receipt.timeline
        rows.append(
            [
                names[i] if names else _name(receipt.plan),
                format_bytes(sum(row.planned for row in receipt.rest if row.kind != "grads")),
                format_bytes(receipt.peak.total),
                format_bytes(receipt.wire_bytes),
                f"{receipt.ratio:.2f}",
                "-" if line is None else f"{line.exposed * 1e3:.1f} ms",
                "-" if line is None else f"{line.seconds * 1e3:.0f} ms",
                str(len(receipt.findings)),
            ]
        )
    header = ["plan", "at rest", "peak", "wire", "/ theory", "exposed", "step", "findings"]
    return format_table(header, rows, right=range(1, 8))


def as_dict(receipt: Any) -> dict[str, Any]:
    """What `to_json` writes."""
    line = receipt.timeline
    return {
        "stage": receipt.plan.stage.number,
        "devices": receipt.plan.num_devices,
        "target": receipt.target.name,
        "microbatches": receipt.microbatches,
        "rest": [row._asdict() for row in receipt.rest],
        "compiled_rest": receipt.compiled_rest,
        "peak": receipt.peak._asdict(),
        "predicted_peak": receipt.predicted and receipt.predicted.rows,
        "wire_bytes": receipt.wire_bytes,
        "expected_bytes": receipt.expected.parts,
        "ahead_bytes": receipt.expected.ahead,
        "ratio": receipt.ratio,
        "moves": [
            {
                "part": move.part,
                "what": move.what,
                "kind": move.collective.kind,
                "dtype": move.dtype,
                "times": move.collective.times,
                "wire_bytes": move.wire_bytes,
                "async": move.collective.is_async,
            }
            for move in receipt.moves
        ],
        "seconds": None if line is None else line.seconds,
        "exposed_seconds": None if line is None else line.exposed,
        "xla_exposed_seconds": receipt.xla_exposed,
        "findings": [finding._asdict() for finding in receipt.findings],
        "notes": list(receipt.notes),
    }


def draw(receipts: Sequence[Any], path: str | os.PathLike[str]) -> None:
    """Draws Audits into a picture file: bytes on each device, and the streams of the last one.

    Args:
      receipts: Audits, one bar each.
      path: of the picture; its suffix says the format, such as `.png`.

    Raises:
      ValueError: there are no receipts.
      ImportError: matplotlib is not installed (`pip install matplotlib`).

    Example:
      >>> import jax.numpy as jnp, matplotlib.image, optax, tempfile, zerojax as zj
      >>> init = lambda key: {"w": jnp.zeros((256, 256))}
      >>> loss_fn = lambda params, batch, key: (jnp.sum((batch @ params["w"]) ** 2), batch.size)
      >>> plan = zj.make_plan(init, optax.adam(1e-3), zj.make_mesh(8), stage=3)
      >>> step = zj.make_train_step(loss_fn, plan)
      >>> path = f"{tempfile.mkdtemp()}/receipt.png"
      >>> draw([zj.audit(step, plan.abstract_state, jnp.zeros((16, 256)))], path)
      >>> matplotlib.image.imread(path).shape  # pixels, and four channels
      (192, 1200, 4)
    """
    if not receipts:
        raise ValueError("draw: no receipts; pass at least one Audit.")
    from matplotlib.figure import Figure  # an extra: only pictures need it

    line = receipts[-1].timeline
    height = 1.2 + 0.4 * len(receipts)
    height += 0 if line is None else 5
    figure = Figure(figsize=(10, height), layout="constrained", dpi=120)
    axes = figure.subplots(1 if line is None else 3, 1, squeeze=False)[:, 0]
    _draw_bytes(axes[0], receipts)
    if line is not None:
        _draw_streams(axes[1], receipts[-1], 0.0, 1.0)
        _draw_streams(axes[2], receipts[-1], 0.60, 0.66)
    figure.savefig(path)


def _name(plan: Any) -> str:
    return f"stage {plan.stage.number}, {type(plan.partitioner).__name__.lower()}"


def _headline(receipt: Any) -> str:
    plan = receipt.plan
    slices = f", {receipt.microbatches} microbatches" if receipt.microbatches > 1 else ""
    where = f"{plan.num_devices} devices ({receipt.target.name})"
    return f"receipt: {_name(plan)}, {where}{slices}; GB = 1e9 bytes, each device's own"


def _rest(receipt: Any) -> str:
    rows = []
    for row in receipt.rest:
        compiled = receipt.compiled_rest.get(row.kind)
        sizes = [row.formula, row.planned, compiled, row.live]
        rows.append([row.kind, *("-" if size is None else format_bytes(size) for size in sizes)])
    header = ["1. at rest", "formula", "plan", "compiled", "live"]
    return format_table(header, rows, right=[1, 2, 3, 4])


def _peak(receipt: Any) -> str:
    peak, gpu = receipt.peak, receipt.target.gpu
    predicted = dict(receipt.predicted.rows) if receipt.predicted else {}
    rest = sum(predicted.pop(kind, 0) for kind in ("params", "master", "opt_state", "batch"))
    more = sum(predicted.values())
    moment = f"in {receipt.predicted.moment}" if receipt.predicted else ""
    sums = [
        ("state and batch", rest, peak.arguments, ""),
        ("temporary", more, peak.temporary, "the sum of these" if more else ""),
        ("at the fullest moment" if gpu else "sum of all", rest + more, peak.total, moment),
    ]
    rows = [
        [name, format_bytes(size) if receipt.predicted else "-", format_bytes(compiled), what]
        for name, size, compiled, what in sums
    ]
    parts = {kind: size for kind, size in predicted.items() if size}
    rows[1:1] = [[kind, format_bytes(size), "", WHAT[kind]] for kind, size in parts.items()]
    if gpu:
        share = f"{peak.total / gpu.memory_bytes:.0%}"
        rows.append([f"of the memory of {gpu.name}", "", share, ""])
    return format_table(["2. at peak", "predicted", "compiled", ""], rows, right=[1, 2])


def _moved(receipt: Any) -> str:
    groups = collections.defaultdict(list)
    for move in receipt.moves:
        where = "in loops" if move.collective.loops else "outside"
        groups[move.part, move.collective.kind, move.dtype, where].append(move)
    rows = []
    for (part, kind, dtype, where), moves in sorted(
        groups.items(), key=lambda item: (PARTS.index(item[0][0]), item[0][1:])
    ):
        times = sum({id(m.collective): m.collective.times for m in moves}.values())
        late = {m.collective.is_async for m in moves}
        way = "both" if len(late) == 2 else "async" if late == {True} else "sync"
        size = format_bytes(sum(m.wire_bytes for m in moves))
        rows.append([part, kind, dtype, where, str(times), way, size])
    moved, expected = by_part(receipt.moves), receipt.expected
    header = ["3. collectives", "kind", "dtype", "where", "per step", "how", "on the wire"]
    if not rows:
        return "3. collectives: none"
    parts = [
        f"{part} {format_bytes(moved.get(part, 0))} of {format_bytes(size)}"
        for part, size in expected.parts.items()
        if size or moved.get(part)
    ]
    total = f"moved {format_bytes(receipt.wire_bytes)}, theory {format_bytes(expected.total)}"
    if expected.ahead:
        total += f", and {format_bytes(expected.ahead)} gathered ahead and dropped"
    total += f": ratio {receipt.ratio:.3f}"
    if parts:
        total += "\n" + _wrap(f"moved of theory by part: {'; '.join(parts)}", "  ")
    return f"{format_table(header, rows, right=[4, 6])}\n{total}"


def _time(receipt: Any) -> str:
    line, target = receipt.timeline, receipt.target
    if line is None:
        return "4. time: not predicted for simulated devices; compile for GPUs to see it"
    rows = [
        ["compute", f"{line.total('compute') * 1e3:.1f} ms"],
        ["on the link", f"{line.total('link') * 1e3:.1f} ms"],
        ["exposed: compute waits for the link", f"{line.exposed * 1e3:.1f} ms"],
        ["step", f"{line.seconds * 1e3:.1f} ms"],
    ]
    if receipt.xla_exposed is not None:
        rows.append(["exposed by XLA's own estimate", f"{receipt.xla_exposed * 1e3:.1f} ms"])
    used = line.matmul_flops / (line.seconds * target.gpu.matmul_flops) if line.seconds else 0.0
    rows.append(["of the peak FLOP/s, recomputation included", f"{used:.0%}"])
    rates = (
        f"rates: matmul {target.matmul_efficiency:.0%} of {target.gpu.matmul_flops / 1e12:.0f} "
        f"TFLOP/s, attention {target.attention_efficiency:.0%}; memory "
        f"{target.memory_efficiency:.0%} of {target.gpu.memory_bandwidth / 1e12:.2f} TB/s + "
        f"{target.kernel_seconds * 1e6:.0f} us; collectives {target.collective_seconds * 1e6:.0f} "
        f"us + bytes at {target.link_bandwidth / 1e9:.0f} GB/s in a host, "
        f"{target.network_bandwidth / 1e9:.0f} GB/s per GPU between hosts"
    )
    table = format_table(["4. time", "predicted"], rows, right=[1])
    return table + "\n" + _wrap(rates, "")


def _findings(receipt: Any) -> str:
    lines = ["5. findings: none"] if not receipt.findings else ["5. findings"]
    for finding in receipt.findings:
        lines.append(_wrap(f"{finding.name}: {finding.what}. {finding.remedy}", "  "))
    lines += [_wrap(f"note: {note}", "  ") for note in receipt.notes]
    return "\n".join(lines)


def _wrap(text: str, indent: str) -> str:
    return textwrap.fill(text, WIDTH, initial_indent=indent, subsequent_indent=indent + "  ")


def _draw_bytes(axes: Any, receipts: Sequence[Any]) -> None:
    """One bar for each receipt: what rests, and what comes on top of it."""
    labels = [_name(receipt.plan) for receipt in receipts]
    left = [0.0] * len(receipts)
    for kind in ("params", "master", "opt_state", "temporary"):
        sizes = [
            receipt.peak.temporary if kind == "temporary" else receipt.compiled_rest.get(kind, 0)
            for receipt in receipts
        ]
        name = "gathered weights, gradients, activations" if kind == "temporary" else kind
        if any(sizes):
            widths = [size / 1e9 for size in sizes]
            color = BAR_COLORS[kind]
            axes.barh(range(len(labels)), widths, left=left, label=name, height=0.7, color=color)
            left = [a + b for a, b in zip(left, widths, strict=True)]
    axes.set_yticks(range(len(labels)), labels)
    axes.invert_yaxis()
    axes.set_xlabel("GB on each device at the fullest moment (GB = 1e9 bytes)")
    axes.set_xlim(0, 1.02 * max(left) if max(left) else 1)
    axes.legend(loc="lower center", bbox_to_anchor=(0.5, 1.0), ncols=4, frameon=False, fontsize=9)


def _draw_streams(axes: Any, receipt: Any, first: float, last: float) -> None:
    """The two streams from one share of the step to another; what is exposed on its own line."""
    lanes = {"compute": 0, "link": 1, "wait": 2}
    colors = {"matmul": "C0", "attention": "C1", "other": "C7", "all-gather": "C2"}
    colors |= {"reduce-scatter": "C4", "all-reduce": "C3"}
    bars = collections.defaultdict(list)
    for event in receipt.timeline.events:
        bars[event.stream, event.kind].append((event.start * 1e3, (event.end - event.start) * 1e3))
    named = set()
    for (stream, kind), spans in sorted(bars.items(), key=lambda item: lanes[item[0][0]]):
        label = kind if kind not in named else None
        named.add(kind)
        place = (lanes[stream] - 0.4, 0.8)
        axes.broken_barh(spans, place, color=colors.get(kind, "C5"), label=label, linewidth=0)
    axes.set_yticks(list(lanes.values()), ["compute", "link", "exposed"])
    axes.invert_yaxis()
    step = receipt.timeline.seconds * 1e3
    part = ", a part of it" if last - first < 1 else ""
    name = _name(receipt.plan)
    axes.set_xlabel(f"ms of a step{part}: {name} on {receipt.target.name}, predicted")
    axes.set_xlim(first * step, last * step)
    if last - first == 1:
        above = {"loc": "lower center", "bbox_to_anchor": (0.5, 1.0)}
        axes.legend(**above, ncols=6, frameon=False, fontsize=9)
