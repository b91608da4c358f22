# SPDX-License-Identifier: Apache-2.0
"""The arrays of a training state as flat lists: path, shape, where each is cut."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec as P

from zerojax.sharding.axes import DATA
from zerojax.sharding.specs import Split, split
from zerojax.tree import PathRule, PyTree, leaf_path, matches


class Leaf(NamedTuple):
    """One array of the state.

    Attributes:
      path: its path in its tree, such as "blocks/attn/kernel".
      array: shape and dtype at rest.
      split: where it is cut when its kind of state is split.
      rest: its spec at rest: `split.spec` if the stage splits its kind, else P().
      trained: it has a gradient and optimizer state.
      stacked: its first dimension counts layers.
    """

    path: str
    array: jax.ShapeDtypeStruct
    split: Split
    rest: P
    trained: bool = True
    stacked: bool = False

    @property
    def num_bytes(self) -> int:
        """Bytes of the whole array."""
        return self.array.size * self.array.dtype.itemsize


def param_leaves(
    init_params: Callable[[jax.Array], PyTree],
    layers: Sequence[str],
    frozen: PathRule,
    num_shards: int,
) -> tuple[Leaf, ...]:
    """A Leaf for every leaf of the parameters as `init_params` makes them, in tree order."""
    flat = jax.tree.leaves_with_path(_abstract_params(init_params))
    paths = [leaf_path(path) for path, _ in flat]
    arrays = [array for _, array in flat]
    stacked = _stacked(paths, [array.shape for array in arrays], layers)
    is_frozen = matches(paths, frozen, "frozen")
    leaves = []
    for path, array, stack, off in zip(paths, arrays, stacked, is_frozen, strict=True):
        cut = split(array.shape, num_shards, DATA, stacked=stack)
        trained = jnp.issubdtype(array.dtype, jnp.inexact) and not off
        leaves.append(Leaf(path, array, cut, P(), trained, stack))
    if not any(leaf.trained for leaf in leaves):
        raise ValueError(
            f"all {len(leaves)} leaves of the parameters are frozen or integer, so there is "
            "nothing to train. Narrow the `frozen` argument."
        )
    return tuple(leaves)


def opt_state_leaves(
    opt_state: PyTree, params: Sequence[Leaf], num_shards: int
) -> tuple[Leaf, ...]:
    """A Leaf for every leaf of the optimizer state, each cut by its own shape.

    A leaf that is shaped like the parameter whose path ends its own, as moments are, is cut
    where that parameter is, so that the update moves nothing.
    """
    by_path = {leaf.path: leaf for leaf in params}
    leaves = []
    for keys, array in jax.tree.leaves_with_path(opt_state):
        suffixes = (leaf_path(keys[i:]) for i in range(len(keys) + 1))
        param = next((by_path[suffix] for suffix in suffixes if suffix in by_path), None)
        if param is not None and param.array.shape == array.shape:
            cut, stacked = param.split, param.stacked
        else:
            first = param.array.shape[:1] if param is not None and param.stacked else None
            stacked = first is not None and array.shape[:1] == first
            cut = split(array.shape, num_shards, DATA, stacked=stacked)
        leaves.append(Leaf(leaf_path(keys), array, cut, P(), stacked=stacked))
    return tuple(leaves)


def at_rest(leaves: Iterable[Leaf], kind_is_split: bool, dtype: Any = None) -> tuple[Leaf, ...]:
    """The leaves on their specs if their kind is split, and in `dtype` if they are real."""

    def resting(leaf: Leaf) -> Leaf:
        array = leaf.array
        if dtype is not None and jnp.issubdtype(array.dtype, jnp.floating):
            array = jax.ShapeDtypeStruct(array.shape, dtype)
        return leaf._replace(array=array, rest=leaf.split.spec if kind_is_split else P())

    return tuple(map(resting, leaves))


def _abstract_params(init_params: Callable[[jax.Array], PyTree]) -> PyTree:
    """Shapes of the parameters; complains of any leaf that is not an array."""

    def checked(key: jax.Array) -> PyTree:
        params = init_params(key)
        for path, leaf in jax.tree.leaves_with_path(params):
            if not isinstance(leaf, jax.Array | np.ndarray):
                raise ValueError(
                    f"params leaf {leaf_path(path)!r} is {leaf!r}, a {type(leaf).__name__}, not an "
                    "array. Make it one with jnp.asarray, or keep it out of the parameters."
                )
        return params

    if not callable(init_params):
        raise ValueError(
            f"init_params is a {type(init_params).__name__}; pass the function from a PRNG key to "
            "the parameters, not the parameters: they must be created where they will live."
        )
    params = jax.eval_shape(checked, jax.random.key(0))
    if not jax.tree.leaves(params):
        raise ValueError("init_params returned a tree without leaves; return the parameters.")
    return params


def _stacked(
    paths: Sequence[str], shapes: Sequence[tuple[int, ...]], layers: Sequence[str]
) -> list[bool]:
    """For every leaf, whether its first dimension counts layers; each stack must agree on it."""
    stacked = matches(paths, layers, "layers")
    for name in layers:
        inside = matches(paths, (name,), "layers")
        stack = [(p, s) for p, s, hit in zip(paths, shapes, inside, strict=True) if hit]
        first_path, first = stack[0]
        for path, shape in stack:
            if not shape or shape[0] != first[0]:
                raise ValueError(
                    f"layers={name!r}: leaf {path!r} has shape {shape}, but {first_path!r} has "
                    f"{first}. Every leaf below it must have the number of layers as its first "
                    "dimension; stack them, or leave the odd one out of `layers`."
                )
    return stacked
