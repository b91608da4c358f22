# SPDX-License-Identifier: Apache-2.0
"""The receipt: what a compiled step stores, moves and waits for, beside the theory."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Sequence
from typing import NamedTuple

import jax

from zerojax.engine.observer import Stack, open_ledger
from zerojax.hardware.devices import compile_only, target_of
from zerojax.hardware.targets import Target
from zerojax.hardware.targets import target as get_target
from zerojax.receipt import hlo
from zerojax.receipt import hlo_collectives as wire
from zerojax.receipt import timeline as simulate
from zerojax.receipt.hlo_inputs import STATE_KINDS, read_arguments, shapes
from zerojax.receipt.memory import MemoryReport, memory_report
from zerojax.receipt.notes import find_notes
from zerojax.receipt.peak import Peak, predict_peak
from zerojax.receipt.report import as_dict, describe
from zerojax.receipt.rules import Evidence, Finding, find
from zerojax.receipt.traffic import Expected, Move, expected_bytes, find_moves, sizes_of
from zerojax.receipt.xla_statistics import compile_with_statistics
from zerojax.sharding.plan import Plan
from zerojax.sharding.state import PyTree, TrainState
from zerojax.training.step import Step


class CompiledPeak(NamedTuple):
    """Bytes per device while the program runs, as XLA assigned them.

    Attributes:
      arguments: the state and the batch.
      outputs: results; of them `aliased` take over memory of arguments.
      temporary: everything in between: gathered weights, gradients, activations.
      total: the most at any time. On CPU, where XLA does not say, the sum of all.
    """

    arguments: int
    outputs: int
    aliased: int
    temporary: int
    total: int

    @property
    def allocated(self) -> int:
        """What the program is given to run in; more than `total` by gaps between arrays."""
        return self.arguments + self.outputs - self.aliased + self.temporary


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
    timeline: simulate.Timeline | None
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


def audit(
    step: Step,
    state: TrainState,
    batch: PyTree,
    *,
    target: str | Target | None = None,
    growth: bool = False,
    xla_statistics: bool = False,
) -> Audit:
    """Compiles a step for the devices of its plan and reads what became of it.

    Args:
      step: from `make_train_step` or `make_eval_step`.
      state: a state, which is measured too, or `plan.abstract_state`.
      batch: arrays or ShapeDtypeStructs.
      target: hardware with other rates, such as `zerojax.target("h100:8", link_bandwidth=1e11)`;
        default the mesh's own.
      growth: compiles a second time, with twice the rows, and reports traffic that grows with
        them.
      xla_statistics: reads XLA's own estimate of exposed communication too; GPUs only.

    Returns:
      An Audit: print it, `.check()` it in a test, save `.to_json()`.

    Raises:
      ValueError: the batch does not fit the plan, `target` is other hardware than the mesh, or
        XLA's statistics are asked for on devices that are no GPUs.

    Example:
      >>> import jax, jax.numpy as jnp, optax, zerojax as zj
      >>> init = lambda key: {"w": jnp.zeros((256, 256))}
      >>> loss_fn = lambda params, batch, key: (jnp.sum((batch @ params["w"]) ** 2), batch.size)
      >>> plan = zj.make_plan(init, optax.adam(1e-3), zj.make_mesh(8), stage=2)
      >>> step = zj.make_train_step(loss_fn, plan)
      >>> receipt = zj.audit(step, plan.abstract_state, jnp.zeros((16, 256)))
      >>> f"{receipt.ratio:.2f}", [finding.name for finding in receipt.findings]
      ('1.00', [])
    """
    abstract, rows = step.plan.abstract_state, shapes(batch)
    lowered, exposed, larger = step.lower(abstract, rows), None, None
    if xla_statistics:
        compiled, exposed = compile_with_statistics(lowered)
    else:
        compiled = lowered.compile()
    if growth:
        doubled = jax.tree.map(
            lambda x: jax.ShapeDtypeStruct((2 * x.shape[0], *x.shape[1:]), x.dtype), rows
        )
        larger = step.lower(abstract, doubled).compile()
    predicted = None
    if step.donates:  # a training step
        slices = step.microbatches
        predicted = predict_peak(step.loss_fn, step.plan, rows, microbatches=slices)
        stacks = predicted.stacks
    else:
        with open_ledger() as ran:
            jax.eval_shape(lambda *args: step.fn(*args), abstract, rows)
        stacks = tuple(ran)
    is_abstract = any(isinstance(x, jax.ShapeDtypeStruct) for x in jax.tree.leaves(state))
    found = audit_compiled(
        compiled,
        step.plan,
        batch,
        microbatches=step.microbatches,
        state=None if is_abstract else state,
        target=target,
        larger=larger,
        stacks=stacks,
        training=step.donates,
    )
    return dataclasses.replace(found, xla_exposed=exposed, predicted=predicted)


def audit_compiled(
    compiled: jax.stages.Compiled,
    plan: Plan,
    batch: PyTree,
    *,
    microbatches: int = 1,
    state: TrainState | None = None,
    target: str | Target | None = None,
    larger: jax.stages.Compiled | None = None,
    stacks: Sequence[Stack] | None = None,
    training: bool = True,
) -> Audit:
    """Reads any compiled training step, held against a plan of what it should do.

    Args:
      compiled: of a function of `(state, batch)` or `(params, opt_state, batch)`, by
        `jax.jit(...).lower(...).compile()`.
      plan: the stage that the function is meant to be.
      batch: what the function gets, arrays or shapes.
      microbatches: slices that it makes of each device's rows.
      state: a live state, to measure.
      target: as for `audit`.
      larger: the same function compiled for more rows; traffic that grows with them is a finding.
      stacks: for a step of the library's own, what its layer engine ran, such as
        `predict_peak(...).stacks`: how often each layer is used, and how far ahead gathered.
      training: False is a step without gradients and optimizer.

    Returns:
      An Audit, without a predicted peak.

    Raises:
      ValueError: `target` is other hardware than the program was compiled for.

    Example:
      >>> import jax.numpy as jnp, optax, zerojax as zj
      >>> init = lambda key: {"w": jnp.zeros((256, 256))}
      >>> plan = zj.make_plan(init, optax.sgd(0.1), zj.make_mesh(8), stage=0)
      >>> def step(params, opt_state, batch):
      ...     grads = jax.grad(lambda p: jnp.sum((batch @ p["w"]) ** 2))(params)
      ...     return jax.tree.map(lambda p, g: p - 0.1 * g, params, grads), opt_state
      >>> rows = jax.ShapeDtypeStruct((16, 256), jnp.float32, sharding=plan.batch_sharding)
      >>> state = plan.abstract_state
      >>> compiled = jax.jit(step).lower(state.params, state.opt_state, rows).compile()
      >>> (finding,) = audit_compiled(compiled, plan, rows).findings
      >>> print(finding.name, "-", finding.what)
      donation-lost - 262 kB on each device are held twice, old and new: [0]['w']
    """
    program = hlo.parse(_text(compiled))
    hardware = hardware_of(plan, target)
    arguments = read_arguments(compiled, program, batch)
    moves = find_moves(plan, wire.collectives(program), sizes_of(plan, batch, microbatches))
    expected = expected_bytes(plan, microbatches, stacks, training=training)
    evidence = Evidence(plan, program, moves, expected, arguments, microbatches, stacks or ())
    rest: dict[str, int] = dict.fromkeys(STATE_KINDS, 0) if arguments else {}
    for argument in arguments:
        if argument.kind in rest:
            rest[argument.kind] += argument.local.num_bytes
    findings = find(evidence)
    if larger is not None:
        findings += _growth(moves, wire.collectives(hlo.parse(_text(larger))))
    return Audit(
        plan=plan,
        microbatches=microbatches,
        target=hardware,
        rest=memory_report(plan, state),
        compiled_rest=rest,
        peak=_peak(compiled, evidence.on_cpu),
        moves=tuple(moves),
        expected=expected,
        timeline=None if hardware.gpu is None else simulate.simulate(program, hardware),
        findings=tuple(findings),
        notes=tuple(find_notes(evidence)),
    )


def hardware_of(plan: Plan, target: str | Target | None) -> Target:
    """The target of the plan's mesh, with the rates of the one given."""
    if target is None:
        return target_of(plan.mesh)
    given, first = get_target(target), plan.mesh.devices.flat[0]
    if first.platform != "cpu" and not compile_only(plan.mesh):
        return given  # real GPUs, perhaps of a kind that has no rates here
    own = target_of(plan.mesh)
    shapes = [(x.gpu and x.gpu.name, x.hosts, x.gpus_per_host) for x in (own, given)]
    if shapes[0] != shapes[1]:
        raise ValueError(
            f"target is {given.name!r}, but the plan's mesh is of {own.name!r}, for which the "
            "program was compiled; a target changes rates only. Make the plan on "
            f"zerojax.make_mesh(target={given.name!r})."
        )
    return given


def _text(compiled: jax.stages.Compiled) -> str:
    text = compiled.as_text()
    if not text:
        raise ValueError("the compiled program has no text on this backend; nothing to audit.")
    return text


def _peak(compiled: jax.stages.Compiled, on_cpu: bool) -> CompiledPeak:
    sizes = compiled.memory_analysis()
    assert sizes is not None
    peak = CompiledPeak(
        arguments=sizes.argument_size_in_bytes,
        outputs=sizes.output_size_in_bytes,
        aliased=sizes.alias_size_in_bytes,
        temporary=sizes.temp_size_in_bytes,
        total=sizes.peak_memory_in_bytes,
    )
    # On CPU what XLA reports as the peak is something else.
    return peak._replace(total=peak.allocated) if on_cpu else peak


def _growth(moves: Sequence[Move], larger: Sequence[wire.Collective]) -> list[Finding]:
    """Traffic that grows with the rows, scalars aside."""
    before = sum(m.wire_bytes for m in moves)
    after = sum(c.wire_bytes * c.times for c in larger)
    if after <= 1.01 * before or not before:
        return []
    return [
        Finding(
            "traffic-grows",
            f"twice the rows send {after / before:.2f} times the bytes; weights do not grow",
            "Activations are on the wire: constrain them to the batch axis in each layer.",
        )
    ]
