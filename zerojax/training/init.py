# SPDX-License-Identifier: Apache-2.0
"""The state of step 0, born where the plan says: every leaf as the shards it will live in."""

from __future__ import annotations

import functools
from collections.abc import Callable

import jax
import numpy as np

from zerojax.sharding.plan import Plan
from zerojax.sharding.state import TrainState, complete, new_state
from zerojax.training.checks import check_plan, check_runs
from zerojax.training.initial_params import make_leaf, match_params
from zerojax.tree import PyTree


def init_state(plan: Plan, key: jax.Array, params: PyTree | None = None) -> TrainState:
    """Creates the training state, every leaf as the shards it will live in.

    The whole initialisation is compiled for the plan's shardings, so that each device computes
    its own shards. With JAX's partitionable random numbers (the default) the values do not depend
    on the number of devices or the stage.

    Args:
      plan: from `make_plan`.
      key: a typed key, such as `jax.random.key(0)`. It is not consumed: it may be used again.
      params: weights to start from in place of those that `init_params` would draw: a tree with
        the same paths, of arrays of NumPy (memory maps too) or JAX, or of objects with `shape` and
        `dtype` that are sliced like them. They are read leaf by leaf, of each the slices that the
        devices here hold, and are cast; a master copy is cast from what was given, not from
        what was rounded. None in place of a leaf, or of a tree of them, leaves it to
        `init_params`. With several processes, each gives the same values.

    Returns:
      A TrainState of step 0, which may be donated.

    Raises:
      ValueError: `key` is not one typed key of JAX's default implementation, the mesh is
        compile-only, or `params` do not fit the plan: leaves missing or unknown, other shapes, or
        dtypes whose cast would lose more than digits.

    Example:
      >>> import jax.numpy as jnp, optax, zerojax as zj
      >>> init = lambda key: {"w": jnp.zeros((8, 8)), "b": jnp.zeros(8)}
      >>> plan = zj.make_plan(init, optax.sgd(0.1), zj.make_mesh(8), stage=3)
      >>> given = {"w": np.eye(8), "b": None}
      >>> zj.init_state(plan, jax.random.key(0), given).params["w"].addressable_shards[1].data
      Array([[0., 1., 0., 0., 0., 0., 0., 0.]], dtype=float32)
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
    return init_program(plan)(key) if params is None else _given_state(plan, key, params)


def init_program(plan: Plan) -> jax.stages.Wrapped:
    """The compiled function from a key to the state, on the plan's shardings."""
    return jax.jit(_builder(plan), out_shardings=plan.state_shardings)


def _builder(plan: Plan) -> Callable[[jax.Array], TrainState]:
    trained = [leaf.trained for leaf in plan.params]
    return functools.partial(new_state, plan.init_params, plan.optimizer, plan.precision, trained)


def _given_state(plan: Plan, key: jax.Array, params: PyTree) -> TrainState:
    """The state of step 0 with the given parameters; what is None is drawn as in a fresh one."""
    abstract, trained = plan.abstract_state, [leaf.trained for leaf in plan.params]
    values = match_params(abstract.params, params)
    if plan.master:
        values += [value for value, keep in zip(values, trained, strict=True) if keep]
    arrays, treedef = jax.tree.flatten((abstract.params, abstract.master))

    def draw(key: jax.Array) -> list[jax.Array]:
        state = _builder(plan)(key)
        leaves = jax.tree.leaves((state.params, state.master))
        return [x for x, value in zip(leaves, values, strict=True) if value is None]

    pairs = list(zip(arrays, values, strict=True))
    shardings = [array.sharding for array, value in pairs if value is None]
    drawn = iter(jax.jit(draw, out_shardings=shardings)(key) if shardings else [])
    born = [next(drawn) if value is None else make_leaf(value, array) for array, value in pairs]
    params, master = treedef.unflatten(born)
    where = plan.state_shardings
    finish = jax.jit(
        functools.partial(complete, plan.optimizer, trained),
        out_shardings=(where.step, where.opt_state, where.key),
    )
    step, opt_state, run_key = finish(params, master, key)
    return TrainState(step, params, opt_state, run_key, master)
