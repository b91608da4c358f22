# SPDX-License-Identifier: Apache-2.0
"""One process with 8 simulated devices serves the whole suite."""

import zerojax as zj

zj.simulate_devices(8)
