# SPDX-License-Identifier: Apache-2.0
"""The device mesh: make one, check one, and simulate devices where there are too few."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

import jax
from jax.sharding import AxisType, Mesh

DATA = "data"  # the axis over which ZeRO splits the model state and the batch


def simulate_devices(num_devices: int) -> None:
    """Makes this process see `num_devices` CPU devices, for notebooks, laptops and tests.

    Call it before anything touches a JAX array. Calling it again with the same number is fine, so
    a notebook cell can be run twice.

    Args:
      num_devices: how many devices to simulate.

    Raises:
      ValueError: `num_devices` is not positive, or JAX already started with other devices.

    Example:
      >>> simulate_devices(8)
      >>> jax.device_count()
      8
    """
    if num_devices < 1:
        raise ValueError(f"num_devices is {num_devices}; pass 1 or more, for example 8.")
    try:
        jax.config.update("jax_num_cpu_devices", num_devices)
        jax.config.update("jax_platforms", "cpu")
        # The devices of a program wait for each other in every collective, each on a thread of one
        # pool. As many threads as devices, XLA's default, can leave one of them waiting for ever.
        os.environ.setdefault("PJRT_NPROC", str(4 * num_devices))
        found = len(jax.devices())
    except RuntimeError:  # JAX refuses to change the number once its backends have started
        found = len(jax.devices())
    if found != num_devices or jax.default_backend() != "cpu":
        raise ValueError(
            f"simulate_devices({num_devices}): JAX already started with {found} "
            f"{jax.default_backend()} device(s). Call it before any other use of JAX: restart the "
            "notebook kernel, or move the call to the top of the script."
        )


def make_mesh(num_devices: int | None = None, *, devices: Sequence[Any] | None = None) -> Mesh:
    """Returns a mesh of one axis, "data", over every device or over the first `num_devices`.

    Args:
      num_devices: how many devices to use; default all.
      devices: the devices themselves, in the order wanted; default `jax.devices()`.

    Raises:
      ValueError: more devices are asked for than there are.

    Example:
      >>> make_mesh(4).shape
      OrderedDict({'data': 4})
    """
    available = list(jax.devices() if devices is None else devices)
    wanted = len(available) if num_devices is None else num_devices
    if not 1 <= wanted <= len(available):
        simulate = f", or call zerojax.simulate_devices({wanted}) before any other use of JAX"
        raise ValueError(
            f"make_mesh: {wanted} devices wanted, {len(available)} available. Pass num_devices "
            f"between 1 and {len(available)}{simulate if wanted > 0 else ''}."
        )
    return jax.make_mesh((wanted,), (DATA,), (AxisType.Auto,), devices=available[:wanted])


def check_mesh(mesh: Mesh) -> None:
    """Raises ValueError unless the mesh has an Auto axis "data" and no other of size over 1."""
    if not isinstance(mesh, Mesh):
        raise ValueError(
            f"mesh is a {type(mesh).__name__}; pass a jax.sharding.Mesh, such as "
            "zerojax.make_mesh()."
        )
    if DATA not in mesh.shape:
        raise ValueError(
            f"mesh has axes {tuple(mesh.axis_names)} and none named {DATA!r}, the axis over which "
            "ZeRO splits. Use zerojax.make_mesh(), or rename the data-parallel axis."
        )
    explicit = [
        (name, kind)
        for name, kind in zip(mesh.axis_names, mesh.axis_types, strict=True)
        if kind != AxisType.Auto
    ]
    if explicit:
        raise ValueError(
            f"mesh axis {explicit[0][0]!r} is of type {explicit[0][1].name}; zerojax places "
            "arrays itself and needs AxisType.Auto. Use zerojax.make_mesh(), or "
            "jax.make_mesh(shape, names, axis_types=(jax.sharding.AxisType.Auto,))."
        )
    others = {name: size for name, size in mesh.shape.items() if name != DATA and size > 1}
    if others:
        raise ValueError(
            f"mesh has other axes {others}; only {DATA!r} may be larger than 1 in this version. "
            "Put all devices on it with zerojax.make_mesh()."
        )
