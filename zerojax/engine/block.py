# SPDX-License-Identifier: Apache-2.0
"""The contract with the user's block: what it returns, what it may close over, what is refused."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.core import Tracer

from zerojax.tree import Parts, PyTree, combine, leaf_path, partition

REMAT = ("full", "none")  # what `remat` may be
MOST_PREFETCHED = 8


def split_output(out: Any, x: PyTree) -> tuple[PyTree, tuple]:
    """Tells a block's `x` from `(x, aux)`: returns (x, ()) or (x, (aux,))."""
    same = jax.tree.structure(x)
    if jax.tree.structure(out) == same:
        return out, ()
    if isinstance(out, tuple) and len(out) == 2:
        y, aux = out
        if jax.tree.structure(y) == same:
            return y, (aux,)
    raise ValueError(
        f"the block returned a tree of structure {jax.tree.structure(out)}; it must return x, of "
        f"structure {same}, or (x, aux)."
    )


def check_same(x: PyTree, y: PyTree) -> None:
    """Raises ValueError unless a block of a stack handed on what it was given."""
    for (path, old), new in zip(jax.tree.leaves_with_path(x), jax.tree.leaves(y), strict=True):
        before, after = _describe(old), _describe(new)
        if before != after:
            raise ValueError(
                f"the block turned x{jax.tree_util.keystr(path)} from {before} into {after}; all "
                "layers of a stack must hand on the same. Cast or project inside the block, or "
                "use apply_layer."
            )


def check_closure(block: Callable[..., Any], whole: PyTree, x: PyTree, inputs: PyTree) -> None:
    """Raises ValueError if a block closes over a traced floating array.

    The backward runs the block again, where such an array is out of reach, and so is its gradient.
    """
    floating, others = partition(inputs)  # an integer may be a number that Python counts to

    def run(whole, x, floating):
        return block(whole, x, combine(Parts(floating, others)))

    for const in jax.make_jaxpr(run)(whole, x, floating).consts:
        if isinstance(const, Tracer) and jnp.issubdtype(const.dtype, jnp.inexact):
            raise ValueError(
                f"the block closes over a traced array, {_describe(const)}: a weight or something "
                "computed outside the block. Pass it through broadcast, or through per_layer if "
                "each layer has its own; its gradient comes back the same way."
            )


def count_layers(stacked_params: PyTree, per_layer: PyTree) -> int:
    """The number of layers; ValueError unless every leaf agrees on it."""
    if not jax.tree.leaves(stacked_params):
        raise ValueError("scan_layers: stacked_params has no arrays; pass the stacked weights.")
    flat = jax.tree.leaves_with_path((stacked_params, per_layer))
    shapes = [(leaf_path(path[1:]), jnp.shape(x)) for path, x in flat]
    first_name, first = shapes[0]
    for name, shape in shapes:
        if not (shape and first and shape[0] == first[0]):
            raise ValueError(
                f"scan_layers: leaf {name!r} has shape {shape} and {first_name!r} has {first}; the "
                "first dimension of each must count the layers. Stack them with jnp.stack."
            )
    return first[0]


def check_choices(remat: str, prefetch: int) -> None:
    """Raises ValueError for what `scan_layers` does not know."""
    if remat not in REMAT:
        raise ValueError(f'remat is {remat!r}; pass "full" or "none".')
    if prefetch not in range(MOST_PREFETCHED + 1):
        raise ValueError(
            f"prefetch is {prefetch!r}; pass 0, 1 or 2 layers (at most {MOST_PREFETCHED})."
        )


def _describe(x: Any) -> str:
    return f"{jnp.result_type(x)}{list(jnp.shape(x))}"
