# SPDX-License-Identifier: Apache-2.0
"""Reads collectives from compiled programs, loop trip counts multiplied in."""

from __future__ import annotations

import collections
import math
import re

KINDS = "all-gather|all-reduce|reduce-scatter|all-to-all|collective-permute"


def compiled(step, batch):
    return step.lower(step.plan.abstract_state, batch).compile()


def collectives_of(text, num_devices=8):
    """Counter of (kind, elements of the whole array, "loop" or "top") -> times per step.

    Scalars are left out. A collective of a tuple counts once for each array in it.
    """
    bodies, entry, name = collections.defaultdict(list), None, None
    for line in text.splitlines():
        head = re.match(r"(ENTRY )?%?([\w.\-]+) \(.*\{$", line)
        if head:
            name = head[2]
            entry = name if head[1] else entry
        bodies[name].append(line)

    found = collections.Counter()

    def visit(name, times, where):
        for line in bodies[name]:
            loop = re.search(r" while\(.*body=%?([\w.\-]+)", line)
            if loop:
                trips = re.search(r'"known_trip_count":\{"n":"(\d+)"', line)
                assert trips, f"a loop without a trip count: {line[:200]}"
                visit(loop[1], times * int(trips[1]), "loop")
            for called in re.findall(r"(?:calls|to_apply)=%?([\w.\-]+)", line):
                if " while(" not in line and not re.search(rf" ({KINDS})\(", line):
                    visit(called, times, where)
            op = re.search(rf"= (.*?) ({KINDS})(?:-start)?\(", line)
            for shape in re.findall(r"\w+\[([\d,]+)\]", op[1]) if op else ():
                size = math.prod(map(int, shape.split(",")))
                size *= num_devices if op[2] == "reduce-scatter" else 1
                found[op[2], size, where] += times

    visit(entry, 1, "top")
    return found
