# SPDX-License-Identifier: Apache-2.0
"""The tests, in rooms as the code is; what they share stands beside this file."""

import pathlib

ROOT = pathlib.Path(__file__).parent.parent  # of the project
