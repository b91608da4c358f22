# SPDX-License-Identifier: Apache-2.0
"""Devices to build a mesh of: those that JAX finds, simulated ones, or GPUs to compile for."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import glob
import importlib
import importlib.util
import os
import pkgutil
import shutil
from collections.abc import Sequence
from typing import Any

import jax
from jax.experimental import topologies
from jax.sharding import Mesh

from zerojax.hardware import targets
from zerojax.hardware.targets import Target

_MADE: dict[Any, Target] = {}  # what each compile-only device was made for


def simulate_devices(num_devices: int) -> None:
    """Makes this process see `num_devices` CPU devices, for notebooks, laptops and tests.

    Call it before anything touches a JAX array, and after `zerojax.start_hosts`. Calling it again
    with the same number is fine, so a notebook cell can be run twice.

    Args:
      num_devices: how many devices to simulate, in each process.

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
        found = jax.local_device_count()
    except RuntimeError:  # JAX refuses to change the number once its backends have started
        found = jax.local_device_count()
    if found != num_devices or jax.default_backend() != "cpu":
        raise ValueError(
            f"simulate_devices({num_devices}): JAX already started with {found} "
            f"{jax.default_backend()} device(s). Call it before any other use of JAX: restart the "
            "notebook kernel, or move the call to the top of the script."
        )


def platform(mesh: Mesh) -> str:
    """What the devices of a mesh are: "cpu", "gpu" or another of JAX's names.

    >>> platform(jax.make_mesh((1,), ("data",)))
    'cpu'
    """
    return platform_of(mesh.devices.flat[0])


def platform_of(device: Any) -> str:
    """As `platform`, of one device."""
    return "gpu" if device.platform == "cuda" else device.platform  # so the compiler's own say


def may_have_accelerator() -> bool:
    """Whether JAX could find an accelerator here when it starts; starts nothing."""
    if jax.config.jax_platforms:
        return jax.config.jax_platforms != "cpu"
    found = plugins()
    if importlib.util.find_spec("libtpu") or any("cuda" not in name for name in found):
        return True
    # Files of the driver: of a PC or server, of Tegra, of WSL.
    driver = any(glob.glob(f"/dev/{name}") for name in ("nvidia*", "nvhost*", "dxg"))
    return bool(found) and (driver or shutil.which("nvidia-smi") is not None)


def skip_absent_gpus() -> None:
    """Keeps JAX from looking for GPUs that cannot be here.

    With its CUDA plugin installed, for compiling, JAX looks for them at every start, and prints
    the traceback of not finding them. Once JAX has started, this changes nothing.
    """
    if plugins() and not may_have_accelerator():
        with contextlib.suppress(RuntimeError):
            jax.config.update("jax_platforms", "cpu")


def plugins() -> list[str]:
    """Names of JAX's installed plugins, such as "xla_cuda12"."""
    found = importlib.util.find_spec("jax_plugins")
    places = found.submodule_search_locations if found else None
    return [module.name for module in pkgutil.iter_modules(places)] if places else []


def target_devices(target: Target) -> list[Any]:
    """Returns the target's devices: GPUs for the compiler alone, or simulated CPU devices.

    GPUs may be asked for before or after JAX starts.

    Raises:
      ValueError: JAX's CUDA plugin is missing or refuses, or fewer CPU devices are simulated.

    Example:
      >>> len(target_devices(targets.target("simulated:8")))
      8
    """
    skip_absent_gpus()
    if target.gpu is not None:
        return list(_compile_only_devices(target))
    found = jax.devices("cpu")
    if len(found) < target.num_devices:
        raise ValueError(
            f"target {target.name!r}: {len(found)} CPU device(s) here. Call "
            f"zerojax.simulate_devices({target.num_devices}) before any other use of JAX."
        )
    return found[: target.num_devices]


@functools.cache
def _compile_only_devices(target: Target) -> Sequence[Any]:
    assert target.gpu is not None
    describe = functools.partial(
        topologies.get_topology_desc,
        topology_name=target.name,
        platform="cuda",
        target_config=target.gpu.device_facts,
        topology=f"1x{target.hosts}x{target.gpus_per_host}",
    )
    cuda = [name for name in plugins() if name.startswith("xla_cuda")]
    if not cuda:
        raise ValueError(
            f"target {target.name!r}: compiling for GPUs needs JAX's CUDA plugin, and it is not "
            "installed. pip install '.[aot]' in a clone of zerojax."
        )
    try:
        try:
            found = describe().devices
        except NotImplementedError:  # the plugin found no CUDA when JAX started, and withdrew
            _start_without_cuda(cuda[0])
            found = describe().devices
    except Exception as error:  # of whatever type the plugin's own failure is
        raise ValueError(
            f"target {target.name!r}: JAX's CUDA plugin cannot compile here: {error}. Set "
            "JAX_PLATFORMS=cpu, or call zerojax.simulate_devices, before any other use of JAX."
        ) from error
    _MADE.update(dict.fromkeys(found, target))
    return found


def _start_without_cuda(plugin: str) -> None:
    """Registers a plugin that JAX left out; compiling needs none of the libraries it missed."""
    variable = "JAX_SKIP_CUDA_CONSTRAINTS_CHECK"
    before = os.environ.get(variable)
    os.environ[variable] = "1"
    try:
        importlib.import_module(f"jax_plugins.{plugin}").initialize()
    finally:
        os.environ.pop(variable)
        if before is not None:
            os.environ[variable] = before


def compile_only(mesh: Mesh) -> str:
    """What a mesh for the compiler alone stands for, such as "h100:8"; "" if its devices run."""
    first = mesh.devices.flat[0]
    if "CompileOnly" not in type(first.client).__name__:
        return ""
    made = _MADE.get(first)
    whole = made is not None and made.num_devices == mesh.size
    return made.name if made and whole else f"{mesh.size} x {first.device_kind or first.platform}"


def target_of(mesh: Mesh, **rates: float) -> Target:
    """Returns the target of a mesh's devices, real, compile-only or simulated.

    A process counts as a host. A mesh from `make_mesh(target=...)` has the rates of that target.

    Args:
      mesh: any mesh.
      **rates: as for `zerojax.target`.

    Raises:
      ValueError: the devices are not known, or differ in number between hosts.

    Example:
      >>> target_of(jax.make_mesh((4,), ("data",))).name
      'simulated:4'
    """
    found = list(mesh.devices.flat)
    first, made, hosts = found[0], _MADE.get(found[0]), len({d.process_index for d in found})
    if len(found) % hosts:
        raise ValueError(
            f"the mesh has {len(found)} devices on {hosts} hosts, not the same number on each. "
            "Pass target=, such as target='h100:8'."
        )
    gpus = {gpu.kind: gpu for gpu in targets.GPUS.values()}
    if first.platform != "cpu" and made is None and first.device_kind not in gpus:
        raise ValueError(
            f"nothing is known of device {first.device_kind!r}; known are {', '.join(gpus)}. "
            "Pass target=, such as target='h100:8'."
        )
    size = targets.make_target(gpus.get(first.device_kind), hosts, len(found) // hosts)
    if made is not None:
        size = dataclasses.replace(
            made, name=size.name, hosts=hosts, gpus_per_host=size.gpus_per_host
        )
    return targets.target(size, **rates)
