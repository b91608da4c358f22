# SPDX-License-Identifier: Apache-2.0
"""Where bytes live: axes, mesh, stage, precision, and the plan of every array."""
