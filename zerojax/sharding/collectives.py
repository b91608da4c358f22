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

PyTree = Any
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
    axis: str
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
            in_specs=(param_specs, P(self.axis), P()),
            out_specs=out_specs,
            check_vma=self.check_vma,
        )

    def gather(self, x: jax.Array, spec: P) -> jax.Array:
        """A shard, or a replicated array, becomes this device's own whole copy."""
        dim = split_dim(spec, self.axis)
        if dim is None:
            return self.local(x)
        return lax.all_gather(x, self.axis, axis=dim, tiled=True)

    def scatter(self, x: jax.Array, spec: P) -> jax.Array:
        """Sums the devices' whole arrays and keeps this device's shard, or all if none is cut."""
        dim = split_dim(spec, self.axis)
        if dim is None:
            return self.all_reduce(x)
        return lax.psum_scatter(self.local(x), self.axis, scatter_dimension=dim, tiled=True)

    def all_reduce(self, x: jax.Array) -> jax.Array:
        """Sums over the devices; the result is equal on all of them."""
        return lax.psum(self.local(x), self.axis)

    def zeros(self, shape: tuple[int, ...], dtype: Any, spec: P | None) -> jax.Array:
        """What a gradient that lies on `spec` starts from; None is one whole copy per device."""
        if spec is None:
            return self.local(jnp.zeros(shape, dtype))
        shard = NamedSharding(self.mesh, spec).shard_shape(shape)
        zeros = jnp.zeros(shard, dtype)
        return zeros if split_dim(spec, self.axis) is None else self.local(zeros)

    def local(self, x: jax.Array) -> jax.Array:
        """Marks a replicated array as one that may differ between devices from here on.

        Under `check_vma`, the gradient of one not marked would be summed over the devices at once.
        """
        if self.axis in jax.typeof(x).manual_axis_type.varying:
            return x
        return lax.pcast(x, self.axis, to="varying")


@dataclasses.dataclass(frozen=True)
class Auto:
    """NamedSharding constraints on global arrays; XLA inserts the collectives."""

    mesh: Mesh
    axis: str

    def per_device(self, fn: PerDevice, param_specs: PyTree, out_specs: PyTree) -> PerDevice:
        """As Manual.per_device; specs are held by the constraints in gather and scatter."""
        del param_specs, out_specs
        num_devices = self.mesh.shape[self.axis]
        mapped = jax.vmap(
            fn,
            in_axes=(None, 0, None),
            out_axes=None,
            axis_name=self.axis,
            axis_size=num_devices,
            spmd_axis_name=self.axis,
        )

        def run(params, batch, key):
            def rows(x):
                return self._constrain(x.reshape(num_devices, -1, *x.shape[1:]), P(self.axis))

            return mapped(params, jax.tree.map(rows, batch), key)

        return run

    def gather(self, x: jax.Array, spec: P) -> jax.Array:
        """As Manual.gather. The first constraint pins the cast to the shard, before the wire."""
        return self._constrain(self._constrain(x, spec), P())

    def scatter(self, x: jax.Array, spec: P) -> jax.Array:
        """As Manual.scatter."""
        return self._constrain(lax.psum(x, self.axis), spec)

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


def device_index(axis: str) -> jax.Array:
    """This device's position on the axis, inside `per_device`."""
    return lax.axis_index(axis)


def gather_global(x: jax.Array, spec: P, mesh: Mesh, axis: str) -> jax.Array:
    """A global array on `spec` becomes whole on every device, under either partitioner.

    The shards are gathered along a new first dimension and moved to their place afterwards. If they
    were gathered along an inner one, XLA would lay them out with that dimension first, and so every
    array that the optimizer computes them from: two transposes of each moment and master copy.
    """
    dim = split_dim(spec, axis)

    def constrain(x: jax.Array, spec: P) -> jax.Array:
        return lax.with_sharding_constraint(x, NamedSharding(mesh, spec))

    if not dim:
        return constrain(x, P())
    sizes = mesh.shape[axis], x.shape[dim] // mesh.shape[axis]
    shards = jnp.moveaxis(x.reshape(*x.shape[:dim], *sizes, *x.shape[dim + 1 :]), dim, 0)
    whole = constrain(constrain(shards, P(axis)), P())
    return constrain(jnp.moveaxis(whole, 0, dim).reshape(x.shape), P())


def split_dim(spec: P, axis: str) -> int | None:
    """The dimension of an array that `spec` splits over `axis`, or None."""
    for dim, names in enumerate(spec):
        if names == axis or (isinstance(names, tuple) and axis in names):
            return dim
    return None
