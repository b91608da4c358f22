# SPDX-License-Identifier: Apache-2.0
"""The axes of a mesh by name: which cut the batch, which split the state, which cut a layer.

    axis      rows of a batch   arrays of the state          a layer's arithmetic
    pipe      the same          the layers are dealt out     whole layers
    replica   cut               copies                       whole
    data      cut               split, as the stage says     whole
    tensor    the same          cut where the model says     cut

Three numbers follow, and are equal only where "data" is the one axis larger than 1: into how many
shards ZeRO splits an array, into how many parts the rows of a batch are cut, how many devices
there are (`mesh.size`). In this version only "data" may be larger than 1.
"""

from __future__ import annotations

import math

from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

PIPE, REPLICA, DATA, TENSOR = "pipe", "replica", "data", "tensor"
BATCH_AXES = (REPLICA, DATA)  # devices that differ here have other rows
STATE_AXES = (DATA,)  # over these ZeRO splits
LAYER_AXES = (TENSOR,)  # over these the arithmetic inside a layer is cut


def batch_axes(mesh: Mesh) -> tuple[str, ...]:
    """The axes of the mesh that cut the rows of a batch, outermost first."""
    return tuple(name for name in BATCH_AXES if name in mesh.shape)


def copy_axes(mesh: Mesh) -> tuple[str, ...]:
    """The axes that cut the batch and hold copies of the state: gradients are summed over them."""
    return tuple(name for name in batch_axes(mesh) if name not in STATE_AXES)


def batch_spec(mesh: Mesh) -> P:
    """The spec of every leaf of a batch: its rows are cut over the batch axes."""
    names = batch_axes(mesh)
    return P(names[0] if len(names) == 1 else names)


def num_shards(mesh: Mesh) -> int:
    """Into how many shards ZeRO splits an array.

    >>> import jax
    >>> mesh = jax.make_mesh((2, 2, 2), ("replica", "data", "tensor"))
    >>> num_shards(mesh), num_batch_shards(mesh), mesh.size
    (2, 4, 8)
    """
    return math.prod(mesh.shape[name] for name in STATE_AXES)


def num_batch_shards(mesh: Mesh) -> int:
    """Into how many parts the rows of a batch are cut."""
    return math.prod(mesh.shape[name] for name in batch_axes(mesh))
