# SPDX-License-Identifier: Apache-2.0
"""What can be wrong with a compiled step, and how to mend it: one rule for each finding."""

from __future__ import annotations

import collections
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import jax.numpy as jnp

from zerojax.arguments import Argument
from zerojax.collectives import Auto
from zerojax.hlo import Array, Program
from zerojax.leaves import Leaf
from zerojax.moves import Move, by_part, gather_passes
from zerojax.plan import Plan
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
    expected: dict[str, float]
    arguments: Sequence[Argument]
    microbatches: int
    kept: bool  # regather=False was asked for
    ahead: float  # bytes on the wire for layers gathered beyond the end of their stack

    @property
    def worth_telling(self) -> float:
        """Bytes on the wire below which nothing is reported: a hundredth of what theory expects."""
        return 0.01 * sum(self.expected.values())

    @property
    def on_cpu(self) -> bool:
        """Compiled for CPU devices, whose XLA passes form no reduce-scatter."""
        return self.plan.mesh.devices.flat[0].platform == "cpu"


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
            "received them; each layer is then gathered where it is used.",
        )


def weights_kept(e: Evidence) -> Iterator[Finding]:
    """At stage 3, whole layers that live from the forward to the backward."""
    stacks = _whole_stacks(e)
    if not stacks:
        return
    size = sum(array.num_bytes for _, array in stacks)
    where = ", ".join(sorted({leaf.path for leaf, _ in stacks}))
    held = f"{format_bytes(size)} of whole layers are held at once: {where}"
    passes = gather_passes(e.plan, e.moves) / e.microbatches
    if passes >= 1.75:
        yield Finding(
            "stack-regathered",
            f"{held}; they are gathered again, but all of them before the backward begins",
            "Take jax.checkpoint with its policy from around the layer scan; use "
            "zerojax.scan_layers(remat=...), or a checkpoint inside the block.",
        )
    elif passes and not e.kept:
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
        and m.part in ("layers", "root")
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
    expected = sum(e.expected.values())
    moved = sum(m.wire_bytes for m in e.moves if m.part != "scalars") - e.ahead
    if expected and moved > 1.05 * expected:
        parts = ", ".join(f"{part} {format_bytes(n)}" for part, n in by_part(e.moves).items())
        yield Finding(
            "extra-traffic",
            f"{format_bytes(moved)} per step and device, {moved / expected:.2f} of theory: {parts}",
            "See the other findings; without any, look at the largest collectives of the receipt.",
        )


def leaf_left_whole(e: Evidence) -> Iterator[Finding]:
    """State that the stage splits, and that lies whole on every device."""
    split = {"params": e.plan.stage.splits_params}
    split |= dict.fromkeys(("master", "opt_state"), e.plan.stage.splits_opt_state)
    total = sum(a.whole.num_bytes for a in e.arguments if a.kind in split)
    whole = [
        a
        for a in e.arguments
        if split.get(a.kind) and a.local == a.whole and a.whole.num_bytes > 0.01 * total
    ]
    if whole and e.plan.num_devices > 1:
        named = ", ".join(f"{a.path} {list(a.whole.shape)}" for a in whole[:3])
        size = format_bytes(sum(a.whole.num_bytes for a in whole))
        yield Finding(
            "leaf-left-whole",
            f"{len(whole)} leaves, {size} on each device: {named}",
            "Pad a dimension to a multiple of the devices, or give the leaf a NamedSharding that "
            "splits one.",
        )


def donation_lost(e: Evidence) -> Iterator[Finding]:
    """State of which the program holds the old and the new at once."""
    outputs = collections.Counter(e.program.entry.root.arrays)
    outputs.subtract(a.local for a in e.arguments if not a.kept)
    state = sum(a.local.num_bytes for a in e.arguments if a.kind != "batch")
    lost = []
    for a in e.arguments:
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
    """Stacks of whole layers that loops carry, though the parameters rest as shards."""
    if not e.plan.stage.splits_params or e.plan.num_devices == 1:
        return []
    at_rest = {a.whole.shape for a in e.arguments if a.kind == "params" and a.local == a.whole}
    shapes = {
        leaf.array.shape: leaf
        for leaf in e.plan.params
        if leaf.stacked and leaf.split.dim is not None and leaf.array.shape[0] > 1
        if leaf.array.shape not in at_rest
    }
    loops = [v.instruction for v in e.program.walk() if v.instruction.opcode == "while"]
    found = {}
    for loop in loops:
        for array in loop.arrays:
            for leaf in [shapes[s] for s in _orders(array.shape) if s in shapes]:
                found[leaf.path] = leaf, array
    return list(found.values())


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
