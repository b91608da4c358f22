# SPDX-License-Identifier: Apache-2.0
"""What a save holds of a run: which array goes into which folder, and where the data is."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import multihost_utils

from zerojax.sharding.plan import Plan
from zerojax.sharding.state import TrainState
from zerojax.tree import PyTree

WEIGHT_ITEMS = ("params", "master")
ITEMS = (*WEIGHT_ITEMS, "optimizer")  # folders of a save, Orbax's items


class DataIterator(Protocol):
    """What is saved and restored with a state: a grain iterator, or one of the user's own."""

    def get_state(self) -> Any:
        """Where the iterator is, in numbers, strings, lists and dicts."""
        ...

    def set_state(self, state: Any) -> None:
        """Goes on from there."""
        ...


class SavedArray(NamedTuple):
    """One array of a save: the folder it is in, its key there, and what is (to be) in memory."""

    item: str
    key: str
    array: Any  # jax.Array or jax.ShapeDtypeStruct, with a sharding


def saved_arrays(plan: Plan, state: TrainState) -> list[SavedArray]:
    """Every array of a state of the plan, or of its shapes, with its place in a save."""
    opt_state = jax.tree.leaves(state.opt_state)
    return [
        *arrays_of_item("params", [leaf.path for leaf in plan.params], state.params),
        *arrays_of_item("master", [leaf.path for leaf in plan.master], state.master),
        *arrays_of_item(
            "optimizer", [f"opt_state/{leaf.path}" for leaf in plan.opt_state], opt_state
        ),
        *arrays_of_item("optimizer", ["step", "key"], [state.step, state.key]),
    ]


def arrays_of_item(item: str, keys: Sequence[str], tree: PyTree) -> list[SavedArray]:
    """An SavedArray for every leaf; PRNG keys as the integers that they are made of."""

    def stored(x: Any) -> Any:
        if not is_key(x):
            return x
        if isinstance(x, jax.Array):
            return jax.random.key_data(x)
        shape = jax.eval_shape(jax.random.key_data, x)
        return jax.ShapeDtypeStruct(shape.shape, shape.dtype, sharding=x.sharding)

    leaves = jax.tree.leaves(tree)
    return [SavedArray(item, key, stored(x)) for key, x in zip(keys, leaves, strict=True)]


def abstract_leaves(plan: Plan) -> list[Any]:
    """The leaves of the abstract state in the order of `saved_arrays`."""
    return jax.tree.leaves(_parts(plan.abstract_state))


def make_state(plan: Plan, arrays: Sequence[jax.Array]) -> TrainState:
    """The state of arrays in the order of `saved_arrays`."""
    structure = jax.tree.structure(_parts(plan.abstract_state))
    params, master, opt_state, step, key = jax.tree.unflatten(structure, arrays)
    return TrainState(step, params, opt_state, key, master)


def _parts(state: TrainState) -> tuple[PyTree, ...]:
    return state.params, state.master, state.opt_state, state.step, state.key


def data_states(data: DataIterator) -> list[Any]:
    """The iterator's state on every process, as JSON holds it. Raises ValueError if it cannot."""
    state = data.get_state()
    try:
        _check_keys(state)
        said = json.dumps(state)
    except TypeError as error:
        raise ValueError(
            f"data.get_state() of a {type(data).__name__} is not for JSON ({error}); it must be "
            "made of numbers, strings, lists and dicts with strings as keys."
        ) from error
    if jax.process_count() == 1:
        return [json.loads(said)]
    raw = np.frombuffer(said.encode(), np.uint8)
    sizes = multihost_utils.process_allgather(np.array(raw.size))
    padded = multihost_utils.process_allgather(np.pad(raw, (0, int(sizes.max()) - raw.size)))
    return [json.loads(bytes(x[:n])) for x, n in zip(np.asarray(padded), sizes, strict=True)]


def _check_keys(state: Any) -> None:
    """Raises TypeError for a key that JSON would turn into a string."""
    if isinstance(state, dict):
        for key in state:
            if not isinstance(key, str):
                raise TypeError(f"the key {key!r} is a {type(key).__name__}")
    if isinstance(state, dict | list | tuple):
        for x in state.values() if isinstance(state, dict) else state:
            _check_keys(x)


def is_key(x: Any) -> bool:
    """Whether an array, or its shape, is of typed PRNG keys."""
    return jnp.issubdtype(x.dtype, jax.dtypes.prng_key)


def as_key(x: jax.Array, like: jax.ShapeDtypeStruct) -> jax.Array:
    """The integers as PRNG keys again, where the plan has keys."""
    if not is_key(like):
        return x
    impl = jax.random.key_impl(jnp.empty((0,), like.dtype))
    wrap = jax.jit(
        lambda data: jax.random.wrap_key_data(data, impl=impl), out_shardings=like.sharding
    )
    return wrap(x)
