# SPDX-License-Identifier: Apache-2.0
"""What can be wrong with a compiled step, and how to mend it: one rule for each finding."""

from __future__ import annotations

import collections
import re
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import jax.numpy as jnp

from zerojax.engine.observer import StackRecord
from zerojax.hardware.devices import platform
from zerojax.receipt.hlo import Array, Instruction, Program
from zerojax.receipt.hlo_inputs import Input
from zerojax.receipt.theory import Expected, gather_passes
from zerojax.receipt.traffic import WEIGHT_PARTS, Move, by_part
from zerojax.sharding.collectives import Auto
from zerojax.sharding.leaves import Leaf
from zerojax.sharding.plan import Plan
from zerojax.sharding.stage import STATE_KINDS
from zerojax.table import format_bytes


class Finding(NamedTuple):
    """Something that the compiled program does and should not.

    Attributes:
      name: which rule found it, such as "activations-moved".
      what: where, and how much.
      remedy: what to do about it.
    """

    name: str
    what: str
    remedy: str


class Evidence(NamedTuple):
    """What the rules look at."""

    plan: Plan
    program: Program
    moves: Sequence[Move]
    expected: Expected
    inputs: Sequence[Input]
    microbatches: int
    stacks: Sequence[StackRecord] = ()  # what the layer engine ran, if it did

    @property
    def worth_telling(self) -> float:
        """Bytes on the wire below which nothing is reported: a hundredth of what theory expects."""
        return 0.01 * self.expected.total

    @property
    def on_cpu(self) -> bool:
        """Compiled for CPU devices, whose XLA passes form no reduce-scatter."""
        return platform(self.plan.mesh) == "cpu"


def find(evidence: Evidence) -> list[Finding]:
    """All findings, by every rule."""
    return [finding for rule in RULES for finding in rule(evidence)]


def activations_moved(e: Evidence) -> Iterator[Finding]:
    """Arrays of the batch's sizes on the wire: the model is split, not the data."""
    moves = [m for m in e.moves if m.part in ("activations", "other")]
    moved = sum(m.wire_bytes for m in moves)
    if moved > e.worth_telling:
        yield Finding(
            "activations-moved",
            f"{format_bytes(moved)} per step are of no parameter: {_largest(moves)}",
            "Constrain activations to the batch axis inside each layer, or use "
            "zerojax.make_train_step, which gathers weights instead.",
        )


def gathers_hoisted(e: Evidence) -> Iterator[Finding]:
    """At stage 3, all layers of a stack gathered at once."""
    if not e.plan.stage.splits_params:
        return
    moves = [m for m in e.moves if m.whole_stack and m.collective.kind == "all-gather"]
    if sum(m.wire_bytes for m in moves) > e.worth_telling:
        held = sum(_leaf(e.plan, m.what).array.size for m in moves)
        width = jnp.dtype(e.plan.precision.compute).itemsize
        yield Finding(
            "gather-hoisted",
            f"all layers of {_paths(moves)} are gathered at once, "
            f"{format_bytes(held * width)} whole on each device",
            "Run the stack through zerojax.scan_layers, with its weights as the loss function "
            "received them and nowhere else (a penalty goes into the optimizer or the block); each "
            "layer is then gathered where it is used.",
        )


def weights_kept(e: Evidence) -> Iterator[Finding]:
    """At stage 3, whole layers that live from the forward to the backward."""
    stacks = _whole_stacks(e)
    paths = {leaf.path for leaf, _ in stacks}
    passes = gather_passes(e.plan, e.moves, paths) / e.microbatches
    if not passes:
        return
    size = sum(array.num_bytes for _, array in stacks)
    held = f"{format_bytes(size)} of whole layers are held at once: {', '.join(sorted(paths))}"
    if passes >= 1.75:
        yield Finding(
            "stack-regathered",
            f"{held}; they are gathered again, but all of them before the backward begins",
            "Take jax.checkpoint with its policy from around the layer scan; use "
            "zerojax.scan_layers(remat=...), or a checkpoint inside the block.",
        )
    else:
        yield Finding(
            "weights-kept",
            f"{held} from the forward to the backward; each is gathered once, not twice",
            "Use zerojax.scan_layers, which drops each layer and gathers it again; if the memory "
            "is meant to buy traffic, say regather=False there.",
        )


def all_reduce_for_scatter(e: Evidence) -> Iterator[Finding]:
    """A gradient that is to be split, and is summed whole on every device."""
    if not e.plan.stage.splits_opt_state or (e.on_cpu and isinstance(e.plan.partitioner, Auto)):
        return
    moves = [
        m
        for m in e.moves
        if m.collective.kind == "all-reduce"
        and m.part in WEIGHT_PARTS
        and _leaf(e.plan, m.what).split.dim is not None
    ]
    moved = sum(m.wire_bytes for m in moves)
    if moved > e.worth_telling:
        yield Finding(
            "all-reduce-for-scatter",
            f"{_paths(moves)}: all-reduced, {format_bytes(moved)} on the wire; a reduce-scatter "
            "moves half of it",
            "Reduce with lax.psum_scatter, or constrain the gradient to its shard before the "
            "optimizer; zerojax.make_train_step does.",
        )


def extra_traffic(e: Evidence) -> Iterator[Finding]:
    """More on the wire than the stage needs, layers gathered ahead of the last one aside."""
    expected = e.expected.total
    moved = e.expected.moved(e.moves)
    if expected and moved > 1.05 * expected:
        parts = ", ".join(f"{part} {format_bytes(n)}" for part, n in by_part(e.moves).items())
        yield Finding(
            "extra-traffic",
            f"{format_bytes(moved)} per step and device, {moved / expected:.2f} of theory: {parts}",
            "See the other findings; without any, look at the largest collectives of the receipt.",
        )


def leaf_left_whole(e: Evidence) -> Iterator[Finding]:
    """More state on each device than the plan puts there."""
    planned = e.plan.rest_bytes()
    state = [a for a in e.inputs if a.kind in STATE_KINDS]
    found = sum(a.local.num_bytes for a in state)
    if not state or found <= 1.02 * planned:
        return
    leaves = e.plan.leaves(*STATE_KINDS)
    accepted = {leaf.array.shape for leaf in leaves if leaf.split.dim is None}
    whole = [a for a in state if a.local == a.whole and a.whole.shape not in accepted]
    whole.sort(key=lambda a: -a.whole.num_bytes)
    named = ", ".join(f"{a.path} {list(a.whole.shape)}" for a in whole[:3])
    yield Finding(
        "leaf-left-whole",
        f"{format_bytes(found)} of state on each device, where the plan has "
        f"{format_bytes(planned)}; whole on each: {len(whole)} leaves, {named}",
        "Give those leaves the shardings of plan.state_shardings, or pad a dimension to a multiple "
        "of the devices; zerojax.init_state makes them where they belong.",
    )


def donation_lost(e: Evidence) -> Iterator[Finding]:
    """State of which the program holds the old and the new at once."""
    outputs = collections.Counter(e.program.entry.root.arrays)
    outputs.subtract(a.local for a in e.inputs if not a.kept)
    state = sum(a.local.num_bytes for a in e.inputs if a.kind != "batch")
    lost = []
    for a in e.inputs:
        if a.kept and a.kind != "batch" and outputs[a.local] > 0:
            outputs[a.local] -= 1
            lost.append(a)
    size = sum(a.local.num_bytes for a in lost)
    if size > 0.01 * state:
        named = ", ".join(a.path for a in sorted(lost, key=lambda a: -a.local.num_bytes)[:3])
        yield Finding(
            "donation-lost",
            f"{format_bytes(size)} on each device are held twice, old and new: {named}",
            "Pass donate_argnums to jax.jit, and give outputs the shardings of the inputs; "
            "zerojax.make_train_step does both.",
        )


RULES: tuple[Callable[[Evidence], Iterator[Finding]], ...] = (
    activations_moved,
    gathers_hoisted,
    weights_kept,
    all_reduce_for_scatter,
    extra_traffic,
    leaf_left_whole,
    donation_lost,
)


def _leaf(plan: Plan, path: str) -> Leaf:
    return next(leaf for leaf in plan.params if leaf.path == path)


def _whole_stacks(e: Evidence) -> list[tuple[Leaf, Array]]:
    """Stacks of whole layers that loops carry, though the parameters rest as shards.

    An array of a stack's shape counts if the loop takes or puts layers of it; stacks that are kept
    on purpose, and shapes in which anything rests, do not.
    """
    if not e.plan.stage.splits_params or e.plan.num_shards == 1:
        return []
    kept = {path for stack in e.stacks if not stack.regathers for path in stack.paths}
    resting = {a.local.shape for a in e.inputs}
    split = [x for x in e.plan.params if x.stacked and x.split.dim is not None]
    shapes = {
        leaf.array.shape: leaf
        for leaf in split
        if leaf.array.shape[0] > 1 and leaf.path not in kept and leaf.array.shape not in resting
    }
    found = {}
    for visit in e.program.walk():
        loop = visit.instruction
        if loop.opcode != "while":
            continue
        for index, array in enumerate(loop.arrays):
            for leaf in [shapes[s] for s in _orders(array.shape) if s in shapes]:
                if _takes_layers(e.program, loop, index):
                    found[leaf.path] = leaf, array
    held = sum(array.num_bytes for _, array in found.values())
    whole = sum(leaf.array.size for leaf in split) * jnp.dtype(e.plan.precision.compute).itemsize
    return list(found.values()) if held > 0.1 * whole else []


def _takes_layers(program: Program, loop: Instruction, index: int) -> bool:
    """Whether the body of a loop slices the array at `index` of what it carries, or updates it."""
    body = program.computations[loop.called["body"][0]]
    reads = [
        x.name
        for x in body.instructions.values()
        if x.opcode == "get-tuple-element" and re.match(rf"index={index}\b", x.attributes)
    ]
    for name in reads:
        for user in body.users.get(name, ()):
            inner = [user]
            if user.opcode.startswith("fusion"):
                inner = program.computations[user.called["calls"][0]].instructions.values()
            if any("dynamic-" in x.opcode for x in inner):
                return True
    return False


def _orders(shape: tuple[int, ...]) -> list[tuple[int, ...]]:
    """The shape, and itself with the last two dimensions swapped."""
    return [shape, (*shape[:-2], shape[-1], shape[-2])] if len(shape) > 2 else [shape]


def _largest(moves: Sequence[Move]) -> str:
    """The three largest moves, in words."""
    ordered = sorted(moves, key=lambda m: -m.wire_bytes)[:3]
    return "; ".join(
        f"{m.collective.kind} of {m.dtype}[{m.what}] x {m.collective.times}" for m in ordered
    )


def _paths(moves: Sequence[Move]) -> str:
    """Up to three paths."""
    paths = list(dict.fromkeys(m.what for m in sorted(moves, key=lambda m: -m.wire_bytes)))
    more = f" and {len(paths) - 3} more" if len(paths) > 3 else ""
    return ", ".join(paths[:3]) + more
