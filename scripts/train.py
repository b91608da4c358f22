# SPDX-License-Identifier: Apache-2.0
"""Train a transformer on text: `python -m scripts.train`, on GPUs or on simulated devices."""

import signal
import sys

import jax
import tyro
from jax.experimental.multihost_utils import process_allgather

import zerojax as zj
from models import transformer
from models.generate import generate
from scripts.parts.files import Files
from scripts.parts.log import Screen, Summary, wrap
from scripts.parts.loop import run
from scripts.parts.mesh import make_mesh
from scripts.parts.model import make_config, make_optimizer, make_plan
from scripts.parts.options import LEAST, Options, check_least
from scripts.parts.text import (
    Bytes,
    TokenizerFile,
    check_batch,
    make_batches,
    read_text,
    split_text,
)
from scripts.parts.weights import read_initial
from zerojax.hardware.hosts import exit_process
from zerojax.sharding.axes import num_batch_shards


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
    check_batch(options.batch, num_batch_shards(mesh), options.microbatches)

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
        exit_process(130)
    except (ValueError, OSError, FloatingPointError) as error:
        print(f"error: {error}", file=sys.stderr)
        exit_process(1 if isinstance(error, FloatingPointError) else 2)
