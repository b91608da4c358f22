# SPDX-License-Identifier: Apache-2.0
"""Gather and scatter for both partitioners: the only file that names a lax collective.

The rest of the library writes what one device does, as a function of the parameters at rest, the
device's own rows and a key. A partitioner runs that function on every device:

  Manual  shard_map: a shard is a local array, and a collective is the one written here.
  Auto    vmap over the devices' rows, on global arrays: a shard is an array with a sharding
          constraint, a sum over devices is a sum over the mapped dimension, and XLA inserts the
          collective that turns one layout into the other.

Both see the same rows, the same keys and the same order of operations, so they compute the same
numbers. The mapped dimension keeps per-device values apart, so that Auto too can hold a gradient
local over several microbatches and reduce it once.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from zerojax.sharding.axes import (
    DATA,
    STATE_AXES,
    batch_axes,
    batch_spec,
    copy_axes,
    num_batch_shards,
    num_shards,
)
from zerojax.sharding.specs import split_dim
from zerojax.tree import PyTree

# What one device does: (parameters at rest, its rows of the batch, key) -> results.
PerDevice = Callable[[PyTree, PyTree, jax.Array], PyTree]


@dataclasses.dataclass(frozen=True)
class Manual:
    """shard_map, with every collective written out.

    `check_vma` has JAX check which results are equal on all devices. It is off in a user's step and
    on in our tests, because it also types the user's code, where a constant that meets rows of the
    batch gets a psum as its transpose: the gradient of an inner `jax.grad` would be summed over the
    devices, silently.
    """

    mesh: Mesh
    check_vma: bool = False

    def per_device(self, fn: PerDevice, param_specs: PyTree, out_specs: PyTree) -> PerDevice:
        """Returns `fn` run on every device, as a function of global arrays.

        Args:
          fn: what one device does. Its results must agree with `out_specs`: a result is whole and
            equal everywhere (P()), or a shard.
          param_specs: specs of the first argument. The second is split by rows, the third whole.
          out_specs: specs of the results.
        """
        return jax.shard_map(
            fn,
            mesh=self.mesh,
            in_specs=(param_specs, batch_spec(self.mesh), P()),
            out_specs=out_specs,
            check_vma=self.check_vma,
        )

    def batch_index(self) -> jax.Array:
        """Which part of the batch this device has; inside `per_device`."""
        return lax.axis_index(batch_axes(self.mesh))

    def gather(self, x: jax.Array, spec: P) -> jax.Array:
        """A shard, or a replicated array, becomes this device's own whole copy."""
        dim = split_dim(spec)
        if dim is None:
            return self.local(x)
        return self.local(lax.all_gather(x, STATE_AXES, axis=dim, tiled=True))

    def scatter(self, x: jax.Array, spec: P) -> jax.Array:
        """Sums the devices' whole arrays and keeps this device's shard, or all if none is cut."""
        dim = split_dim(spec)
        if dim is None:
            return self.all_reduce(x)
        shard = lax.psum_scatter(self.local(x), STATE_AXES, scatter_dimension=dim, tiled=True)
        copies = copy_axes(self.mesh)
        return lax.psum(shard, copies) if copies else shard

    def all_reduce(self, x: jax.Array) -> jax.Array:
        """Sums over the parts of the batch; the result is equal on all devices."""
        return lax.psum(self.local(x), batch_axes(self.mesh))

    def zeros(self, shape: tuple[int, ...], dtype: Any, spec: P | None) -> jax.Array:
        """What a gradient that lies on `spec` starts from; None is one whole copy per device."""
        if spec is None:
            return self.local(jnp.zeros(shape, dtype))
        shard = NamedSharding(self.mesh, spec).shard_shape(shape)
        zeros = jnp.zeros(shard, dtype)
        return zeros if split_dim(spec) is None else _varying(zeros, STATE_AXES)

    def local(self, x: jax.Array) -> jax.Array:
        """Marks a replicated array as one that may differ between devices from here on.

        Under `check_vma`, the gradient of one not marked would be summed over the devices at once.
        """
        return _varying(x, batch_axes(self.mesh))


def _varying(x: jax.Array, axes: tuple[str, ...]) -> jax.Array:
    known = jax.typeof(x).manual_axis_type.varying
    new = tuple(name for name in axes if name not in known)
    return lax.pcast(x, new, to="varying") if new else x


@dataclasses.dataclass(frozen=True)
class Auto:
    """NamedSharding constraints on global arrays; XLA inserts the collectives.

    Inside `per_device` the mapped dimension counts the parts of the batch, whichever axes of the
    mesh cut them, and is called "data".
    """

    mesh: Mesh

    def per_device(self, fn: PerDevice, param_specs: PyTree, out_specs: PyTree) -> PerDevice:
        """As Manual.per_device; specs are held by the constraints in gather and scatter."""
        del param_specs, out_specs
        (names,) = batch_spec(self.mesh)
        num_parts = num_batch_shards(self.mesh)
        mapped = jax.vmap(
            fn,
            in_axes=(None, 0, None),
            out_axes=None,
            axis_name=DATA,
            axis_size=num_parts,
            spmd_axis_name=names,
        )

        def run(params, batch, key):
            def rows(x):
                parts = x.reshape(num_parts, -1, *x.shape[1:])
                return self._constrain(parts, batch_spec(self.mesh))

            return mapped(params, jax.tree.map(rows, batch), key)

        return run

    def batch_index(self) -> jax.Array:
        """As Manual.batch_index."""
        return lax.axis_index(DATA)

    def gather(self, x: jax.Array, spec: P) -> jax.Array:
        """As Manual.gather. The first constraint pins the cast to the shard, before the wire."""
        return self._constrain(self._constrain(x, spec), P())

    def scatter(self, x: jax.Array, spec: P) -> jax.Array:
        """As Manual.scatter."""
        return self._constrain(lax.psum(x, DATA), spec)

    def all_reduce(self, x: jax.Array) -> jax.Array:
        """As Manual.all_reduce."""
        return self.scatter(x, P())

    def zeros(self, shape: tuple[int, ...], dtype: Any, spec: P | None) -> jax.Array:
        """As Manual.zeros."""
        return self._constrain(jnp.zeros(shape, dtype), P() if spec is None else spec)

    def local(self, x: jax.Array) -> jax.Array:
        """A value with one copy per device stays with its device."""
        return self._constrain(x, P())

    def _constrain(self, x: jax.Array, spec: P) -> jax.Array:
        return lax.with_sharding_constraint(x, NamedSharding(self.mesh, spec))


PARTITIONERS = {"manual": Manual, "auto": Auto}


def gather_global(x: jax.Array, spec: P, mesh: Mesh) -> jax.Array:
    """A global array on `spec` becomes whole on every device, under either partitioner.

    The shards are gathered along a new first dimension and moved to their place afterwards. If they
    were gathered along an inner one, XLA would lay them out with that dimension first, and so every
    array that the optimizer computes them from: two transposes of each moment and master copy.
    """
    dim = split_dim(spec)

    def constrain(x: jax.Array, spec: P) -> jax.Array:
        return lax.with_sharding_constraint(x, NamedSharding(mesh, spec))

    if not dim:
        return constrain(x, P())
    count = num_shards(mesh)
    sizes = count, x.shape[dim] // count
    shards = jnp.moveaxis(x.reshape(*x.shape[:dim], *sizes, *x.shape[dim + 1 :]), dim, 0)
    whole = constrain(constrain(shards, P(DATA)), P())
    return constrain(jnp.moveaxis(whole, 0, dim).reshape(x.shape), P())
