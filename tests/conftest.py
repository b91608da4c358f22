# SPDX-License-Identifier: Apache-2.0
"""One process with 8 simulated devices serves the whole suite."""

import os

# Compiling dominates the suite; LLVM's optimizer is half of it. XLA's own passes, which decide
# what is stored and moved, stay as they are.
os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} --xla_backend_optimization_level=0"

import zerojax as zj

zj.simulate_devices(8)
