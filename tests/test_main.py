# SPDX-License-Identifier: Apache-2.0
"""`python -m zerojax`: what a bug report needs."""

from __future__ import annotations

import os
import subprocess
import sys
from importlib import metadata

import jax

import zerojax as zj
from tests import ROOT, aot
from zerojax import __main__ as report


def facts(printed):
    return dict(line.split(": ", 1) for line in printed.splitlines())


def test_it_prints_versions_devices_and_processes():
    here = {**os.environ, "JAX_PLATFORMS": "cpu"}
    command = [sys.executable, "-W", "error", "-m", "zerojax"]
    done = subprocess.run(command, cwd=ROOT, env=here, capture_output=True, text=True, check=True)
    found = facts(done.stdout)
    for package in ("jax", "jaxlib", "optax", "orbax-checkpoint", "numpy"):
        assert found[package] == metadata.version(package)
    assert found["zerojax"] == zj.__version__
    assert found["python"].startswith(sys.version.split()[0])
    assert found["devices"] == "1 x cpu (cpu)"
    assert found["processes"] == "1, this is number 0"
    assert found["JAX_PLATFORMS"] == "cpu"
    assert not done.stderr


@aot.needed
def test_it_compiles_for_a_gpu(capsys):
    report.main()
    printed = capsys.readouterr().out
    assert facts(printed)["compiles for GPUs"] == "yes, a program for h100:1 was compiled"
    assert facts(printed)["devices"] == "8 x cpu (cpu)"


def test_what_is_missing_is_one_line(capsys, monkeypatch):
    monkeypatch.setattr(report, "plugins", list)
    monkeypatch.setenv("XLA_FLAGS", "--a " * 60)
    report.main()
    printed = capsys.readouterr().out
    assert facts(printed)["compiles for GPUs"].endswith(
        "pip install '.[aot]' in a clone of zerojax"
    )
    assert facts(printed)["XLA_FLAGS"].endswith("--a ...")
    assert max(map(len, printed.splitlines())) <= 100


def test_a_compiler_that_refuses_is_quoted(monkeypatch):
    def refuse(target):
        raise ValueError(f"target {target!r}: refused\nfor a reason")

    monkeypatch.setattr(report, "plugins", lambda: ["xla_cuda12"])
    monkeypatch.setattr(report, "make_mesh", refuse)
    assert report.try_aot() == "no: target 'h100:1': refused\nfor a reason"


def test_the_memory_of_a_device_is_said_where_it_is_known(monkeypatch):
    class Device:
        device_kind, platform = "NVIDIA H100 80GB HBM3", "gpu"
        memory_stats = staticmethod(lambda: {"bytes_limit": 64_000_000_000})

    monkeypatch.setattr(jax, "local_devices", lambda: [Device] * 2)
    assert report.describe_devices() == "2 x NVIDIA H100 80GB HBM3 (gpu), 64.0 GB each"
