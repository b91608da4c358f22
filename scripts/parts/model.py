# SPDX-License-Identifier: Apache-2.0
"""The transformer that a program trains or reads, its plan and its optimizer."""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import Mesh

import zerojax as zj
from models import transformer
from models.transformer import TransformerConfig
from scripts.parts.options import Options


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
