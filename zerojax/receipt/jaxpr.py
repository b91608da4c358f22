# SPDX-License-Identifier: Apache-2.0
"""A traced program as one list of steps: its calls written out, what no result needs left out."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.extend.core import Jaxpr, Literal

# Another view of the same bytes, as a matmul or a kernel can read it.
VIEWS = {"reshape", "squeeze", "expand_dims", "transpose", "pvary", "pcast", "copy"}
VIEWS |= {"sharding_constraint", "optimization_barrier", "stop_gradient"}
# Computed where they are used.
FUSED = {"convert_element_type", "broadcast_in_dim", "select_n", "slice", "concatenate", "pad"}
FUSED |= {"dynamic_slice", "rev", "iota", "integer_pow", "pow", "square", "sqrt", "rsqrt", "cbrt"}
FUSED |= {"add", "add_any", "sub", "mul", "div", "rem", "max", "min", "neg", "abs", "sign", "exp"}
FUSED |= {"exp2", "log", "log1p", "expm1", "tanh", "logistic", "erf", "erfc", "erf_inv", "sin"}
FUSED |= {"cos", "tan", "atan2", "floor", "ceil", "round", "clamp", "is_finite", "not", "and", "or"}
FUSED |= {"xor", "eq", "ne", "lt", "le", "gt", "ge", "shift_left", "shift_right_logical"}
FUSED |= {"shift_right_arithmetic", "random_bits", "random_wrap", "random_unwrap", "random_fold_in"}
FUSED |= {"random_split", "threefry2x32", "bitcast_convert_type", "empty", "axis_index"}
# They read their operands element by element, so that these need not be in memory first.
READERS = {"reduce_sum", "reduce_max", "reduce_min", "reduce_and", "reduce_or", "reduce_prod"}
READERS |= {"argmax", "argmin", "gather", "scatter", "scatter-add", "dynamic_update_slice"}
LOOPS = {"scan", "while", "cond"}
LEAVES = {"reduce_scatter", "psum", "psum_invariant", "all_reduce"}


class Value:
    """One array of the trace: its bytes, and what made it."""

    def __init__(self, aval: Any, op: Op | None = None):
        self.num_bytes = array_bytes(aval)
        self.shape = getattr(aval, "shape", ())
        self.ndim = len(self.shape)
        self.op = op


class Op(NamedTuple):
    """One step of the trace: a primitive or a function with a name, what it takes and makes."""

    name: str
    inputs: list[Value]
    outputs: list[Value]
    params: dict[str, Any]

    @property
    def is_fused(self) -> bool:
        """No kernel of its own."""
        return self.name in FUSED or self.name in VIEWS


class Trace(NamedTuple):
    """A jaxpr without the calls in it: one list of steps."""

    inputs: list[Value]
    ops: list[Op]
    outputs: list[Value]


def array_bytes(aval: Any) -> int:
    """Bytes of an array of that shape and dtype; a PRNG key counts as nothing."""
    dtype = getattr(aval, "dtype", None)
    if dtype is None or jnp.issubdtype(dtype, jax.dtypes.extended):
        return 0
    return math.prod(aval.shape) * dtype.itemsize


def flatten(jaxpr: Jaxpr, opaque: str = "") -> Trace:
    """Writes out the calls of a jaxpr, but for functions whose name begins with `opaque`."""
    ops: list[Op] = []
    inputs = [Value(var.aval) for var in (*jaxpr.constvars, *jaxpr.invars)]
    outputs = _inline(jaxpr, inputs, ops, opaque)
    return Trace(inputs, _needed(ops, outputs, opaque), outputs)


def _inline(jaxpr: Jaxpr, inputs: Sequence[Value], ops: list[Op], opaque: str) -> list[Value]:
    values = dict(zip((*jaxpr.constvars, *jaxpr.invars), inputs, strict=True))

    def read(atom: Any) -> Value:
        return Value(atom.aval) if isinstance(atom, Literal) else values[atom]

    for eqn in jaxpr.eqns:
        taken, name = list(map(read, eqn.invars)), eqn.primitive.name
        named = str(eqn.params.get("name", ""))
        inner = None if name in LOOPS else _called(eqn.params, len(taken))
        if inner is not None and not (opaque and named.startswith(opaque)):
            consts = [Value(jax.typeof(const)) for const in getattr(inner, "consts", ())]
            made = _inline(getattr(inner, "jaxpr", inner), (*consts, *taken), ops, opaque)
        else:
            op = Op(named if inner is not None else name, taken, [], eqn.params)
            made = [Value(var.aval, op) for var in eqn.outvars]
            op.outputs.extend(made)
            ops.append(op)
        values.update(zip(eqn.outvars, made, strict=True))
    return list(map(read, jaxpr.outvars))


def _called(params: dict[str, Any], num_inputs: int) -> Any:
    """The jaxpr that a primitive calls once on its operands, such as jit's, or None."""
    found = [x for x in params.values() if isinstance(getattr(x, "jaxpr", x), Jaxpr)]
    if len(found) != 1 or len(getattr(found[0], "jaxpr", found[0]).invars) != num_inputs:
        return None
    return found[0]


def _needed(ops: list[Op], outputs: Sequence[Value], opaque: str) -> list[Op]:
    """The steps on which a result depends."""
    needed, kept = set(map(id, outputs)), []
    for op in reversed(ops):
        if any(id(x) in needed for x in op.outputs):
            needed.update(id(x) for x in (_read(op, opaque) if op.name == "scan" else op.inputs))
            kept.append(op)
    return kept[::-1]


def _read(scan: Op, opaque: str) -> list[Value]:
    """The inputs of a scan on which a result of its body depends."""
    body = flatten(scan.params["jaxpr"].jaxpr, opaque)
    read = {id(x) for op in body.ops for x in op.inputs} | set(map(id, body.outputs))
    return [x for x, inner in zip(scan.inputs, body.inputs, strict=True) if id(inner) in read]


def scan_body(op: Op, opaque: str = "") -> Trace:
    """One iteration of a scan; what it scans over is sliced first."""
    trace = flatten(op.params["jaxpr"].jaxpr, opaque)
    inputs, slices = [], []
    for x, whole in zip(trace.inputs, op.inputs, strict=True):
        if x.ndim == whole.ndim:  # a constant, or carried
            inputs.append(x)
        else:
            x.op = Op("slice", [], [x], {})
            slices.append(x.op)
    return Trace(inputs, slices + trace.ops, trace.outputs)


def num_consts(op: Op) -> int:
    """How many inputs of a scan are the same in all iterations; they come first."""
    body = op.params["jaxpr"].jaxpr
    carried = sum(x.aval.ndim == y.ndim for x, y in zip(body.outvars, op.outputs, strict=True))
    sliced = sum(x.aval.ndim < y.ndim for x, y in zip(body.invars, op.inputs, strict=True))
    return len(op.inputs) - carried - sliced


def source(value: Value) -> Value:
    """What a view is a view of."""
    while value.op is not None and value.op.name in VIEWS and value.op.inputs:
        index = next(i for i, x in enumerate(value.op.outputs) if x is value)
        value = value.op.inputs[min(index, len(value.op.inputs) - 1)]
    return value
