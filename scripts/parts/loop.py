# SPDX-License-Identifier: Apache-2.0
"""The training loop: steps, validations, saves; and a run that goes on where it was stopped."""

import dataclasses
import math
import time
import warnings
from collections import deque
from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
import numpy as np

import zerojax as zj
from models import transformer
from models.transformer import TransformerConfig
from scripts.parts.files import Files, read_options
from scripts.parts.log import (
    Screen,
    Stop,
    Summary,
    ask_all,
    raise_if_not_finite,
    stop_on_signals,
)
from scripts.parts.options import Options
from zerojax.checkpoint.items import DataIterator

Batch = dict[str, np.ndarray]


@dataclasses.dataclass
class Progress:
    """Where a run is, as a save keeps it: its place in the data, and what it came to so far."""

    batches: DataIterator
    summary: Summary
    rows: int  # in a batch

    def get_state(self) -> dict[str, Any]:
        """Return the reader's state and the summary's numbers."""
        place = self.batches.get_state()
        return {"batches": place, "rows": self.rows, "summary": self.summary.numbers()}

    def set_state(self, state: dict[str, Any]) -> None:
        """Go on from there: from that row, in batches of another size from the last one before."""
        place, rows = state["batches"], state.get("rows", self.rows)
        if rows != self.rows:
            place = {**place, "next_index": place["next_index"] * rows // self.rows}
        self.batches.set_state(place)
        for name, x in state["summary"].items():
            setattr(self.summary, name, x)


class Done(NamedTuple):
    """A step that was made: its number, its metrics, and whether it is the run's last."""

    number: int
    metrics: dict[str, jax.Array]
    state: zj.TrainState | None = None
    last: bool = False


def run_steps(
    step: zj.Step,
    state: zj.TrainState,
    batches: Iterator[Batch],
    first: int,
    options: Options,
    stop: Stop,
) -> Iterator[Done]:
    """Yield each step, without its state, once the next one is under way.

    So the device never waits for whoever reads the metrics. Only a step that is to be validated or
    saved, and the last one, are yielded at once, with the state that they led to.
    """
    unread = None
    for number in range(first, options.steps + 1):
        told_to_stop = ask_all(stop, state, step)
        state, metrics = step(state, zj.shard_batch(next(batches), step.plan))
        if unread:
            yield unread
        last = told_to_stop() or number == options.steps
        if last or is_due(number, options.eval_every) or is_due(number, options.save_every):
            yield Done(number, metrics, state, last)
            unread = None
        else:
            unread = Done(number, metrics)
        if last:
            return


def is_due(number: int, every: int) -> bool:
    """Whether what happens every so many steps, or never (0), happens after this one."""
    return every > 0 and number % every == 0


def evaluate(eval_step: zj.Step, state: zj.TrainState, batches: Sequence[Batch]) -> float:
    """Return the mean loss per token over all batches."""
    run = partial(eval_step, state)
    results = [jax.device_get(run(zj.shard_batch(batch, eval_step.plan))) for batch in batches]
    losses, weights = zip(*[(float(x["loss"]), float(x["weight"])) for x in results], strict=True)
    return float(np.average(losses, weights=weights))


def begin(
    options: Options,
    plan: zj.Plan,
    given: Any,
    saves: zj.Checkpointer,
    progress: Progress,
    screen: Screen,
) -> zj.TrainState:
    """Return the state of the newest save, with `progress` set to its place, or a new state.

    A new one is of the weights that are given, or of random ones for None.
    """
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        state = saves.restore(data=progress)
    for warning in said:
        screen.say(str(warning.message))
    if state is None:
        return zj.init_state(plan, jax.random.key(options.seed), given)
    done = progress.summary.steps
    if done > options.steps:
        raise ValueError(
            f"--steps: {options.steps}, but the run in {options.out} has made {done}; give more, "
            "or another --out"
        )
    began = read_options(options.out)
    if options.init_from and began and began.get("init_from") != str(options.init_from):
        raise ValueError(
            f"--init-from: the run in {options.out} has made {done} steps and did not begin from "
            f"{options.init_from}; give another --out"
        )
    screen.say(f"going on after step {done}, from {saves.folder / str(int(state.step))}")
    if done == options.steps:
        screen.say("all its steps are made; for more give --steps, for a new run another --out")
    return state


def run(
    options: Options,
    config: TransformerConfig,
    plan: zj.Plan,
    given: Any,
    batches: Any,
    validation: Sequence[Batch],
    rates: np.ndarray,
    screen: Screen,
    files: Files,
) -> tuple[zj.TrainState, Summary]:
    """Run, log, validate and save; raise FloatingPointError for a loss that is not finite."""
    step = zj.make_train_step(
        partial(transformer.loss_fn, config),
        plan,
        microbatches=options.microbatches,
        skip_nonfinite=options.skip_nonfinite,
    )
    eval_step = zj.make_eval_step(partial(transformer.eval_loss_fn, config), plan)
    summary = Summary(recent=deque(maxlen=options.log_every))
    progress = Progress(batches, summary, options.batch)
    keep = {"keep_latest": options.keep, "keep_best": "val_loss"}
    with (
        files,
        stop_on_signals(screen.say_stopping) as stop,  # until the last save is complete
        zj.Checkpointer(options.out / "checkpoints", plan, **keep) as saves,
        screen,
    ):
        state = begin(options, plan, given, saves, progress, screen)
        files.go_on(summary.steps)
        screen.wait("compiling the step ...")
        start = time.perf_counter()
        first = summary.first = summary.steps + 1
        for done in run_steps(step, state, batches, first, options, stop):
            row = {
                "step": done.number,
                **jax.tree.map(float, jax.device_get(done.metrics)),
            }  # waits
            row["lr"] = float(rates[summary.steps - summary.skipped])  # a skip takes no rate
            row["tokens"] = summary.tokens + int(row["weight"])
            row["seconds"] = time.perf_counter() - start
            start = time.perf_counter()
            at_end = done.number == options.steps
            if done.state and (at_end or is_due(done.number, options.eval_every)):
                if math.isnan(summary.val_loss):
                    screen.wait("compiling the validation ...")
                row["val_loss"] = evaluate(eval_step, done.state, validation)
                start = time.perf_counter()
            summary.add(row)
            files.row(row)
            screen.row(row, summary)
            raise_if_not_finite(row)
            saves.check()
            state = done.state or state
            if done.state and (done.last or is_due(done.number, options.save_every)):
                found = {"val_loss": row["val_loss"]} if "val_loss" in row else {}
                saves.save(done.state, data=progress, metrics=found)
        summary.stopped_early = summary.steps < options.steps
    summary.signal = stop.number
    return state, summary
