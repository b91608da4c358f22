# SPDX-License-Identifier: Apache-2.0
"""The options of a training run, and the least that an option of any program may be."""

import dataclasses
from pathlib import Path
from typing import Any, Literal

import zerojax as zj
from models import transformer
from zerojax.hardware.targets import Target

# The least that an option may be.
LEAST = {"layers": 1, "seq": 1, "vocab": 1, "devices": 1, "steps": 1, "batch": 1, "microbatches": 1}
LEAST |= {"log_every": 1, "eval_batches": 1, "warmup": 0, "eval_every": 0, "sample": 0}
LEAST |= {"save_every": 0, "keep": 1}


@dataclasses.dataclass(frozen=True)
class Options:
    """Train a transformer on text with ZeRO.

    Ctrl-C and SIGTERM save after the running step; the same command goes on from the newest save.
    """

    model: Literal[*transformer.PRESETS] = "tiny"  # pyright: ignore[reportInvalidTypeForm]
    """Preset of models/transformer.py."""
    layers: int | None = None
    """Layers (None: the preset's)."""
    seq: int | None = None
    """Tokens in a row (None: the preset's)."""
    vocab: int | None = None
    """Vocabulary of the model (None: the tokenizer's; 256 for bytes)."""
    dropout: float = 0.0
    """Dropout probability in training."""
    remat: Literal["full", "none"] | None = None
    """What the backward computes again: each layer, or nothing (None: the preset's)."""
    prefetch: int | None = None
    """Layers gathered ahead of the one that runs (None: the preset's)."""
    stage: Literal[0, 1, 2, 3] = 3
    """ZeRO stage."""
    partitioner: Literal["manual", "auto"] = "manual"
    """Who places the collectives: zerojax or XLA."""
    precision: Literal["fp32", "bf16", "bf16_master"] = "fp32"
    """Number formats at rest, in compute and on the wire."""
    devices: int | None = None
    """Devices to use (None: all accelerators, or 8 simulated CPU devices)."""
    steps: int = 1200
    """Optimizer updates."""
    batch: int = 8
    """Rows in an update, over all devices: a multiple of devices x microbatches."""
    microbatches: int = 1
    """Slices that each device makes of its rows, one after another."""
    lr: float = 4e-3
    """Peak learning rate; a cosine takes it to a hundredth."""
    warmup: int | None = None
    """Updates until the peak (None: a tenth of steps)."""
    weight_decay: float = 0.1
    """AdamW's, on matrices only."""
    clip: float = 1.0
    """Largest global gradient norm; 0 clips nothing."""
    seed: int = 0
    """Of parameters, order of rows, dropout and sample."""
    data: tuple[Path, ...] = ()
    """Files and folders of text (none: the Python standard library's source)."""
    tokenizer: Path | None = None
    """A tokenizer.json (None: bytes are the tokens)."""
    init_from: Path | None = None
    """A .safetensors file of weights to start from, as scripts/export.py makes (None: random)."""
    out: Path = Path("out/train")
    """Folder of saves, from which the run goes on, and of its logs (TensorBoard's if installed)."""
    save_every: int = 300
    """Steps between saves; 0: only at the end, or when stopped."""
    keep: int = 2
    """How many of the latest saves to keep, beside the best by validation."""
    log_every: int = 20
    """Steps between printed lines when the output is no terminal, and in averages of speed."""
    eval_every: int = 300
    """Steps between validations; 0: only at the end."""
    eval_batches: int = 8
    """Batches of a validation, always the same."""
    skip_nonfinite: bool = False
    """Skip and count updates whose gradients are not finite, where the run would stop."""
    sample: int = 200
    """Tokens to generate at the end, from gathered parameters; 0: none."""


def check_least(options: Any, least: dict[str, int]) -> None:
    """Raise ValueError, naming the flag, for an option below the least that it may be."""
    for name, smallest in least.items():
        value = getattr(options, name)
        if value is not None and value < smallest:
            flag = "--" + name.replace("_", "-")
            raise ValueError(f"{flag}: {value} is too few; give {smallest} or more")


def find_target(name: str, options: Any) -> Target:
    """The GPUs of that name, at the bandwidths that the options ask for, in GB/s."""
    rates = {rate: getattr(options, rate) for rate in ("link_bandwidth", "network_bandwidth")}
    return zj.target(name, **{rate: x * 1e9 for rate, x in rates.items() if x is not None})
