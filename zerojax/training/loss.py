# SPDX-License-Identifier: Apache-2.0
"""The contract with the user's loss function: a sum, and what to divide it by."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple, Protocol

import jax
import jax.numpy as jnp

from zerojax.sharding.precision import accumulable
from zerojax.tree import PyTree, leaf_path


class LossFn(Protocol):
    """The type of a loss function: `(params, batch, key) -> (loss_sum, weight)`, or with sums more.

    Ordinary single-device code, any function or lambda of three arguments.

    Args:
      params: the parameters as `init_params` arranges them, whole, in the compute dtype.
      batch: the batch's tree, with some of its rows.
      key: one PRNG key, which differs between steps, microbatches and devices.

    Returns:
      `(loss_sum, weight)`, or `((loss_sum, weight), aux)`: a floating scalar, the SUM of the losses
      of those rows; a real scalar that it is to be divided by (rows, tokens, the sum of a mask); a
      tree of further sums, divided by the same weight. Devices and microbatches are added before
      the one division.

    Raises:
      ValueError: when the step is called or lowered: something else was returned.

    Example:
      >>> def loss_fn(params, batch, key):
      ...     error = (batch["x"] @ params["w"] - batch["y"]) * batch["mask"]
      ...     return (jnp.sum(error**2), jnp.sum(batch["mask"])), {"size": jnp.sum(abs(error))}
      >>> batch = {"x": jnp.ones((3, 2)), "y": jnp.zeros(3), "mask": jnp.array([1.0, 1.0, 0.0])}
      >>> (loss_sum, weight), aux = loss_fn({"w": jnp.array([1.0, 2.0])}, batch, None)
      >>> float(loss_sum), float(weight), float(aux["size"])
      (18.0, 2.0, 6.0)
    """

    def __call__(self, params: PyTree, batch: PyTree, key: jax.Array, /) -> Any:
        """The loss of these rows, and its weight."""
        ...


class Sums(NamedTuple):
    """What a loss function returns, in at least fp32, ready to be added over slices of a batch."""

    loss_sum: jax.Array
    weight: jax.Array
    aux: PyTree = None

    def map(self, fn: Callable[[jax.Array], jax.Array]) -> Sums:
        """The sums with `fn` applied to each array."""
        return jax.tree.map(fn, self)

    def metrics(self) -> dict[str, Any]:
        """Per unit of weight: `loss`, `weight`, and `aux` if there is one."""
        metrics = {"loss": self.loss_sum / self.weight, "weight": self.weight}
        if self.aux is not None:
            metrics["aux"] = jax.tree.map(lambda x: x / self.weight, self.aux)
        return metrics


def call_loss(loss_fn: LossFn, params: PyTree, batch: PyTree, key: jax.Array) -> Sums:
    """Calls the loss function and checks what it returned.

    Raises:
      ValueError: it is not (loss_sum, weight) or ((loss_sum, weight), aux) with real scalars.
    """
    out = loss_fn(params, batch, key)
    aux = None
    if isinstance(out, tuple | list) and len(out) == 2 and isinstance(out[0], tuple | list):
        out, aux = out
    if not (isinstance(out, tuple | list) and len(out) == 2):
        raise ValueError(
            f"the loss function returned {_summary(out)}; it must return (loss_sum, weight) or "
            "((loss_sum, weight), aux). Return the sum of the losses and their number (or the sum "
            "of the mask), not a mean: zerojax divides once, over all devices and microbatches."
        )
    loss_sum, weight = out
    if jax.tree.structure(weight) != jax.tree.structure(0):
        raise ValueError(
            f"the loss function returned {_summary(weight)} as its weight. For aux, return "
            "((loss_sum, weight), aux); the weight is the number that the loss is divided by."
        )
    for name, value, kind in (
        ("loss_sum", loss_sum, (jnp.floating,)),
        ("weight", weight, (jnp.floating, jnp.integer, jnp.bool_)),
    ):
        shape, dtype = jnp.shape(value), jnp.result_type(value)
        if shape or not any(jnp.issubdtype(dtype, k) for k in kind):
            raise ValueError(
                f"the loss function returned a {name} of shape {shape} and type {dtype}; it must "
                f"be a {'floating' if name == 'loss_sum' else 'real'} scalar. Sum it over the rows "
                "and tokens of the batch."
            )
    for path, value in jax.tree.leaves_with_path(aux):
        if not jnp.issubdtype(jnp.result_type(value), jnp.number):
            raise ValueError(
                f"aux leaf {leaf_path(path)!r} is of type {jnp.result_type(value)}; aux holds sums "
                "that are divided by the weight. Return a number, or drop it."
            )
    return Sums(loss_sum, weight, aux).map(accumulable)


def _summary(out: Any) -> str:
    if isinstance(out, tuple | list):
        return f"a {type(out).__name__} of {len(out)}"
    if hasattr(out, "shape"):
        return f"an array of shape {out.shape}" if out.shape else "a scalar"
    return f"a {type(out).__name__}"
