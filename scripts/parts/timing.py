# SPDX-License-Identifier: Apache-2.0
"""Programs that train, timed in turn: what scripts/bench.py and its sweep share."""

from __future__ import annotations

import dataclasses
import functools
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np
import optax


@dataclasses.dataclass(frozen=True)
class Program:
    """One way to train: `run()` makes a step and returns arrays to wait for."""

    name: str
    run: Callable[[], Any]
    state_bytes: int  # on each device


def unsharded_step(loss_fn, optimizer):
    """The plain step of one device: what the ratios are measured against."""

    @functools.partial(jax.jit, donate_argnums=(0, 1))
    def step(params, opt_state, batch):
        def total(params):
            loss_sum, weight = loss_fn(params, batch, None)
            return loss_sum / weight

        loss, grads = jax.value_and_grad(total)(params)
        updates, opt_state = optimizer.update(grads, opt_state, params)
        return optax.apply_updates(params, updates), opt_state, loss

    return step


def repeat(step, *state) -> Callable[[], Any]:
    """Return a function that runs `(*state, loss) = step(*state)` on the state it left last."""
    state = list(state)

    def run():
        *state[:], loss = step(*state)
        return state, loss

    return run


def announce(text: str) -> None:
    """Say on stderr what takes a while: one line that changes on a terminal, else a line each."""
    if sys.stderr.isatty():
        print(f"\r\x1b[K{text}", end="", file=sys.stderr, flush=True)
    elif text:
        print(text, file=sys.stderr, flush=True)


def time_steps(programs: Sequence[Program], rounds: int) -> np.ndarray:
    """Compile, then return seconds [rounds, programs] of one step each, in turn."""
    for number, program in enumerate(programs, start=1):
        announce(f"compiling {number} of {len(programs)}: {program.name}")
        program.run()
        jax.block_until_ready(program.run())  # not timed: the first run on its own outputs
    announce(f"timing {rounds} rounds")
    seconds = np.zeros((rounds, len(programs)))
    for i in range(rounds):
        for j, program in enumerate(programs):
            start = time.perf_counter()
            jax.block_until_ready(program.run())
            seconds[i, j] = time.perf_counter() - start
    announce("")
    return seconds
