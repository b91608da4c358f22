# SPDX-License-Identifier: Apache-2.0
"""One process with 8 simulated devices serves the whole suite."""

import gc
import os

import jax
import pytest

# Compiling dominates the suite; LLVM's optimizer is half of it. XLA's own passes, which decide
# what is stored and moved, stay as they are.
os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} --xla_backend_optimization_level=0"

import zerojax as zj

zj.simulate_devices(8)


@pytest.fixture(autouse=True, scope="module")
def unload_programs():
    """Each compiled program keeps some hundred memory maps; at 65,530 Linux ends the process."""
    yield
    jax.clear_caches()
    gc.collect()
