# SPDX-License-Identifier: Apache-2.0
"""The inputs of a compiled program: which leaf each is, whole and on one device."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from zerojax.receipt.hlo import Array, Program
from zerojax.sharding.stage import STATE_KINDS
from zerojax.sharding.state import TrainState
from zerojax.tree import PyTree


class Input(NamedTuple):
    """An input of the compiled program.

    Attributes:
      path: where in the arguments it is.
      kind: "params", "master", "opt_state", "batch" or "other".
      whole: the array; local: what one device holds of it.
      kept: the program leaves its memory alone (it was not donated).
    """

    path: str
    kind: str
    whole: Array
    local: Array
    kept: bool


def shapes(batch: PyTree) -> PyTree:
    """The batch as ShapeDtypeStructs."""
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(jnp.shape(x), jnp.result_type(x)), batch)


def read_inputs(
    compiled: jax.stages.Compiled, program: Program, batch: PyTree
) -> tuple[Input, ...]:
    """Every input: its path and kind, whole and on one device."""
    if compiled.args_info[1]:
        names = ", ".join(compiled.args_info[1])
        raise ValueError(f"the program takes {names} by keyword; lower it with positions only.")
    flat = jax.tree.leaves_with_path(compiled.args_info)
    params = [x for x in program.entry.instructions.values() if x.opcode == "parameter"]
    params.sort(key=lambda x: x.parameter or 0)
    if len(params) != len(flat):
        program.unread.append(
            f"{len(flat)} arguments, of which the program takes {len(params)}: which is which is "
            "not known, so arguments were not checked; jit with keep_unused=True"
        )
        return ()
    rows = [(x.shape, x.dtype) for x in jax.tree.leaves(shapes(batch))]
    last = max(path[1].idx for path, _ in flat)
    found = []
    for (path, info), x in zip(flat, params, strict=True):
        local = x.arrays[0]
        is_key = jnp.issubdtype(info.dtype, jax.dtypes.prng_key)
        whole = local if is_key else Array(local.dtype, tuple(info.shape))
        kind = _kind(path, last, (info.shape, info.dtype) in rows)
        name = jax.tree_util.keystr(path[1:])
        found.append(Input(name, kind, whole, local, x.parameter not in program.aliased))
    return tuple(found)


def _kind(path: Sequence[Any], last: int, is_batch: bool) -> str:
    """The kind of an argument at (args, position, ...): by the names of TrainState, or by place."""
    position, name = path[1].idx, getattr(path[2], "name", None) if len(path) > 2 else None
    if position == last and is_batch and last > 0:
        return "batch"
    if name in TrainState._fields:
        return name if name in STATE_KINDS else "other"
    return "params" if position == 0 else "opt_state"
