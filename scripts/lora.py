# SPDX-License-Identifier: Apache-2.0
"""Fine-tune low-rank adapters beside frozen weights: `python -m scripts.lora --base FILE`.

OUT/adapters.safetensors holds the adapters alone; --adapters goes on from it. The base with them
merged into it is OUT/merged.safetensors. A checkpoint would hold the base again: there are none.
"""

import dataclasses
import sys
from functools import partial
from pathlib import Path
from typing import Literal

import jax
import optax
import tyro

import zerojax as zj
from models import lora, transformer
from scripts.parts.loop import evaluate
from scripts.parts.mesh import make_mesh
from scripts.parts.options import check_least
from scripts.parts.text import (
    Bytes,
    TokenizerFile,
    check_batch,
    make_batches,
    read_text,
    split_text,
)
from scripts.parts.weights import finest_params, read_safetensors, write_safetensors
from zerojax.sharding.axes import num_batch_shards
from zerojax.table import format_bytes


@dataclasses.dataclass(frozen=True)
class Options:
    """Train low-rank adapters beside the frozen weights of a safetensors file (LoRA), with ZeRO."""

    base: Path
    """Weights that scripts/export.py wrote; what follows must be the model that they are of."""
    model: Literal[*transformer.PRESETS] = "tiny"  # pyright: ignore[reportInvalidTypeForm]
    """Preset of models/transformer.py."""
    layers: int | None = None
    """Layers (None: the preset's)."""
    seq: int | None = None
    """Tokens in a row (None: the preset's)."""
    tokenizer: Path | None = None
    """A tokenizer.json (None: bytes are the tokens)."""
    adapters: Path | None = None
    """Adapters of the same rank to go on from, with a new optimizer (None: those that add 0)."""
    rank: int = 8
    """Columns and rows of the two matrices beside every weight; what they add counts twice."""
    data: tuple[Path, ...] = ()
    """Files and folders of text (none: the Python standard library's source)."""
    out: Path = Path("out/lora")
    """Folder of the two files that are written."""
    stage: Literal[0, 1, 2, 3] = 3
    """ZeRO stage."""
    precision: Literal["fp32", "bf16", "bf16_master"] = "fp32"
    """Number formats; with bf16_master a frozen weight takes 2 bytes."""
    devices: int | None = None
    """Devices to use (None: all accelerators, or 8 simulated CPU devices)."""
    steps: int = 200
    """Optimizer updates."""
    batch: int = 8
    """Rows in an update, over all devices."""
    lr: float = 2e-3
    """AdamW's learning rate."""
    seed: int = 0
    """Of adapters and order of rows."""


def read_given(options: Options, plan: zj.Plan):
    """Return the base, read in slices, with the adapters of a file or None in their place."""
    abstract = plan.abstract_state.params
    given = read_safetensors(options.base, lora.select(abstract, adapters=False))
    if options.adapters is None:
        return given
    adapters = read_safetensors(options.adapters, lora.select(abstract, adapters=True))
    return jax.tree.map(lambda *x: x[x[0] is None], given, adapters, is_leaf=lambda x: x is None)


def main(options: Options) -> list[float]:
    """Train and write; return the losses per held-out token before and after."""
    check_least(options, dict.fromkeys(("rank", "steps", "batch", "devices", "layers", "seq"), 1))
    tokens = TokenizerFile(options.tokenizer) if options.tokenizer else Bytes()
    sizes = {"num_layers": options.layers, "seq_len": options.seq, "vocab_size": tokens.vocab_size}
    config, mesh = transformer.preset(options.model, **sizes), make_mesh(options.devices)
    check_batch(options.batch, num_batch_shards(mesh))
    text = split_text(read_text(options.data, tokens, config.vocab_size), config.seq_len)
    batches, held_out = (make_batches(part, options.batch, options.seed) for part in text)
    validation = [next(held_out)]

    init_params = partial(lora.init_params, config, options.rank)
    how = {"stage": options.stage, "precision": options.precision, "layers": ("blocks",)}
    make_plan = partial(zj.make_plan, init_params, optax.adamw(options.lr), mesh, **how)
    plan = make_plan(frozen=lambda path: not lora.is_adapter(path))
    plans = plan, make_plan()  # the second trains all, to say what freezing saves
    few, many = (sum(x.num_bytes for x in (*p.opt_state, *p.master)) for p in plans)
    print(f"{plan}\n\noptimizer state on all devices: {format_bytes(few)}; if all were trained,")
    print(f"{format_bytes(many)}: freezing the base saves {format_bytes(many - few)}\n")
    state = zj.init_state(plan, jax.random.key(options.seed), read_given(options, plan))
    rank, scale = options.rank, 2.0  # the paper's alpha / rank
    loss_fn = partial(transformer.loss_fn, config, graph=lora.make_graph(config, rank, scale))
    step, eval_step = zj.make_train_step(loss_fn, plan), zj.make_eval_step(loss_fn, plan)
    losses = [evaluate(eval_step, state, validation)]
    for number in range(1, options.steps + 1):
        state, metrics = step(state, zj.shard_batch(next(batches), plan))
        if number % 20 == 0 or number == options.steps:
            print(f"step {number}/{options.steps}  loss {metrics['loss']:.3f}")
    losses.append(evaluate(eval_step, state, validation))
    print(f"held out: loss {losses[0]:.3f} before, {losses[1]:.3f} after")

    options.out.mkdir(parents=True, exist_ok=True)
    params, said = finest_params(state), {"rank": str(rank), "alpha": str(scale * rank)}
    write_safetensors(options.out / "adapters.safetensors", lora.select(params, True), None, said)
    merged = jax.jit(lora.merge, static_argnums=1)(params, scale)
    write_safetensors(options.out / "merged.safetensors", merged, "float32")
    return losses


if __name__ == "__main__":
    try:
        main(tyro.cli(Options, prog="python -m scripts.lora"))
    except (ValueError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)
