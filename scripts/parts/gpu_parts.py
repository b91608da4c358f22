# SPDX-License-Identifier: Apache-2.0
"""What `scripts/gpu_check.py` runs on the device: the checks that need a GPU, and measured sizes.

A part is a function of `(job, figures)` that adds to `figures`: `what`, a line to print, and
`passed` where it is a check. What it has added stays if it fails later.
"""

from __future__ import annotations

import dataclasses
import functools
import importlib.metadata
import math
import re
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

import zerojax as zj
from models import transformer
from models.transformer import TransformerConfig
from zerojax.hardware.devices import target_of
from zerojax.hardware.targets import Target
from zerojax.receipt.memory import live_bytes
from zerojax.receipt.peak import predict_peak

Figures = dict[str, Any]

PACKAGES = re.compile(r"jax|jaxlib|flax|optax|zerojax|jax-cuda\d+-plugin|nvidia-cudnn-cu\d+")
ROWS = {"gpt2-124m": 64, "gpt2-1.5b": 8, "llama2-7b": 2}  # the step takes some 0.2 s on an H100
SHARE = 1 / 4  # of the GPU's memory, that llama2-7b is cut to
HELD_TWICE = 1.75  # times the state: state and gradients are 1.4 times, two states 2.4


class Job(NamedTuple):
    """What every part is told; `dry` is tiny, on the CPU, and measures nothing."""

    out: Path
    dry: bool
    target: str | None


def device(job: Job, figures: Figures) -> None:
    """What is here; raises ValueError if it is no GPU, or one without known rates."""
    mesh = zj.make_mesh(1)
    first = mesh.devices.flat[0]
    if first.platform not in ("gpu", "cuda") and not job.dry:
        raise ValueError(
            f"JAX sees no NVIDIA GPU here, only {first.device_kind!r}; install a JAX with CUDA "
            "(make env, on a host with nvidia-smi), or give --dry-run"
        )
    installed = importlib.metadata.distributions()
    versions = {x.name: x.version for x in installed if PACKAGES.fullmatch(x.name)}
    figures["versions"] = dict(sorted(versions.items()))
    figures["device"], figures["target"] = first.device_kind, hardware(job).name
    figures["platform"] = " ".join(first.client.platform_version.split())
    figures["memory_stats"] = first.memory_stats()
    listed = ", ".join(f"{name} {version}" for name, version in figures["versions"].items())
    figures["what"] = f"{first.device_kind}, rates of {figures['target']}; {listed}"


def donation(job: Job, figures: Figures) -> None:
    """The new state takes the place of the old one: they are never both in memory."""
    size = {"num_layers": 8, "d_model": 1024, "d_ff": 4096, "vocab_size": 8192, "seq_len": 128}
    run = Program(small(job, num_heads=16, num_kv_heads=16, **size), 1, "fp32")
    state = run.init()
    old, state_bytes = jax.tree.leaves(state.params), live_bytes(state._replace(key=None))
    for _ in range(3):
        state, _ = run.step(state)
    figures |= {"state_bytes": state_bytes, "peak_bytes": peak_bytes()}
    figures |= judge_donation(all(x.is_deleted() for x in old), state_bytes, peak_bytes())


def judge_donation(deleted: bool, state_bytes: int, peak: int | None) -> Figures:
    """Whether a step donated the state, by its old arrays and by the peak of a fresh process."""
    passed = deleted and (peak is None or peak < HELD_TWICE * state_bytes)
    ratio = "-" if peak is None else f"{peak / state_bytes:.2f}"
    gone = "gone" if deleted else "STILL THERE"
    what = f"old arrays are {gone}; peak / state: {ratio}, below {HELD_TWICE} if held once"
    return {"passed": passed, "what": what}


def bf16_step(job: Job, figures: Figures) -> None:
    """A step in bf16 runs, and learns a batch by heart."""
    run = Program(small(job), 8, "bf16", optax.adamw(3e-3))
    state, losses = run.init(), []
    for _ in range(20):
        state, metrics = run.step(state)
        losses.append(float(metrics["loss"]))
    figures["losses"] = losses
    figures["passed"] = bool(np.isfinite(losses).all()) and losses[-1] < 0.9 * losses[0]
    figures["what"] = f"loss {losses[0]:.3f} -> {losses[-1]:.3f} in 20 steps on one batch"


def cudnn_attention(job: Job, figures: Figures) -> None:
    """CuDNN's attention gives what XLA's gives; a dry run compares XLA's with the default."""
    config = small(job)
    init = functools.partial(transformer.init_params, config)
    params = jax.tree.map(lambda x: x.astype(jnp.bfloat16), jax.jit(init)(jax.random.key(0)))
    found = []
    for attention in ("xla", None if job.dry else "cudnn"):
        chosen = dataclasses.replace(config, attention=attention)

        def mean(params, batch, config=chosen):
            loss_sum, weight = transformer.loss_fn(config, params, batch)
            return loss_sum / weight

        compiled = jax.jit(jax.value_and_grad(mean)).lower(params, tokens(config, 8)).compile()
        if attention == "cudnn" and "fmha" not in (compiled.as_text() or ""):
            raise ValueError("the compiled program has no call of cuDNN's attention")
        loss, grads = compiled(params, tokens(config, 8))
        grads = jax.tree.map(lambda x: np.asarray(x, np.float32), grads)
        norm = math.sqrt(sum(float(np.vdot(x, x)) for x in jax.tree.leaves(grads)))
        found.append((np.float32(loss), np.float32(norm), grads["blocks"]["attn"]["q"]["kernel"]))
    # bf16 has 8 bits; the queries' gradient is a difference of sums, and the most sensitive.
    parts, limits = ("loss", "gradient norm", "gradient of queries"), (0.01, 0.02, 0.1)
    apart = [float(np.linalg.norm(b - a) / np.linalg.norm(a)) for a, b in zip(*found, strict=True)]
    figures["relative_difference"] = dict(zip(parts, apart, strict=True))
    figures["passed"] = all(x <= most for x, most in zip(apart, limits, strict=True))
    words = [f"{part} {x:.1e}" for part, x in zip(parts, apart, strict=True)]
    figures["what"] = f"relative differences: {', '.join(words)}; at most {limits}"


def skip_nonfinite(job: Job, figures: Figures) -> None:
    """A step whose gradients are not finite leaves the state as it was, bit for bit."""
    config = small(job)
    batch = tokens(config, 8) | {"mask": np.ones((8, config.seq_len), np.float32)}
    run = Program(config, 8, "bf16", batch=batch, skip_nonfinite=True)
    state, _ = run.step(run.init())
    before = raw(state)
    batch["mask"][0, 0] = np.nan
    run.batch = zj.shard_batch(batch, run.plan)
    state, metrics = run.step(state)
    same, skipped = raw(state) == before, int(metrics["skipped"])
    batch["mask"][0, 0] = 1
    run.batch = zj.shard_batch(batch, run.plan)
    state, metrics = run.step(state)
    changed = raw(state) != before and not int(metrics["skipped"])
    figures["passed"] = same and skipped == 1 and changed
    figures["what"] = f"NaN: skipped {skipped}, state the same {same}; next step updates {changed}"


def receipt(job: Job, figures: Figures) -> None:
    """The receipt of the program that the GPU itself runs has no findings, and all was read."""
    config = small(job)
    run = Program(config, 8, "bf16")
    found = zj.audit(run.train_step, run.init(), run.batch, target=hardware(job))
    judge_receipt(job, figures, "small", found)


def judge_receipt(job: Job, figures: Figures, name: str, found: zj.Audit) -> None:
    """Keep the receipt's text; findings and what its parser left unread fail the check."""
    (job.out / f"receipt-{name}.txt").write_text(f"{found}\n")
    unread = [note for note in found.notes if note.startswith("not read")]
    figures["findings"], figures["unread"] = [x.name for x in found.findings], unread
    figures["passed"] = not found.findings and not unread
    first = f", {', '.join(figures['findings'] + unread)}"[:160] if not figures["passed"] else ""
    figures["what"] = f"{len(found.findings)} findings, {len(unread)} unread{first}"


def measure(job: Job, figures: Figures, name: str) -> None:
    """Peak memory and step time of a real training step, predicted and measured."""
    target, rows = hardware(job), ROWS[name]
    config = transformer.PRESETS[name]
    config = tiny(config, num_layers=min(3, config.num_layers)) if job.dry else config
    if name == "llama2-7b":
        room = SHARE * target.gpu.memory_bytes if target.gpu else 6e5
        config = dataclasses.replace(config, num_layers=fit_layers(config, rows, room))
    figures |= {"size": f"{name}, {config.num_layers} layers", "rows": rows}
    figures |= {"tokens": config.seq_len, "num_params": transformer.num_params(config)}
    formula = predict_peak(*arguments(config, rows))
    figures["formula_bytes"], figures["formula_rows"] = formula.num_bytes, formula.rows
    run = Program(config, rows)
    found = zj.audit_compiled(run.compiled, run.plan, run.batch, target=target)
    judge_receipt(job, figures, name, found)
    peak = found.peak
    figures["compiled_peak_bytes"] = peak.total
    figures["compiled_bytes"] = peak.allocated
    if found.timeline:
        figures["predicted_seconds"] = found.timeline.seconds
    figures["compiling_peak_bytes"] = peak_bytes()
    state = run.init()
    figures["init_peak_bytes"], start = peak_bytes(), time.perf_counter()
    metrics, seconds = {}, []
    for _ in range(3 if job.dry else 12):
        begin = time.perf_counter()
        state, metrics = run.step(state)
        seconds.append(time.perf_counter() - begin)
        if len(seconds) >= 7 and time.perf_counter() - start > 20:
            break
    figures["loss"], figures["measured_bytes"] = float(metrics["loss"]), peak_bytes()
    if not target.gpu or job.dry:
        return
    figures["seconds"] = seconds
    figures["measured_seconds"] = median = statistics.median(seconds[2:])  # two to warm up
    flops = transformer.flops_per_token(config) * rows * config.seq_len
    figures["mfu"] = flops / (median * target.gpu.matmul_flops)


class Program:
    """A compiled training step on one device, with its batch."""

    def __init__(
        self,
        config: TransformerConfig,
        rows: int,
        precision="bf16_master",
        optimizer=None,
        batch=None,
        **how: Any,
    ):
        loss_fn, self.plan, _ = arguments(config, rows, precision, optimizer)
        self.train_step = zj.make_train_step(loss_fn, self.plan, **how)
        self.batch = zj.shard_batch(batch or tokens(config, rows), self.plan)
        # Before there is a state: XLA tries kernels on arrays of their own, which count at peak.
        self.compiled = self.train_step.lower(self.plan.abstract_state, self.batch).compile()

    def init(self) -> zj.TrainState:
        """The state of step 0, once it is there."""
        return jax.block_until_ready(zj.init_state(self.plan, jax.random.key(0)))

    def step(self, state: zj.TrainState) -> tuple[zj.TrainState, dict[str, Any]]:
        """One step, waited for."""
        return jax.block_until_ready(self.compiled(state, self.batch))


def arguments(config: TransformerConfig, rows: int, precision="bf16_master", optimizer=None):
    """Loss function, plan and batch of a step at stage 3 on the first device."""
    init = functools.partial(transformer.init_params, config)
    optimizer, mesh = optimizer or optax.adamw(1e-3), zj.make_mesh(1)
    plan = zj.make_plan(init, optimizer, mesh, stage=3, layers=("blocks",), precision=precision)
    return functools.partial(transformer.loss_fn, config), plan, tokens(config, rows)


def tokens(config: TransformerConfig, rows: int) -> dict[str, np.ndarray]:
    """Random tokens, always the same."""
    shape = rows, config.seq_len + 1
    return {"tokens": np.random.default_rng(0).integers(0, config.vocab_size, shape, np.int32)}


def small(job: Job, **changes: int) -> TransformerConfig:
    """A transformer whose attention matters from the start; in a dry run smaller still."""
    config = TransformerConfig(512, 256, 4, 4, 4, 256, 1024, init_std=0.06, loss_chunk=128)
    return tiny(config, num_layers=2) if job.dry else dataclasses.replace(config, **changes)


def tiny(config: TransformerConfig, num_layers: int) -> TransformerConfig:
    """The same choices at a size for a CPU."""
    size = {"vocab_size": 64, "seq_len": 16, "num_heads": 4, "num_kv_heads": 4, "d_model": 32}
    return dataclasses.replace(config, num_layers=num_layers, d_ff=64, loss_chunk=16, **size)


def fit_layers(config: TransformerConfig, rows: int, room: float) -> int:
    """How many layers of a model train within so many bytes, by formula; 1 at least."""
    one, two = (
        predict_peak(*arguments(dataclasses.replace(config, num_layers=n), rows)).num_bytes
        for n in (1, 2)
    )
    return max(1, min(config.num_layers, 1 + int((room - one) // (two - one))))


def hardware(job: Job) -> Target:
    """The rates of the device: those of `--target`, or those of its own name."""
    return zj.target(job.target) if job.target else target_of(zj.make_mesh(1))


def peak_bytes() -> int | None:
    """The most that this process ever held on the device; None where nobody counts."""
    stats = jax.devices()[0].memory_stats()
    return stats["peak_bytes_in_use"] if stats else None


def raw(state: zj.TrainState) -> list[bytes]:
    """The bits of every array."""
    bare = state._replace(key=jax.random.key_data(state.key))
    return [np.asarray(x).tobytes() for x in jax.tree.leaves(bare)]


CHECKS: dict[str, Callable[[Job, Figures], None]] = {
    "donation": donation,  # first: the peak that it reads is that of the process
    "bf16 step": bf16_step,
    "cuDNN attention": cudnn_attention,
    "skip_nonfinite": skip_nonfinite,
    "receipt": receipt,
}
SIZES = {name: functools.partial(measure, name=name) for name in ROWS}
PARTS = {"device": device, **CHECKS, **SIZES}
