# SPDX-License-Identifier: Apache-2.0
"""What the programs of `scripts/` are made of."""
