# SPDX-License-Identifier: Apache-2.0
"""Options with which XLA compiles a step for GPUs, so that communication hides behind compute."""

from __future__ import annotations

from collections.abc import Mapping

from jax.sharding import Mesh

# Compiled for 8 x H100, 16 layers of 2048 x 8192 in bf16 (`python -m scripts.h100`): at prefetch 1
# every gather and scatter in the layer loops is asynchronous, with matmuls between start and done.
GPU_OPTIONS: dict[str, bool | int] = {
    # One gather and one scatter for all the weights of a layer, instead of one for each.
    "xla_gpu_all_gather_combine_threshold_bytes": 128 * 2**20,
    "xla_gpu_reduce_scatter_combine_threshold_bytes": 64 * 2**20,
    # Two layers in an iteration of the loop: the prefetched layer changes its place without a copy.
    "xla_gpu_enable_while_loop_double_buffering": True,
}


def compiler_options(
    mesh: Mesh, options: Mapping[str, bool | int | str] | None
) -> dict[str, bool | int | str]:
    """The user's options, or the defaults for the mesh's kind of device: GPU_OPTIONS or none."""
    if options is not None:
        return dict(options)
    return dict(GPU_OPTIONS) if mesh.devices.flat[0].platform in ("gpu", "cuda") else {}
