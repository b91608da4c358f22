# SPDX-License-Identifier: Apache-2.0
"""Trees: paths of leaves, which ones a user's rule names, and a tree in two parts."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

PyTree = Any
PathRule = Sequence[str] | Callable[[str], bool]


def leaf_path(path: Sequence[Any]) -> str:
    """A readable path, from one of jax.tree_util's: "blocks/attn/kernel"."""
    return jax.tree_util.keystr(tuple(path), simple=True, separator="/")


def leaves_with_names(tree: PyTree) -> list[tuple[str, Any]]:
    """Readable paths and leaves, in tree order.

    >>> leaves_with_names({"a": 1, "b": [2, 3]})
    [('a', 1), ('b/0', 2), ('b/1', 3)]
    """
    return [(leaf_path(path), leaf) for path, leaf in jax.tree.leaves_with_path(tree)]


def is_below(path: str, name: str) -> bool:
    """Whether the path is the name, or lies in the tree of that name."""
    return path == name or path.startswith(f"{name}/")


def matches(paths: Sequence[str], rule: PathRule, argument: str) -> list[bool]:
    """For every path, whether the rule names it, or names a tree above it.

    Args:
      paths: paths of all leaves.
      rule: paths, each naming a leaf or all leaves below it; or a function from a path to a bool.
      argument: the user's name for the rule, for the error.

    Raises:
      ValueError: a path names nothing, or the rule is a bare string.

    Example:
      >>> matches(["blocks/w", "head/w"], ("blocks",), "frozen")
      [True, False]
    """
    if isinstance(rule, str):
        raise ValueError(f"{argument} is the string {rule!r}; pass a tuple of paths: ({rule!r},).")
    if callable(rule):
        return [bool(rule(path)) for path in paths]

    names = [name.strip("/") for name in rule]
    for name in names:
        if not any(is_below(path, name) for path in paths):
            tops = ", ".join(sorted({path.split("/")[0] for path in paths}))
            raise ValueError(
                f"{argument} names {name!r}, but no parameter has that path or one below it. "
                f"The parameters begin with: {tops}."
            )
    return [any(is_below(path, name) for name in names) for path in paths]


class Parts(NamedTuple):
    """A tree twice: `floating` leaves, which have gradients, and all `others`; None elsewhere."""

    floating: PyTree
    others: PyTree


def partition(tree: PyTree) -> Parts:
    """Takes a tree apart; `combine` puts it together again.

    >>> parts = partition({"w": jnp.ones(2), "steps": 3})
    >>> parts.floating["steps"], parts.others, combine(parts)["steps"]
    (None, {'steps': 3, 'w': None}, 3)
    """
    leaves, treedef = jax.tree.flatten(tree)
    floating = [jnp.issubdtype(jnp.result_type(x), jnp.inexact) for x in leaves]
    pairs = list(zip(leaves, floating, strict=True))
    return Parts(
        treedef.unflatten(jnp.asarray(x) if yes else None for x, yes in pairs),
        treedef.unflatten(None if yes else x for x, yes in pairs),
    )


def combine(parts: Parts) -> PyTree:
    """The tree that was taken apart; its floating leaves may be others of the same kind by now."""
    return jax.tree.map(lambda x, y: y if x is None else x, *parts, is_leaf=lambda x: x is None)
