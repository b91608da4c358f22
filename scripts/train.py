# SPDX-License-Identifier: Apache-2.0
"""Train a transformer on text: `python -m scripts.train`, on GPUs or on simulated devices."""

import dataclasses
import signal
import sys
from functools import partial
from pathlib import Path
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
import optax
import tyro
from jax.experimental.multihost_utils import process_allgather
from jax.sharding import Mesh

import zerojax as zj
from models import transformer
from models.generate import generate
from models.transformer import TransformerConfig
from scripts.parts.files import Files
from scripts.parts.log import Screen, Summary, wrap
from scripts.parts.loop import run
from scripts.parts.mesh import make_mesh
from scripts.parts.text import (
    Bytes,
    TokenizerFile,
    check_batch,
    make_batches,
    read_text,
    split_text,
)
from scripts.parts.weights import read_initial
from zerojax.hardware.hosts import leave

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


def make_config(options: Options, vocab_size: int) -> TransformerConfig:
    """Return the preset with what the options and the tokenizer change of it."""
    return transformer.preset(
        options.model,
        num_layers=options.layers,
        seq_len=options.seq,
        vocab_size=vocab_size if options.vocab is None else options.vocab,
        dropout=options.dropout,
        remat=options.remat,
        prefetch=options.prefetch,
    )


def make_plan(config: TransformerConfig, optimizer, mesh: Mesh, **how: Any) -> zj.Plan:
    """Plan the state of a transformer; the error of an unfit number of devices names fit ones."""
    init_params = partial(transformer.init_params, config)
    try:
        return zj.make_plan(init_params, optimizer, mesh, layers=("blocks",), **how)
    except ValueError as error:
        if "max_unsharded" not in str(error):
            raise
        most = max(8, mesh.size) if jax.default_backend() == "cpu" else jax.device_count()
        *fit, last = [str(n) for n in range(1, most + 1) if config.d_model % n == 0]
        listed = f"{', '.join(fit)} or {last}" if fit else last
        raise ValueError(f"{error} Here: try --devices {listed}.") from error


def make_optimizer(options: Options) -> tuple[optax.GradientTransformation, np.ndarray]:
    """Return AdamW under clipping, and the learning rates of all steps, computed once."""
    warmup = options.steps // 10 if options.warmup is None else options.warmup
    first, last = options.lr / max(1, warmup), options.lr / 100
    schedule = optax.warmup_cosine_decay_schedule(first, options.lr, warmup, options.steps, last)
    # Norm scales and biases do not decay: 1-D, or 2-D where "blocks" adds the dim of layers.
    mask = partial(jax.tree.map_with_path, lambda path, x: x.ndim > 1 + (path[0].key == "blocks"))
    adamw = optax.adamw(schedule, b2=0.99, weight_decay=options.weight_decay, mask=mask)
    clip = optax.clip_by_global_norm(options.clip) if options.clip else optax.identity()
    return optax.chain(clip, adamw), np.asarray(jax.vmap(schedule)(jnp.arange(options.steps)))


def main(options: Options) -> Summary:
    """Train; raises ValueError or OSError for a user's mistake, FloatingPointError for a NaN."""
    zj.start_hosts()
    check_least(options, LEAST)
    if (options.warmup or 0) >= options.steps:
        raise ValueError(f"--warmup: {options.warmup} of {options.steps} steps; give fewer")
    tokenizer = TokenizerFile(options.tokenizer) if options.tokenizer else Bytes()
    config = make_config(options, tokenizer.vocab_size)
    mesh = make_mesh(options.devices)
    optimizer, rates = make_optimizer(options)
    how = {name: getattr(options, name) for name in ("stage", "precision", "partitioner")}
    plan = make_plan(config, optimizer, mesh, **how)
    given = read_initial(options.init_from, plan)
    check_batch(options.batch, mesh.size, options.microbatches)

    text = read_text(options.data, tokenizer, config.vocab_size)
    windows, held_out = split_text(text, config.seq_len)
    process = jax.process_index(), jax.process_count()
    batches = make_batches(windows, options.batch, options.seed, process)
    validation = make_batches(held_out, options.batch, 0, process, options.eval_batches)
    validation = [next(validation) for _ in range(options.eval_batches)]

    flops_per_token = transformer.flops_per_token(config)
    screen = Screen(options.steps, options.log_every, flops_per_token, mesh.size)
    files = Files(options.out, vars(options), screen.say)
    num_params = f"{transformer.num_params(config):,} parameters"
    screen.say(f"{options.model}: {num_params}; devices: {mesh.size} ({screen.device_kind})")
    rows = f"{len(windows):,} to train on, {len(held_out):,} held out for validation"
    screen.say(f"text: {text}\nrows of {config.seq_len} tokens: {rows}")
    screen.say(f"log: {options.out / 'metrics.jsonl'}, a row for every step\n\n{plan}\n")
    screen.legend()
    state, summary = run(options, config, plan, given, batches, validation, rates, screen, files)

    if options.sample and not (summary.stopped_early or summary.signal):
        prompt = held_out[0]["tokens"][:32].tolist()
        screen.say(f"\nsample: {len(prompt)} tokens held out, continued by {options.sample}")
        params = jax.device_put(process_allgather(state.params, tiled=True), jax.local_devices()[0])
        key, vocab_size = jax.random.key(options.seed), tokenizer.vocab_size
        more = generate(config, params, prompt, options.sample, key, vocab_size=vocab_size)
        summary.sample = tokenizer.decode(prompt + more)
        screen.say(wrap("prompt:    ", tokenizer.decode(prompt)))
        screen.say(wrap("continues: ", tokenizer.decode(more)))
    screen.say(f"\n{zj.memory_report(plan, state)}\n\n{summary}")
    if summary.stopped_early:
        screen.say(f"saved in {options.out / 'checkpoints'}; the same command goes on from there")
    return summary


if __name__ == "__main__":  # exit codes: 2 a user's mistake, 1 a loss not finite, 130 Ctrl-C
    try:
        summary = main(tyro.cli(Options, prog="python -m scripts.train"))
        sys.exit(130 if summary.stopped_early and summary.signal == signal.SIGINT else 0)
    except KeyboardInterrupt:  # before the first step, or while the sample is drawn
        print("interrupted", file=sys.stderr)
        leave(130)
    except (ValueError, OSError, FloatingPointError) as error:
        print(f"error: {error}", file=sys.stderr)
        leave(1 if isinstance(error, FloatingPointError) else 2)
