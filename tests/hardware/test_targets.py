# SPDX-License-Identifier: Apache-2.0
"""Named hardware: its facts, its names, and steps compiled for GPUs that are not here."""

from __future__ import annotations

import os
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import zerojax as zj
from tests import ROOT, aot
from zerojax.hardware import devices
from zerojax.hardware.devices import target_devices, target_of
from zerojax.hardware.targets import GPUS


@pytest.mark.parametrize(
    ("name", "canonical", "hosts", "gpus"),
    [
        ("h100:8", "h100:8", 1, 8),
        ("h100:4", "h100:4", 1, 4),
        ("h100:64", "h100:8x8", 8, 8),
        ("H100:64x8", "h100:64x8", 64, 8),
        (" a100:1x16 ", "a100:1x16", 1, 16),
        ("a100:16", "a100:2x8", 2, 8),
        ("b200:2x4", "b200:2x4", 2, 4),
        ("simulated:12", "simulated:12", 1, 12),
    ],
)
def test_names(name, canonical, hosts, gpus):
    found = zj.target(name)
    assert (found.name, found.hosts, found.gpus_per_host) == (canonical, hosts, gpus)
    assert found.num_devices == hosts * gpus
    assert zj.target(found) is found
    assert zj.target(found.name) == found


def test_rates():
    h100 = zj.target("h100:64")
    assert h100.gpu is GPUS["h100"]
    assert h100.bandwidth(1) == h100.bandwidth(2, gpus_per_host=8) == 350e9
    assert h100.bandwidth(8) == 45e9
    assert h100.bandwidth(8, gpus_per_host=4) == 180e9
    slow = zj.target("h100:64", link_bandwidth=100e9, kernel_seconds=0)
    assert (slow.bandwidth(1), slow.kernel_seconds, slow.name) == (100e9, 0, h100.name)
    assert zj.target(slow, link_bandwidth=350e9, kernel_seconds=3e-6) == h100
    assert zj.target("simulated:8").bandwidth(1) == 0


@pytest.mark.parametrize("name", GPUS)
def test_facts_are_of_the_right_size(name):
    gpu = GPUS[name]
    assert gpu.name == name
    assert 300e12 < gpu.matmul_flops < 3e15
    assert 79e9 < gpu.memory_bytes < 192e9
    assert 2e12 < gpu.memory_bandwidth < 8e12
    assert 150 < gpu.matmul_flops / gpu.memory_bandwidth < 300
    assert gpu.network_bandwidth < gpu.link_bandwidth < gpu.memory_bandwidth


@pytest.mark.parametrize(
    ("build", "parts"),
    [
        (lambda: zj.target("h100"), ["'h100'", "GPU:COUNT", "'h100:8'"]),
        (lambda: zj.target(8), ["target is 8;"]),
        (lambda: zj.target("h100:8x"), ["'h100:8x'", "'h100:64x8'"]),
        (lambda: zj.target("v100:8"), ["'v100'", "one of a100, h100, h200, b200, or simulated"]),
        (lambda: zj.target("h100:0"), ["'h100:0' has no devices", "1 or more"]),
        (lambda: zj.target("h100:0x8"), ["'h100:0x8' has no devices"]),
        (lambda: zj.target("h100:12"), ["12 GPUs", "hosts of 8", "'h100:16'", "'h100:2x4'"]),
        (lambda: zj.target("h100:8", speed=2), ["'speed'", "link_bandwidth, network_"]),
        (lambda: zj.target("h100:8", hosts=2), ["no rate is named 'hosts'"]),
        (lambda: zj.target("h100:8", matmul_efficiency=65), ["65", "a share up to 1"]),
        (lambda: zj.target("h100:8", link_bandwidth=0), ["link_bandwidth is 0", "positive"]),
        (lambda: zj.target("h100:8", kernel_seconds=float("nan")), ["nan"]),
        (lambda: zj.target("simulated:8", link_bandwidth=1e9), ["simulated devices have no link"]),
        (lambda: zj.make_mesh(target="simulated:9"), ["8 CPU device(s)", "simulate_devices(9)"]),
        (lambda: zj.make_mesh(4, target="h100:8"), ["target=", "Leave out num_devices"]),
        (lambda: zj.make_mesh(devices=jax.devices(), target="h100:8"), ["Leave out"]),
    ],
)
def test_mistakes(build, parts):
    with pytest.raises(ValueError) as caught:
        build()
    for part in parts:
        assert part in str(caught.value)


def test_the_plugin_that_is_missing_is_named(monkeypatch):
    monkeypatch.setattr(devices, "plugins", list)
    with pytest.raises(ValueError, match=r"'h200:3': .*plugin.*pip install '\.\[aot\]' in a clone"):
        zj.make_mesh(target="h200:3")


def test_a_plugin_that_fails_is_quoted(monkeypatch):
    def fail(**facts):
        raise RuntimeError("no such field")

    monkeypatch.setattr(devices, "plugins", lambda: ["xla_cuda12"])
    monkeypatch.setattr(devices.topologies, "get_topology_desc", fail)
    with pytest.raises(ValueError, match=r"'h200:3': .*no such field. Set JAX_PLATFORMS=cpu") as e:
        zj.make_mesh(target="h200:3")
    assert isinstance(e.value.__cause__, RuntimeError)


def test_simulated_devices_are_a_target():
    mesh = zj.make_mesh(target="simulated:4")
    assert mesh == zj.make_mesh(4)
    assert target_of(mesh) == zj.target("simulated:4")
    assert devices.compile_only(mesh) == ""


class Device:
    """As much of a device as `target_of` looks at."""

    platform, client = "gpu", None

    def __init__(self, kind, process):
        self.device_kind, self.process_index = kind, process


def mesh_of(kind, processes):
    return Mesh(np.array([Device(kind, process) for process in processes]), ("data",))


def test_real_gpus_are_known_by_their_kind():
    assert target_of(mesh_of("NVIDIA H200", [0] * 4)) == zj.target("h200:4")
    two = target_of(mesh_of("NVIDIA H100 80GB HBM3", [0] * 8 + [1] * 8), memory_efficiency=0.7)
    assert two == zj.target("h100:16", memory_efficiency=0.7)
    assert devices.compile_only(mesh_of("NVIDIA H200", [0])) == ""
    with pytest.raises(ValueError, match=r"'TPU v4'; known are .*H100 80GB.* Pass target="):
        target_of(mesh_of("TPU v4", [0]))
    with pytest.raises(ValueError, match=r"3 devices on 2 hosts.* Pass target="):
        target_of(mesh_of("NVIDIA H200", [0, 0, 1]))


@pytest.mark.parametrize(
    ("platforms", "plugins", "files", "possible"),
    [
        (None, [], [], False),
        (None, ["xla_cuda12"], [], False),
        (None, ["xla_cuda12"], ["/dev/nvidia0"], True),
        (None, [], ["/dev/nvidia0"], False),
        (None, ["xla_rocm"], [], True),
        ("cpu", ["xla_cuda12"], ["/dev/nvidia0"], False),
        ("cuda,cpu", ["xla_cuda12"], [], True),
    ],
)
def test_where_an_accelerator_may_be(monkeypatch, platforms, plugins, files, possible):
    before = jax.config.jax_platforms
    monkeypatch.setattr(devices, "plugins", lambda: plugins)
    monkeypatch.setattr(devices.glob, "glob", lambda name: files if "nvidia" in name else [])
    monkeypatch.setattr(devices.shutil, "which", lambda name: None)
    jax.config.update("jax_platforms", platforms)
    try:
        assert devices.may_have_accelerator() == possible
    finally:
        jax.config.update("jax_platforms", before)


def wide_init(key):
    return {"blocks": {"w": jax.random.normal(key, (2, 512, 512))}, "head": jnp.zeros((512, 512))}


def wide_loss(params, batch, key):
    x = zj.scan_layers(lambda p, x: x + jnp.tanh(x @ p["w"]), params["blocks"], batch["x"])
    return jnp.sum((x @ params["head"]) ** 2), x.size


def wide_step(mesh, stage=3):
    plan = zj.make_plan(wide_init, optax.adam(1e-3), mesh, stage=stage, layers=("blocks",))
    return zj.make_train_step(wide_loss, plan)


@aot.needed
@pytest.mark.parametrize("name", ["h100:8", "a100:8", "h200:8", "b200:8", "h100:64", "h100:64x8"])
def test_a_step_compiles_for_gpus_that_are_not_here(name):
    """Scalar all-reduces included: for 64 GPUs they once ended the process."""
    mesh, target = zj.make_mesh(target=name), zj.target(name)
    assert mesh.axis_names == ("data",)
    assert mesh.shape["data"] == target.num_devices
    assert target_of(mesh) == target
    assert devices.compile_only(mesh) == target.name
    assert jax.device_count() == 8
    step = wide_step(mesh)
    batch = {"x": jax.ShapeDtypeStruct((mesh.size, 512), jnp.float32)}
    program = step.lower(step.plan.abstract_state, batch).compile()
    memory, text = program.memory_analysis(), program.as_text()
    whole = 3 * 512 * 512 * 4  # parameters; Adam has two moments
    assert 3 * whole / mesh.size <= memory.argument_size_in_bytes < 3 * whole / mesh.size + 10_000
    assert "all-gather-start" in text
    assert "reduce-scatter" in text


@aot.needed
def test_a_mesh_keeps_the_rates_of_its_target():
    slow = zj.target("h100:4x8", network_bandwidth=5e9)
    mesh = zj.make_mesh(target=slow)
    assert target_of(mesh) == slow
    assert target_of(mesh, network_bandwidth=45e9) == zj.target("h100:32")
    assert target_of(zj.make_mesh(target="h100:32")) == zj.target("h100:32")
    part = zj.make_mesh(devices=target_devices(slow)[:16])
    assert target_of(part) == zj.target("h100:16", network_bandwidth=5e9)
    assert devices.compile_only(part) == "16 x NVIDIA H100 80GB HBM3"


@aot.needed
def test_flash_attention_of_cudnn_compiles():
    mesh = zj.make_mesh(target="h100:8")
    heads = NamedSharding(mesh, P("data"))
    x = jax.ShapeDtypeStruct((8, 256, 4, 64), jnp.bfloat16, sharding=heads)

    def attend(x):
        return jax.nn.dot_product_attention(x, x, x, is_causal=True, implementation="cudnn")

    text = jax.jit(attend).lower(x).compile().as_text()
    assert text is not None
    assert "fmha" in text


@aot.needed
def test_nothing_runs_on_a_compile_only_mesh():
    step = wide_step(zj.make_mesh(target="h100:8"))
    plan, batch = step.plan, {"x": np.ones((8, 512), np.float32)}
    state = zj.init_state(wide_step(zj.make_mesh()).plan, jax.random.key(0))
    for run in (
        lambda: zj.init_state(plan, jax.random.key(0)),
        lambda: zj.shard_batch(batch, plan),
        lambda: step(state, batch),
    ):
        with pytest.raises(ValueError, match=r"compile-only \(h100:8\): .* step\.lower\(plan\."):
            run()


STARTS = {
    "nothing started": "",
    "JAX started": "jax.devices()",
    "devices simulated": "zj.simulate_devices(2)",
    "a mesh made": "zj.make_mesh()",
}


@aot.needed
@pytest.mark.parametrize("start", STARTS)
def test_a_mesh_can_be_made_however_jax_started(start):
    code = f"import jax, zerojax as zj; {STARTS[start]}\nzj.make_mesh(target='h100:8')"
    code += "\nprint(jax.default_backend(), jax.numpy.ones(3).sum())"
    variables = {k: v for k, v in os.environ.items() if k not in ("JAX_PLATFORMS", "XLA_FLAGS")}
    command = [sys.executable, "-W", "error", "-c", code]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, env=variables)
    assert done.returncode == 0, done.stderr[-2000:]
    assert done.stdout.endswith(" 3.0\n")
    # JAX by itself looks for the GPUs that its plugin is for, and prints that it found none.
    assert start == "JAX started" or not done.stderr
