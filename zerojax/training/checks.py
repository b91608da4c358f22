# SPDX-License-Identifier: Apache-2.0
"""What is given to a plan's functions must be of that plan: errors that say what to mend."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from jax.sharding import PartitionSpec as P

from zerojax.hardware.devices import compile_only
from zerojax.sharding.plan import Plan
from zerojax.sharding.specs import format_spec
from zerojax.sharding.state import TrainState
from zerojax.tree import PyTree, leaf_path, leaves_with_names


def check_plan(plan: Plan) -> None:
    """Raises ValueError for anything but a plan, such as arguments in another order."""
    if not isinstance(plan, Plan):
        raise ValueError(
            f"the plan is a {type(plan).__name__}; pass what zerojax.make_plan returned, in the "
            "place that the function's signature gives it."
        )


def check_runs(plan: Plan) -> None:
    """Raises ValueError if the plan's devices exist for the compiler alone."""
    if target := compile_only(plan.mesh):
        raise ValueError(
            f"this mesh is compile-only ({target}): nothing runs on it. Compile the step with "
            "step.lower(plan.abstract_state, abstract_batch).compile(), or plan for the devices "
            "here with zerojax.make_mesh()."
        )


def near_rows(rows: int, multiple: int) -> tuple[int, int] | None:
    """The multiples below (0: none) and above so many rows, or None if they are one themselves.

    >>> near_rows(16, 8), near_rows(12, 8), near_rows(4, 8), near_rows(0, 8)
    (None, (8, 16), (0, 8), (0, 8))
    """
    below = rows - rows % multiple
    return None if rows and below == rows else (below, below + multiple)


def check_rows(batch: PyTree, num_batch_shards: int, microbatches: int = 1) -> None:
    """Raises ValueError unless every leaf has the same rows, a multiple of shards x microbatches.

    Args:
      batch: a pytree of arrays or of their shapes.
      num_batch_shards: into how many parts these rows are cut, by `Plan.num_batch_shards`.
      microbatches: number of slices that each device makes of its rows.
    """
    leaves = [(leaf_path(path), np.shape(x)) for path, x in jax.tree.leaves_with_path(batch)]
    if not leaves:
        raise ValueError("the batch has no arrays; pass a pytree whose leaves have rows.")
    first_path, first_shape = leaves[0]
    for path, shape in leaves:
        if not shape:
            raise ValueError(
                f"batch leaf {path!r} is a scalar; the first dimension of every leaf counts rows. "
                "Repeat it per row, or close over it in the loss function."
            )
        if shape[0] != first_shape[0]:
            raise ValueError(
                f"batch leaf {path!r} has {shape[0]} rows and {first_path!r} has "
                f"{first_shape[0]}; all leaves of a batch need the same rows."
            )
    rows, multiple = first_shape[0], num_batch_shards * microbatches
    if near := near_rows(rows, multiple):
        times = f" x {microbatches} microbatches = {multiple}" if microbatches > 1 else ""
        less, more = near
        fewer = f"Drop {rows - less}, or pad" if less else "Pad"
        raise ValueError(
            f"batch leaf {first_path!r} has {rows} rows, not a multiple of "
            f"{num_batch_shards} data-parallel devices{times}. {fewer} to {more} with rows of "
            "weight 0."
        )


def check_types(plan: Plan, state: TrainState, culprit: str = "") -> None:
    """Raises ValueError unless the state has the plan's leaves, shapes and dtypes.

    Args:
      plan: the plan.
      state: a state, or the shapes of one.
      culprit: what made the state and how to mend it, if it was not the user.
    """
    remedy = culprit or (
        "Use the plan that made the state, or make one for this plan with zerojax.init_state."
    )
    if not isinstance(state, TrainState):
        raise ValueError(
            f"state is a {type(state).__name__}; pass the TrainState from zerojax.init_state."
        )
    expected, found = dict(leaves_with_names(plan.abstract_state)), dict(leaves_with_names(state))
    for path in [*expected, *found]:
        if path not in found or path not in expected:
            where = "this plan" if path in expected else "the state"
            raise ValueError(f"state leaf {path!r} exists only in {where}. {remedy}")
    for path, want in expected.items():
        have = found[path]
        shape, dtype = jnp.shape(have), jnp.result_type(have)
        if shape != want.shape or dtype != want.dtype:
            raise ValueError(
                f"state leaf {path!r} is {dtype}{list(shape)}; the plan says "
                f"{want.dtype}{list(want.shape)}. {remedy}"
            )


def check_alive(state: TrainState) -> None:
    """Raises ValueError if the state was donated to an earlier step; its arrays go together."""
    step = getattr(state, "step", None)
    if isinstance(step, jax.Array) and not isinstance(step, Tracer) and step.is_deleted():
        raise ValueError(
            "this state was given to an earlier step, which reused its memory. Keep the state that "
            "the step returns: state, metrics = step(state, batch)."
        )


def check_state(plan: Plan, state: TrainState) -> None:
    """As `check_types`, and every leaf lies where the plan says."""
    check_types(plan, state)
    wanted, found = leaves_with_names(plan.abstract_state), jax.tree.leaves(state)
    for (path, want), have in zip(wanted, found, strict=True):
        sharding = getattr(have, "sharding", None)
        if sharding is None or not sharding.is_equivalent_to(want.sharding, len(want.shape)):
            count = len(sharding.device_set) if sharding else 0
            raise ValueError(
                f"state leaf {path!r} {list(want.shape)} is "
                f"{format_spec(getattr(sharding, 'spec', P()))} over {count} devices; the plan "
                f"(stage {plan.stage.number}) says {format_spec(want.sharding.spec)} over "
                f"{plan.num_devices}. Use the plan that made the state, or make one for this plan "
                "with zerojax.init_state."
            )


def check_batch(plan: Plan, batch: PyTree) -> None:
    """Raises ValueError if a leaf is held fast by devices that are not the plan's."""
    for path, x in leaves_with_names(batch):
        committed = isinstance(x, jax.Array) and x.committed
        if committed and not x.sharding.is_equivalent_to(plan.batch_sharding, x.ndim):
            raise ValueError(
                f"batch leaf {path!r} {list(x.shape)} is committed to {len(x.devices())} device(s) "
                f"as {x.sharding}; the plan cuts its rows into {plan.num_batch_shards}. Pass it "
                "through zerojax.shard_batch."
            )
