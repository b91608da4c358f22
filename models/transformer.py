# SPDX-License-Identifier: Apache-2.0
"""One decoder-only transformer in Flax NNX: GPT-2 and Llama are choices of its config.

Plain single-device code, with `zerojax.scan_layers` where `lax.scan` would stand: no mesh, no
sharding. Parameters are a pure dict; the equal layers are stacked on a leading dim under
`params["blocks"]`. Parameters are born fp32; whatever dtype they arrive in is the compute dtype,
while norms, softmax and loss are fp32.

Shape letters: B rows, T tokens of a row, C tokens of a loss chunk, D d_model, F d_ff, H heads,
K key and value heads, E head_dim, R = E / 2, V vocabulary, L layers.
"""

import functools
import math
from collections.abc import Mapping
from typing import Any, Literal

import jax
import jax.numpy as jnp
from flax import nnx

import zerojax as zj
from models.config import PRESETS as PRESETS
from models.config import TransformerConfig as TransformerConfig
from models.config import preset as preset


def attention_implementation(config, dtype) -> Literal["xla", "cudnn"] | None:
    """Choose cuDNN's FlashAttention for 16-bit numbers on a GPU, unless the config chooses."""
    if config.attention is None and jax.default_backend() == "gpu" and dtype.itemsize == 2:
        return "cudnn"
    return config.attention


def rope_table(config: TransformerConfig, num_tokens: int, start: jax.Array | int = 0):
    """Cosines and sines, fp32 [T, 1, R], of the rotary embedding (arXiv 2104.09864, eq. 34)."""
    exponent_R = jnp.arange(0, config.head_dim, 2, dtype=jnp.float32) / config.head_dim
    position_T11 = (start + jnp.arange(num_tokens, dtype=jnp.float32))[:, None, None]
    angle_T1R = position_T11 * config.rope_theta**-exponent_R
    return jnp.cos(angle_T1R), jnp.sin(angle_T1R)


def apply_rope(x_BTHE: jax.Array, table: tuple[jax.Array, jax.Array]) -> jax.Array:
    """Turn each pair (x[i], x[i + R]) by its token's angle, in fp32."""
    cos_T1R, sin_T1R = table
    a_BTHR, b_BTHR = jnp.split(x_BTHE.astype(jnp.float32), 2, axis=-1)
    turned = a_BTHR * cos_T1R - b_BTHR * sin_T1R, b_BTHR * cos_T1R + a_BTHR * sin_T1R
    return jnp.concatenate(turned, axis=-1).astype(x_BTHE.dtype)


def make_linear(config, d_in: int, d_out: int, rngs: nnx.Rngs, residual: bool = False):
    """A linear layer with GPT-2's init: smaller by sqrt(2 L) into the residual stream."""
    scale = 1 / math.sqrt(2 * config.num_layers) if residual else 1.0
    init = nnx.initializers.normal(config.init_std * scale)
    return nnx.Linear(d_in, d_out, use_bias=config.bias, kernel_init=init, rngs=rngs)


def make_norm(config: TransformerConfig, rngs: nnx.Rngs) -> nnx.LayerNorm | nnx.RMSNorm:
    """LayerNorm (scale and bias) or RMSNorm (scale); both work in fp32 inside."""
    d_model, eps = config.d_model, config.norm_eps
    if config.norm == "rmsnorm":
        return nnx.RMSNorm(d_model, epsilon=eps, rngs=rngs)
    return nnx.LayerNorm(d_model, epsilon=eps, use_fast_variance=False, rngs=rngs)


class SelfAttention(nnx.Module):
    """Causal self-attention; fewer kv heads than heads is grouped queries (arXiv 2305.13245)."""

    def __init__(self, config: TransformerConfig, rngs: nnx.Rngs):
        self.config = config
        d_model, d_kv = config.d_model, config.num_kv_heads * config.head_dim
        self.q = make_linear(config, d_model, d_model, rngs)
        self.k = make_linear(config, d_model, d_kv, rngs)
        self.v = make_linear(config, d_model, d_kv, rngs)
        self.o = make_linear(config, d_model, d_model, rngs, residual=True)

    def qkv(self, x_BTD: jax.Array, rope) -> tuple[jax.Array, jax.Array, jax.Array]:
        """Queries [B, T, H, E], keys and values [B, T, K, E] of each token."""
        heads = (*x_BTD.shape[:2], -1, self.config.head_dim)
        q_BTHE, k_BTKE = self.q(x_BTD).reshape(heads), self.k(x_BTD).reshape(heads)
        if rope is not None:
            q_BTHE, k_BTKE = apply_rope(q_BTHE, rope), apply_rope(k_BTKE, rope)
        return q_BTHE, k_BTKE, self.v(x_BTD).reshape(heads)

    def __call__(self, x_BTD: jax.Array, rope) -> jax.Array:
        """Mix each token with the tokens before it."""
        q_BTHE, k_BTKE, v_BTKE = self.qkv(x_BTD, rope)
        implementation = attention_implementation(self.config, x_BTD.dtype)
        out_BTHE = jax.nn.dot_product_attention(
            q_BTHE, k_BTKE, v_BTKE, is_causal=True, implementation=implementation
        )
        return self.o(out_BTHE.reshape(x_BTD.shape))


class MLP(nnx.Module):
    """GPT-2's GELU (tanh form) or Llama's SwiGLU (arXiv 2002.05202)."""

    def __init__(self, config: TransformerConfig, rngs: nnx.Rngs):
        self.gated = config.mlp == "swiglu"
        self.up = make_linear(config, config.d_model, config.d_ff, rngs)
        if self.gated:
            self.gate = make_linear(config, config.d_model, config.d_ff, rngs)
        self.down = make_linear(config, config.d_ff, config.d_model, rngs, residual=True)

    def __call__(self, x_BTD: jax.Array) -> jax.Array:
        """Work on each token by itself."""
        up_BTF = self.up(x_BTD)
        if self.gated:
            return self.down(jax.nn.silu(self.gate(x_BTD)) * up_BTF)
        return self.down(jax.nn.gelu(up_BTF))


class Block(nnx.Module):
    """One pre-norm layer; dropout falls on what attention and MLP add to the residual stream."""

    def __init__(self, config: TransformerConfig, rngs: nnx.Rngs):
        self.attn_norm, self.attn = make_norm(config, rngs), SelfAttention(config, rngs)
        self.mlp_norm, self.mlp = make_norm(config, rngs), MLP(config, rngs)
        self.dropout = nnx.Dropout(config.dropout)

    def __call__(self, x_BTD: jax.Array, rope, key: jax.Array | None) -> jax.Array:
        """Run the layer; no key is no dropout."""
        attn_key, mlp_key = (None, None) if key is None else jax.random.split(key)
        drop = functools.partial(self.dropout, deterministic=key is None)
        x_BTD = x_BTD + drop(self.attn(self.attn_norm(x_BTD), rope), rngs=attn_key)
        return x_BTD + drop(self.mlp(self.mlp_norm(x_BTD)), rngs=mlp_key)


class Transformer(nnx.Module):
    """Tokens [B, T] to the final hidden states [B, T, D]; `head_kernel` makes logits of them."""

    def __init__(self, config: TransformerConfig, rngs: nnx.Rngs):
        self.config = config
        init = nnx.initializers.normal(config.init_std)
        # Not nnx.Embed, which casts what it looks up to the dtype the parameters were born in.
        self.embed = nnx.Param(init(rngs.params(), (config.vocab_size, config.d_model)))
        if config.positions == "learned":
            self.positions = nnx.Param(init(rngs.params(), (config.seq_len, config.d_model)))
        layer_keys = jax.random.split(rngs.params(), config.num_layers)
        self.blocks = nnx.vmap(lambda key: Block(config, nnx.Rngs(key)))(layer_keys)
        self.final_norm = make_norm(config, rngs)
        if not config.tied:
            self.head = nnx.Param(init(rngs.params(), (config.vocab_size, config.d_model)))
        self.dropout = nnx.Dropout(config.dropout)

    def __call__(self, tokens_BT: jax.Array, key: jax.Array | None = None) -> jax.Array:
        """Run the model up to its head; no key is no dropout."""
        num_tokens, seq_len = tokens_BT.shape[1], self.config.seq_len
        x_BTD, rope = jnp.take(self.embed[...], tokens_BT, axis=0), None
        if self.config.positions == "rope":
            rope = rope_table(self.config, num_tokens)
        elif num_tokens > seq_len:
            trouble = f"rows of {num_tokens} tokens, with learned positions for seq_len={seq_len}"
            raise ValueError(f"tokens: {trouble}; cut the rows or raise TransformerConfig.seq_len.")
        else:
            x_BTD = x_BTD + self.positions[:num_tokens]
        embed_key, blocks_key = (None, None) if key is None else jax.random.split(key)
        x_BTD = self.dropout(x_BTD, deterministic=key is None, rngs=embed_key)
        return self.final_norm(self.run_blocks(x_BTD, rope, blocks_key))

    def run_blocks(self, x_BTD: jax.Array, rope, key: jax.Array | None) -> jax.Array:
        """Scan over the stacked layers, one key for each."""
        graphdef, stacked = nnx.split(self.blocks)
        keys = None if key is None else jax.random.split(key, self.config.num_layers)

        def block(layer_params, x_BTD, rope, layer_key=None):
            return nnx.merge(graphdef, layer_params)(x_BTD, rope, layer_key)

        return zj.scan_layers(
            block,
            nnx.to_pure_dict(stacked),
            x_BTD,
            rope,
            per_layer=keys,
            remat=self.config.remat,
            prefetch=self.config.prefetch,
            regather=self.config.regather,
        )

    @property
    def head_kernel(self) -> jax.Array:
        """The [V, D] matrix that makes logits: its own, or the embedding's."""
        return (self.embed if self.config.tied else self.head)[...]


@functools.cache
def make_graph(config: TransformerConfig) -> nnx.GraphDef[Transformer]:
    """The model without its arrays: what `nnx.merge` needs besides the parameters."""
    return nnx.graphdef(nnx.eval_shape(lambda: Transformer(config, nnx.Rngs(0))))


def init_params(config: TransformerConfig, key: jax.Array) -> dict[str, Any]:
    """Make fp32 parameters, a pure dict: `["blocks"]["attn"]["q"]["kernel"]` is [L, D, H E]."""
    return nnx.to_pure_dict(nnx.state(Transformer(config, nnx.Rngs(key)), nnx.Param))


def head_logits(x_BCD: jax.Array, head_VD: jax.Array) -> jax.Array:
    """Make fp32 logits; bf16 parameters are multiplied in bf16, in the backward too."""
    # Without a named algorithm the backward multiplies the logits' fp32 cotangent in fp32.
    bf16 = jax.lax.DotAlgorithmPreset.BF16_BF16_F32 if x_BCD.dtype == jnp.bfloat16 else None
    product = functools.partial(jnp.einsum, precision=bf16, preferred_element_type=jnp.float32)
    return product("bcd,vd->bcv", x_BCD, head_VD)


def chunked_loss(x_BTD, head_VD, targets_BT, weight_BT, chunk: int) -> jax.Array:
    """Sum weighted token cross-entropies, with the logits of `chunk` tokens per row at a time.

    The backward makes the logits again. A last chunk that is not full is padded, at weight zero.
    """
    rows, num_tokens = targets_BT.shape
    extra = -num_tokens % chunk

    def into_chunks(a_BT):
        a_BT = jnp.pad(a_BT, [(0, 0), (0, extra)] + [(0, 0)] * (a_BT.ndim - 2))
        return jnp.moveaxis(a_BT.reshape(rows, -1, chunk, *a_BT.shape[2:]), 1, 0)

    @functools.partial(jax.checkpoint, prevent_cse=False)
    def chunk_loss(args):
        x_BCD, targets_BC, weight_BC = args
        logits_BCV = head_logits(x_BCD, head_VD)
        # A masked sum, not a gather: its transpose is a select, not a scatter into [B, C, V].
        is_target_BCV = targets_BC[..., None] == jnp.arange(head_VD.shape[0])
        target_BC = jnp.sum(jnp.where(is_target_BCV, logits_BCV, 0.0), axis=-1)
        return jnp.sum(weight_BC * (jax.nn.logsumexp(logits_BCV, axis=-1) - target_BC))

    chunks = into_chunks(x_BTD), into_chunks(targets_BT), into_chunks(weight_BT)
    return jnp.sum(jax.lax.map(chunk_loss, chunks))


def loss_fn(
    config: TransformerConfig,
    params: dict[str, Any],
    batch: Mapping[str, jax.Array],
    key=None,
    graph: nnx.GraphDef[Transformer] | None = None,
) -> tuple[jax.Array, jax.Array]:
    """Sum the next-token cross-entropies of a batch, in nats.

    Args:
        config: the model's shape.
        params: as `init_params` makes them, in the one dtype to compute in.
        batch: `"tokens"`, integers [B, T + 1], and if wanted `"mask"`, weights [B, T] of the
            targets `tokens[:, 1:]`.
        key: for dropout; None is no dropout.
        graph: of a model that was changed after it was made, as scripts/lora.py does.

    Returns:
        `(loss_sum, weight)`, two fp32 scalars: their quotient is the mean.
    """
    model = nnx.merge(graph or make_graph(config), params)
    inputs_BT, targets_BT = batch["tokens"][:, :-1], batch["tokens"][:, 1:]
    weight_BT = batch.get("mask", jnp.ones_like(targets_BT)).astype(jnp.float32)
    x_BTD = model(inputs_BT, key if config.dropout else None)
    chunk = min(config.loss_chunk, inputs_BT.shape[1])
    loss_sum = chunked_loss(x_BTD, model.head_kernel, targets_BT, weight_BT, chunk)
    return loss_sum, jnp.sum(weight_BT)


def eval_loss_fn(config, params, batch, key=None) -> tuple[jax.Array, jax.Array]:
    """`loss_fn` without dropout, whatever the key."""
    return loss_fn(config, params, batch, None)


def logits(config: TransformerConfig, params: dict[str, Any], tokens_BT: jax.Array) -> jax.Array:
    """Make whole fp32 logits [B, T, V], without dropout; models/generate.py needs not all."""
    model = nnx.merge(make_graph(config), params)
    return head_logits(model(tokens_BT), model.head_kernel)


def num_params(config: TransformerConfig) -> int:
    """Count the parameters without making them; a tied head is counted once."""
    shapes = jax.eval_shape(functools.partial(init_params, config), jax.random.key(0))
    return sum(math.prod(leaf.shape) for leaf in jax.tree.leaves(shapes))


def flops_per_token(config: TransformerConfig) -> int:
    """FLOPs that training needs per token, for MFU (arXiv 2204.02311, appendix B).

    `6 P + 12 L H E T / 2`, forward and backward: P counts the parameters in matmuls (the head is
    one, tied or not; embedding lookups, norms and biases are not), T is `seq_len`, and causality
    masks half of attention away. What remat computes a second time does not count.
    """
    attn = 2 * config.d_model * config.head_dim * (config.num_heads + config.num_kv_heads)
    mlp = (3 if config.mlp == "swiglu" else 2) * config.d_model * config.d_ff
    matmul_params = config.num_layers * (attn + mlp) + config.d_model * config.vocab_size
    return 6 * matmul_params + 6 * config.num_layers * config.d_model * config.seq_len
