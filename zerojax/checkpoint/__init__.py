# SPDX-License-Identifier: Apache-2.0
"""Never lose a run: saves that are whole or not there, and reading them onto any plan."""
