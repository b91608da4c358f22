# SPDX-License-Identifier: Apache-2.0
"""The layer engine: gather a layer, use it, drop it; gather it again in the backward.

Inside a zerojax step the loss function receives weights that look whole. Handed to `scan_layers`
or `apply_layer` untouched, they are recognised, and the engine works on the arrays at rest instead:
no layer is whole before its turn or after it. Weights used in any other way are what they look
like, gathered where the step enters, and their gradient joins the engine's.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from zerojax.engine.layer import (
    Arrays,
    Layer,
    Parts,
    PyTree,
    check_choices,
    check_closure,
    check_same,
    count_layers,
    first_order,
    part,
    split_output,
)
from zerojax.engine.observer import watch
from zerojax.engine.weights import Entry, current, recognise
from zerojax.sharding.precision import accumulable


def scan_layers(
    block: Callable[..., Any],
    stacked_params: PyTree,
    x: PyTree,
    *broadcast: PyTree,
    per_layer: PyTree = None,
    remat: str = "full",
    prefetch: int = 1,
    regather: bool = True,
    unroll: int = 1,
) -> Any:
    """Runs a stack of equal layers, each gathered just before it is used.

    Outside a zerojax step this is a plain `lax.scan`, with the same results.

    Args:
      block: `(params, x, *broadcast) -> x` or `-> (x, aux)`, one layer; with `per_layer`,
        `(params, x, *broadcast, per_layer) -> ...`. `x` keeps its shapes and dtypes.
      stacked_params: a tree of arrays whose first dimension counts layers, under a name that
        `make_plan` was given in `layers`, exactly as the loss function received them.
      x: a tree of floating arrays, what the layers hand on.
      broadcast: trees that every layer receives whole: masks, position tables.
      per_layer: a tree of arrays whose first dimension counts layers: keys, rates.
      remat: what the backward finds saved: "full" is the layer's input alone, and the block runs
        again; "none" is everything but the weights. A `jax.checkpoint` in the block is respected.
      prefetch: how many layers are gathered ahead of their use; each costs one more whole layer.
      regather: False keeps the gathered layers from the forward to the backward: two thirds of the
        traffic, for the whole parameters in memory. Only stage 3 gathers at all.
      unroll: layers in one iteration of the compiled loop.

    Returns:
      `x`, or `(x, aux)` with every layer's aux stacked.

    Raises:
      ValueError: leaves disagree on the number of layers, the block changes `x`, `remat` or
        `prefetch` is out of range; inside a step, a weight that is not one of the plan's stacks.

    Example:
      >>> block = lambda p, x: x + jnp.tanh(x @ p["w"])
      >>> scan_layers(block, {"w": jnp.ones((3, 2, 2))}, jnp.ones((1, 2))).shape
      (1, 2)
    """
    num_layers = count_layers(stacked_params, per_layer)
    check_choices(remat, prefetch)
    inside = current()
    if inside is None:
        return _plain_scan(block, stacked_params, x, broadcast, per_layer, remat, unroll)
    entries = recognise(inside, stacked_params, stacked=True)
    treedef = jax.tree.structure(stacked_params)
    (shared, join_shared), (own, join_own) = part(broadcast), part(per_layer)

    def run_block(weights: Arrays, x: PyTree, inputs: Parts) -> tuple[PyTree, PyTree]:
        trees = join_shared(Parts(inputs.floating[0], inputs.others[0]))
        if per_layer is not None:
            trees = (*trees, join_own(Parts(inputs.floating[1], inputs.others[1])))
        y, aux = split_output(block(treedef.unflatten(weights), x, *trees), x)
        check_same(x, y)
        return y, aux

    inputs = Parts((shared.floating, own.floating), (shared.others, own.others))
    weights, own_floating, own_others = jax.tree.map(
        lambda a: a[0], (jax.tree.leaves(stacked_params), own.floating, own.others)
    )
    first = Parts((shared.floating, own_floating), (shared.others, own_others))
    check_closure(run_block, weights, x, first)
    layer = Layer(inside.entrance, [entry.layer() for entry in entries], run_block, remat)
    whole = not any(any(entry.rest) for entry in entries)  # and at hand: nothing to gather
    ahead = 0 if whole else min(prefetch, num_layers - 1)
    stack = _Stack(layer, num_layers, ahead, regather or whole, unroll)
    x, aux = _run(stack, entries, x, inputs)
    return (x, *aux) if aux else x


def apply_layer(
    block: Callable[..., Any], params: PyTree, x: PyTree, *broadcast: PyTree, remat: str = "full"
) -> Any:
    """Runs one layer of its own, gathered just before it is used; outside a step, a plain call.

    Args:
      block: `(params, x, *broadcast) -> y`, any tree of arrays; `y` need not be like `x`.
      params: a tree of arrays, not stacked, exactly as the loss function received them.
      x: a tree of floating arrays.
      broadcast: further trees that the block receives: masks, position tables.
      remat: as for `scan_layers`.

    Returns:
      What the block returned.

    Raises:
      ValueError: `remat` is out of range; inside a step, a weight is not one of the plan's, is of
        a stack, or the block closes over a traced array.

    Example:
      >>> block = lambda p, x: jnp.tanh(x @ p["w"])
      >>> apply_layer(block, {"w": jnp.zeros((2, 3))}, jnp.ones((1, 2))).shape
      (1, 3)
    """
    check_choices(remat, 0)
    inside = current()
    if inside is None:
        call = jax.checkpoint(block) if remat == "full" else block
        return call(params, x, *broadcast)
    entries = recognise(inside, params, stacked=False)
    treedef = jax.tree.structure(params)
    inputs, join = part(broadcast)

    def run_block(weights: Arrays, x: PyTree, inputs: Parts) -> tuple[PyTree, PyTree]:
        return (), block(treedef.unflatten(weights), x, *join(inputs))  # all of it is "aux"

    check_closure(run_block, jax.tree.leaves(params), x, inputs)
    layer = Layer(inside.entrance, entries, run_block, remat)
    return _run(_Single(layer), entries, x, inputs)[1]


class _Single(NamedTuple):
    """The engine on one layer."""

    layer: Layer

    def forward(self, arrays: Arrays, x: PyTree, inputs: Parts) -> tuple:
        """As Layer.forward, from the arrays at rest."""
        return self.layer.forward(self.layer.gather(arrays), x, inputs)

    def backward(self, arrays: Arrays, saved: Any, inputs: Parts, cotangents: tuple) -> tuple:
        """The cotangents of the sinks, of x and of the floating inputs."""
        # Without the barrier XLA would keep the forward's weights instead of gathering them again.
        arrays, cotangents = lax.optimization_barrier((arrays, cotangents))
        weights = self.layer.gather(arrays)
        ct_weights, ct_x, ct_inputs = self.layer.backward(weights, saved, inputs, cotangents)
        return self.layer.leave(ct_weights), ct_x, ct_inputs


class _Stack(NamedTuple):
    """The engine on a stack: two loops, each with a queue of `prefetch` gathered layers.

    The inputs are pairs: (what all layers share, what is each layer's own).
    """

    layer: Layer
    num_layers: int
    prefetch: int
    regather: bool
    unroll: int

    def forward(self, arrays: Arrays, x: PyTree, inputs: Parts) -> tuple:
        """As Layer.forward for all layers; aux and what is saved come stacked."""
        place, joins = self.layer.entrance.place, []

        def body(carry: tuple, xs: tuple) -> tuple:
            x, queue = carry
            index, own = xs
            weights, queue = self._turn(arrays, queue, index, 1)
            (x, aux), (others, join), saved = self.layer.forward(weights, x, _with(inputs, own))
            joins.append(join)
            kept = () if self.regather else weights
            return (jax.tree.map(place.local, x), queue), (aux, others, (saved, kept))

        carry = x, self._start(arrays, 0, 1, x)
        (x, _), (aux, others, saved) = lax.scan(
            body, carry, self._indexed(inputs), unroll=self.unroll
        )
        return (x, aux), (others, joins[0]), saved

    def backward(self, arrays: Arrays, saved: Any, inputs: Parts, cotangents: tuple) -> tuple:
        """The cotangents of the sinks, of x and of the floating inputs."""
        shared, place = inputs.floating[0], self.layer.entrance.place
        ct_x, ct_aux = cotangents
        saved, kept = saved

        def body(carry: tuple, xs: tuple) -> tuple:
            ct_x, ct_shared, queue = carry
            (index, own), saved, ct_aux = xs
            if self.regather:
                weights, queue = self._turn(arrays, queue, index, -1)
            else:
                # Scanned over, they would be copied on a stream of their own, and XLA would have
                # the scatter of the layer before hide behind those copies instead of the layer.
                weights = self._take(kept, index)
            ct_weights, ct_x, (ct_terms, ct_own) = self.layer.backward(
                weights, saved, _with(inputs, own), (ct_x, ct_aux)
            )
            ct_shared = [a + accumulable(b) for a, b in zip(ct_shared, ct_terms, strict=True)]
            return (ct_x, ct_shared, queue), (self.layer.leave(ct_weights), ct_own)

        zeros = [place.zeros(x.shape, accumulable(x).dtype, None) for x in shared]
        queue = self._start(arrays, self.num_layers - 1, -1, ct_x) if self.regather else ()
        carry, xs = (ct_x, zeros, queue), (self._indexed(inputs), saved, ct_aux)
        (ct_x, ct_shared, _), (left, ct_own) = lax.scan(
            body, carry, xs, reverse=True, unroll=self.unroll
        )
        ct_shared = [ct.astype(x.dtype) for ct, x in zip(ct_shared, shared, strict=True)]
        return left, ct_x, (ct_shared, ct_own)

    def _indexed(self, inputs: Parts) -> tuple[jax.Array, Parts]:
        return jnp.arange(self.num_layers), Parts(inputs.floating[1], inputs.others[1])

    def _take(self, arrays: Arrays, index: Any) -> Arrays:
        return [lax.dynamic_index_in_dim(array, index, keepdims=False) for array in arrays]

    def _start(self, arrays: Arrays, first: int, direction: int, x: PyTree) -> tuple[Arrays, ...]:
        """The queue before the first turn.

        The barrier keeps its gathers behind `x`: free to move, they would move to the top of the
        step and hold these layers all the while.
        """
        layers = [self._take(arrays, first + direction * i) for i in range(self.prefetch)]
        layers, _ = lax.optimization_barrier((layers, x))
        return tuple(map(self.layer.gather, layers))

    def _turn(self, arrays: Arrays, queue: tuple[Arrays, ...], index: Any, direction: int) -> tuple:
        """Gathers the layer `prefetch` ahead; returns the one whose turn it is, and the queue.

        In the last `prefetch` turns none is ahead, and the last layer is gathered again.
        """
        ahead = jnp.clip(index + direction * self.prefetch, 0, self.num_layers - 1)
        queue = (*queue, self.layer.gather(self._take(arrays, ahead)))
        return queue[0], queue[1:]


def _with(inputs: Parts, own: Parts) -> Parts:
    """The inputs of one layer: what all share, and its own."""
    return Parts((inputs.floating[0], own.floating), (inputs.others[0], own.others))


def _run(engine: _Single | _Stack, entries: list[Entry], x: PyTree, inputs: Parts) -> Any:
    """Runs an engine with its own backward; returns (x, aux)."""
    engine, joins = watch(engine), []

    def forward(arrays: Arrays, x: PyTree, inputs: Parts) -> tuple:
        out, (others, join), saved = engine.forward(arrays, x, inputs)
        joins.append(join)
        return (out, others), saved

    @jax.custom_vjp
    def run(arrays, sinks, x, inputs):
        return forward(arrays, x, inputs)[0]

    def run_forward(arrays, sinks, x, inputs):
        out, saved = forward(arrays, x, inputs)
        return out, (arrays, sinks, saved, inputs)

    def run_backward(residuals, cotangents):
        arrays, sinks, saved, inputs = residuals
        out = engine.backward(arrays, saved, inputs, cotangents[0])
        left, ct_x, ct_floating = first_order(out, sinks)
        return None, left, ct_x, Parts(ct_floating, None)

    run.defvjp(run_forward, run_backward)
    local = functools.partial(jax.tree.map, engine.layer.entrance.place.local)
    (x, aux), others = run(
        [entry.array for entry in entries],
        [entry.sink for entry in entries if entry.sink is not None],
        local(x),
        Parts(local(inputs.floating), inputs.others),
    )
    return x, joins[0](Parts(aux, others))


def _plain_scan(block, stacked_params, x, broadcast, per_layer, remat, unroll):
    def body(x, xs):
        params, inputs = xs
        out = block(params, x, *broadcast, *(() if per_layer is None else (inputs,)))
        return split_output(out, x)

    body = jax.checkpoint(body, prevent_cse=False) if remat == "full" else body
    x, aux = lax.scan(body, x, (stacked_params, per_layer), unroll=unroll)
    return (x, *aux) if aux else x
