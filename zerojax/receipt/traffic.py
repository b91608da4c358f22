# SPDX-License-Identifier: Apache-2.0
"""What a compiled step moves, array by array: which parameter it is and what theory expects."""

from __future__ import annotations

import collections
import itertools
import math
from collections.abc import Container, Iterable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from zerojax.engine.observer import Stack
from zerojax.receipt.hlo_collectives import Collective
from zerojax.sharding.collectives import Auto
from zerojax.sharding.leaves import Leaf
from zerojax.sharding.plan import Plan

SCALARS = 64  # elements: what is smaller and no parameter counts as a number, not as an array
PARTS = ("layers", "root", "optimizer", "update", "scalars", "activations", "other")


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
            in_loop = bool(collective.loops)
            part, what, whole_stack = _recognise(array.shape, factor, sizes, in_loop)
            if "/sums/" in collective.op_name or "/update/" in collective.op_name:
                part = "scalars" if "/sums/" in collective.op_name else "update"
            if (
                part in PARTS[:2]
                and collective.kind == "all-gather"
                and not plan.stage.splits_params
            ):
                part = "optimizer"
            share = array.num_bytes / total * collective.wire_bytes * collective.times
            moves.append(Move(part, what, whole_stack, collective, array.dtype, share))
    return moves


class Expected(NamedTuple):
    """Bytes that each device sends per step in theory.

    Attributes:
      parts: by part: "layers", "root" and "optimizer".
      ahead: on top of them, for layers that a queue of `prefetch` gathers beyond the end of its
        stack, and drops.
    """

    parts: dict[str, float]
    ahead: float

    @property
    def total(self) -> float:
        """Without what is gathered ahead."""
        return sum(self.parts.values())

    def moved(self, moves: Iterable[Move]) -> float:
        """The bytes of these moves that `total` speaks of.

        Not scalars, what the optimizer itself exchanges, and layers gathered ahead.
        """
        counted = (m.wire_bytes for m in moves if m.part not in ("scalars", "update"))
        return sum(counted) - self.ahead


def expected_bytes(
    plan: Plan,
    microbatches: int,
    stacks: Sequence[Stack] | None = None,
    *,
    training: bool = True,
) -> Expected:
    """What theory expects on the wire, in the dtypes of the plan.

    arXiv 1910.02054, section 7: a gather or a scatter of a leaf moves (N - 1) / N of it, an
    all-reduce twice that. With m microbatches stages 0 and 1 reduce once, stage 2 scatters m times
    and gathers the new parameters once, stage 3 gathers a layer 2 m times and scatters it m times,
    as often as it is used. Leaves outside the layers are gathered once per step; one that cannot be
    split is all-reduced once.

    Args:
      plan: from `make_plan`.
      microbatches: m.
      stacks: what the layer engine ran, from `predict_peak`; None takes every leaf under
        `make_plan(layers=...)` as used once, and gathered again for the backward.
      training: False is a step without gradients and optimizer.
    """
    # On CPU "auto" has no reduce-scatter, but an all-reduce and a slice.
    scatter = 2 if _on_cpu(plan) and isinstance(plan.partitioner, Auto) else 1
    parts: dict[str, float] = dict.fromkeys(PARTS[:3], 0.0)
    ahead = 0.0
    for leaf in plan.params:
        uses = _uses(leaf, stacks)
        part = "layers" if leaf.stacked or uses else "root"
        gather = _sent(plan, leaf, plan.precision.compute)
        reduce = _sent(plan, leaf, plan.precision.reduce) if leaf.trained and training else 0.0
        early = max(len(uses), 1)  # as often a gradient leaves the backward
        if leaf.split.dim is None or plan.stage.number == 0:
            at_once = plan.stage.number == 0 and microbatches == 1
            parts[part] += 2 * reduce * (early if at_once else 1)
            continue
        parts[part] += reduce * scatter * (early * microbatches if plan.stage.splits_grads else 1)
        if plan.stage.splits_params:
            parts[part] += 0.0 if uses else gather
            for use in uses:
                passes = microbatches * (2 if use.regathers and training else 1)
                parts[part] += gather * passes
                ahead += gather * passes * use.prefetch / use.num_layers
        elif leaf.trained and training:
            parts["optimizer"] += _sent(plan, leaf, plan.precision.params)
    return Expected(parts, ahead)


def _uses(leaf: Leaf, stacks: Sequence[Stack] | None) -> list[Stack]:
    """The runs of the engine that use a leaf."""
    if stacks is None:
        num_layers = leaf.array.shape[0] if leaf.stacked else 1
        return [Stack(num_layers, 0, True, True, 1, 1, 0, 0)] if leaf.stacked else []
    return [stack for stack in stacks if leaf.path in stack.paths]


def gather_passes(plan: Plan, moves: Iterable[Move], paths: Container[str]) -> float:
    """How often in a step each layer of these stacks is gathered, on average over bytes."""
    one = sum(
        _sent(plan, leaf, plan.precision.compute)
        for leaf in plan.params
        if leaf.path in paths and leaf.split.dim is not None
    )
    moved = sum(
        move.wire_bytes
        for move in moves
        if move.collective.kind == "all-gather" and move.what in paths and not move.whole_stack
    )
    return moved / one if one else 0.0


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
    shape: tuple[int, ...], factor: int, sizes: Sizes, in_loop: bool
) -> tuple[str, str, bool]:
    """(part, what, whole stack) of an array of which each device puts in `shape`."""
    count = math.prod(shape) * factor
    wholes = _grown(shape, factor)
    known = sizes.weights.get(count, [])
    # In the same order, or else transposed, or else reshaped.
    exact = [entry for entry in known if entry[2] in map(_no_ones, wholes)]
    exact = exact or [x for x in known if sorted(x[2]) in (sorted(_no_ones(w)) for w in wholes)]
    # Of several, in a loop one layer before a whole stack, and elsewhere no layer before one.
    exact.sort(key=lambda entry: (entry[1], not entry[0].stacked) if in_loop else entry[0].stacked)
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
