# SPDX-License-Identifier: Apache-2.0
"""Low-rank adapters (LoRA, arXiv 2106.09685) on the linear layers of the transformer's blocks.

The weights keep their paths; each adapted layer has two leaves more, `lora_a` and `lora_b`. Shape
letters: R rank, and those of models/transformer.py.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from models.transformer import Transformer, TransformerConfig

Tree = dict[str, Any]


class Adapted(nnx.Module):
    """A linear layer with a term of low rank: `x W + b + scale (x A) B`; B is zero at first."""

    def __init__(self, linear: nnx.Linear, rank: int, scale: float, key: jax.Array):
        self.kernel, self.bias, self.scale = linear.kernel, linear.bias, scale
        *stack, d_in, d_out = linear.kernel.shape
        a = jax.random.normal(key, (*stack, d_in, rank)) / d_in**0.5
        self.lora_a, self.lora_b = nnx.Param(a), nnx.Param(jnp.zeros((*stack, rank, d_out)))

    def __call__(self, x: jax.Array) -> jax.Array:
        """Apply the layer; A B is never made."""
        y = x @ self.kernel[...]
        y = y if self.bias is None else y + self.bias[...]
        return y + self.scale * (x @ self.lora_a[...] @ self.lora_b[...])


def make_model(config: TransformerConfig, rank: int, scale: float, key: jax.Array) -> Transformer:
    """Make the transformer with adapters on every linear layer of its blocks."""
    model = Transformer(config, nnx.Rngs(key))
    for part in (model.blocks.attn, model.blocks.mlp):
        for name, layer in list(vars(part).items()):
            if isinstance(layer, nnx.Linear):
                key, own = jax.random.split(key)
                setattr(part, name, Adapted(layer, rank, scale, own))
    return model


@functools.cache
def make_graph(config: TransformerConfig, rank: int, scale: float) -> nnx.GraphDef[Transformer]:
    """The adapted model without its arrays: the `graph` of `transformer.loss_fn`."""
    return nnx.graphdef(nnx.eval_shape(lambda: make_model(config, rank, scale, jax.random.key(0))))


def init_params(config: TransformerConfig, rank: int, key: jax.Array) -> Tree:
    """Make weights and adapters, fp32: `["blocks"]["mlp"]["up"]["lora_a"]` is [L, D, R]."""
    return nnx.to_pure_dict(nnx.state(make_model(config, rank, 1.0, key), nnx.Param))


def is_adapter(path: str) -> bool:
    """Whether a leaf's path, such as `blocks/attn/q/lora_a`, is of an adapter."""
    return path.rsplit("/", 1)[-1] in ("lora_a", "lora_b")


def select(params: Tree, adapters: bool) -> Tree:
    """The tree with None in place of every leaf but the adapters, or but the weights."""
    return jax.tree.map_with_path(
        lambda path, x: x if is_adapter(path[-1].key) == adapters else None, params
    )


def merge(params: Tree, scale: float) -> Tree:
    """Add every adapter to its weight: the tree of the plain transformer, for `jax.jit`."""
    if "lora_a" not in params:
        return {k: merge(x, scale) if isinstance(x, dict) else x for k, x in params.items()}
    kernel, a, b = (params[name] for name in ("kernel", "lora_a", "lora_b"))
    kernel = kernel + scale * jnp.matmul(a, b, precision="highest")
    return {k: x for k, x in params.items() if not is_adapter(k)} | {"kernel": kernel}
