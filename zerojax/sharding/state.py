# SPDX-License-Identifier: Apache-2.0
"""TrainState: everything a run carries from step to step, and how one is made from its parts."""

# Without `from __future__ import annotations`: of a NamedTuple, pdoc cannot read postponed ones.

from collections.abc import Callable, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import optax

from zerojax.hardware.devices import platform_of
from zerojax.sharding.precision import Precision, cast
from zerojax.tree import PyTree


class TrainState(NamedTuple):
    """Arrays only, so that it saves, donates and maps like any pytree.

    Attributes:
      step: int32 scalar, the number of updates made.
      params: the parameters as the user's `init_params` arranges them.
      opt_state: what `optimizer.init` returned, for the trained leaves.
      key: the run's PRNG key. A step draws from `fold_in(key, step)`, so a resumed run repeats
        the same dropout.
      master: the trained leaves in the precision's master dtype, or None if it has no master.

    Example:
      >>> import zerojax as zj
      >>> init = lambda key: {"w": jnp.zeros((16, 64))}
      >>> plan = zj.make_plan(init, optax.adam(1e-3), zj.make_mesh(8), stage=3)
      >>> state = zj.init_state(plan, jax.random.key(0))
      >>> int(state.step), state.params["w"].addressable_shards[0].data.shape
      (0, (2, 64))
    """

    step: jax.Array
    params: PyTree
    opt_state: PyTree
    key: jax.Array
    master: PyTree = None


def select(params: PyTree, trained: Sequence[bool]) -> PyTree:
    """The tree with every leaf that is not trained replaced by optax.MaskedNode."""
    leaves, treedef = jax.tree.flatten(params)
    kept = [x if keep else optax.MaskedNode() for x, keep in zip(leaves, trained, strict=True)]
    return treedef.unflatten(kept)


def merge(params: PyTree, trained: PyTree) -> PyTree:
    """The tree `params` with the leaves of `trained`, a result of `select`, put in their places."""
    leaves, treedef = jax.tree.flatten(params)
    updated = treedef.flatten_up_to(trained)
    masked = optax.MaskedNode
    return treedef.unflatten(
        [old if isinstance(new, masked) else new for old, new in zip(leaves, updated, strict=True)]
    )


def new_state(
    init_params: Callable[[jax.Array], PyTree],
    optimizer: optax.GradientTransformation,
    precision: Precision,
    trained: Sequence[bool],
    key: jax.Array,
) -> TrainState:
    """The state of step 0; pure, so it is traced for shapes and compiled for shardings.

    The master copy is taken before the parameters are rounded to their dtype at rest.
    """
    initial = init_params(jax.random.split(key)[0])
    params = jax.tree.map(lambda x: cast(x, precision.params), initial)
    master = None
    if precision.master is not None:
        master = jax.tree.map(lambda x: cast(x, precision.master), select(initial, trained))
    step, opt_state, run_key = complete(optimizer, trained, params, master, key)
    return TrainState(step, strong(params), opt_state, run_key, strong(master))


def complete(
    optimizer: optax.GradientTransformation,
    trained: Sequence[bool],
    params: PyTree,
    master: PyTree,
    key: jax.Array,
) -> tuple[jax.Array, PyTree, jax.Array]:
    """What step 0 has beside its parameters: the step, the optimizer state and the run's key."""
    opt_state = optimizer.init(select(params, trained) if master is None else master)
    return jnp.zeros((), jnp.int32), strong(opt_state), jax.random.split(key)[1]


def strong(tree: PyTree) -> PyTree:
    """Makes scalars arrays and drops weak types, which would make the second step compile again."""
    return jax.tree.map(lambda x: jnp.asarray(x, dtype=jnp.result_type(x)), tree)


def owned(array: jax.Array) -> jax.Array:
    """The array in memory that a step may be given: on CPUs, what was made of NumPy's is copied."""
    if platform_of(next(iter(array.sharding.device_set))) != "cpu":
        return array
    return jax.block_until_ready(jax.device_put(jnp.array(array, copy=True), array.sharding))
