# SPDX-License-Identifier: Apache-2.0
"""Bytes per device: of each kind of state by formula, plan and measured; of a program, by XLA."""

from __future__ import annotations

import collections
from typing import NamedTuple

import jax

from zerojax.sharding.plan import Plan
from zerojax.sharding.stage import KINDS, STATE_KINDS
from zerojax.sharding.state import TrainState
from zerojax.table import format_bytes, format_table
from zerojax.tree import PyTree


class MemoryRow(NamedTuple):
    """Bytes per device of one kind of state.

    Attributes:
      kind: "params", "grads", "master" or "opt_state".
      formula: all its bytes, divided by the number of shards if the stage splits it.
      planned: the bytes of its shards under the plan, with what could not be split whole.
      live: the largest sum over one device of the shards that exist, or None for gradients, which
        do not outlive a step.
    """

    kind: str
    formula: float
    planned: int
    live: int | None


class MemoryReport(tuple[MemoryRow, ...]):
    """Rows that print as a table."""

    def __str__(self) -> str:
        rows = [
            [row.kind, *("-" if size is None else format_bytes(size) for size in row[1:])]
            for row in self
        ]
        header = ["bytes per device", "formula", "plan", "live"]
        return format_table(header, rows, right=[1, 2, 3])


def memory_report(plan: Plan, state: TrainState | None = None) -> MemoryReport:
    """Compares the stage's formula, the plan and the arrays that exist.

    Args:
      plan: from `make_plan`.
      state: a state of that plan, to measure; without it the `live` column is empty.

    Returns:
      A MemoryReport: a tuple of MemoryRow, one for each kind of state that the plan has. Sizes are
      in bytes per device; GB = 1e9 where printed.

    Example:
      >>> import jax, jax.numpy as jnp, optax, zerojax as zj
      >>> init = lambda key: {"w": jnp.zeros((16, 64))}
      >>> plan = zj.make_plan(init, optax.adam(1e-3), zj.make_mesh(8), stage=1)
      >>> print(memory_report(plan, zj.init_state(plan, jax.random.key(0))))
      bytes per device  formula     plan     live
      ----------------  -------  -------  -------
      params            4.10 kB  4.10 kB  4.10 kB
      grads             4.10 kB  4.10 kB        -
      opt_state         1.02 kB  1.03 kB  1.03 kB
    """
    rows = []
    for kind in KINDS:
        leaves = plan.leaves(kind)
        if not leaves:
            continue
        shards = plan.num_shards if plan.stage.splits(kind) else 1
        formula = sum(leaf.num_bytes for leaf in leaves) / shards
        live = None
        if state is not None and kind in STATE_KINDS:
            live = live_bytes(getattr(state, kind))
        rows.append(MemoryRow(kind, formula, plan.rest_bytes(kind), live))
    return MemoryReport(rows)


def live_bytes(tree: PyTree) -> int:
    """Bytes that the arrays of a tree hold on the fullest of this process's devices."""
    totals = collections.Counter()
    for x in jax.tree.leaves(tree):
        for shard in x.addressable_shards:
            totals[shard.device] += shard.data.nbytes
    return max(totals.values(), default=0)


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


def compiled_peak(compiled: jax.stages.Compiled, on_cpu: bool) -> CompiledPeak:
    """What XLA assigned to a compiled program."""
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
