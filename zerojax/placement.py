# SPDX-License-Identifier: Apache-2.0
"""Putting things where the plan says: the state is born there, a batch is moved there."""

from __future__ import annotations

import functools

import jax
import numpy as np

from zerojax.checks import check_plan, check_rows, check_runs
from zerojax.plan import Plan
from zerojax.state import PyTree, TrainState, new_state


def init_state(plan: Plan, key: jax.Array) -> TrainState:
    """Creates the training state, every leaf as the shards it will live in.

    The whole initialisation is compiled for the plan's shardings, so that each device computes
    its own shards. With JAX's partitionable random numbers (the default) the values do not depend
    on the number of devices or the stage.

    Args:
      plan: from `make_plan`.
      key: a typed key, such as `jax.random.key(0)`. It is not consumed: it may be used again.

    Raises:
      ValueError: `key` is not one typed key of JAX's default implementation, or the mesh is
        compile-only.
    """
    check_plan(plan)
    check_runs(plan)
    expected = plan.abstract_state.key.dtype
    found = getattr(key, "dtype", type(key).__name__)
    if found != expected or np.shape(key) != ():
        raise ValueError(
            f"key is of type {found} and shape {np.shape(key)}; the state holds one {expected}. "
            "Pass jax.random.key(seed); for another implementation set jax_default_prng_impl "
            "before make_plan."
        )
    return init_program(plan)(key)


def init_program(plan: Plan) -> jax.stages.Wrapped:
    """The compiled function from a key to the state, on the plan's shardings."""
    trained = [leaf.trained for leaf in plan.params]
    build = functools.partial(new_state, plan.init_params, plan.optimizer, plan.precision, trained)
    return jax.jit(build, out_shardings=plan.state_shardings)


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
    check_rows(host_batch, len(plan.mesh.local_devices))

    def place(x: jax.Array | np.ndarray) -> jax.Array:
        # A copy: on CPU the array could share its memory with a buffer that the reader fills again.
        return jax.make_array_from_process_local_data(plan.batch_sharding, np.array(x))

    return jax.tree.map(place, host_batch)
