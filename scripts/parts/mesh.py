# SPDX-License-Identifier: Apache-2.0
"""The mesh that a script runs on: accelerators, or simulated devices."""

import contextlib

import jax
from jax.sharding import Mesh

import zerojax as zj
from zerojax.hardware.devices import may_have_accelerator


def make_mesh(num_devices: int | None) -> Mesh:
    """Return a mesh of so many devices: accelerators, or simulated ones on a CPU (None: 8)."""
    if not may_have_accelerator():
        several = jax.distributed.is_initialized()  # then `scripts.launch` gave each its number
        here = max(1, jax.config.jax_num_cpu_devices) if several else num_devices or 8
        with contextlib.suppress(ValueError):  # once JAX runs, the devices are those it has
            zj.simulate_devices(here)
    found, kind = jax.device_count(), jax.devices()[0].device_kind
    if num_devices and not 1 <= num_devices <= found:
        remedy = f"give --devices {found}{' or fewer' if found > 1 else ''}"
        why = "--devices simulates more only on a CPU, and only before JAX starts"
        raise ValueError(f"--devices: {num_devices} wanted, {found} here ({kind}); {remedy}: {why}")
    return zj.make_mesh(num_devices)
