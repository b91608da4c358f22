# SPDX-License-Identifier: Apache-2.0
"""The receipt: what a compiled step stores, moves and waits for, beside the theory."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import jax

from zerojax.engine.observer import StackRecord
from zerojax.hardware.devices import compile_only, platform, target_of
from zerojax.hardware.targets import Target
from zerojax.hardware.targets import target as get_target
from zerojax.receipt import hlo
from zerojax.receipt.hlo_collectives import Collective, collectives
from zerojax.receipt.hlo_inputs import read_inputs, shapes
from zerojax.receipt.memory import compiled_peak, memory_report
from zerojax.receipt.notes import find_notes
from zerojax.receipt.peak import predict_peak
from zerojax.receipt.recorder import record_stacks
from zerojax.receipt.report import Audit
from zerojax.receipt.rules import Evidence, Finding, find
from zerojax.receipt.theory import expected_bytes
from zerojax.receipt.timeline import replay
from zerojax.receipt.traffic import Move, find_moves, sizes_of
from zerojax.receipt.xla_statistics import compile_with_statistics
from zerojax.sharding.plan import Plan
from zerojax.sharding.stage import STATE_KINDS
from zerojax.sharding.state import TrainState
from zerojax.training.step import Step
from zerojax.tree import PyTree


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
        with record_stacks() as ran:
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
    stacks: Sequence[StackRecord] | None = None,
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
    inputs = read_inputs(compiled, program, batch)
    moves = find_moves(plan, collectives(program), sizes_of(plan, batch, microbatches))
    expected = expected_bytes(plan, microbatches, stacks, training=training)
    evidence = Evidence(plan, program, moves, expected, inputs, microbatches, stacks or ())
    rest: dict[str, int] = dict.fromkeys(STATE_KINDS, 0) if inputs else {}
    for x in inputs:
        if x.kind in rest:
            rest[x.kind] += x.local.num_bytes
    findings = find(evidence)
    if larger is not None:
        findings += _growth(moves, collectives(hlo.parse(_text(larger))))
    return Audit(
        plan=plan,
        microbatches=microbatches,
        target=hardware,
        rest=memory_report(plan, state),
        compiled_rest=rest,
        peak=compiled_peak(compiled, evidence.on_cpu),
        moves=tuple(moves),
        expected=expected,
        timeline=None if hardware.gpu is None else replay(program, hardware),
        findings=tuple(findings),
        notes=tuple(find_notes(evidence)),
    )


def hardware_of(plan: Plan, target: str | Target | None) -> Target:
    """The target of the plan's mesh, with the rates of the one given."""
    if target is None:
        return target_of(plan.mesh)
    given = get_target(target)
    if platform(plan.mesh) != "cpu" and not compile_only(plan.mesh):
        return given  # real GPUs, perhaps of a kind that has no rates here
    own = target_of(plan.mesh)
    if _hardware(own) != _hardware(given):
        raise ValueError(
            f"target is {given.name!r}, but the plan's mesh is of {own.name!r}, for which the "
            "program was compiled; a target changes rates only. Make the plan on "
            f"zerojax.make_mesh(target={given.name!r})."
        )
    return given


def _hardware(target: Target) -> tuple[str | None, int, int]:
    """What a target is, whatever its rates."""
    return target.gpu and target.gpu.name, target.hosts, target.gpus_per_host


def _text(compiled: jax.stages.Compiled) -> str:
    text = compiled.as_text()
    if not text:
        raise ValueError("the compiled program has no text on this backend; nothing to audit.")
    return text


def _growth(moves: Sequence[Move], larger: Sequence[Collective]) -> list[Finding]:
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
