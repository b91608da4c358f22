# SPDX-License-Identifier: Apache-2.0
"""What a training run leaves behind: the screen, the files, and a summary of both."""

import contextlib
import dataclasses
import importlib
import json
import math
import resource
import signal
import sys
import tempfile
import textwrap
import threading
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, TextIO

import jax
import jax.numpy as jnp
import numpy as np
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

import zerojax as zj

# Dense bf16 FLOP/s of one device, from NVIDIA's datasheets; the first name in `device_kind` wins.
PEAKS = {
    "A100": 312e12,
    "H100 PCIe": 756e12,
    "H100 NVL": 835e12,
    "H100": 989e12,
    "H200": 989e12,
    "GB200": 2.5e15,
    "B200": 2.25e15,
}
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
    stopped_early: bool = False
    sample: str = ""

    def add(self, row: Row) -> None:
        """Count the row of a step in."""
        if row["step"] == 2:  # the first one compiled
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


@contextlib.contextmanager
def stop_on_ctrl_c(answer: Callable[[], None]) -> Iterator[threading.Event]:
    """Yield an event that the first Ctrl-C sets, with an answer; the second ends the process."""
    stop = threading.Event()

    def first_press(*_: object) -> None:
        stop.set()
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        answer()

    before = signal.signal(signal.SIGINT, first_press)
    try:
        yield stop
    finally:
        signal.signal(signal.SIGINT, before)


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
        self.peak = next((peak for name, peak in PEAKS.items() if name in self.device_kind), None)
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

    def say_stopping(self) -> None:
        """Answer the first Ctrl-C; the second leaves no time to bring the cursor back."""
        self.console.show_cursor()
        self.say("stopping after this step; press Ctrl-C again to quit at once")

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


class Files:
    """The files of a run in the folder `out`; an earlier run's are kept under the next number.

    Only process 0 writes. The folder is made at once, and OSError raised if it cannot be written
    to; nothing in it is moved or written before the first row, so that a run that fails before
    leaves earlier logs as they were.
    """

    def __init__(self, out: Path, options: Mapping[str, Any], say: Callable[[str], None]):
        self.out = out
        self.options = options
        self.say = say
        self.rows = None  # the open metrics.jsonl
        self.board = None  # TensorBoard's writer, if installed
        self.opened = contextlib.ExitStack()
        if jax.process_index() == 0:
            try:
                out.mkdir(parents=True, exist_ok=True)
                tempfile.TemporaryFile(dir=out).close()
            except OSError as error:
                why = f"cannot write to the folder {out} ({error.strerror})"
                raise OSError(f"--out: {why}; give another") from error

    def __enter__(self) -> "Files":
        return self

    def __exit__(self, *_: object) -> None:
        self.opened.close()

    def row(self, row: Row) -> None:
        """Write the row of a step; what is not finite is `null`."""
        if jax.process_index() > 0:
            return
        if self.rows is None:
            self.rows = self.open()
        valid = {name: x if math.isfinite(x) else None for name, x in row.items()}
        print(json.dumps(valid, allow_nan=False), file=self.rows, flush=True)
        if self.board:
            for name, x in row.items():
                self.board.add_scalar(name, x, int(row["step"]))

    def open(self) -> TextIO:
        """Rename the files of an earlier run, start new ones, and return the open metrics.jsonl."""
        number = 1 + len(list(self.out.glob("metrics.*.jsonl")))
        for name in ("metrics.jsonl", "options.json", "tensorboard"):
            path = self.out / name
            if path.exists():
                kept = path.rename(self.out / f"{path.stem}.{number}{path.suffix}")
                self.say(f"{path} of an earlier run is now {kept}")
        options = json.dumps(self.options, indent=2, default=str)
        (self.out / "options.json").write_text(options + "\n", encoding="utf-8")
        with contextlib.suppress(ImportError):
            tensorboard = importlib.import_module("tensorboardX")
            self.board = tensorboard.SummaryWriter(str(self.out / "tensorboard"))
            self.opened.callback(self.board.close)
        return self.opened.enter_context((self.out / "metrics.jsonl").open("w", encoding="utf-8"))
