# SPDX-License-Identifier: Apache-2.0
"""Text from trained weights: `python -m scripts.sample --checkpoint out/train/checkpoints`."""

import dataclasses
import functools
import json
import sys
from pathlib import Path
from typing import Any, Literal

import jax
import jax.numpy as jnp
import optax
import tyro

import zerojax as zj
from models import transformer
from models.generate import generate
from scripts.parts.log import wrap
from scripts.parts.mesh import make_mesh
from scripts.parts.model import make_plan
from scripts.parts.options import check_least
from scripts.parts.text import Bytes, TokenizerFile
from scripts.parts.weights import read_safetensors

FROM_RUN = ("model", "layers", "seq", "vocab", "tokenizer")


@dataclasses.dataclass(frozen=True)
class Options:
    """Continue a prompt with a trained transformer.

    Each token is drawn from all before it; when they are more than the model's window, it begins
    again with its last half.
    """

    checkpoint: Path
    """A run's OUT/checkpoints, or one save in it, of any stage; or a .safetensors file."""
    prompt: str = "import "
    """What to continue."""
    tokens: int = 200
    """How many to draw."""
    temperature: float = 0.8
    """What logits are divided by; 0 always takes the likeliest token."""
    top_k: int | None = None
    """Draw among so many of the likeliest tokens (None: among all)."""
    seed: int = 0
    """Of the draws."""
    devices: int = 1
    """Devices to split the weights over, as at stage 3."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """Of weights and compute."""
    model: Literal[*transformer.PRESETS] | None = None  # pyright: ignore[reportInvalidTypeForm]
    """Preset of models/transformer.py (None, here and below: as options.json of the run says)."""
    layers: int | None = None
    """Layers."""
    seq: int | None = None
    """Tokens in a row, which is the window."""
    vocab: int | None = None
    """Vocabulary of the model."""
    tokenizer: Path | None = None
    """A tokenizer.json."""


def complete(options: Options) -> Options:
    """Fill what is None with the options of the run that the weights are of, if they are there."""
    if not options.checkpoint.exists():
        raise FileNotFoundError(
            f"--checkpoint: {options.checkpoint} is no folder of saves, and no file"
        )
    if (options.checkpoint / "checkpoints").is_dir():
        named = options.checkpoint / "checkpoints"
        raise ValueError(f"--checkpoint: {options.checkpoint} is the folder of a run; give {named}")
    folder = options.checkpoint.absolute().parent
    found = [each / "options.json" for each in (folder, folder.parent)]  # of all saves, or of one
    path = next((each for each in found if each.is_file()), None)
    said = json.loads(path.read_text()) if path else {}
    given = {name: getattr(options, name) for name in FROM_RUN}
    given = {name: said.get(name) if x is None else x for name, x in given.items()}
    if given["model"] is None:
        raise ValueError(f"--model: {found[0]} is not there to say which; give the preset")
    given["tokenizer"] = Path(given["tokenizer"]) if given["tokenizer"] else None
    return dataclasses.replace(options, **given)


def read_params(options: Options, config: transformer.TransformerConfig) -> Any:
    """Read the parameters onto the devices, each its shards of them."""
    dtype = jnp.dtype(options.dtype)
    precision = zj.Precision(params=dtype, compute=dtype)
    mesh = make_mesh(options.devices)
    plan = make_plan(config, optax.identity(), mesh, stage=3, precision=precision)
    try:
        if options.checkpoint.suffix != ".safetensors":
            return zj.restore_params(options.checkpoint, plan)
        given = read_safetensors(options.checkpoint, plan.abstract_state.params)
        return zj.init_state(plan, jax.random.key(0), given).params
    except (ValueError, OSError) as error:
        raise type(error)(f"--checkpoint: {error}") from error


def main(options: Options) -> str:
    """Print and return what follows the prompt; raises ValueError or OSError for a mistake."""
    check_least(options, {"tokens": 1, "top_k": 1, "devices": 1, "layers": 1, "seq": 1, "vocab": 1})
    if not options.temperature >= 0:
        raise ValueError(f"--temperature: {options.temperature} is negative; give 0 or more")
    run = complete(options)
    tokenizer = TokenizerFile(run.tokenizer) if run.tokenizer else Bytes()
    assert run.model is not None
    config = transformer.preset(
        run.model,
        num_layers=run.layers,
        seq_len=run.seq,
        vocab_size=run.vocab or tokenizer.vocab_size,
    )
    ids = tokenizer.encode(run.prompt.encode())
    if ids is None or not len(ids):
        raise ValueError("--prompt: it has no token; give one character or more")
    params = read_params(run, config)
    draw = functools.partial(generate, temperature=run.temperature, top_k=run.top_k)
    key, vocab_size = jax.random.key(run.seed), tokenizer.vocab_size
    more = draw(config, params, ids.tolist(), run.tokens, key, vocab_size=vocab_size)
    text = tokenizer.decode(more)
    print(wrap("prompt:    ", run.prompt))
    print(wrap("continues: ", text))
    if len(ids) + run.tokens > config.seq_len + 1:
        print(f"past {config.seq_len} tokens the window began again with its last half")
    return text


if __name__ == "__main__":
    try:
        main(tyro.cli(Options, prog="python -m scripts.sample"))
    except KeyboardInterrupt:
        sys.exit(130)
    except (ValueError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)
