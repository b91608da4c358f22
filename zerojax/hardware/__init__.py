# SPDX-License-Identifier: Apache-2.0
"""What there is to run on: named GPUs and their rates, devices real or simulated, hosts."""
