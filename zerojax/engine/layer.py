# SPDX-License-Identifier: Apache-2.0
"""One layer of the engine: its forward, and its backward from what was saved and the weights."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from zerojax.engine.observer import Arrays, Engine, StackRecord
from zerojax.engine.weights import Exchange, Weight
from zerojax.sharding.axes import num_shards
from zerojax.sharding.specs import is_split
from zerojax.tree import Parts, PyTree, combine, partition


class Inputs(NamedTuple):
    """What blocks take beside weights and x: what all of them share, and what is each one's own."""

    shared: PyTree
    own: PyTree = None


class Layer(NamedTuple):
    """One layer as the engine runs it.

    Attributes:
      exchange: how weights become whole and gradients leave.
      weights: the layer's weights, flat.
      block: the user's function of (flat weights, x, Inputs), to (x, aux).
      remat: what is saved for the backward: "full" is x alone, "none" all but the weights.
    """

    exchange: Exchange
    weights: list[Weight]
    block: Callable[[Arrays, PyTree, Inputs], tuple[PyTree, PyTree]]
    remat: str

    def gather(self, arrays: Arrays) -> Arrays:
        """The whole weights, from their arrays at rest."""
        pairs = zip(self.weights, arrays, strict=True)
        return [self.exchange.gather(weight._replace(array=array)) for weight, array in pairs]

    def reduce(self, grads: Arrays) -> Arrays:
        """The gradients of the trained weights as they leave the backward."""
        pairs = zip(self.weights, grads, strict=True)
        return [self.exchange.reduce(weight, g) for weight, g in pairs if weight.sink is not None]

    def forward(self, whole: Arrays, x: PyTree, inputs: Parts) -> tuple[PyTree, Parts, Any]:
        """From whole weights, returns x, aux, and what to save; `inputs` are Inputs in parts."""

        def run(whole, x, floating, others):
            y, aux = self.block(whole, x, combine(Parts(floating, others)))
            aux = partition(aux)
            return (y, aux.floating), aux.others

        args = (whole, x, inputs.floating, inputs.others)
        if self.remat == "full":
            (y, floating), others = run(*args)
            return y, Parts(floating, others), x
        # Weights and inputs are at hand in the backward; saved, they would be so for every layer.
        saveable = (False, True, False, False)
        (y, floating), vjp, others = jax.vjp(run, *args, has_aux=True, saveable_args=saveable)
        return y, Parts(floating, others), vjp

    def backward(
        self, whole: Arrays, saved: Any, inputs: Parts, ct_x: PyTree, ct_aux: PyTree
    ) -> tuple[Arrays, PyTree, PyTree]:
        """Returns the cotangents of the whole weights, of x and of the floating inputs."""
        if self.remat == "full":

            def run(whole, x, floating):
                y, aux = self.block(whole, x, combine(Parts(floating, inputs.others)))
                return y, partition(aux).floating

            _, vjp = jax.vjp(run, whole, saved, inputs.floating)
            return vjp((ct_x, ct_aux))
        _, x, _, _ = saved.args_res
        vjp = saved.replace(args_res=[whole, x, inputs.floating, inputs.others])
        ct_whole, ct_x, ct_floating, _ = vjp((ct_x, ct_aux))
        return ct_whole, ct_x, ct_floating

    def record(self, *, num_layers: int, prefetch: int, regathers: bool) -> StackRecord:
        """What an observer is told of so many of these layers."""
        trained = [weight for weight in self.weights if weight.sink is not None]
        precision = self.exchange.precision
        return StackRecord(
            num_layers=num_layers,
            prefetch=prefetch,
            gathers=any(is_split(weight.rest_spec) for weight in self.weights),
            reduces=any(weight.grad_spec is not None for weight in trained),
            num_weights=len(self.weights),
            num_grads=len(trained),
            layer_bytes=self._whole_bytes(self.weights, precision.compute) // num_layers,
            layer_grad_bytes=self._whole_bytes(trained, precision.reduce) // num_layers,
            paths=tuple(weight.path for weight in self.weights),
            regathers=regathers,
        )

    def _whole_bytes(self, weights: Sequence[Weight], dtype: Any) -> int:
        """Bytes of whole weights, of all layers of a stack, the real ones in `dtype`."""
        total = 0
        for weight in weights:
            # Inside the step, the array at rest of a split weight is a device's shard.
            shards = num_shards(self.exchange.partitioner.mesh) if is_split(weight.rest_spec) else 1
            is_real = jnp.issubdtype(weight.array.dtype, jnp.floating)
            width = jnp.dtype(dtype if is_real else weight.array.dtype).itemsize
            total += weight.array.size * shards * width
        return total


def differentiable(
    engine: Engine, weights: Sequence[Weight], exchange: Exchange, x: PyTree, inputs: Inputs
) -> tuple[PyTree, PyTree]:
    """Runs an engine with its own backward, whose gradients reach the sinks; returns (x, aux)."""

    @jax.custom_vjp
    def run(arrays, sinks, x, inputs):
        return run_and_save(arrays, sinks, x, inputs)[0]

    def run_and_save(arrays, sinks, x, inputs):
        x, aux, saved = engine.forward(arrays, x, inputs)
        return (x, aux), (arrays, sinks, saved, inputs)

    def pull_back(residuals, cotangents):
        arrays, sinks, saved, inputs = residuals
        ct_x, ct_aux = cotangents
        out = engine.backward(arrays, saved, inputs, ct_x, ct_aux.floating)
        ct_sinks, ct_x, ct_floating = first_order(out, sinks)
        return None, ct_sinks, ct_x, Parts(ct_floating, None)

    run.defvjp(run_and_save, pull_back)
    local = functools.partial(jax.tree.map, exchange.partitioner.local)
    floating, others = partition(inputs)
    arrays = [weight.array for weight in weights]
    sinks = [weight.sink for weight in weights if weight.sink is not None]
    x, aux = run(arrays, sinks, local(x), Parts(local(floating), others))
    return x, combine(aux)


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
