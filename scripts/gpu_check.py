# SPDX-License-Identifier: Apache-2.0
"""What only a GPU can show: steps that run, and predicted beside measured memory and time.

  make gpu-check ARGS="--minutes 8"

For one NVIDIA GPU. Each size has a process of its own, as the peak of a process cannot be reset.
What does not fit into the time is left out, and named; results.json is written after every part.
Exit code 1 if a check failed, 2 if there is no GPU.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import textwrap
import time
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from scripts.parts.gpu_parts import CHECKS, PARTS, SIZES, Figures, Job
from zerojax.hardware.devices import may_have_accelerator
from zerojax.table import format_bytes, format_table

WIDTH = 100
REMEDY = "run it on a host with one, or with --dry-run to try the script on the CPU"
SECONDS = {"device": 15} | dict.fromkeys(CHECKS, 30) | dict.fromkeys(SIZES, 60)  # to begin with
LONGEST = 150  # of one part, so that one that hangs leaves time for the others


def read_options(arguments: Sequence[str] | None) -> argparse.Namespace:
    """Read the command line; ends with exit code 2 for a mistake."""
    # argparse needs nothing installed: this runs with whatever JAX the GPU's host has.
    parser = argparse.ArgumentParser("python -m scripts.gpu_check", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--minutes", type=float, default=8, help="of the whole run (8)")
    parser.add_argument("--out", type=Path, default=Path("out/gpu-check"), help="folder of results")
    parser.add_argument("--target", help="rates of a GPU that is not known by name, as h100:1")
    parser.add_argument("--dry-run", action="store_true", help="tiny, on the CPU; no GPU needed")
    parser.add_argument("--parts", nargs="+", choices=PARTS, help="run these alone (default: all)")
    parser.add_argument("--deadline", type=float, help=argparse.SUPPRESS)  # set for a child process
    options = parser.parse_args(arguments)
    if not options.minutes > 0:
        parser.error(f"--minutes: {options.minutes} is no time; give more than 0")
    return options


def too_late(name: str, deadline: float, now: float) -> str | None:
    """Why a part is not begun any more, or None."""
    left = max(0.0, deadline - now)
    if left >= SECONDS[name]:
        return None
    return f"{left:.0f} s were left of the time, and it may take {SECONDS[name]}"


def run_parts(job: Job, names: Sequence[str], deadline: float) -> None:
    """In a child process: run the parts, and print the figures of each as a line of JSON."""
    for name in names:
        begin = time.time()
        figures: Figures = {"part": name}
        if reason := too_late(name, deadline, begin):
            print(json.dumps({**figures, "left_out": reason}), flush=True)
            continue
        # Ends the process, also within a library; whoever started it goes on with the other parts.
        signal.alarm(max(1, int(min(deadline - begin, LONGEST))))
        try:
            PARTS[name](job, figures)
        except Exception as error:
            traceback.print_exc()
            why = f"{type(error).__name__}: {str(error).strip()}".splitlines()[0]
            figures |= {"passed": False, "what": why[:400]}
        signal.alarm(0)
        figures["wall_seconds"] = round(time.time() - begin, 1)
        print(json.dumps(figures), flush=True)


def run_group(
    options: argparse.Namespace,
    names: Sequence[str],
    deadline: float,
    record: Callable[[Figures], None],
) -> None:
    """Run parts in a child process, and those after one that ended it in another."""
    waiting = list(names)
    environment = os.environ | {"XLA_PYTHON_CLIENT_PREALLOCATE": "false"}
    if options.dry_run:
        environment["JAX_PLATFORMS"] = "cpu"
    command = [sys.executable, "-m", "scripts.gpu_check", "--out", str(options.out.resolve())]
    command += ["--deadline", str(deadline), *(["--dry-run"] if options.dry_run else [])]
    command += [f"--target={options.target}"] if options.target else []
    log_path = options.out / "log.txt"
    while waiting:
        if reason := too_late(waiting[0], deadline, time.time()):
            record({"part": waiting.pop(0), "left_out": reason})
            continue
        with (
            log_path.open("a") as log,
            subprocess.Popen(
                [*command, "--parts", *waiting],
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
                env=environment,
                cwd=Path(__file__).parents[1],
            ) as child,
        ):
            assert child.stdout is not None
            for line in child.stdout:
                if line.startswith('{"part"'):
                    figures = json.loads(line)
                    waiting.remove(figures["part"])
                    record(figures)
        if waiting:  # the child died in the first of them
            name, code = waiting.pop(0), child.returncode
            if code == -signal.SIGALRM:
                record({"part": name, "left_out": "it was stopped, as it took too long"})
            else:
                what = f"the process ended with {code}; see {log_path}"
                record({"part": name, "passed": False, "what": what})


def describe(x: Figures) -> str:
    """A size in a line."""
    kinds = ("formula", "compiled", "measured")
    sizes = [(kind, x[f"{kind}_bytes"]) for kind in kinds if x.get(f"{kind}_bytes")]
    memory = ", ".join(f"{format_bytes(size)} {kind}" for kind, size in sizes)
    times = [(kind, x.get(f"{kind}_seconds")) for kind in ("predicted", "measured")]
    times = [(kind, seconds) for kind, seconds in times if seconds]
    step = f"; step {', '.join(f'{1e3 * y:.1f} ms {kind}' for kind, y in times)}" if times else ""
    return f"peak {memory}{step}; {x['what']}"


class Report:
    """Everything found so far, on the screen and in results.json."""

    def __init__(self, out: Path):
        self.out, self.parts, self.start = out, [], time.time()

    def add(self, figures: Figures) -> None:
        """Print a part and write the file again, so that an abort keeps what was done."""
        self.parts.append(figures)
        name, what = figures["part"], figures.get("left_out") or figures.get("what", "")
        if "left_out" in figures:
            verdict = "left out"
        else:
            verdict = "ok" if figures.get("passed", True) else "FAILED"
        if name in SIZES and "formula_bytes" in figures:
            what = describe(figures)
        first = f"{verdict:<8}  {name:<15}  "
        lines = textwrap.wrap(what, WIDTH, initial_indent=first, subsequent_indent=" " * len(first))
        print("\n".join(lines) or first.rstrip(), flush=True)
        self.write()

    def write(self, **more: Any) -> None:
        """All figures, in bytes and seconds."""
        everything = {"parts": self.parts, "seconds": round(time.time() - self.start, 1), **more}
        (self.out / "results.json").write_text(json.dumps(everything, indent=1) + "\n")

    def named(self, key: str) -> list[str]:
        """The parts that were left out, or failed."""
        if key == "left_out":
            return [x["part"] for x in self.parts if key in x]
        return [x["part"] for x in self.parts if not x.get("passed", True)]

    def summary(self) -> str:
        """The tables of the sizes, and what is not shown."""
        memory, times = [], []
        for x in self.parts:
            if x["part"] not in SIZES or "formula_bytes" not in x:
                continue
            measured, held = x.get("measured_bytes"), x.get("init_peak_bytes") or 0
            # The initialisation may have held more than the step: then this is a bound.
            bound = "<= " if measured and held >= measured else ""
            bytes_of = [x["formula_bytes"], x.get("compiled_bytes"), measured]
            cells = ["-" if size is None else format_bytes(size) for size in bytes_of]
            cells[2] = bound + cells[2]
            shape = f"{x['rows']} x {x['tokens']}"
            memory.append([x["size"], shape, *cells, *(ratio(measured, y) for y in bytes_of[:2])])
            pair = x.get("measured_seconds"), x.get("predicted_seconds")
            cells = ["-" if y is None else f"{1e3 * y:.1f} ms" for y in (pair[1], pair[0])]
            mfu = f"{x['mfu']:.1%}" if "mfu" in x else "-"
            times.append([x["size"], *cells, ratio(*pair), mfu])
        header = ["peak memory", "tokens", "formula", "compiled", "measured"]
        header += ["measured / formula", "/ compiled"]
        blocks = [format_table(header, memory, right=range(1, 7))] if memory else []
        header = ["step", "predicted", "measured", "measured / predicted", "MFU"]
        blocks += [format_table(header, times, right=range(1, 5))] if times else []
        failed, left = self.named("failed"), self.named("left_out")
        end = f"failed: {', '.join(failed) or 'nothing'}; left out: {', '.join(left) or 'nothing'}"
        blocks.append(textwrap.fill(f"{end}; all figures: {self.out / 'results.json'}", WIDTH))
        return "\n\n".join(blocks)


def ratio(measured: float | None, predicted: float | None) -> str:
    """Measured to predicted, or a dash."""
    return f"{measured / predicted:.3f}" if measured and predicted else "-"


def main(arguments: Sequence[str] | None = None) -> int:
    """Run everything; returns the exit code."""
    options = read_options(arguments)
    if options.deadline:
        job = Job(options.out, options.dry_run, options.target)
        run_parts(job, options.parts, options.deadline)
        return 0
    # The time begins with the process, and ends with its summary.
    deadline = time.time() + 60 * options.minutes - 5
    if not options.dry_run and not may_have_accelerator():
        print(f"error: no NVIDIA GPU here; {REMEDY}", file=sys.stderr)
        return 2
    options.out.mkdir(parents=True, exist_ok=True)
    report = Report(options.out)
    wanted = [x for x in options.parts or PARTS if x != "device"]
    checks, sizes = [[x for x in wanted if (x in SIZES) is which] for which in (False, True)]
    run_group(options, ["device"], deadline, report.add)
    if report.named("failed"):
        print(f"error: {report.parts[0]['what']}", file=sys.stderr)
        return 2
    # A dry run measures no memory, so its sizes may share a process.
    for names in (checks, *([sizes] if options.dry_run else [[x] for x in sizes])):
        run_group(options, names, deadline, report.add)
    code = 1 if report.named("failed") else 0
    print(f"\n{report.summary()}", flush=True)
    report.write(exit_code=code)
    return code


if __name__ == "__main__":
    try:
        sys.exit(main())
    except KeyboardInterrupt:
        sys.exit(130)
