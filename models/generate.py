# SPDX-License-Identifier: Apache-2.0
"""Text from a transformer, one token after another, with the keys and values of those before kept.

Plain jitted code on parameters wherever they are: whole on one device, or split over several, where
XLA places the communication.

Shape letters: those of models/transformer.py; S tokens of the window.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax import lax

import zerojax as zj
from models.transformer import Block, TransformerConfig, head_logits, make_graph, rope_table

Cache = dict[str, jax.Array]  # "k" and "v", [L, B, S, K, E]


def init_cache(config: TransformerConfig, rows: int, num_tokens: int, dtype: Any) -> Cache:
    """Make an empty cache for so many tokens of each row."""
    sizes = (config.num_layers, rows, num_tokens, config.num_kv_heads, config.head_dim)
    return {"k": jnp.zeros(sizes, dtype), "v": jnp.zeros(sizes, dtype)}


def extend_block(block: Block, x_BTD: jax.Array, rope, start, cache: Cache):
    """Run one layer on the tokens from `start` on; return also its cache with them in it."""
    q_BTHE, k_BTKE, v_BTKE = block.attn.qkv(block.attn_norm(x_BTD), rope)
    k_BSKE = lax.dynamic_update_slice_in_dim(cache["k"], k_BTKE, start, axis=1)
    v_BSKE = lax.dynamic_update_slice_in_dim(cache["v"], v_BTKE, start, axis=1)
    # What lies behind a token in the cache is of padding, or of a text that was there before.
    sees_TS = jnp.arange(k_BSKE.shape[1]) <= start + jnp.arange(x_BTD.shape[1])[:, None]
    out_BTHE = jax.nn.dot_product_attention(q_BTHE, k_BSKE, v_BSKE, mask=sees_TS[None, None])
    x_BTD = x_BTD + block.attn.o(out_BTHE.reshape(x_BTD.shape))
    return x_BTD + block.mlp(block.mlp_norm(x_BTD)), {"k": k_BSKE, "v": v_BSKE}


def extend(
    config: TransformerConfig, params: Any, tokens_BT: jax.Array, start: Any, cache: Cache
) -> tuple[jax.Array, Cache]:
    """Run the model on the tokens from `start` on, of rows whose tokens before are in the cache.

    Returns:
        The final hidden states [B, T, D] and the cache with these tokens. `start` + T must not be
        more than the cache has room for: like every dynamic slice of JAX, it would be moved.
    """
    model = nnx.merge(make_graph(config), params)
    num_tokens, rope = tokens_BT.shape[1], None
    x_BTD = jnp.take(model.embed[...], tokens_BT, axis=0)
    if config.positions == "rope":
        rope = rope_table(config, num_tokens, start)
    else:
        x_BTD = x_BTD + lax.dynamic_slice_in_dim(model.positions[...], start, num_tokens)
    graph, stacked = nnx.split(model.blocks)

    def block(params, x_BTD, rope, start, cache):
        return extend_block(nnx.merge(graph, params), x_BTD, rope, start, cache)

    stack = nnx.to_pure_dict(stacked)
    x_BTD, cache = zj.scan_layers(block, stack, x_BTD, rope, start, per_layer=cache, remat="none")
    return model.final_norm(x_BTD), cache


def draw(key: jax.Array, logits_V: jax.Array, temperature: float, top_k: int | None) -> jax.Array:
    """Draw a token: of the `top_k` likeliest, or the likeliest one at temperature 0."""
    if temperature == 0:
        return jnp.argmax(logits_V)
    if top_k is not None and top_k < logits_V.size:
        least = lax.top_k(logits_V, top_k)[0][-1]
        logits_V = jnp.where(logits_V < least, -jnp.inf, logits_V)
    return jax.random.categorical(key, logits_V / temperature)


@functools.partial(jax.jit, static_argnames=("config", "vocab_size", "temperature", "top_k"))
def _fill(config, params, tokens, first, last, key, *, vocab_size, temperature, top_k):
    """Replace tokens[first:last] by drawn ones, each from all before it; one compiled loop."""
    room = init_cache(config, 1, len(tokens) - 1, params["embed"].dtype)
    _, cache = extend(config, params, tokens[None, :-1], 0, room)
    head_VD = params["embed" if config.tied else "head"]

    def body(i, carry):
        tokens, cache = carry
        x_BTD, cache = extend(config, params, tokens[None, i - 1][None], i - 1, cache)
        logits_V = head_logits(x_BTD, head_VD)[0, 0, :vocab_size]
        token = draw(jax.random.fold_in(key, i), logits_V, temperature, top_k)
        return tokens.at[i].set(token.astype(tokens.dtype)), cache

    return lax.fori_loop(first, last, body, (tokens, cache))[0]


def generate(
    config: TransformerConfig,
    params: Any,
    prompt: list[int],
    num_tokens: int,
    key: jax.Array,
    *,
    vocab_size: int | None = None,
    temperature: float = 0.8,
    top_k: int | None = None,
) -> list[int]:
    """Draw the tokens that follow a prompt.

    Each is drawn from all tokens before it, as long as they are at most `config.seq_len`. When they
    are more, the window begins again with the last half of it: a cache cannot slide, since every
    key and value in it was made from the tokens that would leave.

    Args:
        config: the model's shape.
        params: as `transformer.init_params` makes them, on one device or split over several.
        prompt: one token or more.
        num_tokens: how many to draw.
        key: two calls with the same key draw the same.
        vocab_size: ids from here on are never drawn (None: that of the config).
        temperature: what logits are divided by; 0 takes the likeliest token.
        top_k: draw among so many of the likeliest tokens (None: among all).

    Raises:
        ValueError: the prompt is empty.
    """
    if not prompt:
        raise ValueError("prompt: no token; give one or more to begin with")
    size, tokens, end = config.seq_len, list(prompt), len(prompt) + num_tokens
    how = {"temperature": temperature, "top_k": top_k}
    while len(tokens) < end:
        window = tokens if len(tokens) <= size else tokens[-max(1, size // 2) :]
        first, last = len(window), min(size + 1, len(window) + end - len(tokens))
        padded = np.zeros(size + 1, np.int32)
        padded[:first] = window
        own = jax.random.fold_in(key, len(tokens))
        vocab = vocab_size or config.vocab_size
        filled = _fill(config, params, padded, first, last, own, vocab_size=vocab, **how)
        tokens += np.asarray(filled)[first:last].tolist()
    return tokens[len(prompt) :]
