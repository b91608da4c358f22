# SPDX-License-Identifier: Apache-2.0
"""Counts collectives of compiled programs, loop trip counts multiplied in."""

from __future__ import annotations

import collections

from zerojax.receipt import hlo
from zerojax.receipt import hlo_collectives as wire


def compiled(step, batch):
    return step.lower(step.plan.abstract_state, batch).compile()


def collectives_of(text):
    """Counter of (kind, elements of the whole array, "loop" or "top") -> times per step.

    Scalars are left out. A collective of a tuple counts once for each array in it.
    """
    found = collections.Counter()
    program = hlo.parse(text)
    for collective in wire.collectives(program):
        for array in collective.arrays:
            gathered = len(collective.group) if collective.kind == "all-gather" else 1
            if array.shape:
                where = "loop" if collective.loops else "top"
                found[collective.kind, array.size * gathered, where] += collective.times
    assert not program.unread
    return found
