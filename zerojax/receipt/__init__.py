# SPDX-License-Identifier: Apache-2.0
"""What a compiled step stores, moves and waits for, beside the theory."""
