# SPDX-License-Identifier: Apache-2.0
"""Options with which XLA compiles a step for GPUs, so that communication hides behind compute."""

from __future__ import annotations

from collections.abc import Mapping

import jax
from jax.sharding import Mesh

from zerojax.hardware.devices import platform

# Chosen on Llama2-7B, 2 x 4096 tokens per GPU, compiled for 8 x H100 (docs/log.md): at prefetch 1
# the collectives in the layer loops hide behind compute, also on a link of 100 GB/s.
GPU_OPTIONS: dict[str, bool | int | str] = {
    # Few large collectives for the weights of a layer, instead of one for each.
    "xla_gpu_all_gather_combine_threshold_bytes": 200 * 2**20,
    "xla_gpu_reduce_scatter_combine_threshold_bytes": 400 * 2**20,
    # Two layers in an iteration of the loop: the prefetched layer changes its place without a copy.
    "xla_gpu_enable_while_loop_double_buffering": True,
    # The scheduler assumes a fast link and would start a collective as late as that allows.
    "xla_gpu_experimental_collective_start_as_early_as_possible": True,
    # In the backward the gathers of one layer and the scatter of another are under way together.
    "xla_gpu_experimental_parallel_collective_overlap_limit": 4,
}
# XLA makes the reduce-scatters of the partitioner "auto" from all-reduces, too late to move them
# into the next iteration of the loop, as it moves those of "manual": let it move the all-reduces.
GPU_OPTIONS |= (
    {"xla_gpu_pipeline_all_reduce": "2"}
    if jax.__version_info__ >= (0, 11, 1)
    else {"xla_gpu_enable_pipelined_all_reduce": True}
)


def options_for(
    mesh: Mesh, options: Mapping[str, bool | int | str] | None
) -> dict[str, bool | int | str]:
    """The user's options, or the defaults for the mesh's kind of device: GPU_OPTIONS or none."""
    if options is not None:
        return dict(options)
    return dict(GPU_OPTIONS) if platform(mesh) == "gpu" else {}
