# SPDX-License-Identifier: Apache-2.0
"""What a compiled step moves, array by array: which parameter it is, or what else."""

from __future__ import annotations

import collections
import itertools
import math
from collections.abc import Iterable
from typing import Any, NamedTuple

import jax
import numpy as np

from zerojax.receipt.hlo_collectives import Collective
from zerojax.sharding.leaves import Leaf
from zerojax.sharding.plan import Plan

SCALARS = 64  # elements: what is smaller and no parameter counts as a number, not as an array
WEIGHT_PARTS = ("layers", "root")  # weights and their gradients
THEORY_PARTS = (*WEIGHT_PARTS, "optimizer")  # what theory expects on the wire
PARTS = (*THEORY_PARTS, "update", "scalars", "activations", "other")


class Move(NamedTuple):
    """One array that a collective moves.

    Attributes:
      part: "layers" (one layer's weights or gradients), "root" (leaves outside the stacks, where
        the step enters and leaves), "optimizer" (new parameters, gathered after the update),
        "update" (what the optimizer itself exchanges), "scalars" (the loss, norms and aux),
        "activations" (an array of the batch's sizes), or "other".
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


class Known(NamedTuple):
    """A size on the wire that a parameter explains.

    Attributes:
      leaf: the parameter.
      whole_stack: of all its layers at once; else of one of them, or of a leaf that has none.
      dims: the shape, without ones.
    """

    leaf: Leaf
    whole_stack: bool
    dims: tuple[int, ...]


class Sizes(NamedTuple):
    """How arrays are recognised: by the sizes of the parameters, and of the batch."""

    weights: dict[int, list[Known]]  # by the number of elements
    batch_dims: frozenset[int]


def sizes_of(plan: Plan, batch: Any, microbatches: int) -> Sizes:
    """The sizes by which a plan's parameters and a batch's arrays are told apart."""
    weights = collections.defaultdict(list)
    for leaf in plan.params:
        shape, has_layers = leaf.array.shape, leaf.stacked and leaf.array.shape[0] > 1
        weights[leaf.array.size].append(Known(leaf, has_layers, _no_ones(shape)))
        if has_layers:
            one = leaf.array.size // shape[0]
            weights[one].append(Known(leaf, False, _no_ones(shape[1:])))
    dims = set()
    for x in jax.tree.leaves(batch):
        if np.ndim(x) or getattr(x, "shape", ()):
            rows, *others = x.shape
            per_device = rows // plan.num_batch_shards
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
            in_loop = bool(collective.loops)
            part, what, whole_stack = _recognise(array.shape, factor, sizes, in_loop)
            if "/sums/" in collective.op_name or "/update/" in collective.op_name:
                part = "scalars" if "/sums/" in collective.op_name else "update"
            if (
                part in WEIGHT_PARTS
                and collective.kind == "all-gather"
                and not plan.stage.splits_params
            ):
                part = "optimizer"
            share = array.num_bytes / total * collective.wire_bytes * collective.times
            moves.append(Move(part, what, whole_stack, collective, array.dtype, share))
    return moves


def _recognise(
    shape: tuple[int, ...], factor: int, sizes: Sizes, in_loop: bool
) -> tuple[str, str, bool]:
    """(part, what, whole stack) of an array of which each device puts in `shape`."""
    count = math.prod(shape) * factor
    wholes = _grown(shape, factor)
    known = sizes.weights.get(count, [])
    # In the same order, or else transposed, or else reshaped.
    exact = [x for x in known if x.dims in map(_no_ones, wholes)]
    exact = exact or [x for x in known if sorted(x.dims) in (sorted(_no_ones(w)) for w in wholes)]
    # Of several, in a loop one layer before a whole stack, and elsewhere no layer before one.
    exact.sort(key=lambda x: (x.whole_stack, not x.leaf.stacked) if in_loop else x.leaf.stacked)
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
