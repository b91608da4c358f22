# SPDX-License-Identifier: Apache-2.0
"""The layer engine on a stack: gather a layer, use it, drop it; gather it again in the backward.

Inside a zerojax step the loss function receives weights that look whole. Handed to `scan_layers`
or `apply_layer` untouched, they are recognised, and the engine works on the arrays at rest instead:
no layer is whole before its turn or after it. Weights used in any other way are what they look
like, gathered where the step enters, and their gradient joins the engine's.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from zerojax.engine.block import (
    check_choices,
    check_closure,
    check_same,
    count_layers,
    split_output,
)
from zerojax.engine.layer import Inputs, Layer, differentiable
from zerojax.engine.observer import Arrays, StackRecord, observed
from zerojax.engine.weights import current_scope
from zerojax.sharding.precision import accumulable
from zerojax.sharding.specs import is_split
from zerojax.tree import Parts, PyTree


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
    scope = current_scope()
    if scope is None:
        return _plain_scan(block, stacked_params, x, broadcast, per_layer, remat, unroll)
    weights = scope.find(stacked_params, stacked=True)
    treedef = jax.tree.structure(stacked_params)

    def run_block(whole: Arrays, x: PyTree, inputs: Inputs) -> tuple[PyTree, PyTree]:
        own = () if per_layer is None else (inputs.own,)
        y, aux = split_output(block(treedef.unflatten(whole), x, *inputs.shared, *own), x)
        check_same(x, y)
        return y, aux

    first_weights, first_own = jax.tree.map(
        lambda a: a[0], (jax.tree.leaves(stacked_params), per_layer)
    )
    check_closure(run_block, first_weights, x, Inputs(broadcast, first_own))
    layer = Layer(scope.exchange, [weight.layer() for weight in weights], run_block, remat)
    gathers = any(is_split(weight.rest_spec) for weight in weights)
    ahead = min(prefetch, num_layers - 1) if gathers else 0
    # Weights that rest whole are at hand: nothing to gather, ahead or again.
    engine = StackEngine(layer, num_layers, ahead, regather or not gathers, unroll)
    inputs = Inputs(broadcast, per_layer)
    x, aux = differentiable(observed(engine, engine.record), weights, scope.exchange, x, inputs)
    return (x, *aux) if aux else x


class StackEngine(NamedTuple):
    """The engine on a stack: two loops, each with a queue of `prefetch` gathered layers."""

    layer: Layer
    num_layers: int
    prefetch: int
    regather: bool
    unroll: int

    def forward(self, arrays: Arrays, x: PyTree, inputs: Parts) -> tuple[PyTree, Parts, Any]:
        """As Engine.forward."""
        local = self.layer.exchange.partitioner.local

        def body(carry: tuple, xs: tuple) -> tuple:
            x, queue = carry
            index, own = xs
            whole, queue = self._turn(arrays, queue, index, 1)
            x, aux, saved = self.layer.forward(whole, x, _of_layer(inputs, own))
            kept = () if self.regather else whole
            return (jax.tree.map(local, x), queue), (aux, saved, kept)

        carry = x, self._start(arrays, 0, 1, x)
        (x, _), (aux, saved, kept) = lax.scan(
            body, carry, self._indexed(inputs), unroll=self.unroll
        )
        return x, aux, (saved, kept)

    def backward(
        self, arrays: Arrays, saved: Any, inputs: Parts, ct_x: PyTree, ct_aux: PyTree
    ) -> tuple[Arrays, PyTree, PyTree]:
        """As Engine.backward."""
        saved, kept = saved

        def body(carry: tuple, xs: tuple) -> tuple:
            ct_x, ct_shared, queue = carry
            (index, own), saved, ct_aux = xs
            if self.regather:
                whole, queue = self._turn(arrays, queue, index, -1)
            else:
                # Scanned over, they would be copied on a stream of their own, and XLA would have
                # the scatter of the layer before hide behind those copies instead of the layer.
                whole = self._take(kept, index)
            ct_whole, ct_x, ct_inputs = self.layer.backward(
                whole, saved, _of_layer(inputs, own), ct_x, ct_aux
            )
            ct_shared = jax.tree.map(lambda a, b: a + accumulable(b), ct_shared, ct_inputs.shared)
            return (ct_x, ct_shared, queue), (self.layer.reduce(ct_whole), ct_inputs.own)

        def zeros(x: jax.Array) -> jax.Array:
            return self.layer.exchange.partitioner.zeros(x.shape, accumulable(x).dtype, None)

        shared = inputs.floating.shared
        queue = self._start(arrays, self.num_layers - 1, -1, ct_x) if self.regather else ()
        carry = ct_x, jax.tree.map(zeros, shared), queue
        xs = self._indexed(inputs), saved, ct_aux
        (ct_x, ct_shared, _), (reduced, ct_own) = lax.scan(
            body, carry, xs, reverse=True, unroll=self.unroll
        )
        ct_shared = jax.tree.map(lambda ct, x: ct.astype(x.dtype), ct_shared, shared)
        return reduced, ct_x, Inputs(ct_shared, ct_own)

    def record(self) -> StackRecord:
        """What runs."""
        return self.layer.record(
            num_layers=self.num_layers, prefetch=self.prefetch, regathers=self.regather
        )

    def _indexed(self, inputs: Parts) -> tuple[jax.Array, Parts]:
        """What the loops scan over: the number of a layer, and its own inputs."""
        return jnp.arange(self.num_layers), Parts(inputs.floating.own, inputs.others.own)

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
        whole, *queue_left = (*queue, self.layer.gather(self._take(arrays, ahead)))
        return whole, tuple(queue_left)


def _of_layer(inputs: Parts, own: Parts) -> Parts:
    """The inputs of a stack as one layer gets them: what all share, and its own."""
    return Parts(inputs.floating._replace(own=own.floating), inputs.others._replace(own=own.others))


def _plain_scan(block, stacked_params, x, broadcast, per_layer, remat, unroll):
    def body(x, xs):
        params, inputs = xs
        out = block(params, x, *broadcast, *(() if per_layer is None else (inputs,)))
        return split_output(out, x)

    body = jax.checkpoint(body, prevent_cse=False) if remat == "full" else body
    x, aux = lax.scan(body, x, (stacked_params, per_layer), unroll=unroll)
    return (x, *aux) if aux else x
