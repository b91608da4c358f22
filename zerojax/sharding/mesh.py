# SPDX-License-Identifier: Apache-2.0
"""The device mesh: make one, check one."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

import jax
from jax.sharding import AxisType, Mesh

from zerojax.hardware import targets
from zerojax.hardware.devices import skip_absent_gpus, target_devices
from zerojax.hardware.targets import Target
from zerojax.sharding.axes import DATA


def make_mesh(
    num_devices: int | None = None,
    *,
    devices: Sequence[Any] | None = None,
    target: str | Target | None = None,
) -> Mesh:
    """Returns a mesh of one axis, "data", over every device or over the first `num_devices`.

    With `target` the mesh is of hardware that need not be here. Nothing runs on it, but
    `step.lower(plan.abstract_state, abstract_batch).compile()` is the program for it.

    Args:
      num_devices: how many devices to use; default all.
      devices: the devices themselves, in the order wanted; default `jax.devices()`.
      target: in place of both, such as "h100:8" or "h100:64x8" (hosts x GPUs), or what
        `zerojax.target` returned; GPUs need `pip install '.[aot]' in a clone of zerojax`.

    Raises:
      ValueError: more devices are asked for than there are, processes would have unequal numbers
        of them, or the target is not known or not to be had.

    Example:
      >>> make_mesh(4).shape
      OrderedDict({'data': 4})
    """
    if target is not None:
        if devices is not None or num_devices is not None:
            raise ValueError(
                "make_mesh: target= says which devices, and how many. Leave out num_devices and "
                "devices."
            )
        devices = target_devices(targets.target(target))
    skip_absent_gpus()
    available = list(jax.devices() if devices is None else devices)
    wanted = len(available) if num_devices is None else num_devices
    if not 1 <= wanted <= len(available):
        simulate = f", or call zerojax.simulate_devices({wanted}) before any other use of JAX"
        raise ValueError(
            f"make_mesh: {wanted} devices wanted, {len(available)} available. Pass num_devices "
            f"between 1 and {len(available)}{simulate if wanted > 0 else ''}."
        )
    chosen = available[:wanted]
    per_process = Counter(device.process_index for device in chosen)
    idle = target is None and len(per_process) < jax.process_count()
    if idle or len(set(per_process.values())) > 1:
        raise ValueError(
            f"make_mesh: {wanted} of {len(available)} devices leave processes with unequal numbers "
            f"of them: {dict(per_process)} of {jax.process_count()} processes. Use all devices, or "
            "pass devices= with as many of each process."
        )
    return jax.make_mesh((wanted,), (DATA,), (AxisType.Auto,), devices=chosen)


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
        name, kind = explicit[0]
        raise ValueError(
            f"mesh axis {name!r} is of type {kind.name}; zerojax places "
            "arrays itself and needs AxisType.Auto. Use zerojax.make_mesh(), or "
            "jax.make_mesh(shape, names, axis_types=(jax.sharding.AxisType.Auto,))."
        )
    others = {name: size for name, size in mesh.shape.items() if name != DATA and size > 1}
    if others:
        raise ValueError(
            f"mesh has other axes {others}; only {DATA!r} may be larger than 1 in this version. "
            "Put all devices on it with zerojax.make_mesh()."
        )
