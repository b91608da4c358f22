# SPDX-License-Identifier: Apache-2.0
"""When a compiled program computes and when it waits: its schedule on two streams.

Compute runs instruction after instruction in scheduled order; collectives run one after another on
one link. A collective that was started in time costs nothing; what the compute stream waits for at
its end is *exposed*. Every rate is the target's, and is printed with the result: this compares
programs, it does not promise seconds.
"""

from __future__ import annotations

import collections
import math
from typing import NamedTuple

from zerojax.hardware.targets import Target
from zerojax.receipt.hlo import Computation, Instruction, Program, Visit
from zerojax.receipt.hlo_collectives import KINDS, Collective, read_collective
from zerojax.receipt.roofline import KernelCost, cost_of


class Event(NamedTuple):
    """A stretch of one stream.

    Attributes:
      stream: "compute", "link" or "wait" (compute that waits for the link).
      name: of the instruction; kind: "matmul", "attention", "other" or the collective's kind.
      start, end: seconds from the start of the step.
      loops: names of the while loops around it.
    """

    stream: str
    kind: str
    name: str
    start: float
    end: float
    loops: tuple[str, ...]


class Timeline(NamedTuple):
    """One step on two streams.

    Attributes:
      events: in the order in which they were issued.
      seconds: until both streams are done.
      matmul_flops: FLOPs of one device, matrix products and attention, as in Work.
    """

    events: tuple[Event, ...]
    seconds: float
    matmul_flops: float

    def total(self, stream: str) -> float:
        """Seconds that a stream is busy."""
        return sum(event.end - event.start for event in self.events if event.stream == stream)

    @property
    def exposed(self) -> float:
        """Seconds in which nothing is computed because a collective is not done."""
        return self.total("wait")

    def exposed_by_collective(self) -> dict[str, float]:
        """Exposed seconds for each collective of the program, most first."""
        found = collections.defaultdict(float)
        for event in self.events:
            if event.stream == "wait":
                found[event.name] += event.end - event.start
        return dict(sorted(found.items(), key=lambda item: -item[1]))


def collective_seconds(target: Target, collective: Collective) -> float:
    """Start-up plus bytes on the wire by bandwidth; a start-up more for each doubling of hosts."""
    if len(collective.group) < 2:
        return 0.0
    hosts = len({device // target.gpus_per_host for device in collective.group})
    bandwidth = target.bandwidth(hosts, len(collective.group) // hosts)
    start_up = target.collective_seconds * (1 + math.log2(hosts))
    return start_up + collective.wire_bytes / bandwidth


def replay(program: Program, target: Target) -> Timeline:
    """Replays the schedule of a program on a target.

    Args:
      program: scheduled, from `hlo.parse`.
      target: with a GPU; `zerojax.target("h100:8", link_bandwidth=100e9)` changes a rate.

    Raises:
      ValueError: the program is not scheduled, or the target has no rates.
    """
    if not program.is_scheduled:
        raise ValueError("the program is not scheduled; pass the text of a compiled program.")
    if target.gpu is None:
        raise ValueError(
            f"target {target.name!r} has no rates to predict a time with; compile for GPUs, "
            'such as zerojax.make_mesh(target="h100:8").'
        )
    return _Replay(program, target).run()


class _Replay:
    """The state of a replay: the time on each stream, and collectives under way."""

    def __init__(self, program: Program, target: Target):
        self.program, self.target = program, target
        self.now = self.link = self.flops = 0.0
        self.under_way: dict[str, tuple[str, float]] = {}  # start's name -> kind, end
        self.costs: dict[tuple[str, str], KernelCost | None] = {}
        self.events: list[Event] = []

    def run(self) -> Timeline:
        self.computation(self.program.entry, ())
        return Timeline(tuple(self.events), max(self.now, self.link), self.flops)

    def computation(self, computation: Computation, loops: tuple[Instruction, ...]) -> None:
        for x in computation.instructions.values():
            if x.opcode == "while":
                for _ in range(x.trip_count or 1):
                    for name in x.called["body"]:
                        self.computation(self.program.computations[name], (*loops, x))
            elif x.opcode in ("call", "conditional"):
                for names in x.called.values():
                    for name in names:
                        self.computation(self.program.computations[name], loops)
            elif (kind := self.collective_kind(x)) is not None:
                self.start(kind, x, computation, loops)
            elif x.opcode.endswith("-done") and x.operands and x.operands[0] in self.under_way:
                kind, end = self.under_way.pop(x.operands[0])
                self.wait(kind, x.operands[0], end, loops)
            else:
                self.compute(x, computation, loops)

    def collective_kind(self, x: Instruction) -> str | None:
        """The kind of a collective that starts here, also inside an async-start."""
        if x.opcode == "async-start":
            for name in x.called.get("calls", ()):
                inner = self.program.computations[name].instructions.values()
                return next((y.opcode for y in inner if y.opcode in KINDS), None)
        kind = x.opcode.removesuffix("-start")
        return kind if kind in KINDS else None

    def start(self, kind: str, x: Instruction, computation: Computation, loops: tuple) -> None:
        """Puts a collective on the link; a synchronous one is waited for at once."""
        seen, within = x, computation
        if x.opcode == "async-start":
            within = self.program.computations[x.called["calls"][0]]
            seen = next(y for y in within.instructions.values() if y.opcode == kind)
        collective = read_collective(self.program, Visit(seen, within, 1, loops))
        begin = max(self.now, self.link)
        self.link = begin + collective_seconds(self.target, collective)
        self.record("link", kind, x.name, begin, self.link, loops)
        if x.opcode == kind or (x.opcode != "async-start" and not collective.is_async):
            self.wait(kind, x.name, self.link, loops)
        else:
            self.under_way[x.name] = kind, self.link

    def wait(self, kind: str, name: str, end: float, loops: tuple) -> None:
        if end > self.now:
            self.record("wait", kind, name, self.now, end, loops)
            self.now = end

    def compute(self, x: Instruction, computation: Computation, loops: tuple) -> None:
        key = computation.name, x.name
        if key not in self.costs:
            self.costs[key] = cost_of(self.program, computation, x)
        cost = self.costs[key]
        if cost is None:
            return
        kind = "attention" if cost.attention_flops else "matmul" if cost.matmul_flops else "other"
        end = self.now + cost.seconds(self.target)
        self.record("compute", kind, x.name, self.now, end, loops)
        self.now = end
        self.flops += cost.matmul_flops + cost.attention_flops

    def record(self, stream, kind, name, start: float, end: float, loops: tuple) -> None:
        names = tuple(loop.name for loop in loops)
        self.events.append(Event(stream, kind, name, start, end, names))
