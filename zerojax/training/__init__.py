# SPDX-License-Identifier: Apache-2.0
"""What one step computes: the loss function's contract, gradients, update, compiled step."""
