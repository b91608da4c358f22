# SPDX-License-Identifier: Apache-2.0
"""What the reader of a receipt should know, though nothing is wrong: a choice and its price."""

from __future__ import annotations

from zerojax.hardware.devices import compile_only
from zerojax.receipt.rules import Evidence
from zerojax.sharding.collectives import Auto
from zerojax.table import format_bytes


def find_notes(e: Evidence) -> list[str]:
    """One sentence each, in the order of importance to a reader."""
    notes = []
    target = compile_only(e.plan.mesh)
    if target:
        notes.append(f"compiled for {target}, which is not here; nothing ran")
    if any(not stack.regathers for stack in e.stacks):
        notes.append("regather=False: whole layers are kept from the forward to the backward")
    update = sum(move.wire_bytes for move in e.moves if move.part == "update")
    if update > e.worth_telling:
        notes.append(f"the optimizer itself sends {format_bytes(update)}: it mixes whole arrays")
    notes += _unstacked(e)
    layers = sum(m.wire_bytes for m in e.moves if m.part == "layers") - e.expected.ahead
    if e.plan.stage.splits_params and layers < 0.95 * e.expected.parts["layers"]:
        share = layers / e.expected.parts["layers"]
        notes.append(
            f"layers move {share:.2f} of theory: some that were gathered stay whole, or need no "
            "backward"
        )
    if e.on_cpu and isinstance(e.plan.partitioner, Auto) and e.plan.stage.splits_opt_state:
        notes.append(
            "XLA's CPU backend forms no reduce-scatter: sharding constraints become an all-reduce "
            "and a slice here, twice the bytes; compiled for GPUs they do not"
        )
    return notes + [f"not read: {text}" for text in e.program.unread]


def _unstacked(e: Evidence) -> list[str]:
    """At stage 3, parameters that are whole all through the step."""
    paths = {path for stack in e.stacks for path in stack.paths}
    root = [x for x in e.plan.params if not x.stacked and x.path not in paths]
    held, total = (sum(leaf.num_bytes for leaf in leaves) for leaves in (root, e.plan.params))
    if not e.plan.stage.splits_params or held <= 0.5 * total or e.plan.num_shards == 1:
        return []
    return [
        f"{format_bytes(held)} of {format_bytes(total)} of parameters are gathered where "
        "the step enters, and whole all through it: run layers through scan_layers (and name "
        "their stack in make_plan(layers=...)) or apply_layer"
    ]
