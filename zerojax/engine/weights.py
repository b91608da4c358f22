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


class Entry(NamedTuple):
    """How one parameter enters the computation and its gradient leaves it.

    Attributes:
      path: the leaf's path, for errors.
      array: the leaf at rest.
      rest: its spec at rest.
      sink: where its gradient goes, or None if it has none.
      leave: the spec on which its gradient leaves, or None if it stays local.
      stacked: its first dimension counts layers.
    """

    path: str
    array: jax.Array
    rest: P
    sink: jax.Array | None
    leave: P | None
    stacked: bool

    def layer(self) -> Entry:
        """The entry of one layer of the stack; its array is still the stack's."""
        leave = None if self.leave is None else P(*self.leave[1:])
        return self._replace(rest=P(*self.rest[1:]), leave=leave, stacked=False)


class Entrance(NamedTuple):
    """What turns entries into weights, and gradients into what their sinks receive."""

    place: Manual | Auto
    precision: Precision

    def gather(self, entry: Entry) -> jax.Array:
        """The whole weight in the compute dtype; the cast comes first, for half the bytes."""
        return self.place.gather(cast(entry.array, self.precision.compute), entry.rest)

    def leave(self, entry: Entry, grad: jax.Array) -> jax.Array:
        """A whole local gradient as it leaves the backward."""
        if entry.leave is None:
            return self.place.local(grad)
        return self.place.scatter(cast(grad, self.precision.reduce), entry.leave)

    def attach(self, entry: Entry, whole: jax.Array) -> jax.Array:
        """The whole weight, with its gradient led to the sink."""
        if entry.sink is None:
            return whole

        @jax.custom_vjp
        def attached(whole, sink):
            del sink
            return whole

        attached.defvjp(
            lambda whole, sink: (whole, None),
            lambda _, grad: (None, self.leave(entry, grad)),
        )
        return attached(whole, entry.sink)


class Inside(NamedTuple):
    """The weights that a loss function was given, and the entries they stand for."""

    entrance: Entrance
    entries: dict[int, Entry]  # by the id of the weight that the loss function received
    weights: list[jax.Array]  # keeps those ids from being used again


_current: contextvars.ContextVar[Inside | None] = contextvars.ContextVar("inside", default=None)


def current() -> Inside | None:
    """What the loss function being traced was given, or None outside a zerojax step."""
    return _current.get()


@contextlib.contextmanager
def inside(
    entrance: Entrance, entries: Sequence[Entry], weights: Sequence[jax.Array]
) -> Iterator[None]:
    """While a loss function is traced: lets the engine recognise the weights it was given."""
    known = {id(weight): entry for weight, entry in zip(weights, entries, strict=True)}
    token = _current.set(Inside(entrance, known, list(weights)))
    try:
        yield
    finally:
        _current.reset(token)


def recognise(inside: Inside, params: Any, *, stacked: bool) -> list[Entry]:
    """The entries that stand behind the weights of a tree; ValueError if one is not the plan's."""
    entries = []
    for path, weight in jax.tree.leaves_with_path(params):
        name, shape = leaf_path(path), jnp.shape(weight)
        entry = inside.entries.get(id(weight))
        if entry is None:
            raise ValueError(
                f"params leaf {name!r} {list(shape)} is not one of the arrays that the loss "
                "function received. Pass its weights on untouched (they are in the compute dtype "
                "already): not from inside a jax.jit, jax.checkpoint, jax.grad or another block of "
                "your own, and not through lax.stop_gradient (use make_plan(frozen=...)). What you "
                "computed goes through broadcast or per_layer."
            )
        if entry.stacked and not stacked:
            raise ValueError(f"params leaf {name!r} {list(shape)} is stacked; use scan_layers.")
        if stacked and not entry.stacked:
            raise ValueError(
                f"params leaf {name!r} {list(shape)} is not stacked: name it or a tree above it in "
                f"make_plan(layers=...), its path is {entry.path!r}, or use apply_layer."
            )
        entries.append(entry)
    return entries
