# SPDX-License-Identifier: Apache-2.0
"""One process with 8 simulated devices serves the whole suite."""

import gc
import itertools
import os
import pathlib

import pytest

from tests import cache

os.environ["JAX_COMPILATION_CACHE_DIR"] = cache.begin()
# Compiling dominates the suite; LLVM's optimizer is half of it, and choosing among kernels a third
# of it for GPUs. XLA's own passes, which decide what is stored and moved, stay as they are.
os.environ["XLA_FLAGS"] = (
    os.environ.get("XLA_FLAGS", "")
    + " --xla_backend_optimization_level=0 --xla_gpu_autotune_level=0"
)

import jax

import zerojax as zj
from tests import toy

zj.simulate_devices(8)

OWN_CACHE = pathlib.Path(os.environ["JAX_COMPILATION_CACHE_DIR"])
# Each compiled program keeps some hundred memory maps; at 65,530 Linux ends the process.
MAPS = pathlib.Path("/proc/self/maps")
NUMBER = itertools.count(1)


def unload_programs():
    jax.clear_caches()
    gc.collect()


@pytest.fixture(autouse=True, scope="module")
def unload_after_each_file():
    cache.share(OWN_CACHE)
    yield
    unload_programs()


def pytest_configure(config):
    """JAX writes programs for GPUs that are not here, and cannot read them: it compiles again."""
    unread = "Error reading persistent compilation cache entry.*PjRtCompiler must be constructed"
    config.addinivalue_line("filterwarnings", f"ignore:{unread}:UserWarning")


def pytest_sessionfinish():
    cache.share(OWN_CACHE)


def pytest_terminal_summary(terminalreporter):
    """The worst error of all runs that were compared with the oracle."""
    reports = terminalreporter.getreports("passed") + terminalreporter.getreports("failed")
    found = [x for report in reports for name, x in report.user_properties if name == toy.ERROR]
    if found:
        said = f"{max(found):.1e} in {len(found)} tests; the limit is {toy.RTOL:.0e}"
        terminalreporter.write_line(f"largest relative error against plain optax: {said}")


@pytest.fixture(autouse=True)
def unload_in_time():
    """For files with many programs; counting takes a while, so after every tenth test only."""
    yield
    if next(NUMBER) % 10 == 0 and MAPS.exists() and MAPS.read_bytes().count(b"\n") > 30_000:
        unload_programs()
