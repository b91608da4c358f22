# SPDX-License-Identifier: Apache-2.0
"""Watches the engine while a step is traced: what ran, under a name that the trace shows.

Each stack's forward and backward become named functions of the trace, and the numbers that a trace
does not show are kept beside it.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any, NamedTuple

import jax

from zerojax.engine.observer import Arrays, Engine, StackRecord, observing
from zerojax.tree import Parts, PyTree

NAME = "zerojax_stack_"  # then the number of the stack, "_forward" or "_backward"


class Named(NamedTuple):
    """An engine whose forward and backward are functions with a name in the trace."""

    engine: Engine
    number: int

    def forward(self, arrays: Arrays, x: PyTree, inputs: Parts) -> tuple[PyTree, Parts, Any]:
        """As the engine's."""

        def run(*args):
            return self.engine.forward(*args)

        run.__name__ = f"{NAME}{self.number}_forward"
        return jax.jit(run)(arrays, x, inputs)

    def backward(
        self, arrays: Arrays, saved: Any, inputs: Parts, ct_x: PyTree, ct_aux: PyTree
    ) -> tuple[Arrays, PyTree, PyTree]:
        """As the engine's."""

        def run(*args):
            return self.engine.backward(*args)

        run.__name__ = f"{NAME}{self.number}_backward"
        return jax.jit(run)(arrays, saved, inputs, ct_x, ct_aux)


@contextlib.contextmanager
def record_stacks() -> Iterator[list[StackRecord]]:
    """While a step is traced: collects its stacks, in the order of the loss function."""
    stacks: list[StackRecord] = []

    def watch(engine: Engine, record: StackRecord) -> Engine:
        stacks.append(record)
        return Named(engine, len(stacks) - 1)

    with observing(watch):
        yield stacks
