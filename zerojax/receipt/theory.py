# SPDX-License-Identifier: Apache-2.0
"""What theory expects on the wire: how often each leaf is gathered and reduced, in which dtype.

arXiv 1910.02054, section 7: over N devices a gather or a scatter of an array moves (N - 1) / N of
it, an all-reduce twice that. How often, `zerojax.sharding.stage` says.
"""

from __future__ import annotations

from collections.abc import Container, Iterable, Sequence
from typing import Any, NamedTuple

import jax.numpy as jnp

from zerojax.engine.observer import StackRecord
from zerojax.hardware.devices import platform
from zerojax.receipt.hlo_collectives import ring
from zerojax.receipt.traffic import THEORY_PARTS, Move
from zerojax.sharding.collectives import Auto
from zerojax.sharding.leaves import Leaf
from zerojax.sharding.plan import Plan


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
    stacks: Sequence[StackRecord] | None = None,
    *,
    training: bool = True,
) -> Expected:
    """What theory expects on the wire, in the dtypes of the plan.

    A layer is gathered and scattered as often as it is used. Leaves outside the layers are gathered
    once per step; one that cannot be split is all-reduced once.

    Args:
      plan: from `make_plan`.
      microbatches: m.
      stacks: what the layer engine ran, from `predict_peak`; None takes every leaf under
        `make_plan(layers=...)` as used once, and gathered again for the backward.
      training: False is a step without gradients and optimizer.
    """
    stage = plan.stage
    # On CPU "auto" has no reduce-scatter, but an all-reduce and a slice.
    scatter = 2 if platform(plan.mesh) == "cpu" and isinstance(plan.partitioner, Auto) else 1
    at_once = stage.number == 0 and microbatches == 1  # each gradient leaves where it is made
    parts: dict[str, float] = dict.fromkeys(THEORY_PARTS, 0.0)
    ahead = 0.0
    for leaf in plan.params:
        uses = _uses(leaf, stacks)
        part = "layers" if leaf.stacked or uses else "root"
        times = max(len(uses), 1)  # as often a gradient leaves the backward
        reduces = leaf.trained and training
        if leaf.split.dim is None or stage.number == 0:
            sent = _bytes(plan, leaf, plan.precision.reduce) * ring(plan.num_batch_shards)
            parts[part] += 2 * sent * (times if at_once else 1) if reduces else 0.0
            continue
        share = ring(plan.num_shards)
        if reduces:
            sent = _bytes(plan, leaf, plan.precision.reduce) * share * scatter
            parts[part] += (
                sent * stage.num_reduces(microbatches) * (times if stage.splits_grads else 1)
            )
        if stage.splits_params:
            gather = _bytes(plan, leaf, plan.precision.compute) * share
            parts[part] += 0.0 if uses else gather
            for use in uses:
                both = use.regathers and training  # in the forward and in the backward
                passes = stage.num_gathers(microbatches) // (1 if both else 2)
                parts[part] += gather * passes
                ahead += gather * passes * use.prefetch / use.num_layers
        elif reduces:
            parts["optimizer"] += _bytes(plan, leaf, plan.precision.params) * share
    return Expected(parts, ahead)


def bytes_per_param(plan: Plan, microbatches: int) -> tuple[float, float]:
    """Bytes per parameter and step that (gathers, reductions) send, but for (N - 1) / N.

    As `expected_bytes` for a model of nothing but layers, used once, that all divide.
    """
    stage, precision = plan.stage, plan.precision
    params, reduce, _ = precision.bytes_per_param()
    compute = jnp.dtype(precision.compute).itemsize
    # The second half of an all-reduce has the dtype of the first.
    gathered = compute if stage.splits_params else params if stage.splits_opt_state else reduce
    return stage.num_gathers(microbatches) * gathered, stage.num_reduces(microbatches) * reduce


def gather_passes(plan: Plan, moves: Iterable[Move], paths: Container[str]) -> float:
    """How often in a step each layer of these stacks is gathered, on average over bytes."""
    one = ring(plan.num_shards) * sum(
        _bytes(plan, leaf, plan.precision.compute)
        for leaf in plan.params
        if leaf.path in paths and leaf.split.dim is not None
    )
    moved = sum(
        move.wire_bytes
        for move in moves
        if move.collective.kind == "all-gather" and move.what in paths and not move.whole_stack
    )
    return moved / one if one else 0.0


def _uses(leaf: Leaf, stacks: Sequence[StackRecord] | None) -> list[StackRecord]:
    """The runs of the engine that use a leaf."""
    if stacks is None:
        num_layers = leaf.array.shape[0] if leaf.stacked else 1
        return [StackRecord(num_layers, 0, True, True, 1, 1, 0, 0)] if leaf.stacked else []
    return [stack for stack in stacks if leaf.path in stack.paths]


def _bytes(plan: Plan, leaf: Leaf, dtype: Any) -> int:
    """Bytes of a whole leaf as it is on the wire."""
    width = leaf.array.dtype.itemsize
    if jnp.issubdtype(leaf.array.dtype, jnp.floating):
        # XLA's CPU collectives are at least 32 bits wide.
        width = max(jnp.dtype(dtype).itemsize, 4 if platform(plan.mesh) == "cpu" else 0)
    return leaf.array.size * width
