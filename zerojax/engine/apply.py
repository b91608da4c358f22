# SPDX-License-Identifier: Apache-2.0
"""A layer of its own: gathered just before it is used, dropped, gathered again in the backward."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
from jax import lax

from zerojax.engine.block import check_choices, check_closure
from zerojax.engine.layer import Inputs, Layer, differentiable
from zerojax.engine.observer import Arrays, StackRecord, observed
from zerojax.engine.weights import current_scope
from zerojax.tree import Parts, PyTree


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
      >>> import jax.numpy as jnp
      >>> block = lambda p, x: jnp.tanh(x @ p["w"])
      >>> apply_layer(block, {"w": jnp.zeros((2, 3))}, jnp.ones((1, 2))).shape
      (1, 3)
    """
    check_choices(remat, 0)
    scope = current_scope()
    if scope is None:
        call = jax.checkpoint(block) if remat == "full" else block
        return call(params, x, *broadcast)
    weights = scope.find(params, stacked=False)
    treedef = jax.tree.structure(params)

    def run_block(whole: Arrays, x: PyTree, inputs: Inputs) -> tuple[PyTree, PyTree]:
        return (), block(treedef.unflatten(whole), x, *inputs.shared)  # all of it is "aux"

    inputs = Inputs(broadcast)
    check_closure(run_block, jax.tree.leaves(params), x, inputs)
    engine = SingleEngine(Layer(scope.exchange, weights, run_block, remat))
    _, y = differentiable(observed(engine, engine.record), weights, scope.exchange, x, inputs)
    return y


class SingleEngine(NamedTuple):
    """The engine on one layer."""

    layer: Layer

    def forward(self, arrays: Arrays, x: PyTree, inputs: Parts) -> tuple[PyTree, Parts, Any]:
        """As Engine.forward."""
        return self.layer.forward(self.layer.gather(arrays), x, inputs)

    def backward(
        self, arrays: Arrays, saved: Any, inputs: Parts, ct_x: PyTree, ct_aux: PyTree
    ) -> tuple[Arrays, PyTree, PyTree]:
        """As Engine.backward."""
        # Without the barrier XLA would keep the forward's weights instead of gathering them again.
        arrays, ct_x, ct_aux = lax.optimization_barrier((arrays, ct_x, ct_aux))
        whole = self.layer.gather(arrays)
        ct_whole, ct_x, ct_inputs = self.layer.backward(whole, saved, inputs, ct_x, ct_aux)
        return self.layer.reduce(ct_whole), ct_x, ct_inputs

    def record(self) -> StackRecord:
        """What runs."""
        return self.layer.record(num_layers=1, prefetch=0, regathers=True)
