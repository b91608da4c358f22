# SPDX-License-Identifier: Apache-2.0
"""The programs a person runs: `python -m scripts.train --help`."""
