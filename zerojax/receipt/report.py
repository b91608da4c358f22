# SPDX-License-Identifier: Apache-2.0
"""The receipt itself: its figures, printed, as JSON, and several side by side."""

from __future__ import annotations

import collections
import dataclasses
import json
import textwrap
from collections.abc import Sequence
from typing import Any

from zerojax.hardware.targets import Target
from zerojax.receipt.memory import CompiledPeak, MemoryReport
from zerojax.receipt.peak import WHAT, Peak
from zerojax.receipt.rules import Finding
from zerojax.receipt.theory import Expected
from zerojax.receipt.timeline import Timeline
from zerojax.receipt.traffic import PARTS, Move, by_part
from zerojax.sharding.plan import Plan
from zerojax.sharding.stage import STATE_KINDS
from zerojax.table import format_bytes, format_table

WIDTH = 100  # columns


@dataclasses.dataclass(frozen=True, eq=False)
class Audit:
    """What a compiled step stores, moves and waits for. Made by `audit`.

    Attributes:
      plan: what was wanted.
      microbatches: slices of each device's rows.
      target: the hardware, with its rates.
      rest: bytes at rest by formula, plan and (of a state that exists) as measured.
      compiled_rest: bytes of the state among the program's arguments, by kind.
      peak: bytes while it runs.
      predicted: the same from the trace of the step, by what they are (`predict_peak`).
      moves: every array of every collective.
      expected: bytes on the wire in theory, by part and for layers gathered ahead.
      timeline: the schedule replayed, on a target with rates.
      findings: what is wrong.
      notes: what the reader should know, and what could not be read.
      xla_exposed: XLA's own estimate of exposed communication, seconds, if it was asked for.

    Example:
      >>> import jax.numpy as jnp, optax, zerojax as zj
      >>> init = lambda key: {"w": jnp.zeros((256, 256))}
      >>> loss_fn = lambda params, batch, key: (jnp.sum((batch @ params["w"]) ** 2), batch.size)
      >>> plan = zj.make_plan(init, optax.adam(1e-3), zj.make_mesh(8), stage=3)
      >>> step = zj.make_train_step(loss_fn, plan)
      >>> receipt = zj.audit(step, plan.abstract_state, jnp.zeros((16, 256))).check()
      >>> receipt.expected.total, receipt.compiled_rest["params"]  # 2 x 7/8 of w; 1/8 of it
      (458752.0, 32768)
    """

    plan: Plan
    microbatches: int
    target: Target
    rest: MemoryReport
    compiled_rest: dict[str, int]
    peak: CompiledPeak
    moves: tuple[Move, ...]
    expected: Expected
    timeline: Timeline | None
    findings: tuple[Finding, ...]
    notes: tuple[str, ...]
    xla_exposed: float | None = None
    predicted: Peak | None = None

    @property
    def wire_bytes(self) -> float:
        """Bytes that each device sends per step."""
        return sum(move.wire_bytes for move in self.moves)

    @property
    def ratio(self) -> float:
        """Bytes on the wire to theory; 1.0 where theory moves nothing.

        Scalars, what the optimizer itself exchanges, and layers gathered ahead do not count.
        """
        expected = self.expected.total
        return self.expected.moved(self.moves) / expected if expected else 1.0

    def check(self) -> Audit:
        """Returns itself; raises ValueError that lists the findings if there are any."""
        if self.findings:
            listed = "\n".join(f"  {f.name}: {f.what}. {f.remedy}" for f in self.findings)
            raise ValueError(f"the compiled step has {len(self.findings)} findings:\n{listed}")
        return self

    def to_json(self) -> str:
        """All figures as JSON; bytes per device, seconds."""
        return json.dumps(as_dict(self), indent=1)

    def __str__(self) -> str:
        return describe(self)


def describe(receipt: Audit) -> str:
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


def compare(receipts: Sequence[Audit], names: Sequence[str] | None = None) -> str:
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
                names[i] if names else name_of(receipt.plan),
                format_bytes(sum(row.planned for row in receipt.rest if row.kind in STATE_KINDS)),
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


def as_dict(receipt: Audit) -> dict[str, Any]:
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


def name_of(plan: Plan) -> str:
    """What a plan is called beside others: its stage and partitioner."""
    return f"stage {plan.stage.number}, {type(plan.partitioner).__name__.lower()}"


def _headline(receipt: Audit) -> str:
    plan = receipt.plan
    slices = f", {receipt.microbatches} microbatches" if receipt.microbatches > 1 else ""
    where = f"{plan.num_devices} devices ({receipt.target.name})"
    return f"receipt: {name_of(plan)}, {where}{slices}; GB = 1e9 bytes, each device's own"


def _rest(receipt: Audit) -> str:
    rows = []
    for row in receipt.rest:
        compiled = receipt.compiled_rest.get(row.kind)
        sizes = [row.formula, row.planned, compiled, row.live]
        rows.append([row.kind, *("-" if size is None else format_bytes(size) for size in sizes)])
    header = ["1. at rest", "formula", "plan", "compiled", "live"]
    return format_table(header, rows, right=[1, 2, 3, 4])


def _peak(receipt: Audit) -> str:
    peak, gpu = receipt.peak, receipt.target.gpu
    predicted = dict(receipt.predicted.rows) if receipt.predicted else {}
    rest = sum(predicted.pop(kind, 0) for kind in (*STATE_KINDS, "batch"))
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


def _moved(receipt: Audit) -> str:
    groups = collections.defaultdict(list)
    for move in receipt.moves:
        where = "in loops" if move.collective.loops else "outside"
        groups[move.part, move.collective.kind, move.dtype, where].append(move)
    rows = []
    for part, kind, dtype, where in sorted(groups, key=lambda key: (PARTS.index(key[0]), key)):
        moves = groups[part, kind, dtype, where]
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


def _time(receipt: Audit) -> str:
    line, target = receipt.timeline, receipt.target
    if line is None or target.gpu is None:
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


def _findings(receipt: Audit) -> str:
    lines = ["5. findings: none"] if not receipt.findings else ["5. findings"]
    for finding in receipt.findings:
        lines.append(_wrap(f"{finding.name}: {finding.what}. {finding.remedy}", "  "))
    lines += [_wrap(f"note: {note}", "  ") for note in receipt.notes]
    return "\n".join(lines)


def _wrap(text: str, indent: str) -> str:
    return textwrap.fill(text, WIDTH, initial_indent=indent, subsequent_indent=indent + "  ")
