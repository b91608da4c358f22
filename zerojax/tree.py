# SPDX-License-Identifier: Apache-2.0
"""Paths of leaves: how they are written, and which ones a user's rule names."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax

PathRule = Sequence[str] | Callable[[str], bool]


def leaf_path(path: Sequence[Any]) -> str:
    """A readable path, from one of jax.tree_util's: "blocks/attn/kernel"."""
    return jax.tree_util.keystr(tuple(path), simple=True, separator="/")


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
