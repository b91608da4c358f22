# SPDX-License-Identifier: Apache-2.0
"""How a weight at rest becomes whole in a loss function, and how its gradient leaves it.

Gradients leave through *sinks*: zeros of the shape and dtype in which a gradient leaves the
backward, with respect to which the step differentiates. They are never computed; their cotangents
are the reduced gradients. So a stage-2 gradient is a shard although its weight is whole, and an
fp32 sum of gradients does not have to fit a bf16 weight.
"""

from __future__ import annotations

import contextlib
import contextvars
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P

from zerojax.sharding.collectives import Auto, Manual
from zerojax.sharding.precision import Precision, cast
from zerojax.tree import leaf_path


class Weight(NamedTuple):
    """One parameter as the engine sees it: at rest, with the way of its gradient.

    Attributes:
      path: the leaf's path, for errors.
      array: the leaf at rest.
      rest_spec: its spec at rest.
      sink: where its gradient goes, or None if it has none.
      grad_spec: the spec on which its gradient leaves, or None if it stays local.
      stacked: its first dimension counts layers.
    """

    path: str
    array: jax.Array
    rest_spec: P
    sink: jax.Array | None
    grad_spec: P | None
    stacked: bool

    def layer(self) -> Weight:
        """The weight of one layer of the stack; its array is still the stack's."""
        grad_spec = None if self.grad_spec is None else P(*self.grad_spec[1:])
        return self._replace(rest_spec=P(*self.rest_spec[1:]), grad_spec=grad_spec, stacked=False)


class Exchange(NamedTuple):
    """What devices exchange: shards for whole weights, whole gradients for what sinks receive."""

    partitioner: Manual | Auto
    precision: Precision

    def gather(self, weight: Weight) -> jax.Array:
        """The whole weight in the compute dtype; the cast comes first, for half the bytes."""
        return self.partitioner.gather(cast(weight.array, self.precision.compute), weight.rest_spec)

    def reduce(self, weight: Weight, grad: jax.Array) -> jax.Array:
        """A whole local gradient as it leaves the backward."""
        if weight.grad_spec is None:
            return self.partitioner.local(grad)
        return self.partitioner.scatter(cast(grad, self.precision.reduce), weight.grad_spec)

    def attach(self, weight: Weight, whole: jax.Array) -> jax.Array:
        """The whole weight, with its gradient led to the sink."""
        if weight.sink is None:
            return whole

        @jax.custom_vjp
        def attached(whole, sink):
            del sink
            return whole

        attached.defvjp(
            lambda whole, sink: (whole, None),
            lambda _, grad: (None, self.reduce(weight, grad)),
        )
        return attached(whole, weight.sink)


class Scope(NamedTuple):
    """A loss function while it is traced: the arrays it received, and what they stand for."""

    exchange: Exchange
    weights: dict[int, Weight]  # by the id of the array that the loss function received
    received: list[jax.Array]  # keeps those ids from being used again

    def find(self, params: Any, *, stacked: bool) -> list[Weight]:
        """The weights behind the arrays of a tree; ValueError if one is not the plan's."""
        found = []
        for keys, array in jax.tree.leaves_with_path(params):
            name, shape = leaf_path(keys), jnp.shape(array)
            weight = self.weights.get(id(array))
            if weight is None:
                raise ValueError(
                    f"params leaf {name!r} {list(shape)} is not one of the arrays that the loss "
                    "function received. Pass its weights on untouched (they are in the compute "
                    "dtype already): not from inside a jax.jit, jax.checkpoint, jax.grad or "
                    "another block of your own, and not through lax.stop_gradient (use "
                    "make_plan(frozen=...)). What you computed goes through broadcast or per_layer."
                )
            if weight.stacked and not stacked:
                raise ValueError(f"params leaf {name!r} {list(shape)} is stacked; use scan_layers.")
            if stacked and not weight.stacked:
                raise ValueError(
                    f"params leaf {name!r} {list(shape)} is not stacked: name it or a tree above "
                    f"it in make_plan(layers=...), its path is {weight.path!r}, or use apply_layer."
                )
            found.append(weight)
        return found


_current: contextvars.ContextVar[Scope | None] = contextvars.ContextVar("scope", default=None)


def current_scope() -> Scope | None:
    """The scope of the loss function that is being traced, or None outside a zerojax step."""
    return _current.get()


@contextlib.contextmanager
def step_scope(
    exchange: Exchange, weights: Sequence[Weight], received: Sequence[jax.Array]
) -> Iterator[None]:
    """While a loss function is traced: lets the engine recognise the arrays that it received."""
    known = {id(array): weight for array, weight in zip(received, weights, strict=True)}
    token = _current.set(Scope(exchange, known, list(received)))
    try:
        yield
    finally:
        _current.reset(token)
