# SPDX-License-Identifier: Apache-2.0
"""Which arrays a traced program holds at each of its steps, guessed as XLA would fuse it.

A trace names every intermediate value; a compiler keeps few of them. Here an array is *held* if it
leaves a matmul, a reduction, a library kernel or a loop, if it enters a matmul or a kernel, or if
holding it is cheaper than holding what it is made of. All else is computed where it is used. The
order is the trace's. This is a model of a compiler, not the compiler: it is checked against
compiled programs in the tests, and its errors are in the log.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from typing import NamedTuple

from zerojax.receipt.jaxpr import (
    LEAVES,
    LOOPS,
    READERS,
    VIEWS,
    Op,
    Trace,
    Value,
    flatten,
    scan_body,
    source,
)


class Held(NamedTuple):
    """What is in memory while one step runs.

    Attributes:
      op: the step.
      values: the arrays held, its results among them; the trace's own inputs are not.
      inner: of a loop, the most that one iteration holds besides.
      reused: bytes of results that take the place of an operand that ends here: elementwise, or
        carried by a loop.
      ended: those of the trace's inputs that no later step reads.
    """

    op: Op
    values: list[Value]
    inner: int
    reused: int
    ended: list[Value]

    @property
    def num_bytes(self) -> int:
        """Bytes of all of it."""
        return sum(value.num_bytes for value in self.values) + self.inner - self.reused


def profile(trace: Trace, *, until: int = 0, dropped: Collection[int] = ()) -> Iterator[Held]:
    """What is held at each step of a trace that has a kernel, or whose result is held.

    Args:
      trace: from `flatten`.
      until: what a reduction over devices takes is held at least up to this step: XLA puts
        several such reductions together.
      dropped: ids of values that are left out, for who counts them otherwise.
    """
    held = _choose(trace)
    last = _last_uses(trace, held, until)
    out = {*map(id, trace.inputs), *dropped}
    alive: dict[int, Value] = {}
    for time, op in enumerate(trace.ops):
        made = [x for x in op.outputs if id(x) in held and id(x) not in out]
        if op.is_fused and not made:
            continue
        ending = [x for key, x in alive.items() if last.get(key, -1) <= time]
        reused, sizes = 0, [x.num_bytes for x in made]
        for x in ending if op.is_fused or op.name in LOOPS else ():
            if x.num_bytes in sizes:
                sizes.remove(x.num_bytes)
                reused += x.num_bytes
        inner = _inner(op) if op.name in LOOPS else 0
        ended = [x for x in trace.inputs if last.get(id(x), -1) < time]
        yield Held(op, [*alive.values(), *made], inner, reused, ended)
        alive.update((id(x), x) for x in made)
        for key in [key for key in alive if last.get(key, -1) <= time]:
            del alive[key]


def peak(trace: Trace, *, dropped: Collection[int] = ()) -> int:
    """Bytes of the fullest step, without the trace's inputs.

    >>> import jax, jax.numpy as jnp
    >>> f = lambda x, w: jnp.tanh(x @ w) @ w.T
    >>> square = jnp.ones((8, 8))
    >>> peak(flatten(jax.make_jaxpr(f)(square, square).jaxpr)) / square.nbytes
    2.0
    """
    return max((held.num_bytes for held in profile(trace, dropped=dropped)), default=0)


def in_place(body: Trace) -> set[int]:
    """Ids of the carried sums of a scan's body: what is added to one takes no place of its own."""
    inputs = set(map(id, body.inputs))

    def is_sum(x: Value) -> bool:
        op = x.op
        same = [id(source(y)) for y in op.inputs if y.num_bytes == x.num_bytes] if op else []
        return op is not None and op.is_fused and not inputs.isdisjoint(same)

    return {id(x) for x in map(source, body.outputs) if is_sum(x)}


def _inner(op: Op) -> int:
    """The most that one iteration, or one branch, holds besides what goes in and out."""
    if op.name == "scan":
        body = scan_body(op)
        return peak(body, dropped=in_place(body))
    bodies = op.params.get("branches") or [op.params["body_jaxpr"]]
    return max(peak(flatten(body.jaxpr)) for body in bodies)


def _choose(trace: Trace) -> set[int]:
    """The ids of the values that are held."""
    held, users = set(map(id, trace.inputs)), {}
    for op in trace.ops:
        for x in {id(y): y for y in map(source, op.inputs)}.values():
            if op.name not in VIEWS:
                users.setdefault(id(x), []).append(op)
    wanted = set(map(id, map(source, trace.outputs)))
    external = set(held)
    bases: dict[int, dict[int, Value]] = {}

    def roots(value: Value) -> dict[int, Value]:
        value = source(value)
        return {id(value): value} if id(value) in held else bases.get(id(value), {})

    for op in trace.ops:
        if op.name in VIEWS:
            continue
        made_of: dict[int, Value] = {}
        for x in op.inputs:
            made_of.update(roots(x))
        cost = sum(x.num_bytes for key, x in made_of.items() if key not in external)
        for x in op.outputs:
            using = users.get(id(x), [])
            read_whole = any(not (y.is_fused or y.name in READERS) for y in using)
            cheaper = len(using) > 1 and x.num_bytes < cost
            if not op.is_fused or id(x) in wanted or read_whole or cheaper:
                held.add(id(x))
            else:
                bases[id(x)] = made_of
    return held


def _last_uses(trace: Trace, held: set[int], until: int) -> dict[int, int]:
    """For every held value, the number of the last step that reads it, also through others."""
    last: dict[int, int] = {}
    bases: dict[int, set[int]] = {}

    def roots(value: Value) -> set[int]:
        value = source(value)
        return {id(value)} if id(value) in held else bases.get(id(value), set())

    end = len(trace.ops)
    for time, op in enumerate(trace.ops):
        if op.name in VIEWS:
            continue
        made_of = set().union(*map(roots, op.inputs))
        ends = max(time, until) if op.name in LEAVES else time
        if not op.is_fused or any(id(x) in held for x in op.outputs):
            last.update((x, ends) for x in made_of if last.get(x, -1) < ends)
        for x in op.outputs:
            if id(x) not in held:
                bases[id(x)] = made_of
    for x in trace.outputs:
        last.update((x, end) for x in roots(x))
    return last
