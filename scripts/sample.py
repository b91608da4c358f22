# SPDX-License-Identifier: Apache-2.0
"""Tokens drawn from a trained transformer."""

from typing import Any

import jax
import numpy as np
from jax.experimental.multihost_utils import process_allgather

from models import transformer


def generate(options: Any, config, params, prompt: list[int], vocab_size: int) -> list[int]:
    """Draw `options.sample` more tokens at temperature 0.8; the fixed window compiles once."""
    run = jax.jit(lambda params, window_T: transformer.logits(config, params, window_T[None])[0])
    whole = jax.device_put(process_allgather(params, tiled=True), jax.local_devices()[0])
    tokens = list(prompt)
    for key in jax.random.split(jax.random.key(options.seed), options.sample):
        window = tokens[-config.seq_len :]
        window_T = np.array(window + [0] * (config.seq_len - len(window)), np.int32)
        logits_V = np.asarray(run(whole, window_T))[len(window) - 1, :vocab_size]
        tokens.append(int(jax.random.categorical(key, logits_V / 0.8)))
    return tokens[len(prompt) :]
