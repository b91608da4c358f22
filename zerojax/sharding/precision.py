# SPDX-License-Identifier: Apache-2.0
"""Which dtype each thing has: parameters at rest, compute and gathers, reductions, the master."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

DType = Any  # anything jnp.dtype accepts


@dataclasses.dataclass(frozen=True)
class Precision:
    """The dtypes of a plan. They apply to real floating leaves; other leaves keep their own.

    All are fp32, and there is no master copy, unless said otherwise. A dtype is anything that
    `jnp.dtype` takes, of 16 bits or more.

    Attributes:
      params: parameters at rest.
      compute: the dtype in which weights are gathered and the loss function receives them.
      reduce: the dtype in which gradients cross the wire. Several microbatches accumulate in
        at least fp32 whatever this says.
      master: if given, the optimizer updates a copy of the parameters in this dtype and
        `params` is rounded from it. It rests beside the optimizer state and is split like it.

    Raises:
      ValueError: a dtype is not floating, has fewer than 16 bits, or needs jax_enable_x64.

    Example:
      >>> import dataclasses
      >>> dataclasses.replace(PRECISIONS["bf16_master"], reduce=jnp.float32).bytes_per_param()
      (2, 4, 4)
    """

    params: DType = jnp.float32
    compute: DType = jnp.float32
    reduce: DType = jnp.float32
    master: DType | None = None

    def __post_init__(self):
        for field in dataclasses.fields(self):
            dtype = getattr(self, field.name)
            if dtype is None and field.name == "master":
                continue
            try:
                dtype = jnp.dtype(dtype)
                valid = jnp.issubdtype(dtype, jnp.floating) and dtype.itemsize >= 2
            except TypeError:
                valid = False
            if not valid:
                raise ValueError(
                    f"Precision.{field.name} is {dtype!r}, which is not a floating dtype of 16 or "
                    "more bits. Use one such as jnp.float32 or jnp.bfloat16."
                )
            if jax.dtypes.canonicalize_dtype(dtype) != dtype:
                raise ValueError(
                    f"Precision.{field.name} is {dtype}, which JAX would turn into "
                    f"{jax.dtypes.canonicalize_dtype(dtype)}. Set jax_enable_x64, or ask for that."
                )

    def bytes_per_param(self) -> tuple[int, int, int]:
        """Bytes per parameter at rest, of its gradient on the wire, and of its master copy."""
        sizes = [jnp.dtype(dtype).itemsize for dtype in (self.params, self.reduce)]
        return sizes[0], sizes[1], jnp.dtype(self.master).itemsize if self.master else 0


PRECISIONS = {
    "fp32": Precision(),
    # fp32 at rest; half the bytes in every gather; sums of gradients stay exact to fp32.
    "bf16": Precision(compute=jnp.bfloat16),
    # The paper's 16 bytes: 2 (parameter) + 2 (gradient) + 4 (master) + 8 (Adam).
    "bf16_master": Precision(jnp.bfloat16, jnp.bfloat16, jnp.bfloat16, jnp.float32),
}


def get_precision(precision: str | Precision) -> Precision:
    """Returns the Precision of that name, or the one given. Raises ValueError for others."""
    if isinstance(precision, Precision):
        return precision
    if precision not in PRECISIONS:
        raise ValueError(
            f"precision is {precision!r}; the named ones are {', '.join(PRECISIONS)}. "
            "Pass one of them, or a zerojax.Precision for dtypes of your own."
        )
    return PRECISIONS[precision]


def cast(x: jax.Array, dtype: DType) -> jax.Array:
    """Casts a real floating array; integers, booleans, complex numbers and keys pass through."""
    return x.astype(dtype) if jnp.issubdtype(x.dtype, jnp.floating) else x


def accumulable(x: jax.Array) -> jax.Array:
    """Casts to a dtype in which many terms can be added: fp32, or its own if wider."""
    dtype = jnp.result_type(x)
    if jnp.issubdtype(dtype, jnp.inexact) and jnp.finfo(dtype).bits >= 32:
        return jnp.asarray(x)
    return jnp.asarray(x).astype(jnp.float32)
