# SPDX-License-Identifier: Apache-2.0
"""Table I of the ZeRO paper (arXiv 1910.02054): bytes of model state per device, in GB = 1e9 bytes.

Every cell by formula, rounded as the paper rounds, and the 7.5B column from compiled programs.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from fractions import Fraction

import jax
import jax.numpy as jnp
import optax

import zerojax as zj
from models import transformer
from zerojax.sharding.stage import STAGES
from zerojax.table import format_table

# With these a program compiles in a third of the time and is slower itself. Its state is the same.
QUICK = {
    "xla_gpu_autotune_level": 0,
    "xla_gpu_enable_latency_hiding_scheduler": False,
    "xla_gpu_enable_triton_gemm": False,
}
DEGREES = 1, 4, 16, 64, 256, 1024  # devices
SIZES = {"7.5B": 75 * 10**8, "128B": 128 * 10**9, "1T": 10**12}  # parameters


def exact(num_params: int, num_devices: int, stage: int) -> Fraction:
    """GB of model state on each device, without rounding."""
    size = STAGES[stage].model_state_bytes(Fraction(num_params), num_devices)  # pyright: ignore
    return Fraction(size) / 10**9


def rounded(gigabytes: Fraction, model: str) -> str:
    """A cell as the paper prints it: the 7.5B column rounds half up, the others cut off.

    >>> rounded(Fraction(165, 4), "7.5B"), rounded(Fraction(8375, 2), "1T")
    ('41.3', '4187')
    """
    digits = 0 if gigabytes >= 100 else 1
    if model == "7.5B" and gigabytes < 10:
        digits = 2
    half = Fraction(1, 2) if model == "7.5B" else 0
    text = f"{math.floor(gigabytes * 10**digits + half) / 10**digits:.{digits}f}"
    return text.rstrip("0").rstrip(".") if digits else text


def cells() -> dict[tuple[int, str], list[str]]:
    """For each row and column of the table, the three cells: stages 1, 2 and 3.

    >>> cells()[64, "7.5B"], cells()[1024, "1T"]
    (['31.4', '16.6', '1.88'], ['4011', '2013', '15.6'])
    """
    return {
        (degree, model): [rounded(exact(size, degree, stage), model) for stage in (1, 2, 3)]
        for degree in DEGREES
        for model, size in SIZES.items()
    }


def compiled_gigabytes(num_devices: int, stage: int) -> float:
    """GB of model state of 7.5e9 parameters, from a program compiled for so many H100s.

    The program trains one layer of the 7.5B GPT on short rows, as neither changes where state
    lives. Parameters, master and optimizer state are its arguments; gradients, which are none, are
    the plan's. The bytes per parameter are scaled to 7.5e9 parameters.
    """
    config = transformer.TransformerConfig(51200, 2048, 1, 32, 32, 4096, 16384, attention="cudnn")
    hosts, count = (1, num_devices) if num_devices < 8 else (num_devices // 8, 8)
    mesh = zj.make_mesh(target=f"h100:{hosts}x{count}")
    plan = zj.make_plan(
        functools.partial(transformer.init_params, config),
        optax.adam(1e-3),
        mesh,
        stage=stage,
        layers=("blocks",),
        precision="bf16_master",
    )
    batch = {"tokens": jax.ShapeDtypeStruct((num_devices, 129), jnp.int32)}
    loss_fn = functools.partial(transformer.loss_fn, config)
    step = zj.make_train_step(loss_fn, plan, compiler_options=QUICK)
    memory = step.lower(plan.abstract_state, batch).compile().memory_analysis()
    assert memory is not None
    state = memory.argument_size_in_bytes - 129 * 4
    grads = sum(map(plan.bytes_per_device, plan.grads))
    num_params = sum(leaf.array.size for leaf in plan.params)
    return (state + grads) / num_params * 7.5


def main(announce: Callable[[str], None]) -> None:
    """Print both tables."""
    table = cells()
    rows = [[str(n), *(" / ".join(table[n, model]) for model in SIZES)] for n in DEGREES]
    print(
        "The ZeRO paper's Table I: GB (1e9 bytes) of model state on each device at stages 1 / 2 / 3"
        "\n\nby formula, all 54 cells, rounded as in the paper\n"
    )
    print(format_table(["devices", *SIZES], rows, right=[0]))
    rows = []
    for number, degree in enumerate(DEGREES):
        found = []
        for stage in range(4):
            done = 4 * number + stage + 1
            announce(f"compiling {done} of 24: {degree} x H100, stage {stage}")
            size = compiled_gigabytes(degree, stage)
            formula = float(exact(SIZES["7.5B"], degree, stage))
            found.append(f"{size:.2f} ({size / formula - 1:+.2%})")
        rows.append([str(degree), *found])
    announce("")
    print("\n7.5B from programs compiled for so many H100s, and the difference to the formula\n")
    print(format_table(["devices", *(f"stage {stage}" for stage in range(4))], rows, right=[0]))
