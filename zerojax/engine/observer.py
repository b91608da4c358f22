# SPDX-License-Identifier: Apache-2.0
"""What the layer engine did while a step was traced: its stacks, and their places in the trace.

A ledger is open only while memory is predicted. Each stack's forward and backward then become
named functions of the trace, and the ledger keeps the numbers that a trace does not show.
"""

from __future__ import annotations

import contextlib
import contextvars
from collections.abc import Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

NAME = "zerojax_stack_"  # then the number of the stack, "_forward" or "_backward"


class Stack(NamedTuple):
    """One stack of layers, or a layer of its own, as the engine runs it.

    Attributes:
      num_layers: 1 for a layer of its own.
      prefetch: layers gathered ahead of their use.
      gathers: its weights rest as shards, and are gathered for their use.
      reduces: its gradients leave the loop layer by layer, not at the end of the step.
      num_weights, num_grads: how many arrays a layer has, and how many of them are trained.
      layer_bytes: one layer's weights, whole, in the compute dtype.
      layer_grad_bytes: the gradients of those that are trained, whole, in the dtype of the wire.
      paths: of its weights, in the parameters.
      regathers: layers are gathered once more for the backward.
    """

    num_layers: int
    prefetch: int
    gathers: bool
    reduces: bool
    num_weights: int
    num_grads: int
    layer_bytes: int
    layer_grad_bytes: int
    paths: tuple[str, ...] = ()
    regathers: bool = True


class Marked(NamedTuple):
    """An engine whose forward and backward are functions with a name in the trace."""

    engine: Any
    number: int

    @property
    def layer(self) -> Any:
        """The engine's layer."""
        return self.engine.layer

    def forward(self, arrays: Any, x: Any, inputs: Any) -> tuple:
        """As the engine's. What puts aux together is no array, and goes around the trace."""
        joins = []

        def run(arrays, x, inputs):
            out, (others, join), saved = self.engine.forward(arrays, x, inputs)
            joins.append(join)
            return out, others, saved

        run.__name__ = f"{NAME}{self.number}_forward"
        out, others, saved = jax.jit(run)(arrays, x, inputs)
        return out, (others, joins[0]), saved

    def backward(self, arrays: Any, saved: Any, inputs: Any, cotangents: Any) -> tuple:
        """As the engine's."""

        def run(*args):
            return self.engine.backward(*args)

        run.__name__ = f"{NAME}{self.number}_backward"
        return jax.jit(run)(arrays, saved, inputs, cotangents)


_current: contextvars.ContextVar[list[Stack] | None] = contextvars.ContextVar(
    "ledger", default=None
)


@contextlib.contextmanager
def open_ledger() -> Iterator[list[Stack]]:
    """While a step is traced: collects its stacks, in the order of the loss function."""
    stacks: list[Stack] = []
    token = _current.set(stacks)
    try:
        yield stacks
    finally:
        _current.reset(token)


def watch(engine: Any) -> Any:
    """The engine as it is or, while a ledger is open, entered there and marked in the trace."""
    stacks = _current.get()
    if stacks is None:
        return engine
    entries, num_layers = engine.layer.entries, getattr(engine, "num_layers", 1)
    place, precision = engine.layer.entrance
    trained = [entry for entry in entries if entry.sink is not None]

    def whole_bytes(some: Any, dtype: Any) -> int:
        return sum(_whole_bytes(entry, place, dtype) for entry in some) // num_layers

    stacks.append(
        Stack(
            num_layers=num_layers,
            prefetch=getattr(engine, "prefetch", 0),
            gathers=any(any(entry.rest) for entry in entries),
            reduces=any(entry.leave is not None for entry in trained),
            num_weights=len(entries),
            num_grads=len(trained),
            layer_bytes=whole_bytes(entries, precision.compute),
            layer_grad_bytes=whole_bytes(trained, precision.reduce),
            paths=tuple(entry.path for entry in entries),
            regathers=getattr(engine, "regather", True),
        )
    )
    return Marked(engine, len(stacks) - 1)


def _whole_bytes(entry: Any, place: Any, dtype: Any) -> int:
    """Bytes of a whole weight; inside the step, its array at rest is a device's shard."""
    num_shards = place.mesh.shape[place.axis] if any(entry.rest) else 1
    is_real = jnp.issubdtype(entry.array.dtype, jnp.floating)
    return (
        entry.array.size * num_shards * jnp.dtype(dtype if is_real else entry.array.dtype).itemsize
    )
