# SPDX-License-Identifier: Apache-2.0
"""What the layer loops become on 8 H100s, compiled on a machine that has none.

Prints, for each prefetch, the peak memory and the order of collectives and matmuls in the forward
and the backward loop of a stack of MLP layers at stage 3. Needs the `aot` extra.

  python -m scripts.h100
"""

from __future__ import annotations

import collections
import re

import jax
import jax.numpy as jnp
import optax
from jax.sharding import Mesh

import zerojax as zj

LAYERS, WIDTH, HIDDEN, ROWS, TOKENS = 16, 2048, 8192, 32, 1024


def compile_stack(mesh: Mesh, prefetch: int):
    """A stage-3 step of a stack of MLP layers, in bf16."""

    def init_params(key):
        up = jnp.zeros((LAYERS, WIDTH, HIDDEN))
        return {"blocks": {"up": up, "down": up.swapaxes(1, 2)}}

    def block(params, x):
        return x + jax.nn.gelu(x @ params["up"]) @ params["down"]

    def loss_fn(params, batch, key):
        x = zj.scan_layers(block, params["blocks"], batch["x"], prefetch=prefetch)
        return jnp.sum(x.astype(jnp.float32) ** 2), x.size

    bf16 = zj.Precision(jnp.bfloat16, jnp.bfloat16, jnp.bfloat16)
    plan = zj.make_plan(
        init_params, optax.sgd(1e-2), mesh, stage=3, layers=("blocks",), precision=bf16
    )
    batch = {"x": jax.ShapeDtypeStruct((ROWS, TOKENS, WIDTH), jnp.bfloat16)}
    return zj.make_train_step(loss_fn, plan).lower(plan.abstract_state, batch).compile()


def loop_schedules(text: str) -> list[list[str]]:
    """For every loop with collectives: its collectives and matmuls, in scheduled order."""
    bodies = set(re.findall(r" while\(.*body=%?([\w.\-]+)", text))
    found, name = collections.defaultdict(list), ""
    for line in text.splitlines():
        head = re.match(r"(?:ENTRY )?%?([\w.\-]+) \(.*\{$", line)
        name = head[1] if head else name
        op = re.search(r" (all-gather|reduce-scatter|all-reduce)(-start|-done)?\(", line)
        if op:
            found[name].append(op[1] + (op[2] or " (synchronous)"))
        elif re.search(r"= .*(gemm|cublas)", line) and re.search(r" (fusion|custom-call)\(", line):
            found[name].append("matmul")
    return [ops for name, ops in found.items() if name in bodies and set(ops) != {"matmul"}]


def main() -> None:
    """Prints the peak and the schedules."""
    mesh, layer = zj.make_mesh(target="h100:8"), 2 * WIDTH * HIDDEN * 2 / 2**20
    print(f"8 x H100, {LAYERS} layers of {layer:.0f} MiB, {ROWS} x {TOKENS} tokens, bf16, stage 3")
    for prefetch in (0, 1, 2):
        program = compile_stack(mesh, prefetch)
        memory, text = program.memory_analysis(), program.as_text()
        assert memory is not None
        assert text is not None
        peak = memory.peak_memory_in_bytes / 2**20
        print(f"\nprefetch {prefetch}: peak {peak:.0f} MiB per device")
        for ops in loop_schedules(text):
            way = "backward" if any("scatter" in op for op in ops) else "forward"
            print(f"  {way} loop (two layers):")
            for index, op in enumerate(ops):
                if op != "matmul":
                    print(f"    {index:2d} {op}")
            print(f"    and {ops.count('matmul')} matmuls in the other places")


if __name__ == "__main__":
    main()
