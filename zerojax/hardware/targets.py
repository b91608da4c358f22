# SPDX-License-Identifier: Apache-2.0
"""Named hardware: facts of a GPU, how many on how many hosts, and the rates they reach."""

from __future__ import annotations

import dataclasses
import math
import re

GPUS_PER_HOST = 8  # of NVIDIA's DGX and HGX machines
# What collectives reach of the datasheet's peak.
LINK_SHARE, NETWORK_SHARE = 7 / 9, 0.9


@dataclasses.dataclass(frozen=True, kw_only=True)
class Gpu:
    """Facts of one GPU; a bandwidth is in bytes/s, and in one direction."""

    name: str
    kind: str  # JAX's `device_kind`
    matmul_flops: float  # dense bf16 FLOP/s
    memory_bytes: int
    memory_bandwidth: int
    link_bandwidth: float  # NVLink
    network_bandwidth: float  # the usual network card between hosts: one for each GPU
    cores: int
    fpus_per_core: int
    shared_memory: int  # bytes in a core; 1 KiB of it is kept back from a block
    l2_cache: int  # bytes
    clock_ghz: float
    capability: int

    @property
    def device_facts(self) -> str:
        """What the compiler asks of a GPU, as a text proto; limits common to all stand here."""
        # Limits: CUDA C++ programming guide, "Technical Specifications per Compute Capability".
        # NVLink is left out: told of it, XLA makes a Triton kernel of each small all-reduce, and
        # compiling that for 64 GPUs ends the process (jax 0.12).
        accelerated = "feature_extension: ACCELERATED_FEATURES" if self.capability >= 9 else ""
        return f"""gpu_device_info {{
          threads_per_block_limit: 1024 threads_per_warp: 32 threads_per_core_limit: 2048
          block_dim_limit_x: 2147483647 block_dim_limit_y: 65535 block_dim_limit_z: 65535
          registers_per_core_limit: 65536 registers_per_block_limit: 65536
          shared_memory_per_block: 49152 shared_memory_per_core: {self.shared_memory}
          shared_memory_per_block_optin: {self.shared_memory - 1024}
          core_count: {self.cores} fpus_per_core: {self.fpus_per_core}
          clock_rate_ghz: {self.clock_ghz} l2_cache_size: {self.l2_cache}
          device_memory_size: {self.memory_bytes} memory_bandwidth: {self.memory_bandwidth}
          cuda_compute_capability {{ major: {self.capability} {accelerated} }}
        }}
        platform_name: "CUDA" device_description_str: "{self.kind}" """


# NVIDIA's datasheets of the A100 80GB SXM, H100 SXM, H200 SXM and HGX B200: dense bf16 FLOP/s (half
# of what is given with sparsity), NVLink (half of what is given for both directions) and memory
# bandwidth (from the memory clock; rounded in the datasheets to 2.0, 3.35, 4.8 and 8 TB/s). Cores,
# caches and clocks: the architectures' white papers. Memory: what the driver shows of 80, 80, 141
# and 180 GB. Network: a DGX A100 has 200 Gb/s for each GPU, the later ones have 400.
A100 = Gpu(
    name="a100",
    kind="NVIDIA A100-SXM4-80GB",
    matmul_flops=312e12,
    memory_bytes=85_100_068_864,
    memory_bandwidth=2_039_040_000_000,
    link_bandwidth=300e9,
    network_bandwidth=25e9,
    cores=108,
    fpus_per_core=64,
    shared_memory=164 * 1024,
    l2_cache=40 * 2**20,
    clock_ghz=1.41,
    capability=8,
)
H100 = Gpu(
    name="h100",
    kind="NVIDIA H100 80GB HBM3",
    matmul_flops=989e12,
    memory_bytes=84_942_979_072,
    memory_bandwidth=3_352_320_000_000,
    link_bandwidth=450e9,
    network_bandwidth=50e9,
    cores=132,
    fpus_per_core=128,
    shared_memory=228 * 1024,
    l2_cache=50 * 2**20,
    clock_ghz=1.98,
    capability=9,
)
H200 = dataclasses.replace(
    H100,
    name="h200",
    kind="NVIDIA H200",
    memory_bytes=151_397_597_184,
    memory_bandwidth=4_800_000_000_000,
)
B200 = dataclasses.replace(
    H100,
    name="b200",
    kind="NVIDIA B200",
    matmul_flops=2.25e15,
    memory_bytes=191_514_411_008,
    memory_bandwidth=7_672_320_000_000,
    link_bandwidth=900e9,
    cores=148,
    l2_cache=132_644_864,
    clock_ghz=1.965,
    capability=10,
)
GPUS = {gpu.name: gpu for gpu in (A100, H100, H200, B200)}

# Variants that no target names, from their datasheets. They come first: "H100" is in "H100 PCIe".
VARIANTS = {"H100 PCIe": 756e12, "H100 NVL": 835e12, "GB200": 2.5e15}
PEAKS = VARIANTS | {gpu.name.upper(): gpu.matmul_flops for gpu in GPUS.values()}


def peak_flops(device_kind: str) -> float | None:
    """Returns a GPU's dense bf16 FLOP/s by its name as JAX gives it, or None if it is not known.

    >>> [peak_flops(kind) for kind in ("NVIDIA H100 80GB HBM3", "NVIDIA H100 PCIe", "cpu")]
    [989000000000000.0, 756000000000000.0, None]
    """
    return next((peak for name, peak in PEAKS.items() if name in device_kind), None)


@dataclasses.dataclass(frozen=True)
class Target:
    """GPUs on hosts, and the rates at which a simulation lets them work.

    Of simulated devices (`gpu` is None) no time is predicted: their bandwidths are 0.
    """

    name: str
    gpu: Gpu | None
    hosts: int
    gpus_per_host: int
    link_bandwidth: float  # bytes/s that each GPU of a collective in one host reaches
    network_bandwidth: float  # the same, if the collective spans hosts
    matmul_efficiency: float = 0.65  # shares of the peak
    attention_efficiency: float = 0.5
    memory_efficiency: float = 0.8
    kernel_seconds: float = 3e-6  # what each kernel and each collective costs at least
    collective_seconds: float = 15e-6

    @property
    def num_devices(self) -> int:
        """Devices of all hosts."""
        return self.hosts * self.gpus_per_host

    def bandwidth(self, num_hosts: int, gpus_per_host: int = 1) -> float:
        """Bytes/s of each GPU in a collective over so many GPUs of each of so many hosts.

        The rings of a collective leave a host through all network cards of its GPUs, so each GPU
        sends at the rate of the slower of its own link and those cards together.

        >>> [target("h100:2x8").bandwidth(hosts, 8) / 1e9 for hosts in (1, 2)]
        [350.0, 350.0]
        >>> target("h100:2x8").bandwidth(2, 1) / 1e9
        45.0
        """
        if num_hosts == 1:
            return self.link_bandwidth
        return min(self.link_bandwidth, self.network_bandwidth * gpus_per_host)


HARDWARE = ("name", "gpu", "hosts", "gpus_per_host")  # what a Target is; the rest are its rates
RATES = [x.name for x in dataclasses.fields(Target) if x.name not in HARDWARE]


def target(name: str | Target, **rates: float) -> Target:
    """Returns the target of a name, such as "h100:8", with other rates if any are given.

    Args:
      name: GPU:COUNT or GPU:HOSTSxCOUNT, where GPU is a key of `zerojax.targets.GPUS` or
        "simulated" (CPU devices). A count over 8 alone fills hosts of 8. Or a Target.
      **rates: fields of Target from `link_bandwidth` on, in bytes/s, shares and seconds.

    Raises:
      ValueError: the name or a rate is not as above.

    Example:
      >>> target("h100:64") == target("h100:8x8")
      True
      >>> target("h100:64", network_bandwidth=20e9).bandwidth(num_hosts=8)
      20000000000.0
    """
    found = name if isinstance(name, Target) else _parse(name)
    for rate, value in rates.items():
        if rate not in RATES:
            raise ValueError(
                f"target {found.name!r}: no rate is named {rate!r}; use one of {', '.join(RATES)}."
            )
        if found.gpu is None:
            raise ValueError(
                f"target {found.name!r}: simulated devices have no {rate}; name a GPU, as in "
                "'h100:8'."
            )
        most = 1 if rate.endswith("efficiency") else math.inf
        least = 0 if rate.endswith("seconds") else math.ulp(0)
        if not (least <= value <= most and math.isfinite(value)):
            wanted = "a share up to 1" if most == 1 else "a positive number"
            raise ValueError(f"target {found.name!r}: {rate} is {value}; give {wanted}.")
    return dataclasses.replace(found, **rates) if rates else found  # pyright: ignore


def _parse(name: str) -> Target:
    form = r"\s*([a-z]\w*):(\d+)(?:x(\d+))?\s*"
    match = re.fullmatch(form, name.lower()) if isinstance(name, str) else None
    if match is None:
        raise ValueError(
            f"target is {name!r}; write GPU:COUNT or GPU:HOSTSxCOUNT, such as 'h100:8' or "
            "'h100:64x8'."
        )
    kind, first, second = match[1], int(match[2]), match[3]
    if kind != "simulated" and kind not in GPUS:
        raise ValueError(
            f"target {name!r}: {kind!r} is not a known GPU; use one of {', '.join(GPUS)}, or "
            "simulated."
        )
    hosts, count = (first, int(second)) if second else (1, first)
    if not second and kind != "simulated" and count > GPUS_PER_HOST:
        if count % GPUS_PER_HOST:
            more = count + -count % GPUS_PER_HOST
            raise ValueError(
                f"target {name!r}: {count} GPUs do not fill hosts of {GPUS_PER_HOST}; write "
                f"'{kind}:{more}', or hosts x GPUs, as in '{kind}:{more // GPUS_PER_HOST}x4'."
            )
        hosts, count = count // GPUS_PER_HOST, GPUS_PER_HOST
    if hosts < 1 or count < 1:
        raise ValueError(f"target {name!r} has no devices; write 1 or more, as in '{kind}:8'.")
    return make_target(GPUS.get(kind), hosts, count)


def make_target(gpu: Gpu | None, hosts: int, count: int) -> Target:
    """The target of so many GPUs (None: simulated devices) on each of so many hosts."""
    alone = hosts == 1 and (gpu is None or count <= GPUS_PER_HOST)
    size = str(count) if alone else f"{hosts}x{count}"
    if gpu is None:
        return Target(f"simulated:{size}", None, hosts, count, 0.0, 0.0)
    link, network = gpu.link_bandwidth * LINK_SHARE, gpu.network_bandwidth * NETWORK_SHARE
    return Target(f"{gpu.name}:{size}", gpu, hosts, count, link, network)
