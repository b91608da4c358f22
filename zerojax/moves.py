# SPDX-License-Identifier: Apache-2.0
"""What a compiled step moves, array by array: which parameter it is and what theory expects."""

from __future__ import annotations

import collections
import itertools
import math
from collections.abc import Iterable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from zerojax.collectives import Auto
from zerojax.leaves import Leaf
from zerojax.plan import Plan
from zerojax.wire import Collective

SCALARS = 64  # elements: what is smaller and no parameter counts as a number, not as an array
PARTS = ("layers", "root", "optimizer", "scalars", "activations", "other")


class Move(NamedTuple):
    """One array that a collective moves.

    Attributes:
      part: "layers" (one layer's weights or gradients), "root" (leaves outside the stacks, where
        the step enters and leaves), "optimizer" (new parameters, gathered after the update),
        "scalars", "activations" (an array of the batch's sizes), or "other".
      what: the path of the parameter, or the shape of what is none.
      whole_stack: it holds all layers of a stack at once.
      collective: what moves it, perhaps with others.
      dtype: on the wire.
      wire_bytes: bytes that a device sends for it in a whole step.
    """

    part: str
    what: str
    whole_stack: bool
    collective: Collective
    dtype: str
    wire_bytes: float


class Sizes(NamedTuple):
    """How arrays are recognised: by the sizes of the parameters, and of the batch."""

    weights: dict[
        int, list[tuple[Leaf, bool, tuple[int, ...]]]
    ]  # elements: leaf, whole stack, dims
    batch_dims: frozenset[int]


def sizes_of(plan: Plan, batch: Any, microbatches: int) -> Sizes:
    """The sizes by which a plan's parameters and a batch's arrays are told apart."""
    weights = collections.defaultdict(list)
    for leaf in plan.params:
        shape = leaf.array.shape
        weights[leaf.array.size].append((leaf, leaf.stacked and shape[0] > 1, _no_ones(shape)))
        if leaf.stacked and shape[0] > 1:
            weights[leaf.array.size // shape[0]].append((leaf, False, _no_ones(shape[1:])))
    dims = set()
    for x in jax.tree.leaves(batch):
        if np.ndim(x) or getattr(x, "shape", ()):
            rows, *others = x.shape
            per_device = rows // plan.num_devices
            dims |= {rows, per_device, per_device // microbatches}
            dims |= {size - cut for size in others for cut in (0, 1)}  # inputs and targets
    return Sizes(dict(weights), frozenset(size for size in dims if size > 1))


def find_moves(plan: Plan, collectives: Iterable[Collective], sizes: Sizes) -> list[Move]:
    """Every array of every collective, with what it is."""
    moves = []
    for collective in collectives:
        total = sum(array.num_bytes for array in collective.arrays) or 1
        for array in collective.arrays:
            factor = len(collective.group) if collective.kind == "all-gather" else 1
            part, what, whole_stack = _recognise(plan, array.shape, factor, sizes)
            if (
                part in PARTS[:2]
                and collective.kind == "all-gather"
                and not plan.stage.splits_params
            ):
                part = "optimizer"
            share = array.num_bytes / total * collective.wire_bytes * collective.times
            moves.append(Move(part, what, whole_stack, collective, array.dtype, share))
    return moves


def expected_bytes(plan: Plan, microbatches: int, *, kept: bool = False) -> dict[str, float]:
    """Bytes that each device sends per step in theory, by the part they belong to.

    arXiv 1910.02054, section 7, in the dtypes of the plan: a gather or a scatter of a leaf moves
    (N - 1) / N of it, an all-reduce twice that. With m microbatches stages 0 and 1 reduce once,
    stage 2 scatters m times and gathers the new parameters once, stage 3 gathers a layer 2 m times
    and scatters it m times. Leaves outside the stacks are gathered once per step; a leaf that
    cannot be split is all-reduced once.

    Args:
      plan: from `make_plan`.
      microbatches: m.
      kept: gathered layers are kept for the backward (`regather=False`): m gathers.
    """
    # On CPU "auto" has no reduce-scatter, but an all-reduce and a slice.
    scatter = 2 if _on_cpu(plan) and isinstance(plan.partitioner, Auto) else 1
    found: dict[str, float] = dict.fromkeys(PARTS[:3], 0.0)
    for leaf in plan.params:
        part = "layers" if leaf.stacked else "root"
        gather = _sent(plan, leaf, plan.precision.compute)
        reduce = _sent(plan, leaf, plan.precision.reduce) if leaf.trained else 0.0
        if leaf.split.dim is None or plan.stage.number == 0:
            found[part] += 2 * reduce
            continue
        found[part] += reduce * scatter * (microbatches if plan.stage.splits_grads else 1)
        if plan.stage.splits_params:
            passes = (1 if kept else 2) * microbatches
            found[part] += gather * (passes if leaf.stacked else 1)
        elif leaf.trained:
            found["optimizer"] += _sent(plan, leaf, plan.precision.params)
    return found


def gather_passes(plan: Plan, moves: Iterable[Move]) -> float:
    """How often in a step each layer of the stacks is gathered, on average over bytes."""
    one = sum(
        _sent(plan, leaf, plan.precision.compute)
        for leaf in plan.params
        if leaf.stacked and leaf.split.dim is not None
    )
    moved = sum(
        move.wire_bytes
        for move in moves
        if move.collective.kind == "all-gather" and move.part == "layers" and not move.whole_stack
    )
    return moved / one if one else 0.0


def gathered_ahead(plan: Plan, moves: Iterable[Move], microbatches: int, kept: bool) -> float:
    """Bytes on the wire for layers that queues gathered beyond the end of their stack.

    A queue of `prefetch` layers gathers as many too many in each pass; up to two a pass count.
    """
    moves = list(moves)
    passes, wanted = gather_passes(plan, moves), (1 if kept else 2) * microbatches
    if not plan.stage.splits_params or passes <= wanted:
        return 0.0
    fewest = min(leaf.array.shape[0] for leaf in plan.params if leaf.stacked)
    extra = min(passes - wanted, 2 * wanted / fewest)
    layers = (
        m.wire_bytes for m in moves if m.collective.kind == "all-gather" and m.part == "layers"
    )
    return sum(layers) * extra / passes


def _sent(plan: Plan, leaf: Leaf, dtype: Any) -> float:
    """Bytes that a device sends to gather or scatter a leaf once."""
    if jnp.issubdtype(leaf.array.dtype, jnp.floating):
        # XLA's CPU collectives are at least 32 bits wide.
        width = max(jnp.dtype(dtype).itemsize, 4 if _on_cpu(plan) else 0)
    else:
        width = leaf.array.dtype.itemsize
    return leaf.array.size * width * (plan.num_devices - 1) / plan.num_devices


def _on_cpu(plan: Plan) -> bool:
    return plan.mesh.devices.flat[0].platform == "cpu"


def _recognise(
    plan: Plan, shape: tuple[int, ...], factor: int, sizes: Sizes
) -> tuple[str, str, bool]:
    """(part, what, whole stack) of an array of which each device puts in `shape`."""
    count = math.prod(shape) * factor
    wholes = _grown(shape, factor)
    known = sizes.weights.get(count, [])
    # In the same order, or else transposed, or else reshaped.
    exact = [entry for entry in known if entry[2] in map(_no_ones, wholes)]
    exact = exact or [x for x in known if sorted(x[2]) in (sorted(_no_ones(w)) for w in wholes)]
    of_batch = sizes.batch_dims & set(shape)
    for leaf, whole_stack, dims in exact or ([] if of_batch else known):
        if exact or not (of_batch - set(dims)):
            return ("layers" if leaf.stacked else "root"), leaf.path, whole_stack
    if count <= SCALARS:
        return "scalars", "", False
    what = "x".join(map(str, shape)) + (f" from each of {factor}" if factor > 1 else "")
    return ("activations" if of_batch else "other"), what, False


def _grown(shape: tuple[int, ...], factor: int) -> list[tuple[int, ...]]:
    """The shapes that gathering along one dimension can make."""
    if factor == 1:
        return [shape]
    return [
        tuple(n * factor if i == dim else n for i, n in enumerate(shape))
        for dim in range(len(shape))
    ]


def _no_ones(shape: Iterable[int]) -> tuple[int, ...]:
    """What a reshape by ones does not change."""
    return tuple(n for n in shape if n != 1)


def by_part(moves: Iterable[Move]) -> dict[str, float]:
    """Bytes on the wire for each part that moves any."""
    ordered = sorted(moves, key=lambda move: PARTS.index(move.part))
    return {
        part: sum(move.wire_bytes for move in group)
        for part, group in itertools.groupby(ordered, key=lambda move: move.part)
    }
