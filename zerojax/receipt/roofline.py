# SPDX-License-Identifier: Apache-2.0
"""What one instruction of a compiled program computes and touches: FLOPs, bytes, seconds."""

from __future__ import annotations

import math
import re
from typing import NamedTuple

from zerojax.hardware.targets import Target
from zerojax.receipt.hlo import Array, Computation, Instruction, Program

# These name a place or put values together; no kernel runs.
FREE = {"parameter", "constant", "tuple", "get-tuple-element", "bitcast", "after-all"}
FREE |= {"opt-barrier", "partition-id", "replica-id", "add-dependency", "domain"}
_SLICES = ("dynamic-slice", "slice", "gather")
# A loop fusion computes only those elements of these that are read in the end.
_SAME_SIZE = ("bitcast", "convert", "copy", "transpose", "reshape", "negate")


class KernelCost(NamedTuple):
    """What an instruction computes and touches on one device.

    Attributes:
      matmul_flops: multiplications and additions of matrix products, as if in 16 bits; those in
        fp32 count twice (TF32 runs at half the rate), those in 8 bits half.
      attention_flops: the same, of a fused attention kernel.
      num_bytes: bytes read from and written to memory.
    """

    matmul_flops: float = 0.0
    attention_flops: float = 0.0
    num_bytes: float = 0.0

    def seconds(self, target: Target) -> float:
        """By the roofline: the slower of arithmetic and memory, plus a launch if no matmul."""
        gpu = target.gpu
        assert gpu is not None
        compute = self.matmul_flops / (gpu.matmul_flops * target.matmul_efficiency)
        compute += self.attention_flops / (gpu.matmul_flops * target.attention_efficiency)
        memory = self.num_bytes / (gpu.memory_bandwidth * target.memory_efficiency)
        return max(compute, memory) + (0.0 if compute else target.kernel_seconds)


def cost_of(program: Program, computation: Computation, x: Instruction) -> KernelCost | None:
    """The cost of an instruction that runs by itself; None if nothing runs."""
    if x.opcode in FREE or x.opcode.endswith("-done"):
        return None
    taken = computation.operand_arrays(x)
    if x.opcode in ("fusion", "fusion-start"):
        (name,) = x.called["calls"]
        fused = program.computations[name]
        flops = sum(dot_flops(fused, y) for y in fused.instructions.values())
        inner = [y for y in fused.instructions.values() if y.opcode == "custom-call"]
        calls = [_custom_call(y, fused.operand_arrays(y), 0.0) for y in inner]
        return KernelCost(
            matmul_flops=flops + sum(cost.matmul_flops for cost in calls),
            attention_flops=sum(cost.attention_flops for cost in calls),
            num_bytes=_bytes_read(fused, taken) + _bytes_written(fused, fused.root),
        )
    num_bytes = float(sum(a.num_bytes for a in taken) + x.num_bytes)
    if x.opcode == "custom-call":
        return _custom_call(x, taken, num_bytes)
    if x.opcode in _SLICES:
        num_bytes = 2.0 * x.num_bytes
    elif x.opcode == "dynamic-update-slice":
        num_bytes = 2.0 * taken[1].num_bytes
    return KernelCost(dot_flops(computation, x), 0.0, num_bytes)


def dot_flops(computation: Computation, x: Instruction) -> float:
    """FLOPs of a dot or a convolution, 2 for each multiply-add; 0 for anything else."""
    if x.opcode == "dot":
        lhs = computation.instructions[x.operands[0]].arrays[0]
        dims = re.search(r"lhs_contracting_dims=\{([\d,]*)\}", x.attributes)
        contracted = [lhs.shape[int(d)] for d in dims[1].split(",") if d] if dims else []
        return 2.0 * x.arrays[0].size * math.prod(contracted) * _dtype_factor(lhs)
    if x.opcode == "convolution":
        out, kernel = x.arrays[0], computation.instructions[x.operands[1]].arrays[0]
        labels = re.search(r"dim_labels=\w+_(\w+)->(\w+)", x.attributes)
        features = kernel.shape[labels[1].index("o")] if labels else 1
        return 2.0 * out.size * kernel.size / max(features, 1) * _dtype_factor(kernel)
    return 0.0


def _custom_call(x: Instruction, taken: list[Array], num_bytes: float) -> KernelCost:
    """Library kernels: cuBLAS by its contracted dims, cuDNN's attention by its score matrix."""
    target = re.search(r'custom_call_target="([^"]*)"', x.attributes)
    name = target[1] if target else ""
    if "cublas" in name and taken:
        dims = re.search(r'"lhs_contracting_dimensions":\s*\[([^\]]*)\]', x.attributes)
        axes = [int(n) for n in re.findall(r"\d+", dims[1])] if dims else []
        out = max(x.arrays, key=lambda a: a.size)
        contracted = math.prod(taken[0].shape[d] for d in axes)
        return KernelCost(2.0 * out.size * contracted * _dtype_factor(taken[0]), 0.0, num_bytes)
    if "cudnn$conv" in name and len(taken) > 1:
        window = re.search(r"window=\{size=([\dx]+)", x.attributes)
        labels = re.search(r"dim_labels=(\w+)_(\w+)->(\w+)", x.attributes)
        if window and labels:
            # Of the forward: the output, the window and the input's features; the backward's two
            # multiply as often.
            out = max(x.arrays, key=lambda a: a.size)
            arrays = {"Forward": (taken[0], out), "BackwardInput": (out, taken[0])}
            kind = "BackwardInput" if "BackwardInput" in name else "Forward"
            source, result = arrays[kind] if "BackwardFilter" not in name else (taken[0], taken[1])
            features = source.shape[labels[1].index("f")]
            size = math.prod(int(n) for n in window[1].split("x"))
            return KernelCost(
                2.0 * result.size * size * features * _dtype_factor(source), 0.0, num_bytes
            )
    if "fmha" in name:
        scores = re.search(
            r'"intermediate_tensor_shape".*?"dimensions":\s*\[([^\]]*)\]', x.attributes
        )
        size = math.prod(int(n) for n in re.findall(r"\d+", scores[1])) if scores else 0
        # Two matmuls forward (scores, values); five backward, one of them the scores again.
        matmuls = 5 if "Backward" in name else 2
        masked = 0.5 if "CAUSAL" in x.attributes else 1.0
        return KernelCost(0.0, matmuls * 2.0 * size * taken[0].shape[-1] * masked, num_bytes)
    return KernelCost(0.0, 0.0, num_bytes)


def _dtype_factor(array: Array) -> float:
    """How much slower than in 16 bits a tensor core multiplies numbers of this dtype."""
    if array.dtype in ("f32", "c64"):
        return 2.0
    return 0.5 if array.dtype.startswith(("f8", "s8", "u8")) else 1.0


def _bytes_read(fused: Computation, taken: list[Array]) -> float:
    """What a fusion reads of its operands; of one that it only slices, the slices."""
    params = {x.parameter: x for x in fused.instructions.values() if x.opcode == "parameter"}
    total = 0.0
    for number, array in enumerate(taken):
        full = float(array.num_bytes)
        total += min(full, _elements_read(fused, params[number]) * full / max(array.size, 1))
    return total


def _elements_read(fused: Computation, x: Instruction) -> float:
    """Elements of `x` that its users read, at most all."""
    full, read = float(sum(a.size for a in x.arrays)), 0.0
    if x.is_root:
        return full
    for user in fused.users.get(x.name, ()):
        if user.opcode in _SLICES and user.operands[0] == x.name:
            read += sum(a.size for a in user.arrays)
        elif user.opcode == "dynamic-update-slice" and user.operands[0] == x.name:
            continue  # written in place
        elif user.opcode in _SAME_SIZE:
            read += _elements_read(fused, user)
        else:
            return full
    return min(read, full)


def _bytes_written(fused: Computation, x: Instruction) -> float:
    """What a fusion writes; of an array that it updates in place, the update."""
    if x.opcode == "tuple":
        return sum(_bytes_written(fused, fused.instructions[name]) for name in x.operands)
    inner = x
    while inner.opcode in _SAME_SIZE and inner.operands:
        inner = fused.instructions[inner.operands[0]]
    if inner.opcode == "dynamic-update-slice":
        return float(fused.instructions[inner.operands[1]].num_bytes)
    return float(x.num_bytes)
