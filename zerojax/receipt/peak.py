# SPDX-License-Identifier: Apache-2.0
"""How many bytes a device holds at the fullest moment of a step, without compiling it.

What rests is in the plan. What a step adds is read from its trace: which arrays are held where by
`liveness.py`, and the layer engine's part by its own numbers. The rows are those of the fullest
moment, which is usually the backward of a layer.
"""

from __future__ import annotations

import collections
import dataclasses
import re
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import jax

from zerojax.engine.observer import StackRecord
from zerojax.receipt.jaxpr import (
    LEAVES,
    Op,
    Trace,
    Value,
    array_bytes,
    flatten,
    num_consts,
    scan_body,
    source,
)
from zerojax.receipt.liveness import Held, in_place, peak, profile
from zerojax.receipt.recorder import NAME, record_stacks
from zerojax.sharding.collectives import Manual
from zerojax.sharding.plan import Plan
from zerojax.sharding.stage import STATE_KINDS
from zerojax.table import format_bytes, format_table
from zerojax.training.gradients import make_gradients
from zerojax.training.loss import LossFn

WHAT = {
    "params": "parameters at rest",
    "master": "master copy",
    "opt_state": "optimizer state",
    "batch": "this device's rows of the batch",
    "root weights": "whole weights outside the layers",
    "root gradients": "their gradients, unless in the place of a parameter",
    "gradients": "gradients of the layers, and sums over microbatches",
    "window": "whole layers: the one that runs, those gathered ahead",
    "layer gradient": "one layer's whole gradient, on its way out",
    "activations": "what the layers' forward saves for their backward",
    "working set": "arrays inside the layer that runs",
    "outside": "what is computed outside the layers",
}


class Peak(NamedTuple):
    """Bytes per device at the fullest moment of a step.

    Attributes:
      moment: what runs then.
      rows: bytes of each kind of `WHAT` that is there.
      stacks: what the layer engine ran.
    """

    moment: str
    rows: dict[str, int]
    stacks: tuple[StackRecord, ...] = ()

    @property
    def num_bytes(self) -> int:
        """The sum of the rows."""
        return sum(self.rows.values())

    def __str__(self) -> str:
        rows = [[kind, format_bytes(size), WHAT[kind]] for kind, size in self.rows.items() if size]
        rows.append(["peak", format_bytes(self.num_bytes), f"in {self.moment} (GB = 1e9 bytes)"])
        return format_table(["bytes per device", "predicted", "what"], rows, right=[1])


def predict_peak(loss_fn: LossFn, plan: Plan, batch: Any, *, microbatches: int = 1) -> Peak:
    """Predicts the fullest moment of the step that `make_train_step` makes of the same arguments.

    The step is traced for shapes, once; nothing is compiled or allocated. Of the optimizer only
    what rests is counted: one that holds whole arrays (Muon) needs more than this says.

    Args:
      loss_fn: as for `make_train_step`.
      plan: from `make_plan`.
      batch: arrays or ShapeDtypeStructs of the global batch.
      microbatches: as for `make_train_step`.

    Returns:
      A Peak; it prints as a table.

    Example:
      >>> import jax.numpy as jnp, optax, zerojax as zj
      >>> init = lambda key: {"w": jnp.zeros((16, 64))}
      >>> loss_fn = lambda params, batch, key: (jnp.sum((batch @ params["w"]) ** 2), batch.size)
      >>> plan = zj.make_plan(init, optax.adam(1e-3), zj.make_mesh(8), stage=3)
      >>> peak = predict_peak(loss_fn, plan, jnp.ones((32, 16)))
      >>> peak.rows["opt_state"], peak.rows["root gradients"]  # a shard of 2 moments; whole
      (1028, 4096)
    """
    # The other partitioner holds the same on each device, but its trace is of global arrays.
    manual = dataclasses.replace(plan, partitioner=Manual(plan.mesh))
    with record_stacks() as stacks:
        gradients = make_gradients(loss_fn, manual, microbatches)
        jaxpr = jax.make_jaxpr(gradients)(plan.abstract_state, batch).jaxpr
    (mapped,) = (eqn for eqn in jaxpr.eqns if eqn.primitive.name == "shard_map")
    trace = flatten(mapped.params["jaxpr"], NAME)
    rest = {kind: plan.rest_bytes(kind) for kind in STATE_KINDS}
    rows = jax.tree.leaves(batch)
    rest["batch"] = sum(array_bytes(jax.typeof(x)) for x in rows) // plan.num_batch_shards
    params = trace.inputs[: len(plan.params)]
    moments = list(_moments(trace, stacks, params, bool(plan.master)))
    if plan.stage.splits_opt_state and not plan.stage.splits_params:
        # New parameters: as shards, and the largest as gathered, before they are laid out as at
        # rest. With a master copy the old ones are read no more, and it soon takes their place.
        sizes = [leaf.num_bytes for leaf in plan.params]
        sums = sum(leaf.num_bytes for leaf in plan.grads) // plan.num_shards
        count = 1 if plan.master else sizes.count(max(sizes))
        more = sum(sizes) // plan.num_shards + count * max(sizes)
        moments.append(("the optimizer", {"gradients": sums, "outside": more}))
    moment, parts = max(moments, key=lambda item: sum(item[1].values()))
    if (reused := parts.get("outside", 0)) < 0:  # in the place of an array of another kind
        largest = max(parts, key=lambda kind: parts[kind])
        parts |= {"outside": 0, largest: parts[largest] + reused}
    # With microbatches the loss function is traced once more for shapes, outside this trace.
    used = {int(number) for number in re.findall(rf"{NAME}(\d+)_forward", str(jaxpr))}
    ran = tuple(stack for number, stack in enumerate(stacks) if number in used)
    return Peak(moment, {kind: {**rest, **parts}.get(kind, 0) for kind in WHAT}, ran)


def _moments(
    trace: Trace, stacks: list[StackRecord], params: Sequence[Value] = (), has_master: bool = False
) -> Iterator[tuple[str, dict[str, int]]]:
    """For each step of the trace, what runs and the bytes of each kind."""
    leaving, known = _leaving(trace), set(map(id, params))
    replaced = known if has_master else set()  # without one, the optimizer reads them once more
    for held in profile(trace, until=len(trace.ops), dropped=in_place(trace)):
        parts = collections.Counter()
        # Parameters are donated: one that is read no more leaves its place to another array.
        places = collections.Counter(x.num_bytes for x in held.ended if id(x) in replaced)
        for value in held.values:
            if places[value.num_bytes] > 0:
                places[value.num_bytes] -= 1
                continue
            parts[_kind(value, stacks, known, leaving)] += value.num_bytes
        op = held.op
        if op.name.startswith(NAME):
            number, way = op.name.removeprefix(NAME).split("_")
            parts += _inside(op, stacks[int(number)], way)
            yield f"the {way} of a layer", dict(parts)
        elif op.name == "scan" and _has_stack(op):
            inner = scan_body(op, NAME)
            parts["outside"] -= held.reused  # the zeros that sums start from
            for moment, more in _moments(inner, stacks):
                yield moment, dict(parts + collections.Counter(more))
        else:
            parts["outside"] += held.inner - held.reused
            yield _moment(held), dict(parts)


def _moment(held: Held) -> str:
    return f"{held.op.name}, outside the layers"


def _kind(value: Value, stacks: list[StackRecord], params: set[int], leaving: set[int]) -> str:
    """Which row of the table an array of the trace belongs to."""
    op = value.op
    if op is None:
        return "outside"
    if op.name.startswith(NAME):
        number, way = op.name.removeprefix(NAME).split("_")
        if way == "forward":
            return "activations"
        first = op.outputs[: stacks[int(number)].num_grads]
        return "gradients" if any(value is x for x in first) else "outside"
    if op.name == "scan" and value.ndim and _has_stack(op):
        return "gradients"
    made_of = [id(source(x)) for x in op.inputs]
    if op.name == "all_gather" or (op.is_fused and made_of and set(made_of) <= params):
        return "root weights"
    if id(value) in leaving or op.name in LEAVES:
        return "root gradients"
    return "outside"


def _leaving(trace: Trace) -> set[int]:
    """The ids of whole gradients that are to be reduced, and of the terms they are sums of."""
    found = set()
    for op in reversed(trace.ops):
        if op.name in LEAVES:
            found.update(id(source(x)) for x in op.inputs if x.ndim)
        elif op.is_fused or op.name == "scatter-add":
            sizes = {x.num_bytes for x in op.outputs if id(x) in found}
            found.update(id(source(x)) for x in op.inputs if x.num_bytes in sizes)
    return found


def _has_stack(op: Op) -> bool:
    return any(x.name.startswith(NAME) for x in scan_body(op, NAME).ops)


def _inside(op: Op, stack: StackRecord, way: str) -> collections.Counter:
    """What the engine holds while it runs a layer, besides what goes into and out of the stack."""
    body = flatten(op.params["jaxpr"].jaxpr)
    weights = set(map(id, body.inputs[: stack.num_weights]))
    grads = {x.shape[1:] for x in op.outputs[: stack.num_grads]}
    made, is_loop = body.outputs, False
    for loop in body.ops:
        taken = [id(source(x)) in weights for x in loop.inputs]
        if loop.name == "scan" and any(taken[: num_consts(loop)]):
            body, made, is_loop = scan_body(loop), loop.outputs, True
            weights = {id(x) for x, yes in zip(body.inputs, taken, strict=False) if yes}
            break
    # Whole weights and their gradients are counted below, as they overlap from layer to layer.
    dropped = set(weights)
    for x in body.ops:
        if x.name == "all_gather" or (x.is_fused and _from(x, dropped)):
            dropped.update(map(id, x.outputs))
        if x.name in LEAVES:
            dropped.update(id(source(y)) for y in (*x.inputs, *x.outputs))
    # So are what the forward saves, and a layer's part of a stacked gradient that stays local.
    for x, whole in zip(body.outputs, made, strict=True):
        if whole.ndim > x.ndim and (way == "forward" or x.shape in grads):
            dropped.add(id(source(x)))
    parts = collections.Counter()
    held = stack.prefetch + 1 if stack.gathers else int(is_loop)
    parts["window"] = held * stack.layer_bytes
    if way == "backward" and stack.reduces:
        parts["layer gradient"] = stack.layer_grad_bytes
    parts["working set"] = max(0, peak(body, dropped=dropped))
    return parts


def _from(op: Op, weights: set[int]) -> bool:
    """A slice or a cast of a weight."""
    arrays = [x for x in op.inputs if x.ndim]
    return bool(arrays) and all(id(source(x)) in weights for x in arrays)
