# SPDX-License-Identifier: Apache-2.0
"""One way to train on GPUs that are not there: what it takes by formula, and once compiled."""

from __future__ import annotations

import collections
import dataclasses
import math
from typing import Any

import jax

from zerojax.hardware.targets import Target
from zerojax.receipt.audit import audit_compiled
from zerojax.receipt.peak import Peak, predict_peak
from zerojax.receipt.theory import bytes_per_param, expected_bytes
from zerojax.sharding.plan import Plan
from zerojax.table import format_bytes, format_table
from zerojax.training.step import make_train_step

RESERVE = 0.06  # of a GPU's memory, for the CUDA context, NCCL's buffers and fragmentation


@dataclasses.dataclass(frozen=True)
class Case:
    """A step that could be trained with.

    Attributes:
      stage, remat, prefetch: the choices; None where the user's model makes them.
      loss_fn, plan, batch, microbatches: as for `zerojax.make_train_step`.
      model_flops: what the model needs of one GPU and step, or None if not known.
    """

    stage: int
    remat: str | None
    prefetch: int | None
    loss_fn: Any
    plan: Plan
    batch: Any
    microbatches: int
    model_flops: float | None

    def rough_seconds(self, target: Target) -> float:
        """A step of nothing but matmuls and traffic, to rank cases by; it is not shown.

        What is in the layer loops hides, without prefetch it does not, and what is at the end of
        the step neither.
        """
        assert target.gpu is not None
        flops = (self.model_flops or 0.0) * (4 / 3 if self.remat == "full" else 1)
        compute = flops / (target.gpu.matmul_flops * target.matmul_efficiency)
        gathers, scatters = bytes_per_param(self.plan, self.microbatches)
        late = (gathers + scatters, gathers + scatters, gathers, 0)[self.stage]
        if self.stage == 0 and self.microbatches == 1:
            late = 0
        if self.stage == 3 and self.prefetch == 0:
            late = gathers
        rate = target.bandwidth(target.hosts, target.gpus_per_host) / num_params(self.plan)
        return max(compute, (gathers + scatters - late) / rate) + late / rate


@dataclasses.dataclass(frozen=True)
class Compiled:
    """What the compiled program of a case says, for each GPU.

    Attributes:
      peak_bytes: the most that is in use at once, by XLA's own account.
      allocated_bytes: arguments and temporaries as allocated, with the gaps between them.
      wire_bytes: sent in a step.
      exposed_seconds, seconds: of a step, by the two-stream simulation.
      mfu: the model's FLOPs over what the GPU could do in that time, or None.
      findings: names of what is wrong with the program; see `zerojax.findings`.
    """

    peak_bytes: int
    allocated_bytes: int
    wire_bytes: float
    exposed_seconds: float
    seconds: float
    mfu: float | None
    findings: tuple[str, ...] = ()


@dataclasses.dataclass
class Row:
    """A case with its predicted peak and, if it was compiled, what that showed."""

    case: Case
    peak: Peak
    compiled: Compiled | None = None

    @property
    def theory_bytes(self) -> float:
        """What each GPU sends in a step, in theory; what is gathered ahead comes on top."""
        return expected_bytes(self.case.plan, self.case.microbatches, self.peak.stacks).total

    def fits(self, usable_bytes: float) -> bool:
        """Whether it fits: by the program's allocation if compiled, else by the formula."""
        if self.compiled is not None:
            return self.compiled.allocated_bytes <= usable_bytes
        return self.peak.num_bytes <= usable_bytes

    def as_json(self, usable_bytes: float) -> dict[str, Any]:
        """All figures, in bytes and seconds."""
        case = self.case
        return {
            "stage": case.stage,
            "remat": case.remat,
            "prefetch": case.prefetch,
            "rest_bytes": case.plan.rest_bytes(),
            "predicted_peak_bytes": self.peak.num_bytes,
            "predicted_rows": self.peak.rows,
            "theory_wire_bytes": self.theory_bytes,
            "fits": self.fits(usable_bytes),
            "compiled": self.compiled and dataclasses.asdict(self.compiled),
        }


def predict(case: Case) -> Row:
    """The row of a case before it is compiled."""
    peak = predict_peak(case.loss_fn, case.plan, case.batch, microbatches=case.microbatches)
    return Row(case, peak)


def compile_row(row: Row, target: Target) -> Compiled:
    """Compiles the case of a row for its GPUs and reads the program."""
    case = row.case
    assert target.gpu is not None
    step = make_train_step(case.loss_fn, case.plan, microbatches=case.microbatches)
    compiled = step.lower(case.plan.abstract_state, case.batch).compile()
    receipt = audit_compiled(
        compiled,
        case.plan,
        case.batch,
        microbatches=case.microbatches,
        target=target,
        stacks=row.peak.stacks,
    )
    peak, timeline = receipt.peak, receipt.timeline
    assert timeline is not None
    could = timeline.seconds * target.gpu.matmul_flops
    return Compiled(
        peak_bytes=peak.total,
        allocated_bytes=peak.allocated,
        wire_bytes=receipt.wire_bytes,
        exposed_seconds=timeline.exposed,
        seconds=timeline.seconds,
        mfu=case.model_flops / could if case.model_flops else None,
        findings=tuple(finding.name for finding in receipt.findings),
    )


def global_batch(rows: Any, num_gpus: int) -> Any:
    """Shapes of the batch of all GPUs, from those of one GPU's rows."""
    return jax.tree.map(
        lambda x: jax.ShapeDtypeStruct((x.shape[0] * num_gpus, *x.shape[1:]), x.dtype), rows
    )


def num_params(plan: Plan) -> int:
    """Parameters of a plan."""
    return sum(math.prod(leaf.array.shape) for leaf in plan.params)


def usable_bytes(target: Target) -> float:
    """The memory of a GPU that a program may allocate."""
    assert target.gpu is not None
    return target.gpu.memory_bytes * (1 - RESERVE)


def by_promise(rows: list[Row], target: Target) -> list[Row]:
    """The fastest of each stage first, by a rough rule; then the second of each, and so on."""
    ranked, seen = [], collections.Counter()
    for row in sorted(rows, key=lambda row: row.case.rough_seconds(target)):
        seen[row.case.stage] += 1
        ranked.append((seen[row.case.stage], row))
    return [row for _, row in sorted(ranked, key=lambda item: item[0])]


def describe(case: Case) -> str:
    """The choices of a case in words."""
    parts = [f"stage {case.stage}"]
    parts += [f"remat {case.remat}"] if case.remat else []
    parts += [f"prefetch {case.prefetch}"] if case.prefetch is not None else []
    return ", ".join(parts)


def format_ms(seconds: float) -> str:
    """Milliseconds, with a decimal only where there are few."""
    return f"{1e3 * seconds:,.{1 if seconds < 0.01 else 0}f} ms"


def show(rows: list[Row], usable: float) -> str:
    """The table, at most 100 columns wide."""
    lines = []
    for row in rows:
        case, made = row.case, row.compiled
        cells = [str(case.stage), case.remat or "own"]
        cells += ["-" if case.prefetch is None else str(case.prefetch)]
        cells += [format_bytes(case.plan.rest_bytes()), format_bytes(row.peak.num_bytes)]
        fits = "yes" if row.fits(usable) else "no"
        if made is None:
            theory = format_bytes(row.theory_bytes)
            cells += ["predicted", fits, f"~{theory}", *["-"] * 4]
        else:
            cells += [format_bytes(made.peak_bytes), fits, format_bytes(made.wire_bytes)]
            cells += [f"{made.wire_bytes / row.theory_bytes:.2f}" if row.theory_bytes else "-"]
            cells += [format_ms(made.exposed_seconds), format_ms(made.seconds)]
            cells += ["-" if made.mfu is None else f"{made.mfu:.0%}"]
        lines.append(cells)
    header = [
        "stage",
        "remat",
        "prefetch",
        "at rest",
        "formula",
        "compiled",
        "fits",
        "wire",
        "x theory",
    ]
    header += ["exposed", "step", "MFU"]
    return format_table(header, lines, right=[0, 2, 3, 4, 5, 7, 8, 9, 10, 11])


def recommend(rows: list[Row], target: Target) -> str:
    """A sentence: what to take, and why."""
    usable = usable_bytes(target)
    fit = [row for row in by_promise(rows, target) if row.fits(usable)]
    if not fit:
        least = min(rows, key=lambda row: row.peak.num_bytes)
        size = format_bytes(least.peak.num_bytes)
        return (
            f"Nothing fits: {describe(least.case)} takes least, {size} of {format_bytes(usable)}. "
            "Give each GPU fewer or shorter rows, or take more GPUs."
        )
    timed = [(row, row.compiled) for row in fit if row.compiled]
    if not timed:
        room = f"{format_bytes(fit[0].peak.num_bytes)} of {format_bytes(usable)}"
        return (
            f"Take {describe(fit[0].case)}: by formula it fits, {room}, with the least computed "
            "twice and the least traffic left exposed. Nothing was compiled."
        )
    best, made = min(timed, key=lambda pair: pair[1].seconds)
    why = "it fits, and promised most"
    if len(timed) > 1:
        why = f"of the {len(timed)} compiled that fit, it is the fastest"
    return (
        f"Take {describe(best.case)}: {why}: {format_ms(made.seconds)} a step, "
        f"{format_bytes(made.allocated_bytes)} allocated of {format_bytes(usable)}."
    )
