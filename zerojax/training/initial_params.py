# SPDX-License-Identifier: Apache-2.0
"""Weights given by the user: matched with the plan by path, and put in place shard by shard."""

from __future__ import annotations

import collections
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from zerojax.sharding.state import owned
from zerojax.tree import PyTree, is_below, leaf_path, leaves_with_names


def match_params(abstract_params: PyTree, params: PyTree) -> list[Any]:
    """The value given for every leaf, in the order of the plan; None for a leaf to be drawn.

    Paths decide, not types of nodes: `{"blocks": {"up": x}}` and `{"blocks/up": x}` are the same.

    Args:
      abstract_params: the shapes and dtypes of the parameters.
      params: a tree of arrays, or of anything else with a shape and a dtype that is sliced like
        one. None in place of a leaf, or of a tree of them, is None for every leaf there.

    Raises:
      ValueError: leaves are missing, unknown or no arrays, or their shapes or dtypes do not fit.
    """
    wanted = leaves_with_names(abstract_params)
    given = jax.tree.leaves_with_path(params, is_leaf=lambda x: x is None)
    given = [(leaf_path(path), value) for path, value in given]
    for name, tree in (("the plan", wanted), ("params", given)):
        for path, count in collections.Counter(path for path, _ in tree).items():
            if count > 1:
                raise ValueError(f"{count} leaves of {name} have the path {path!r}; rename them.")
    found = {path: value for path, value in given if value is not None}
    for path, value in found.items():
        _check_array(path, value)
    _check_paths(dict(wanted), found, drawn=[path for path, value in given if value is None])
    _check_fit([(path, array, found[path]) for path, array in wanted if path in found])
    return [found.get(path) for path, _ in wanted]


def make_leaf(value: Any, array: jax.ShapeDtypeStruct) -> jax.Array:
    """The value cast to the array's dtype, as the shards of its sharding; waits for it.

    A jax.Array moves between devices and is not aliased. Of anything else each process reads the
    slices that its devices hold, and copies them.
    """
    if isinstance(value, jax.Array):
        moved = jax.device_put(value, array.sharding)
        # A copy: what moves may keep the buffer of a device that had it, may_alias=False or not.
        leaf = jax.device_put(jnp.array(moved, dtype=array.dtype, copy=True), array.sharding)
    else:

        def read(index: Any) -> np.ndarray:
            return np.array(value[index], dtype=array.dtype)

        leaf = owned(
            jax.make_array_from_callback(array.shape, array.sharding, read, dtype=array.dtype)
        )
    return jax.block_until_ready(leaf)  # so that the host holds the slices of one leaf at a time


def _check_array(path: str, value: Any) -> None:
    """Raises ValueError for what has no shape, no dtype of JAX or NumPy, or no slices."""
    try:
        jnp.dtype(value.dtype)
        fits = hasattr(value, "shape") and hasattr(value, "__getitem__")
    except (AttributeError, TypeError):
        fits = False
    if not fits:
        raise ValueError(
            f"params leaf {path!r} is a {type(value).__name__}, not an array. Give one of NumPy "
            "or JAX, or an object with shape and dtype that is sliced like one."
        )


def _check_paths(wanted: Mapping[str, Any], found: Mapping[str, Any], drawn: Sequence[str]) -> None:
    """Raises ValueError unless the paths found are those wanted, but for the drawn ones."""

    def said(items: Mapping[str, Any], others: Mapping[str, Any]) -> list[str]:
        apart = [path for path in items if path not in others]
        return [f"{path!r} {_describe(items[path])}" for path in apart]

    off = {path for path in wanted if any(is_below(path, name) for name in drawn)}
    missing = said({path: x for path, x in wanted.items() if path not in off}, found)
    extra = said(found, wanted)
    if missing and extra:
        raise ValueError(
            f"params have {len(missing)} of the plan's {len(wanted)} leaves under other names or "
            f"not at all: {_few(missing)}. The plan does not know {len(extra)}: {_few(extra)}. "
            "Name every leaf by its path in what init_params returns."
        )
    if missing:
        raise ValueError(
            f"params lack {len(missing)} of the plan's {len(wanted)} leaves: {_few(missing)}. Give "
            "them, or None in their place to have init_params draw them."
        )
    if extra:
        raise ValueError(
            f"params have {len(extra)} leaves more than the plan's {len(wanted)}: {_few(extra)}. "
            "Leave them out, or plan for the model that has them."
        )


def _check_fit(leaves: Sequence[tuple[str, Any, Any]]) -> None:
    """Raises ValueError unless every value has its array's shape and a dtype that may be cast."""

    def said(pairs: Sequence[tuple[str, Any, Any]]) -> str:
        few = [f"{path!r} is {_describe(x)} for {_describe(array)}" for path, array, x in pairs]
        return f"{len(few)} of params' {len(leaves)} leaves do not fit the plan: {_few(few)}."

    shapes = [pair for pair in leaves if tuple(pair[2].shape) != pair[1].shape]
    if shapes:
        raise ValueError(f"{said(shapes)} Plan for the model that the weights belong to.")
    dtypes = [pair for pair in leaves if not _casts(pair[2].dtype, pair[1].dtype)]
    if dtypes:
        raise ValueError(
            f"{said(dtypes)} Real numbers are cast to real ones, integers only to those that hold "
            "them all. Convert these before you give them."
        )


def _casts(given: Any, wanted: Any) -> bool:
    """Whether a cast can lose no more than digits of real or complex numbers."""
    if given == wanted:
        return True
    for kind in (jnp.floating, jnp.complexfloating):
        if jnp.issubdtype(wanted, kind):
            return jnp.issubdtype(given, kind)
    return not jnp.issubdtype(given, jnp.inexact) and np.can_cast(given, wanted, "safe")


def _describe(x: Any) -> str:
    return f"{x.dtype}{list(x.shape)}"


def _few(items: Sequence[str], most: int = 3) -> str:
    """The first items, and how many more there are."""
    more = f"; and {len(items) - most} more" if len(items) > most else ""
    return f"{'; '.join(items[:most])}{more}"
