# SPDX-License-Identifier: Apache-2.0
"""The collectives of a compiled program: kind, dtype, devices, count and bytes on the wire."""

from __future__ import annotations

import math
import re
from typing import NamedTuple

from zerojax.receipt.hlo import Array, Instruction, Program, Visit

KINDS = (
    "all-gather",
    "all-reduce",
    "reduce-scatter",
    "all-to-all",
    "ragged-all-to-all",
    "collective-permute",
    "collective-broadcast",
)


def ring(num_devices: int) -> float:
    """The share of a whole array that each of so many devices sends to gather or scatter it.

    >>> ring(8)
    0.875
    """
    return (num_devices - 1) / num_devices


class Collective(NamedTuple):
    """A collective, with what one device sends and what it is for.

    Attributes:
      kind: one of KINDS.
      arrays: what each device puts in.
      group: the devices of the first group, by position in the mesh.
      times: executions in one call of the program.
      loops: the while loops around it, outermost first.
      is_async: a start and a done with room between them.
      op_name: as of Instruction.
      name: of the instruction.
    """

    kind: str
    arrays: tuple[Array, ...]
    group: tuple[int, ...]
    times: int
    loops: tuple[Instruction, ...]
    is_async: bool
    op_name: str
    name: str

    @property
    def whole_bytes(self) -> int:
        """Bytes of the whole arrays that are gathered, reduced or exchanged."""
        factor = len(self.group) if self.kind == "all-gather" else 1
        return factor * sum(array.num_bytes for array in self.arrays)

    @property
    def wire_bytes(self) -> float:
        """Bytes that each device sends in one execution, by the ring algorithms.

        (N - 1) / N of the whole for an all-gather, a reduce-scatter or an all-to-all, twice that
        for an all-reduce (Rajbhandari et al., arXiv 1910.02054, section 7), all of it for a
        permutation or a broadcast.
        """
        num_devices = len(self.group)
        if self.kind in ("collective-permute", "collective-broadcast"):
            return self.whole_bytes if num_devices > 1 else 0
        passes = 2 if self.kind == "all-reduce" else 1
        return passes * self.whole_bytes * ring(num_devices)


def collectives(program: Program) -> tuple[Collective, ...]:
    """Every collective of the program, in order.

    Example:
      >>> import jax, jax.numpy as jnp, zerojax as zj
      >>> from zerojax.receipt.hlo import parse
      >>> total = jax.shard_map(lambda x: jax.lax.psum(x, "data"), mesh=zj.make_mesh(8),
      ...     in_specs=jax.P("data"), out_specs=jax.P())
      >>> text = jax.jit(total).lower(jnp.ones(64)).compile().as_text()
      >>> [(x.kind, x.times, x.whole_bytes, x.wire_bytes) for x in collectives(parse(text))]
      [('all-reduce', 1, 32, 56.0)]
    """
    found, reached = [], set()
    for visit in program.walk():
        reached.add(visit.computation.name)
        if visit.instruction.opcode.removesuffix("-start") in KINDS:
            found.append(read_collective(program, visit))
    for name, computation in program.computations.items():
        for x in computation.instructions.values():
            kind = x.opcode.removesuffix("-start")
            if name not in reached and (kind in KINDS or kind in ("send", "recv")):
                program.note(f"{x.name}: {x.opcode} in {name}, which was not reached")
    return tuple(found)


def read_collective(program: Program, visit: Visit) -> Collective:
    """The collective that a visited instruction starts."""
    x = visit.instruction
    arrays = tuple(
        array
        for name in x.operands
        if name in visit.computation.instructions
        for array in _pieces(program, visit.computation.instructions[name])
    )
    if not arrays:
        program.note(f"{x.name}: a collective whose operands were not found")
    starts = x.opcode.endswith("-start") and '"is_sync":true' not in x.attributes
    return Collective(
        kind=x.opcode.removesuffix("-start"),
        arrays=arrays,
        group=_group(program, x),
        times=visit.times,
        loops=visit.loops,
        is_async=starts or visit.computation.name in program.async_bodies,
        op_name=x.op_name,
        name=x.name,
    )


def _pieces(program: Program, x: Instruction) -> tuple[Array, ...]:
    """The arrays that an operand is made of: XLA flattens several into one for an all-reduce."""
    if x.opcode == "fusion" and len(x.arrays) == 1:
        fused = program.computations[x.called["calls"][0]]
        if fused.root.opcode == "concatenate" and len(x.arrays[0].shape) == 1:
            return tuple(fused.operand_arrays(fused.root))
    return x.arrays


def _group(program: Program, x: Instruction) -> tuple[int, ...]:
    """The first replica group of a collective; all devices if it names none."""
    everyone = tuple(range(program.num_devices))
    pairs = re.search(r"source_target_pairs=\{(.*?\})\}", x.attributes)
    if pairs:
        return tuple(sorted({int(n) for n in re.findall(r"\d+", pairs[1])}))
    match = re.search(r"replica_groups=(\S.*?)(?:, [a-z_]+=|$)", x.attributes)
    if not match or match[1] == "{}":
        return everyone
    group = parse_groups(match[1])
    if group is None:
        program.note(f"{x.name}: replica groups {match[1]!r} not understood; taken as all")
    return group or everyone


def parse_groups(text: str) -> tuple[int, ...] | None:
    """The first group of `replica_groups`, in any of XLA's three ways to write it.

    >>> parse_groups("{{0,2},{1,3}}"), parse_groups("[2,2]<=[2,2]T(1,0)")
    ((0, 2), (0, 2))
    >>> parse_groups("mesh['replica'=2,'data'=2] {'data'}")
    (0, 1)
    """
    if text.startswith("{{"):
        return tuple(map(int, re.findall(r"\d+", text[: text.index("}")])))
    iota = re.match(r"\[(\d+),(\d+)\]<=\[([\d,]+)\](?:T\(([\d,]+)\))?", text)
    if iota:
        dims = [int(n) for n in iota[3].split(",")]
        order = [int(n) for n in iota[4].split(",")] if iota[4] else list(range(len(dims)))
        return tuple(_transposed_iota(dims, order)[: int(iota[2])])
    mesh = re.match(r"mesh\[(.*?)\]\s*\{(.*?)\}$", text)
    if mesh and "device_ids" not in text:
        sizes = {name: int(n) for name, n in re.findall(r"'([^']+)'=(\d+)", mesh[1])}
        names, used = list(sizes), re.findall(r"'([^']+)'", mesh[2])
        if set(used) <= set(names):
            order = [i for i, n in enumerate(names) if n not in used]
            order += [names.index(n) for n in used]
            count = math.prod(sizes[n] for n in used)
            return tuple(_transposed_iota(list(sizes.values()), order)[:count])
    return None


def _transposed_iota(dims: list[int], order: list[int]) -> list[int]:
    """0, 1, 2, ... shaped as `dims`, transposed to `order`, flat."""
    strides = [math.prod(dims[i + 1 :]) for i in range(len(dims))]
    flat = [0]
    for dim in order:
        flat = [base + i * strides[dim] for base in flat for i in range(dims[dim])]
    return flat
