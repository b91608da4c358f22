# SPDX-License-Identifier: Apache-2.0
"""Write a checkpoint's parameters as one file: `python -m scripts.export`."""

import dataclasses
import sys
from pathlib import Path
from typing import Any, Literal

import jax
import tyro

import zerojax as zj
from scripts.parts.weights import write_safetensors
from zerojax.table import format_bytes


@dataclasses.dataclass(frozen=True)
class Options:
    """Write a checkpoint's parameters, of its master copy if it has one, as a safetensors file."""

    checkpoint: Path
    """Folder of saves, of which the newest is taken, or one save: a run's OUT/checkpoints."""
    out: Path
    """File to write, such as gpt.safetensors."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """Of real numbers in the file."""
    options: Path | None = None
    """The options.json of the run, to be kept in the header (None: nothing is kept)."""


def export(options: Options, params: Any) -> str:
    """Write the file; return a line that says what is in it."""
    kept = {"options": options.options.read_text()} if options.options else {}
    write_safetensors(options.out, params, options.dtype, kept)
    leaves = jax.tree.leaves(params)
    said = f"{len(leaves)} arrays, {sum(x.size for x in leaves):,} numbers"
    return f"{options.out}: {said}, {format_bytes(options.out.stat().st_size)}"


def main(options: Options) -> None:
    """Restore and write; raises ValueError or OSError for a user's mistake."""
    if options.out.exists():
        raise FileExistsError(f"--out: {options.out} exists; give another name, or move it away")
    try:  # fp32 ones are read from the master copy, if there is one
        params = zj.restore_params(options.checkpoint, dtype=options.dtype)
    except (ValueError, OSError) as error:
        raise type(error)(f"--checkpoint: {error}") from error
    print(export(options, params))


if __name__ == "__main__":
    try:
        main(tyro.cli(Options, prog="python -m scripts.export"))
    except KeyboardInterrupt:
        sys.exit(130)
    except (ValueError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)
