# SPDX-License-Identifier: Apache-2.0
"""How a weight becomes whole, and when: layer by layer, in the forward and the backward."""
