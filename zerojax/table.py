# SPDX-License-Identifier: Apache-2.0
"""Plain text tables and sizes, for what is printed."""

from __future__ import annotations

from collections.abc import Sequence


def format_bytes(num_bytes: float) -> str:
    """A size in decimal units, GB = 1e9 bytes, to three digits.

    >>> format_bytes(31.406e9), format_bytes(512), format_bytes(0)
    ('31.4 GB', '512 B', '0 B')
    """
    for unit, size in (("TB", 1e12), ("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if num_bytes >= size:
            return f"{num_bytes / size:#.3g}".rstrip(".") + f" {unit}"
    return f"{num_bytes:.0f} B"


def format_table(
    header: Sequence[str], rows: Sequence[Sequence[str]], right: Sequence[int] = ()
) -> str:
    """Rows of text under a header; the columns in `right` are aligned to the right.

    >>> print(format_table(["leaf", "bytes"], [["w", "128"], ["bias", "8"]], right=[1]))
    leaf  bytes
    ----  -----
    w       128
    bias      8
    """
    widths = [max(len(row[i]) for row in [header, *rows]) for i in range(len(header))]

    def line(cells: Sequence[str]) -> str:
        padded = (
            cell.rjust(width) if i in right else cell.ljust(width)
            for i, (cell, width) in enumerate(zip(cells, widths, strict=True))
        )
        return "  ".join(padded).rstrip()

    return "\n".join([line(header), line(["-" * width for width in widths]), *map(line, rows)])
