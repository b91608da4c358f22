# SPDX-License-Identifier: Apache-2.0
"""A plain multi-layer perceptron on dicts of arrays: the smallest model with a stack of layers.

Shape letters: N rows, I inputs, H hidden, O outputs, L layers.
"""

import jax
import jax.numpy as jnp

import zerojax as zj


def init_params(
    key: jax.Array,
    d_in: int = 16,
    d_hidden: int = 32,
    d_out: int = 8,
    num_layers: int = 4,
) -> dict[str, dict[str, jax.Array]]:
    """Make fp32 parameters; the equal hidden layers are stacked under `"blocks"`.

    Returns:
        `{"in": {kernel [I, H], bias [H]}, "blocks": {kernel [L, H, H], bias [L, H]},
        "out": {kernel [H, O], bias [O]}}`.
    """
    in_key, blocks_key, out_key = jax.random.split(key, 3)
    init = jax.nn.initializers.lecun_normal(batch_axis=())
    stacked_init = jax.nn.initializers.lecun_normal(batch_axis=(0,))
    return {
        "in": {"kernel": init(in_key, (d_in, d_hidden)), "bias": jnp.zeros(d_hidden)},
        "blocks": {
            "kernel": stacked_init(blocks_key, (num_layers, d_hidden, d_hidden)),
            "bias": jnp.zeros((num_layers, d_hidden)),
        },
        "out": {"kernel": init(out_key, (d_hidden, d_out)), "bias": jnp.zeros(d_out)},
    }


def dense(layer, x):
    """Return `x @ kernel + bias`."""
    return x @ layer["kernel"] + layer["bias"]


def block(layer, x_NH):
    """One residual hidden layer."""
    return x_NH + jax.nn.gelu(dense(layer, x_NH))


def loss_fn(params, batch, key=None) -> tuple[jax.Array, jax.Array]:
    """Sum the weighted squared errors of `{"x": [N, I], "y": [N, O], "weight": [N]}`.

    Returns:
        `(loss_sum, weight)`, two fp32 scalars; `key` is not used.
    """
    x_NH = dense(params["in"], batch["x"].astype(params["in"]["kernel"].dtype))
    x_NH = zj.scan_layers(block, params["blocks"], x_NH)
    error_NO = dense(params["out"], x_NH).astype(jnp.float32) - batch["y"]
    weight_N = batch["weight"].astype(jnp.float32)
    return jnp.sum(weight_N * jnp.sum(error_NO**2, axis=-1)), jnp.sum(weight_N)
