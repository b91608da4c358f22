# SPDX-License-Identifier: Apache-2.0
"""Reads a compiled program: optimized HLO text into computations, instructions and loops.

What cannot be read is listed in `Program.unread`; nothing is passed over silently.
"""

from __future__ import annotations

import collections
import dataclasses
import functools
import math
import re
from collections.abc import Iterator
from typing import NamedTuple

_BITS = {"pred": 8, "token": 0, "opaque": 0, "tuple": 0}  # else the digits in the dtype's name
_ARRAY = re.compile(r"\b([a-z]\w*)\[([\d,<=]*)\]")
_LINE = re.compile(r"^\s+(ROOT )?%?([\w.\-]+) = ")
_HEAD = re.compile(r"^(ENTRY )?%?([\w.\-]+) \(.*\{\s*$")
_CALLED = re.compile(
    r"\b(body|condition|calls|to_apply|branch_computations|called_computations"
    r"|true_computation|false_computation)="
)
_NAMES = re.compile(r"%([\w.\-]+)")


class Array(NamedTuple):
    """dtype and shape of one array; a tuple is several."""

    dtype: str
    shape: tuple[int, ...]

    @property
    def size(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)

    @property
    def num_bytes(self) -> int:
        """Bytes of the array, without padding."""
        bits = _BITS.get(self.dtype)
        digits = re.search(r"\d+", self.dtype)
        if bits is None:
            bits = int(digits[0]) if digits else 0
        return -(-self.size * bits // 8)


@dataclasses.dataclass(frozen=True, eq=False)
class Instruction:
    """One line of a computation.

    Attributes:
      name: without its percent sign.
      opcode: such as "fusion", "all-gather-start".
      arrays: what it yields; the leaves of a tuple, in order.
      operands: names of its operands, in the same computation.
      attributes: the rest of the line.
      is_root: it is what its computation returns.
      parameter: which argument of its computation it is, if its opcode is "parameter".
    """

    name: str
    opcode: str
    arrays: tuple[Array, ...]
    operands: tuple[str, ...]
    attributes: str
    is_root: bool
    parameter: int | None = None

    @functools.cached_property
    def called(self) -> dict[str, tuple[str, ...]]:
        """Names of the computations it calls, by attribute."""
        found = {}
        for match in _CALLED.finditer(self.attributes):
            rest = self.attributes[match.end() :]
            listed = rest[1 : rest.index("}")] if rest.startswith("{") else rest.split(",", 1)[0]
            names = (re.sub(r"[^\w.\-].*", "", name.strip(" %")) for name in listed.split(","))
            found[match[1]] = tuple(name for name in names if name)
        return found

    @property
    def op_name(self) -> str:
        """Where in the source it comes from, as JAX wrote it: scopes and a primitive."""
        match = re.search(r'op_name="([^"]*)"', self.attributes)
        return match[1] if match else ""

    @property
    def trip_count(self) -> int | None:
        """How often a while loop runs, where XLA knows it."""
        match = re.search(r'"known_trip_count":\s*\{"n":\s*"(\d+)"', self.attributes)
        return int(match[1]) if match else None

    @property
    def num_bytes(self) -> int:
        """Bytes of what it yields."""
        return sum(array.num_bytes for array in self.arrays)


@dataclasses.dataclass(frozen=True, eq=False)
class Computation:
    """Instructions in the order in which they run, if the program is scheduled."""

    name: str
    instructions: dict[str, Instruction]

    def operand_arrays(self, instruction: Instruction) -> list[Array]:
        """The arrays that an instruction takes."""
        found = [self.instructions.get(name) for name in instruction.operands]
        return [array for operand in found if operand for array in operand.arrays]

    @functools.cached_property
    def users(self) -> dict[str, list[Instruction]]:
        """Who takes each instruction as an operand."""
        found = collections.defaultdict(list)
        for x in self.instructions.values():
            for name in dict.fromkeys(x.operands):
                found[name].append(x)
        return found

    @functools.cached_property
    def root(self) -> Instruction:
        """What the computation returns."""
        marked = [x for x in self.instructions.values() if x.is_root]
        return marked[0] if marked else list(self.instructions.values())[-1]


class Visit(NamedTuple):
    """An instruction of a computation that runs by itself, not inside a fusion.

    Attributes:
      instruction: what runs.
      computation: where it stands.
      times: how often in one call of the program, the trip counts of its loops multiplied.
      loops: the while loops around it, outermost first.
    """

    instruction: Instruction
    computation: Computation
    times: int
    loops: tuple[Instruction, ...]


@dataclasses.dataclass(frozen=True, eq=False)
class Program:
    """A compiled program.

    Attributes:
      computations: by name.
      entry: the computation that runs first.
      num_devices: over how many devices it is partitioned.
      is_scheduled: the order of instructions is the order of execution.
      aliased: parameter numbers of the entry whose memory an output takes over (donated).
      unread: what could not be read, one sentence each.
    """

    computations: dict[str, Computation]
    entry: Computation
    num_devices: int
    is_scheduled: bool
    aliased: frozenset[int]
    unread: list[str]

    def walk(self) -> Iterator[Visit]:
        """Every instruction that runs by itself, in order, loop bodies once at their loop."""
        yield from self._walk(self.entry, 1, ())

    def _walk(self, computation: Computation, times: int, loops: tuple) -> Iterator[Visit]:
        for x in computation.instructions.values():
            yield Visit(x, computation, times, loops)
            inner, around = times, loops
            if x.opcode == "while":
                if x.trip_count is None:
                    self.note(f"{x.name}: a loop of unknown trip count, counted once")
                inner, around = times * (x.trip_count or 1), (*loops, x)
                names = x.called.get("body", ())
            elif x.opcode in ("call", "conditional", "async-start"):
                if x.opcode == "conditional":
                    self.note(f"{x.name}: a branch; all its sides are counted")
                names = (name for attribute in x.called.values() for name in attribute)
            else:
                continue
            for name in names:
                yield from self._walk(self.computations[name], inner, around)

    @functools.cached_property
    def async_bodies(self) -> frozenset[str]:
        """Names of the computations that an async-start runs beside others."""
        every = (x for c in self.computations.values() for x in c.instructions.values())
        starts = (x.called.get("calls", ()) for x in every if x.opcode == "async-start")
        return frozenset(name for names in starts for name in names)

    def note(self, text: str) -> None:
        """Adds to `unread`, once."""
        if text not in self.unread:
            self.unread.append(text)


def parse(text: str) -> Program:
    """Reads the text of `jax.stages.Compiled.as_text()`.

    Raises:
      ValueError: the text has no entry computation.

    Example:
      >>> import jax, jax.numpy as jnp
      >>> program = parse(jax.jit(lambda x: x @ x).lower(jnp.ones((2, 2))).compile().as_text())
      >>> program.entry.root.arrays
      (Array(dtype='f32', shape=(2, 2)),)
    """
    computations, unread, lines, entry = {}, [], None, None
    for line in text.splitlines():
        head = _HEAD.match(line)
        if head:
            lines = computations[head[2]] = {}
            entry = head[2] if head[1] else entry
        elif line.startswith("}"):
            lines = None
        elif lines is not None and line.strip():
            instruction = _parse_line(line)
            if instruction is None:
                unread.append(f"line not understood: {line.strip()[:120]}")
            else:
                lines[instruction.name] = instruction
    if entry is None:
        raise ValueError("the text has no ENTRY computation; pass compiled.as_text().")
    built = {name: Computation(name, lines) for name, lines in computations.items()}
    first = text[: text.index("\n")]
    partitions = re.search(r"num_partitions=(\d+)", first)
    alias = re.search(r"input_output_alias=\{(.*?)\}, [a-z_]+=", first)
    return Program(
        computations=built,
        entry=built[entry],
        num_devices=int(partitions[1]) if partitions else 1,
        is_scheduled="is_scheduled=true" in first,
        aliased=frozenset(map(int, re.findall(r"\((\d+), \{", alias[1]))) if alias else frozenset(),
        unread=unread,
    )


def _parse_line(line: str) -> Instruction | None:
    """An instruction from its line, or None."""
    head = _LINE.match(line)
    if not head:
        return None
    start = head.end()
    end = _closing(line, start) + 1 if line.startswith("(", start) else line.find(" ", start)
    opcode = re.match(r"\s*([\w\-]+)\(", line[end:]) if end > 0 else None
    if not opcode:
        return None
    opened = end + opcode.end() - 1
    closed = _closing(line, opened)
    arrays = tuple(
        Array(dtype, tuple(int(n.lstrip("<=")) for n in dims.split(",") if n))
        for dtype, dims in _ARRAY.findall(re.sub(r"\{[^}]*\}", "", line[start:end]))
    )
    inside = line[opened + 1 : closed]
    operands = () if opcode[1] in ("constant", "parameter") else tuple(_NAMES.findall(inside))
    return Instruction(
        name=head[2],
        opcode=opcode[1],
        arrays=arrays,
        operands=operands,
        attributes=line[closed + 1 :].lstrip(", "),
        is_root=bool(head[1]),
        parameter=int(inside) if opcode[1] == "parameter" else None,
    )


def _closing(text: str, start: int) -> int:
    """Position of the bracket that closes the one at `start`."""
    depth = 0
    for match in re.compile(r"[()]").finditer(text, start):
        depth += 1 if match[0] == "(" else -1
        if depth == 0:
            return match.start()
    return len(text)
