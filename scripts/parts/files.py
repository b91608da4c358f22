# SPDX-License-Identifier: Apache-2.0
"""What a training run writes to its folder: a row for every step, and its options."""

import contextlib
import importlib
import json
import math
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TextIO

import jax

from scripts.parts.log import Row


def read_options(out: Path) -> dict[str, Any]:
    """Return the options of the run in a folder; none where they are missing, or half a file."""
    with contextlib.suppress(FileNotFoundError, ValueError):
        return json.loads((out / "options.json").read_text(encoding="utf-8"))
    return {}


class Files:
    """Logs of a run in the folder `out`; those of a run that it does not go on from are renamed.

    Only process 0 writes. The folder is made at once, and OSError raised if it cannot be written
    to; nothing in it is moved or written before the first row, so that a run that fails before
    leaves earlier logs as they were.
    """

    def __init__(self, out: Path, options: Mapping[str, Any], say: Callable[[str], None]):
        self.out = out
        self.options = options
        self.say = say
        self.step = 0  # that the run goes on from
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

    def go_on(self, step: int) -> None:
        """Begin at the row after `step`: drop the rows of steps that are to be made again."""
        self.step = step

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
        """Return the open metrics.jsonl: of a new run, or with the rows that the run goes on from.

        Files of another run, and other options, are renamed.
        """
        path, options = self.out / "metrics.jsonl", self.out / "options.json"
        said = json.dumps(self.options, indent=2, default=str) + "\n"
        if self.step:
            if options.exists() and options.read_text(encoding="utf-8") != said:
                if old := read_options(self.out):
                    self.say_changes(old, json.loads(said))
                self.set_aside(options)
            self.keep_rows(path)
        else:
            for old in (path, options, self.out / "tensorboard"):
                self.set_aside(old)
        options.write_text(said, encoding="utf-8")
        with contextlib.suppress(ImportError):
            tensorboard = importlib.import_module("tensorboardX")
            purged = {"purge_step": self.step + 1} if self.step else {}
            self.board = tensorboard.SummaryWriter(str(self.out / "tensorboard"), **purged)
            self.opened.callback(self.board.close)
        return self.opened.enter_context(path.open("a", encoding="utf-8"))

    def keep_rows(self, path: Path) -> None:
        """Drop the rows after the step that the run goes on from, and what a kill cut off."""
        if not path.exists():
            return
        lines = path.read_text(encoding="utf-8").splitlines()
        kept = [x for x in lines if x.endswith("}") and json.loads(x)["step"] <= self.step]
        new = path.with_suffix(".new")
        new.write_text("".join(f"{line}\n" for line in kept), encoding="utf-8")
        new.replace(path)

    def say_changes(self, old: Mapping[str, Any], new: Mapping[str, Any]) -> None:
        """Say which options the run goes on with that it did not begin with."""
        changes = [
            f"--{name.replace('_', '-')} {old.get(name)} -> {new.get(name)}"
            for name in {**old, **new}
            if old.get(name) != new.get(name)
        ]
        self.say(f"going on with other options than before: {'; '.join(changes)}")
        if any(old.get(name) != new.get(name) for name in ("steps", "lr", "warmup")):
            self.say("the learning rate goes on from where the new schedule is: it may jump")

    def set_aside(self, path: Path) -> None:
        """Rename what is there to the first free number, and say so."""
        if path.exists():
            number = 1
            while (kept := path.with_name(f"{path.stem}.{number}{path.suffix}")).exists():
                number += 1
            path.rename(kept)
            self.say(f"{path} of an earlier run is now {kept}")
