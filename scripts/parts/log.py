# SPDX-License-Identifier: Apache-2.0
"""What a training run says: the screen, its summary, and its answer to signals."""

import contextlib
import dataclasses
import math
import resource
import signal
import sys
import textwrap
import threading
from collections import deque
from collections.abc import Callable, Iterator

import jax
import jax.numpy as jnp
import numpy as np
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

import zerojax as zj
from zerojax.hardware.targets import peak_flops

WIDTH = 100  # columns of what is wrapped

Row = dict[str, float]


@dataclasses.dataclass
class Summary:
    """What a run came to so far. Losses are nats per token: per byte without a tokenizer."""

    recent: deque[Row] = dataclasses.field(repr=False)  # rows of the last log_every steps
    steps: int = 0
    loss: float = math.nan  # mean of the recent steps, those that are finite
    val_loss: float = math.nan
    tokens: int = 0
    tokens_per_second: float = 0.0  # over the recent steps; the first step compiles
    skipped: int = 0
    first: int = 1  # the first step of this process, which compiles
    stopped_early: bool = False
    signal: int = 0  # the one that stopped it
    sample: str = ""

    def add(self, row: Row) -> None:
        """Count the row of a step in."""
        if row["step"] == self.first + 1:  # the first one compiled
            self.recent.clear()
        self.recent.append(row)
        self.steps = int(row["step"])
        self.tokens = int(row["tokens"])
        self.skipped += int(row.get("skipped", 0))
        self.val_loss = row.get("val_loss", self.val_loss)
        losses = [each["loss"] for each in self.recent if math.isfinite(each["loss"])]
        self.loss = sum(losses) / len(losses) if losses else math.nan
        weight = sum(each["weight"] for each in self.recent)
        self.tokens_per_second = weight / sum(each["seconds"] for each in self.recent)

    def numbers(self) -> Row:
        """Return what a run that goes on must know; those that are not there yet are left out."""
        numbers = {name: getattr(self, name) for name in ("steps", "tokens", "skipped")}
        losses = {name: getattr(self, name) for name in ("loss", "val_loss")}
        return numbers | {name: x for name, x in losses.items() if math.isfinite(x)}

    @property
    def seconds_per_step(self) -> float:
        """Mean over the recent steps."""
        return sum(row["seconds"] for row in self.recent) / len(self.recent)

    def __str__(self) -> str:
        end = "stopped early" if self.stopped_early else "done"
        steps = "1 step" if self.steps == 1 else f"{self.steps} steps"
        val = "" if math.isnan(self.val_loss) else f", validation {self.val_loss:.3f}"
        losses = f"loss {self.loss:.3f}{val} nats per token"
        return f"{end} after {steps}, {self.skipped} of them skipped: {losses}"


def raise_if_not_finite(row: Row) -> None:
    """Raise FloatingPointError for a step that spoiled the parameters and was not skipped."""
    loss, grad_norm = row["loss"], row["grad_norm"]
    if not math.isfinite(loss + grad_norm) and not row.get("skipped"):
        remedy = "try a lower --lr, --precision fp32 or --skip-nonfinite"
        step = int(row["step"])
        raise FloatingPointError(f"step {step}: loss {loss} and grad_norm {grad_norm}; {remedy}")


class Stop(threading.Event):
    """Set when the run is to stop, by the signal of that number."""

    number = 0


@contextlib.contextmanager
def stop_on_signals(answer: Callable[[int], None]) -> Iterator[Stop]:
    """Yield an event that the first Ctrl-C or SIGTERM sets; a second one ends the process."""
    stop = Stop()

    def first(number: int, _: object) -> None:
        stop.number = number
        stop.set()
        for each in before:
            signal.signal(each, signal.SIG_DFL)
        answer(number)

    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    for number in before:
        signal.signal(number, first)
    try:
        yield stop
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def ask_all(stop: threading.Event, state: zj.TrainState, step: zj.Step) -> Callable[[], bool]:
    """Ask all processes whether one was told to stop; what this returns gives them one answer.

    A process that stopped by itself would leave the others waiting for it in a collective. Asked
    before a step starts and read while it runs, the answer keeps no device waiting.
    """
    if jax.process_count() == 1:
        return stop.is_set
    if step.simulated:  # one program at a time, as in `step`
        jax.block_until_ready(state.step)
    here = np.full(len(step.plan.mesh.local_devices), stop.is_set())
    anywhere = jnp.any(zj.shard_batch(here, step.plan))
    if step.simulated:
        jax.block_until_ready(anywhere)
    return lambda: bool(anywhere)


def peak_memory() -> float:
    """Return the most GB that device 0 held; on a CPU, that this process held."""
    stats = jax.local_devices()[0].memory_stats()
    if stats:
        return stats["peak_bytes_in_use"] / 1e9
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit / 1e9


def wrap(label: str, text: str) -> str:
    """Put `label` before `text`, whose lines are kept, wrapped and indented to WIDTH columns.

    >>> print(wrap("prompt: ", "if x:\\n  y"))
    prompt: if x:
              y
    """
    lines = []
    for line in text.splitlines():
        # A model that has learned little writes control characters, which a terminal would obey.
        line = "".join(
            c if c.isprintable() else "\N{REPLACEMENT CHARACTER}" for c in line.expandtabs(4)
        )
        lines += textwrap.wrap(line, WIDTH - len(label), drop_whitespace=False) or [""]
    first, *rest = lines or [""]
    indented = [label + first, *(" " * len(label) + line for line in rest)]
    return "\n".join(line.rstrip() for line in indented)


class Screen:
    """What process 0 prints: lines and, on a terminal and while `with` lasts, a bar."""

    def __init__(self, steps: int, log_every: int, flops_per_token: int, num_devices: int):
        self.steps = steps
        self.log_every = log_every
        self.flops_per_token = flops_per_token
        self.device_kind = jax.devices()[0].device_kind
        self.peak = peak_flops(self.device_kind)
        self.mfu_per_speed = flops_per_token / (self.peak * num_devices) if self.peak else None
        self.on_terminal = sys.stdout.isatty()
        quiet = jax.process_index() > 0
        self.console = Console(quiet=quiet, force_terminal=self.on_terminal, soft_wrap=True)
        self.bar = Progress(
            TextColumn("step {task.completed}/{task.total}"),
            BarColumn(10),
            TextColumn("{task.description}", markup=False),
            TimeRemainingColumn(compact=True),
            console=self.console,
            disable=not self.on_terminal,
        )
        self.task = self.bar.add_task("", total=steps)

    def __enter__(self) -> "Screen":
        self.bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.bar.stop()
        self.bar.disable = True  # what follows is lines

    def say(self, text: str) -> None:
        """Print text as it is."""
        self.console.print(text, markup=False, highlight=False)

    def wait(self, text: str) -> None:
        """Say what takes a while: on the bar, or as a line where there is none."""
        if self.bar.disable:
            self.say(text)
        else:
            self.bar.update(self.task, description=text, refresh=True)

    def say_stopping(self, number: int) -> None:
        """Answer the first signal; a second leaves no time to bring the cursor back."""
        self.console.show_cursor()
        again = "press Ctrl-C again to quit at once"
        why = again if number == signal.SIGINT else f"{signal.Signals(number).name} received"
        self.say(f"saving after this step, then stopping; {why}")

    def legend(self) -> None:
        """Say what the numbers of a row are."""
        holder = "device 0" if jax.local_devices()[0].memory_stats() else "this process"
        means = f"loss, tokens/s and ms a step are means of the last {self.log_every} steps"
        self.say(f"{means}; GB: peak memory of {holder}")
        if self.peak is None:
            self.say(f"MFU is not shown: no peak is known for {self.device_kind}")
            return
        peak = f"a peak of {self.peak:.3g} FLOP/s (NVIDIA's datasheet, dense bf16)"
        self.say(f"MFU: {self.device_kind} has {peak};")
        formula = "6 x parameters in matmuls + 6 x layers x d_model x seq"
        self.say(f"a token takes {self.flops_per_token:.3g} FLOPs: {formula}")

    def row(self, row: Row, summary: Summary) -> None:
        """Show a step on the bar, or every `log_every` steps as a line; validations always."""
        numbers = [
            f"loss {summary.loss:.3f}",
            f"{summary.tokens_per_second / 1e3:.1f}k tokens/s",
            f"{1e3 * summary.seconds_per_step:.0f} ms",
            f"{peak_memory():.2f} GB",
        ]
        if self.mfu_per_speed:
            numbers.append(f"MFU {summary.tokens_per_second * self.mfu_per_speed:.1%}")
        self.bar.update(self.task, completed=summary.steps, description="  ".join(numbers))
        if "val_loss" in row:
            numbers.append(f"validation {row['val_loss']:.3f}")
        elif not self.bar.disable or summary.steps % self.log_every:
            return
        self.say("  ".join([f"step {summary.steps:5d}/{self.steps}", *numbers]))
