# SPDX-License-Identifier: Apache-2.0
"""One layer of the engine: its forward, and its backward from what was saved and the weights."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.core import Tracer

from zerojax.engine.weights import Entrance, Entry
from zerojax.tree import leaf_path

PyTree = Any
Arrays = list[jax.Array]


class Parts(NamedTuple):
    """The leaves of a tree, apart: floating ones have gradients, the others do not."""

    floating: Any
    others: Any


def part(tree: PyTree) -> tuple[Parts, Callable[[Parts], PyTree]]:
    """Takes a tree apart; the function puts one like it together again."""
    leaves, treedef = jax.tree.flatten(tree)
    is_floating = [jnp.issubdtype(jnp.result_type(x), jnp.inexact) for x in leaves]

    def join(parts: Parts) -> PyTree:
        floating, others = iter(parts.floating), iter(parts.others)
        return treedef.unflatten([next(floating if f else others) for f in is_floating])

    pairs = list(zip(leaves, is_floating, strict=True))
    return Parts([jnp.asarray(x) for x, f in pairs if f], [x for x, f in pairs if not f]), join


def split_output(out: Any, x: PyTree) -> tuple[PyTree, tuple]:
    """Tells a block's `x` from `(x, aux)`: returns (x, ()) or (x, (aux,))."""
    same = jax.tree.structure(x)
    if jax.tree.structure(out) == same:
        return out, ()
    if isinstance(out, tuple) and len(out) == 2 and jax.tree.structure(out[0]) == same:
        return out[0], (out[1],)
    raise ValueError(
        f"the block returned a tree of structure {jax.tree.structure(out)}; it must return x, of "
        f"structure {same}, or (x, aux)."
    )


def check_same(x: PyTree, y: PyTree) -> None:
    """Raises ValueError unless a block of a stack handed on what it was given."""
    for (path, old), new in zip(jax.tree.leaves_with_path(x), jax.tree.leaves(y), strict=True):
        before, after = ((jnp.result_type(a), list(jnp.shape(a))) for a in (old, new))
        if before != after:
            raise ValueError(
                f"the block turned x{jax.tree_util.keystr(path)} from {before[0]}{before[1]} into "
                f"{after[0]}{after[1]}; all layers of a stack must hand on the same. Cast or "
                "project inside the block, or use apply_layer."
            )


def check_closure(block: Callable[..., Any], weights: Arrays, x: PyTree, inputs: Parts) -> None:
    """Raises ValueError if a block closes over a traced floating array.

    The backward runs the block again, where such an array is out of reach, and so is its gradient.
    """

    def run(weights, x, floating):
        return block(weights, x, Parts(floating, inputs.others))

    for const in jax.make_jaxpr(run)(weights, x, inputs.floating).consts:
        if isinstance(const, Tracer) and jnp.issubdtype(const.dtype, jnp.inexact):
            raise ValueError(
                f"the block closes over a traced array, {const.dtype}{list(const.shape)}: a weight "
                "or something computed outside the block. Pass it through broadcast, or through "
                "per_layer if each layer has its own; its gradient comes back the same way."
            )


def count_layers(stacked_params: PyTree, per_layer: PyTree) -> int:
    """The number of layers; ValueError unless every leaf agrees on it."""
    flat = jax.tree.leaves_with_path((stacked_params, per_layer))
    if not jax.tree.leaves(stacked_params):
        raise ValueError("scan_layers: stacked_params has no arrays; pass the stacked weights.")
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
    if remat not in ("full", "none"):
        raise ValueError(f'remat is {remat!r}; pass "full" or "none".')
    if prefetch not in range(9):
        raise ValueError(f"prefetch is {prefetch!r}; pass 0, 1 or 2 layers (at most 8).")


class Layer(NamedTuple):
    """One layer as the engine runs it.

    Attributes:
      entrance: how weights become whole and gradients leave.
      entries: the layer's weights, flat.
      block: the user's function of (flat weights, x, inputs), to (x, aux).
      remat: what is saved for the backward: "full" is x alone, "none" all but the weights.
    """

    entrance: Entrance
    entries: list[Entry]
    block: Callable[[Arrays, PyTree, Parts], tuple[PyTree, PyTree]]
    remat: str

    def gather(self, arrays: Arrays) -> Arrays:
        """The whole weights, from their arrays at rest."""
        pairs = zip(self.entries, arrays, strict=True)
        return [self.entrance.gather(entry._replace(array=array)) for entry, array in pairs]

    def leave(self, grads: Arrays) -> Arrays:
        """The gradients of the trained weights as they leave the backward."""
        pairs = zip(self.entries, grads, strict=True)
        return [self.entrance.leave(entry, g) for entry, g in pairs if entry.sink is not None]

    def forward(self, weights: Arrays, x: PyTree, inputs: Parts) -> tuple[tuple, tuple, Any]:
        """Returns (x, floating aux), (other aux, what puts aux together), and what to save."""
        joins = []

        def run(weights, x, floating, others):
            y, aux = self.block(weights, x, Parts(floating, others))
            parts, join = part(aux)
            joins.append(join)
            return (y, parts.floating), parts.others

        args = (weights, x, inputs.floating, inputs.others)
        if self.remat == "full":
            out, others = run(*args)
            return out, (others, joins[0]), x
        # Weights and inputs are at hand in the backward; saved, they would be so for every layer.
        saveable = (False, True, False, False)
        out, vjp, others = jax.vjp(run, *args, has_aux=True, saveable_args=saveable)
        return out, (others, joins[0]), vjp

    def backward(
        self, weights: Arrays, saved: Any, inputs: Parts, cotangents: tuple
    ) -> tuple[Arrays, PyTree, Any]:
        """Returns the cotangents of the weights, of x and of the floating inputs."""
        if self.remat == "full":

            def run(weights, x, floating):
                y, aux = self.block(weights, x, Parts(floating, inputs.others))
                return y, part(aux)[0].floating

            _, vjp = jax.vjp(run, weights, saved, inputs.floating)
            return vjp(cotangents)
        args = list(saved.args_res)
        args[0], args[2], args[3] = weights, inputs.floating, inputs.others
        return saved.replace(args_res=args)(cotangents)[:3]


@jax.custom_vjp
def first_order(gradients: PyTree, sinks: Arrays) -> PyTree:
    """The gradients as they are; an error if they are differentiated with respect to the sinks."""
    return gradients


def _refuse(*_: Any) -> Any:
    raise ValueError(
        "the loss function differentiates a gradient that went through scan_layers or apply_layer. "
        "The engine has first derivatives only: hold the inner gradient with lax.stop_gradient, or "
        "run these layers with a plain lax.scan."
    )


first_order.defvjp(lambda gradients, sinks: (gradients, None), _refuse)
