# SPDX-License-Identifier: Apache-2.0
"""Specs: which dimension of an array is split, or why none; and what a spec says."""

from __future__ import annotations

from typing import NamedTuple

from jax.sharding import PartitionSpec as P

from zerojax.sharding.axes import STATE_AXES


class Split(NamedTuple):
    """Where an array is cut.

    Attributes:
      spec: the array's PartitionSpec once cut; the base spec if it stays whole.
      dim: the dimension cut, or None.
      reason: why this dimension, or why none; one short phrase for a table.
    """

    spec: P
    dim: int | None
    reason: str


def split(
    shape: tuple[int, ...], num_shards: int, axis: str, *, stacked: bool = False, base: P = P()
) -> Split:
    """Cuts the first dimension that divides by `num_shards`.

    Only divisibility decides: small arrays are cut too. The first dimension, because shards of it
    are contiguous pieces of the whole: neither a gather nor a scatter needs a transpose.

    Args:
      shape: the array's shape.
      num_shards: into how many shards; the size of the axis.
      axis: name of the mesh axis.
      stacked: the first dimension counts stacked layers, and is never cut: a layer must be
        gathered from every device, not owned by one.
      base: mesh axes that other forms of parallelism already put on the array. Their dimensions
        are left to them.

    Returns:
      A Split.

    Example:
      >>> split((12, 64, 256), 8, "data", stacked=True)[1:]
      (1, 'dim 1, 64 / 8')
      >>> split((17, 3), 8, "data")[1:]
      (None, '17, 3 do not divide by 8')
    """
    if num_shards == 1:
        return Split(base, None, "one device")
    taken = {dim for dim, name in enumerate(base) if name is not None}
    dims = [d for d in range(1 if stacked else 0, len(shape)) if d not in taken]
    if not dims:
        return Split(base, None, "a scalar per layer" if stacked else "a scalar")
    fits = [d for d in dims if shape[d] and shape[d] % num_shards == 0]
    if not fits:
        sizes = [str(shape[d]) for d in dims]
        verb = "does not divide" if len(sizes) == 1 else "do not divide"
        return Split(base, None, f"{', '.join(sizes)} {verb} by {num_shards}")
    dim = fits[0]
    names = [*base, *[None] * (len(shape) - len(base))]
    names[dim] = axis
    while names and names[-1] is None:
        names.pop()
    return Split(P(*names), dim, f"dim {dim}, {shape[dim]} / {num_shards}")


def split_dim(spec: P) -> int | None:
    """The dimension that ZeRO splits, or None.

    >>> split_dim(P(None, "data")), split_dim(P("tensor")), split_dim(P())
    (1, None, None)
    """
    for dim, names in enumerate(spec):
        if names in STATE_AXES or (isinstance(names, tuple) and set(names) & set(STATE_AXES)):
            return dim
    return None


def is_split(spec: P) -> bool:
    """Whether ZeRO splits an array on this spec: it rests, or leaves the backward, as shards."""
    return split_dim(spec) is not None


def format_spec(spec: P) -> str:
    """A spec as it is printed: "whole", or the axis of every dimension.

    >>> format_spec(P()), format_spec(P(None, "data"))
    ('whole', "(None, 'data')")
    """
    return str(tuple(spec)) if any(spec) else "whole"
