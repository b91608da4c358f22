# SPDX-License-Identifier: Apache-2.0
"""Marks the tests that compile for GPUs. The environment of `make test` runs them, on Linux."""

from __future__ import annotations

import pytest

from zerojax.hardware import devices

needed = pytest.mark.skipif(
    not any("cuda" in name for name in devices.plugins()),
    reason="JAX's CUDA plugin is not installed (the aot extra)",
)
