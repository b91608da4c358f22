# SPDX-License-Identifier: Apache-2.0
"""A batch moved to where the plan says: its rows are cut over the devices."""

from __future__ import annotations

import jax
import numpy as np

from zerojax.sharding.plan import Plan
from zerojax.training.checks import check_plan, check_rows, check_runs
from zerojax.tree import PyTree


def shard_batch(host_batch: PyTree, plan: Plan) -> PyTree:
    """Splits a batch by rows over the devices.

    Args:
      host_batch: a pytree of arrays; the first dimension of each counts rows, the same number in
        all. With several processes, each passes its own rows.
      plan: from `make_plan`.

    Returns:
      The batch as global arrays of the plan's `batch_sharding`.

    Raises:
      ValueError: a leaf has no rows, leaves disagree on them, or they do not divide by the
        number of devices, or the mesh is compile-only.

    Example:
      >>> import jax.numpy as jnp, optax, zerojax as zj
      >>> init = lambda key: {"w": jnp.zeros((8, 8))}
      >>> plan = zj.make_plan(init, optax.sgd(0.1), zj.make_mesh(8), stage=2)
      >>> batch = zj.shard_batch({"x": np.ones((16, 8))}, plan)
      >>> batch["x"].addressable_shards[0].data.shape
      (2, 8)
    """
    check_plan(plan)
    check_runs(plan)
    check_rows(host_batch, _num_local_shards(plan))

    def on_mesh(x: jax.Array | np.ndarray) -> jax.Array:
        # A copy: on CPU the array could share its memory with a buffer that the reader fills again.
        return jax.make_array_from_process_local_data(plan.batch_sharding, np.array(x))

    return jax.tree.map(on_mesh, host_batch)


def _num_local_shards(plan: Plan) -> int:
    """How many different parts of a batch this process's devices hold."""
    parts = plan.batch_sharding.addressable_devices_indices_map((plan.num_batch_shards,))
    return len({str(index) for index in parts.values()})
