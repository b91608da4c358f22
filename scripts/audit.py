# SPDX-License-Identifier: Apache-2.0
"""Audit what scripts/train.py would run, with the same options: `python -m scripts.audit`.

For the devices here, or with `--target h100:8` for GPUs that are not.
"""

from __future__ import annotations

import dataclasses
import sys
from functools import partial
from pathlib import Path

import jax
import jax.numpy as jnp
import tyro

import zerojax as zj
from models import transformer
from scripts.parts import options as training
from scripts.parts.mesh import make_mesh
from scripts.parts.model import make_config, make_optimizer, make_plan
from scripts.parts.options import find_target
from scripts.parts.text import Bytes, TokenizerFile, check_batch
from zerojax.sharding.axes import num_batch_shards


@dataclasses.dataclass(frozen=True)
class Options(training.Options):
    """Compile the training step of the same options, and print its receipt."""

    target: str | None = None
    """GPUs to compile for, such as h100:8 or h100:8x8 (None: the devices here)."""
    link_bandwidth: float | None = None
    """GB/s of each GPU within a host (None: the target's)."""
    network_bandwidth: float | None = None
    """GB/s of each GPU between hosts (None: the target's)."""
    json: Path | None = None
    """Also write all figures to this file."""
    picture: Path | None = None
    """Also draw bytes and timeline into this file, such as audit.png."""
    check: bool = False
    """Exit with 1 if there are findings."""


def audit(options: Options) -> zj.Audit:
    """Compile and read the step; raises ValueError for a user's mistake."""
    training.check_least(options, training.LEAST)
    tokenizer = TokenizerFile(options.tokenizer) if options.tokenizer else Bytes()
    config = make_config(options, tokenizer.vocab_size)
    target = None
    if options.target is None:
        mesh = make_mesh(options.devices)
    else:
        if options.devices is not None:
            raise ValueError("--devices: --target says how many; leave one of them out")
        target = find_target(options.target, options)
        mesh = zj.make_mesh(target=target)
        if target.gpu and options.precision != "fp32" and config.attention is None:
            config = dataclasses.replace(config, attention="cudnn")
    optimizer, _ = make_optimizer(options)
    how = {name: getattr(options, name) for name in ("stage", "precision", "partitioner")}
    plan = make_plan(config, optimizer, mesh, **how)
    check_batch(options.batch, num_batch_shards(mesh), options.microbatches)
    step = zj.make_train_step(
        partial(transformer.loss_fn, config),
        plan,
        microbatches=options.microbatches,
        skip_nonfinite=options.skip_nonfinite,
    )
    batch = {"tokens": jax.ShapeDtypeStruct((options.batch, config.seq_len + 1), jnp.int32)}
    return zj.audit(
        step,
        plan.abstract_state,
        batch,
        target=target,
        xla_statistics=target is not None and target.gpu is not None,
    )


def main(options: Options) -> zj.Audit:
    """Print the receipt, and write what was asked for."""
    found = audit(options)
    print(found)
    if options.json:
        options.json.write_text(found.to_json())
    if options.picture:
        zj.draw([found], options.picture)
    return found


if __name__ == "__main__":
    try:
        wanted = tyro.cli(Options, prog="python -m scripts.audit", description=__doc__)
        sys.exit(1 if main(wanted).findings and wanted.check else 0)
    except KeyboardInterrupt:
        sys.exit(130)
    except (ValueError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)
