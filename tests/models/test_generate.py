# SPDX-License-Identifier: Apache-2.0
"""Generation with kept keys and values is generation without, token by token."""

from __future__ import annotations

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import zerojax as zj
from models import generate, transformer
from tests.models.test_transformer import BOTH, GPT, LLAMA, TOKENS, VOCAB, make_params

KEY = jax.random.key(5)
ROPE_GPT = dataclasses.replace(GPT, positions="rope")  # as many key heads as heads


def tokens_of(rows=2):
    return jax.random.randint(jax.random.key(1), (rows, TOKENS), 0, VOCAB)


@functools.partial(jax.jit, static_argnums=(0, 3))
def cached_logits(config, params, tokens, cuts):
    """Logits of all tokens, handed to the model in pieces."""
    dtype = params["embed"].dtype
    cache, hidden = generate.init_cache(config, len(tokens), TOKENS + 3, dtype), []
    for start, end in zip((0, *cuts), (*cuts, TOKENS), strict=True):
        x, cache = generate.extend(config, params, tokens[:, start:end], start, cache)
        hidden.append(x)
    head = params["embed" if config.tied else "head"]
    return transformer.head_logits(jnp.concatenate(hidden, axis=1), head)


@pytest.mark.parametrize("config", [GPT, LLAMA, ROPE_GPT], ids=["gpt", "llama", "gpt-rope"])
@pytest.mark.parametrize("cuts", [(), tuple(range(1, TOKENS)), (5, 6)], ids=["1", "each", "3"])
def test_the_cache_gives_the_numbers_of_the_whole_forward(config, cuts):
    params, tokens = make_params(config), tokens_of()
    expected = transformer.logits(config, params, tokens)
    found = cached_logits(config, params, tokens, cuts)
    np.testing.assert_allclose(found, expected, rtol=2e-5, atol=2e-5)


def test_bf16_parameters_keep_a_bf16_cache():
    params = jax.tree.map(lambda x: x.astype(jnp.bfloat16), make_params(LLAMA))
    expected = transformer.logits(LLAMA, params, tokens_of())
    found = cached_logits(LLAMA, params, tokens_of(), (5, 6))
    assert np.max(np.abs(found - expected)) < 0.03 * np.max(np.abs(expected))
    assert generate.init_cache(LLAMA, 1, 4, jnp.bfloat16)["k"].shape == (2, 1, 4, 2, 4)


@pytest.mark.parametrize("sabotage", ["rope", "positions", "mask"])
def test_the_comparison_can_fail(sabotage, monkeypatch):
    config = GPT if sabotage == "positions" else LLAMA
    tables, block = transformer.rope_table, generate.extend_block
    if sabotage == "rope":
        monkeypatch.setattr(generate, "rope_table", lambda config, n, start: tables(config, n))
    if sabotage == "positions":
        cut = lambda a, start, n: a[:n]
        monkeypatch.setattr(generate.lax, "dynamic_slice_in_dim", cut)
    if sabotage == "mask":
        run = lambda layer, x, rope, start, cache: block(layer, x, rope, start + 1, cache)
        monkeypatch.setattr(generate, "extend_block", run)
    params, tokens = make_params(config), tokens_of()
    cached_logits.clear_cache()
    found = cached_logits(config, params, tokens, (5, 6))
    cached_logits.clear_cache()
    assert np.max(np.abs(found - transformer.logits(config, params, tokens))) > 1e-2


def plain(config, params, prompt, num_tokens):
    """The likeliest tokens, from the whole forward each time, by the same rule for the window."""
    tokens, window = list(prompt), list(prompt)
    run = jax.jit(functools.partial(transformer.logits, config))
    for _ in range(num_tokens):
        if len(window) > config.seq_len:
            window = window[-(config.seq_len // 2) :]
        padded = np.zeros((1, config.seq_len), np.int32)
        padded[0, : len(window)] = window
        token = int(np.argmax(run(params, padded)[0, len(window) - 1]))
        tokens.append(token)
        window.append(token)
    return tokens[len(prompt) :]


@BOTH
@pytest.mark.parametrize("length", [3, TOKENS, TOKENS + 5])
def test_the_likeliest_tokens_are_those_of_the_whole_forward(config, length):
    """Past the window too, where both begin again with the last half of it."""
    config = dataclasses.replace(config, tied=False)  # a tied head likes the token that it sees
    params = make_params(config)
    prompt = np.random.default_rng(length).integers(0, VOCAB, length).tolist()
    found = generate.generate(config, params, prompt, 2 * TOKENS, KEY, temperature=0)
    assert found == plain(config, params, prompt, 2 * TOKENS)
    assert len(set(found)) > 2


def test_split_parameters_give_the_same_tokens():
    params, prompt = make_params(LLAMA), [1, 2, 3]
    mesh = zj.make_mesh(8)

    def split(x):
        dim = next(d for d in reversed(range(x.ndim)) if x.shape[d] % 8 == 0)
        return jax.device_put(x, NamedSharding(mesh, P(*[None] * dim, "data")))

    found = generate.generate(LLAMA, jax.tree.map(split, params), prompt, 12, KEY)
    assert found == generate.generate(LLAMA, params, prompt, 12, KEY)


def test_draws_follow_key_temperature_top_k_and_vocabulary():
    run = functools.partial(generate.generate, GPT, make_params(GPT), [1, 2], 30)
    assert run(KEY) == run(KEY)
    assert run(KEY) != run(jax.random.key(6))
    assert run(KEY, top_k=1) == run(KEY, temperature=0)
    assert max(run(KEY, vocab_size=7, temperature=9.0)) < 7
    logits = jnp.log(jnp.array([0.5, 0.1, 0.3, 0.1]))
    draws = jax.vmap(lambda key: generate.draw(key, logits, 0.5, 2))
    share = np.bincount(draws(jax.random.split(KEY, 4000)), minlength=4) / 4000
    np.testing.assert_allclose(share, [25 / 34, 0, 9 / 34, 0], atol=0.03)
    with pytest.raises(ValueError, match="prompt: no token"):
        generate.generate(GPT, {}, [], 1, KEY)


def test_a_window_of_one_token():
    config = dataclasses.replace(GPT, seq_len=1)
    found = generate.generate(config, make_params(config), [4], 5, KEY, temperature=0)
    assert len(found) == 5
