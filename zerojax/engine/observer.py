# SPDX-License-Identifier: Apache-2.0
"""Who watches the engine: told of every stack and layer as it is traced, it may put itself between.

The engine knows nothing of its observer. The receipt's recorder is one: it notes what ran, and
gives each forward and backward a name in the trace.
"""

from __future__ import annotations

import contextlib
import contextvars
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple, Protocol

import jax

from zerojax.tree import Parts, PyTree

Arrays = list[jax.Array]


class Engine(Protocol):
    """What runs a stack of layers, or a layer of its own, from its weights at rest."""

    def forward(self, arrays: Arrays, x: PyTree, inputs: Parts) -> tuple[PyTree, Parts, Any]:
        """Returns x, aux, and what is saved for the backward; of a stack both come stacked."""
        ...

    def backward(
        self, arrays: Arrays, saved: Any, inputs: Parts, ct_x: PyTree, ct_aux: PyTree
    ) -> tuple[Arrays, PyTree, PyTree]:
        """Returns the cotangents of the sinks, of x and of the floating inputs."""
        ...


class StackRecord(NamedTuple):
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


Observer = Callable[[Engine, StackRecord], Engine]

_current: contextvars.ContextVar[Observer | None] = contextvars.ContextVar("observer", default=None)


@contextlib.contextmanager
def observing(observer: Observer) -> Iterator[None]:
    """While this lasts, every engine is handed to the observer, which returns the one to run."""
    token = _current.set(observer)
    try:
        yield
    finally:
        _current.reset(token)


def observed(engine: Engine, record: Callable[[], StackRecord]) -> Engine:
    """The engine as it is or, under an observer, what that makes of it."""
    observer = _current.get()
    return engine if observer is None else observer(engine, record())
