# SPDX-License-Identifier: Apache-2.0
"""Train a transformer on text: `python -m scripts.train`, on GPUs or on simulated devices."""

import contextlib
import dataclasses
import importlib
import json
import math
import resource
import signal
import sys
import time
from collections import deque
from functools import partial
from pathlib import Path
from typing import Literal

import jax
import jax.numpy as jnp
import numpy as np
import optax
import tyro
from jax.experimental.multihost_utils import process_allgather
from rich.console import Console
from rich.progress import BarColumn, Progress, TimeRemainingColumn

import zerojax as zj
from models import transformer
from scripts.text import Bytes, TokenizerFile, make_batches, read_text, split_text

# Dense bf16 FLOP/s of one device, from NVIDIA's datasheets; the first part of `device_kind` wins.
PEAKS = {"A100": 312e12, "H100 PCIe": 756e12, "H100 NVL": 835e12, "H100": 989e12, "H200": 989e12}
PEAKS |= {"GB200": 2.5e15, "B200": 2.25e15}


@dataclasses.dataclass(frozen=True)
class Options:
    """Train a transformer on text with ZeRO; Ctrl-C stops after the running step."""

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
    out: Path = Path("out/train")
    """Folder of metrics.jsonl, options.json and, if installed, TensorBoard's log; old ones stay."""
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


@dataclasses.dataclass
class Summary:
    """What a run came to so far. Losses are nats per token: per byte without a tokenizer."""

    steps: int = 0
    loss: float = math.nan  # mean of the last log_every steps, those that are finite
    val_loss: float = math.nan
    tokens: int = 0
    tokens_per_second: float = 0.0  # over the last log_every steps; the first one compiles
    skipped: int = 0
    stopped_early: bool = False
    sample: str = ""


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


def memory() -> str:
    """Return the most bytes that device 0 held; on a CPU, that this process held."""
    stats, unit = jax.local_devices()[0].memory_stats(), 1 if sys.platform == "darwin" else 1024
    host = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit
    return f"{stats['peak_bytes_in_use'] / 1e9:.2f} GB" if stats else f"{host / 1e9:.2f} GB (host)"


class Log:
    """Prints, and writes a row per step; only process 0 does. Touches `out` at the first row.

    Of a row, `tokens` are those so far and `seconds` the step's; what is not finite is `null`.
    """

    def __init__(self, options: Options, flops_per_token: int, num_devices: int):
        self.options, self.summary, self.file, self.board = options, Summary(), None, None
        self.files, self.recent = contextlib.ExitStack(), deque(maxlen=options.log_every)
        self.first, tty = jax.process_index() == 0, sys.stdout.isatty()
        self.console = Console(quiet=not self.first, force_terminal=tty, soft_wrap=True)
        self.say = partial(self.console.print, markup=False, highlight=False)
        columns = "step {task.completed}/{task.total}", BarColumn(10), "{task.description}"
        self.bar = Progress(*columns, TimeRemainingColumn(), console=self.console, disable=not tty)
        self.task = self.bar.add_task("compiling", total=options.steps)
        kind = jax.devices()[0].device_kind
        peak = next((flops for name, flops in PEAKS.items() if name in kind), None)
        self.mfu_per_speed = flops_per_token / (peak * num_devices) if peak else None
        found = (
            f"of {peak:.3g} FLOP/s (NVIDIA's datasheet, dense bf16)" if peak else "no known peak"
        )
        self.say(f"MFU: {kind} has {found}; a token takes {flops_per_token:.3g} FLOPs:")
        self.say("6 x parameters in matmuls + 6 x layers x d_model x seq")

    def open(self) -> None:
        """Keep an earlier run's files under the next number, and start new ones."""
        out, names = self.options.out, ("metrics.jsonl", "options.json", "tensorboard")
        number = 1 + len(list(out.glob("metrics.*.jsonl")))
        for path in (out / name for name in names if (out / name).exists()):
            kept = path.rename(out / f"{path.stem}.{number}{path.suffix}")
            self.say(f"{path} of an earlier run is now {kept}")
        out.mkdir(parents=True, exist_ok=True)
        self.file = self.files.enter_context((out / names[0]).open("w", encoding="utf-8"))
        (out / names[1]).write_text(json.dumps(vars(self.options), indent=2, default=str) + "\n")
        with contextlib.suppress(ImportError):
            self.board = importlib.import_module("tensorboardX").SummaryWriter(str(out / names[2]))
            self.files.callback(self.board.close)

    def row(self, row: dict[str, float]) -> None:
        """Write the row of a step, and show it on the bar or every `log_every` steps as a line."""
        summary, step, steps = self.summary, int(row["step"]), self.options.steps
        if self.first and self.file is None:
            self.open()
        if step == 2:  # the first one compiled
            self.recent.clear()
        self.recent.append((row["weight"], row["seconds"], row["loss"]))
        weights, seconds, losses = np.array(self.recent).T
        finite = losses[np.isfinite(losses)]
        summary.loss = float(finite.mean()) if finite.size else math.nan
        summary.tokens_per_second = float(weights.sum() / seconds.sum())
        mfu = self.mfu_per_speed and f"{summary.tokens_per_second * self.mfu_per_speed:.1%}"
        said = f"loss {summary.loss:.3f}  {summary.tokens_per_second / 1e3:.1f}k tokens/s"
        said += f"  {1e3 * seconds.mean():.0f} ms  {memory()}  MFU {mfu or 'n/a'}"
        self.bar.update(self.task, completed=step, description=said)
        val = f"  validation {row['val_loss']:.3f}" if "val_loss" in row else ""
        if val or (self.bar.disable and step % self.options.log_every == 0):
            self.say(f"step {step:5d}/{steps}  {said}{val}")
        if self.file:
            valid = {name: x if math.isfinite(x) else None for name, x in row.items()}
            print(json.dumps(valid, allow_nan=False), file=self.file, flush=True)
        if self.board:
            for name, x in row.items():
                self.board.add_scalar(name, x, step)


def generate(options: Options, config, params, prompt: list[int], tokenizer) -> str:
    """Draw `options.sample` more tokens at temperature 0.8; the fixed window compiles once."""
    run = jax.jit(lambda params, window_T: transformer.logits(config, params, window_T[None])[0])
    whole = jax.device_put(process_allgather(params, tiled=True), jax.local_devices()[0])
    for key in jax.random.split(jax.random.key(options.seed), options.sample):
        window = prompt[-config.seq_len :]
        window_T = np.array(window + [0] * (config.seq_len - len(window)), np.int32)
        logits_V = np.asarray(run(whole, window_T))[len(window) - 1, : tokenizer.vocab_size]
        prompt = [*prompt, int(jax.random.categorical(key, logits_V / 0.8))]
    return tokenizer.decode(prompt)


def train(options: Options, config, plan: zj.Plan, batches, validation, rates, log: Log):
    """Run the steps; metrics are read one step late, so that the device never waits for Python."""
    how = {"microbatches": options.microbatches, "skip_nonfinite": options.skip_nonfinite}
    step = zj.make_train_step(partial(transformer.loss_fn, config), plan, **how)
    eval_step = zj.make_eval_step(partial(transformer.eval_loss_fn, config), plan)
    state = zj.init_state(plan, jax.random.key(options.seed))
    summary, clock = log.summary, time.perf_counter()

    def read(metrics, evaluate: bool = False) -> None:
        nonlocal clock
        row = {name: float(x) for name, x in jax.device_get(metrics).items()}
        now = time.perf_counter()
        row["lr"] = float(rates[summary.steps - summary.skipped])  # a skipped update takes no rate
        summary.steps, summary.tokens = summary.steps + 1, summary.tokens + int(row["weight"])
        summary.skipped += int(row.get("skipped", 0))
        row = {"step": summary.steps, **row, "tokens": summary.tokens, "seconds": now - clock}
        if evaluate:
            results = [eval_step(state, zj.shard_batch(batch, plan)) for batch in validation]
            losses, weights = np.array([(x["loss"], x["weight"]) for x in results]).T
            row["val_loss"] = summary.val_loss = float(np.average(losses, weights=weights))
        clock = time.perf_counter() if evaluate else now
        log.row(row)
        if not math.isfinite(row["loss"] + row["grad_norm"]) and not row.get("skipped"):
            said = f"step {summary.steps}: loss {row['loss']} and grad_norm {row['grad_norm']}"
            remedy = "try a lower --lr, --precision fp32 or --skip-nonfinite"
            raise FloatingPointError(f"{said}; {remedy}")

    asked, pending, every = [], None, options.eval_every or options.steps
    with log.files, log.bar:
        if jax.process_count() == 1:  # several could stop at different steps, and wait for ever
            before = signal.signal(signal.SIGINT, lambda *_: asked.append(True))
            log.files.callback(signal.signal, signal.SIGINT, before)
        for number in range(1, options.steps + 1):
            state, metrics = step(state, zj.shard_batch(next(batches), plan))
            if pending:
                read(pending)
            pending = metrics
            if asked or number == options.steps:
                break
            if number % every == 0:
                pending = read(metrics, evaluate=True)
        summary.stopped_early = summary.steps + 1 < options.steps  # one is not read yet
        read(pending, evaluate=not summary.stopped_early)
    return state


def main(options: Options) -> Summary:
    """Train; raises ValueError or OSError for a user's mistake, FloatingPointError for a NaN."""
    for name in ("steps", "log_every", "eval_batches"):
        if getattr(options, name) < 1:
            raise ValueError(f"{name}: {getattr(options, name)} is too few; give 1 or more")
    if not 0 <= (options.warmup or 0) < options.steps:
        raise ValueError(f"warmup: {options.warmup} of {options.steps} steps; give --warmup fewer")
    tokenizer = TokenizerFile(options.tokenizer) if options.tokenizer else Bytes()
    sizes = {"num_layers": options.layers, "seq_len": options.seq, "vocab_size": options.vocab}
    given = {name: size for name, size in sizes.items() if size is not None}
    given = {"vocab_size": tokenizer.vocab_size, "dropout": options.dropout} | given
    config = dataclasses.replace(transformer.PRESETS[options.model], **given)
    text = read_text(options.data, tokenizer, config.vocab_size)
    windows, held_out = split_text(text, config.seq_len)
    with contextlib.suppress(RuntimeError):  # once JAX runs, the devices are those it has
        jax.config.update("jax_num_cpu_devices", options.devices or 8)
    mesh = zj.make_mesh(options.devices)
    process = jax.process_index(), jax.process_count()
    batches = make_batches(windows, options.batch, options.seed, process)
    validation = make_batches(held_out, options.batch, 0, process, options.eval_batches)
    validation = [next(validation) for _ in range(options.eval_batches)]
    optimizer, rates = make_optimizer(options)
    init_params = partial(transformer.init_params, config)
    how = {name: getattr(options, name) for name in ("stage", "precision", "partitioner")}
    plan = zj.make_plan(init_params, optimizer, mesh, layers=("blocks",), **how)
    log = Log(options, transformer.flops_per_token(config), mesh.size)
    count = f"{len(windows):,} rows of {config.seq_len} tokens, {len(held_out):,} more held out"
    log.say(f"{options.model}: {transformer.num_params(config):,} parameters; {count}")
    log.say(f"text: {text}\n\n{plan}\n")
    state = train(options, config, plan, batches, validation, rates, log)
    summary = log.summary
    if options.sample and not summary.stopped_early:
        prompt = held_out[0]["tokens"][:32].tolist()
        summary.sample = generate(options, config, state.params, prompt, tokenizer)
        log.say(f"\nsample, from {len(prompt)} tokens held out:\n{summary.sample}")
    end = "stopped early" if summary.stopped_early else "done"
    losses = f"loss {summary.loss:.3f}, validation {summary.val_loss:.3f} nats per token"
    end = f"{end} after {summary.steps} steps, {summary.skipped} of them skipped: {losses}"
    log.say(f"\n{zj.memory_report(plan, state)}\n\n{end}")
    return summary


if __name__ == "__main__":  # exit codes: 2 a user's mistake, 1 a loss not finite, 130 Ctrl-C
    try:
        stopped = main(tyro.cli(Options, prog="python -m scripts.train")).stopped_early
        sys.exit(130 if stopped else 0)
    except KeyboardInterrupt:  # before the first step
        sys.exit(130)
    except (ValueError, OSError, FloatingPointError) as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(1 if isinstance(error, FloatingPointError) else 2)
