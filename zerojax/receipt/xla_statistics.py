# SPDX-License-Identifier: Apache-2.0
"""XLA's own estimate of exposed communication: a second opinion beside `timeline.py`.

The latency-hiding scheduler counts, for each computation, the cycles (microseconds of its own cost
model) that it could not fill while a collective was under way. It believes in other rates than
ours, and that anything asynchronous hides a collective, so its figure is often smaller.
"""

from __future__ import annotations

import collections
import pathlib
import re
import tempfile

import jax

from zerojax.receipt import hlo


def compile_with_statistics(lowered: jax.stages.Lowered) -> tuple[jax.stages.Compiled, float]:
    """Compiles, and returns the program and XLA's estimate of its exposed communication.

    Args:
      lowered: for GPUs, here or compile-only.

    Returns:
      The compiled program, and seconds per step.

    Raises:
      ValueError: XLA wrote no statistics, as on backends that do not schedule.
    """
    with tempfile.TemporaryDirectory() as folder:
        options = {"xla_dump_to": folder, "xla_dump_latency_hiding_schedule": True}
        compiled = lowered.compile(compiler_options=options)
        files = sorted(pathlib.Path(folder).glob("*.schedule.txt"))
        if not files:
            raise ValueError("XLA wrote no scheduler statistics; compile for GPUs to have them.")
        cycles = _wasted_cycles(files[-1].read_text())
    program = hlo.parse(compiled.as_text() or "")
    times = {program.entry.name: 1}
    for visit in program.walk():
        times[visit.computation.name] = visit.times
    return compiled, sum(n * times.get(name, 1) for name, n in cycles.items()) / 1e6


def _wasted_cycles(text: str) -> dict[str, float]:
    """Cycles that each computation wastes, by its name; from protobuf text."""
    names, found = {}, collections.defaultdict(float)
    name = identity = None
    for line in text.splitlines():
        field = re.match(r"( *)(\w+): \"?([^\"]*)", line)
        if line.startswith("  computations {"):
            name = None
        elif line.startswith("computation_schedules {"):
            identity = None
        elif not field:
            continue
        elif field[1] == "    " and field[2] == "name" and name is None:
            name = field[3]
        elif field[1] == "    " and field[2] == "id" and name is not None:
            names[field[3]] = name
        elif field[1] == "  " and field[2] == "computation_id":
            identity = field[3]
        elif field[1] == "    " and field[2] == "total_wasted_cycles":
            found[names.get(identity, "")] += float(field[3])
    return dict(found)
