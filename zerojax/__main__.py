# SPDX-License-Identifier: Apache-2.0
"""What a bug report needs: `python -m zerojax` prints versions, devices and what is missing."""

import os
import platform
import textwrap
from importlib import metadata

import jax
import jax.numpy as jnp
from jax.sharding import SingleDeviceSharding

from zerojax.hardware.devices import plugins, skip_absent_gpus
from zerojax.sharding.mesh import make_mesh
from zerojax.table import format_bytes

PACKAGES = ("zerojax", "jax", "jaxlib", "optax", "orbax-checkpoint", "numpy")


def describe_devices() -> str:
    """Number and kind of this process's devices and, where it is known, the memory of each."""
    first = jax.local_devices()[0]
    limit = (first.memory_stats() or {}).get("bytes_limit")
    memory = f", {format_bytes(limit)} each" if limit else ""
    return f"{len(jax.local_devices())} x {first.device_kind} ({first.platform}){memory}"


def try_aot() -> str:
    """Whether programs can be compiled for GPUs that are not here, or what is missing."""
    if not any(name.startswith("xla_cuda") for name in plugins()):
        return "no, JAX's CUDA plugin is missing: pip install '.[aot]' in a clone of zerojax"
    try:
        where = SingleDeviceSharding(make_mesh(target="h100:1").devices[0])
        jax.jit(jnp.sin).lower(jax.ShapeDtypeStruct((8,), "float32", sharding=where)).compile()
    except (ValueError, RuntimeError) as error:  # the compiler's own are RuntimeErrors
        return f"no: {error}"
    return "yes, a program for h100:1 was compiled"


def main() -> None:
    """Prints a fact a line, cut to 100 columns."""
    skip_absent_gpus()
    facts = {package: metadata.version(package) for package in PACKAGES}
    facts["python"], facts["platform"] = platform.python_version(), platform.platform()
    facts |= {name: os.environ.get(name, "not set") for name in ("JAX_PLATFORMS", "XLA_FLAGS")}
    facts["devices"] = describe_devices()
    facts["processes"] = f"{jax.process_count()}, this is number {jax.process_index()}"
    facts["compiles for GPUs"] = try_aot()
    for name, fact in facts.items():
        print(textwrap.shorten(f"{name}: {fact}", 100, placeholder=" ..."))


if __name__ == "__main__":
    # JAX's persistent cache keeps programs for GPUs that are not here, and cannot read them again.
    jax.config.update("jax_enable_compilation_cache", False)
    main()
