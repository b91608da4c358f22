# SPDX-License-Identifier: Apache-2.0
"""Train a small vision transformer (arXiv 2010.11929) on drawn digits: `python -m scripts.vit`.

Shape letters: B images, S side, P patch, R rows and C columns of patches, T patches, D d_model,
H heads, E head_dim.
"""

import dataclasses
import sys
from typing import Literal

import jax
import jax.numpy as jnp
import numpy as np
import optax
import tyro

import zerojax as zj
from scripts.parts.mesh import make_mesh
from scripts.parts.options import check_least
from scripts.parts.text import check_batch
from zerojax.sharding.axes import num_batch_shards

norm = jax.nn.standardize  # a LayerNorm that learns nothing
SIDE, PATCH, D_MODEL, LAYERS, HEADS = 16, 4, 64, 3, 4
GLYPHS = """111 010 111 111 101 111 111 111 111 111   101 110 001 001 101 100 100 001 101 101
 101 010 111 111 111 111 111 010 111 111   101 010 100 001 001 001 101 010 101 001
 111 111 111 111 001 111 111 010 111 111"""
# [5, 10, 3]: rows of pixels, digits from 0 to 9, columns.
DIGITS = np.array([[int(x) for x in row] for row in GLYPHS.split()]).reshape(5, 10, 3)


@dataclasses.dataclass(frozen=True)
class Options:
    """Train a vision transformer on images of digits, drawn as they are needed, with ZeRO."""

    stage: Literal[0, 1, 2, 3] = 3
    """ZeRO stage."""
    devices: int | None = None
    """Devices to use (None: all accelerators, or 8 simulated CPU devices)."""
    steps: int = 150
    """Optimizer updates."""
    batch: int = 128
    """Images in an update, over all devices."""


def draw_images(rng: np.random.Generator, num_images: int) -> dict[str, np.ndarray]:
    """Draw digits of 9 x 15 pixels somewhere in an image, and noise over all of it."""
    label_B = rng.integers(0, 10, num_images, np.int32)
    image_BSS = rng.normal(0, 0.3, (num_images, SIDE, SIDE)).astype(np.float32)
    for image_SS, label in zip(image_BSS, label_B, strict=True):
        row, column = rng.integers(0, 2), rng.integers(0, 8)
        image_SS[row : row + 15, column : column + 9] += np.kron(DIGITS[:, label], np.ones((3, 3)))
    return {"image": image_BSS, "label": label_B}


def init_params(key: jax.Array) -> dict:
    """Make fp32 parameters; the equal layers are stacked under "blocks"."""
    keys = iter(jax.random.split(key, 7))

    def normal(*shape):
        return jax.random.normal(next(keys), shape) / (2 * shape[-2]) ** 0.5

    blocks = {
        "qkv": normal(LAYERS, D_MODEL, 3 * D_MODEL),
        "out": normal(LAYERS, D_MODEL, D_MODEL),
        "up": normal(LAYERS, D_MODEL, 4 * D_MODEL),
        "down": normal(LAYERS, 4 * D_MODEL, D_MODEL),
    }
    place, patch = normal((SIDE // PATCH) ** 2, D_MODEL), normal(PATCH**2, D_MODEL)
    return {"patch": patch, "place": place, "blocks": blocks, "head": normal(D_MODEL, 10)}


def block(params: dict, x_BTD: jax.Array) -> jax.Array:
    """One pre-norm layer: every patch looks at every other."""
    qkv_BTHE = (norm(x_BTD) @ params["qkv"]).reshape(*x_BTD.shape[:2], 3 * HEADS, -1)
    mixed_BTHE = jax.nn.dot_product_attention(*jnp.split(qkv_BTHE, 3, axis=2))
    x_BTD = x_BTD + mixed_BTHE.reshape(x_BTD.shape) @ params["out"]
    return x_BTD + jax.nn.gelu(norm(x_BTD) @ params["up"]) @ params["down"]


def loss_fn(params: dict, batch: dict, key=None):
    """Sum the cross-entropies of the images, and beside them count the right answers."""
    x_BRPCP = batch["image"].reshape(-1, SIDE // PATCH, PATCH, SIDE // PATCH, PATCH)
    patches_BTP = x_BRPCP.swapaxes(2, 3).reshape(len(x_BRPCP), -1, PATCH**2)
    embedded_BTD = patches_BTP @ params["patch"] + params["place"]
    x_BTD = zj.scan_layers(block, params["blocks"], embedded_BTD)
    logits_BC = norm(x_BTD).mean(axis=1) @ params["head"]
    losses_B = optax.softmax_cross_entropy_with_integer_labels(logits_BC, batch["label"])
    right_B = (logits_BC.argmax(axis=-1) == batch["label"]).astype(jnp.float32)
    return (losses_B.sum(), losses_B.size), {"accuracy": right_B.sum()}


def main(options: Options) -> float:
    """Compare with one device, train, and return the accuracy on 1024 new images."""
    check_least(options, {"devices": 1, "steps": 1, "batch": 1})
    mesh, rng = make_mesh(options.devices), np.random.default_rng(0)
    check_batch(options.batch, num_batch_shards(mesh))
    optimizer = optax.adam(optax.cosine_onecycle_schedule(options.steps, 5e-3), b2=0.99)
    plan = zj.make_plan(init_params, optimizer, mesh, stage=options.stage, layers=("blocks",))
    same = zj.check_against_unsharded(loss_fn, plan, draw_images(rng, mesh.size)).check()
    print(f"{plan}\n\n{same}\n")
    step, eval_step = zj.make_train_step(loss_fn, plan), zj.make_eval_step(loss_fn, plan)
    state = zj.init_state(plan, jax.random.key(0))
    for number in range(1, options.steps + 1):
        state, metrics = step(state, zj.shard_batch(draw_images(rng, options.batch), plan))
        if number % 25 == 0 or number == options.steps:
            said = f"loss {metrics['loss']:.3f}, right {metrics['aux']['accuracy']:.1%}"
            print(f"step {number}/{options.steps}  {said}")
    new = zj.shard_batch(draw_images(np.random.default_rng(1), 1024), plan)
    accuracy = float(eval_step(state, new)["aux"]["accuracy"])
    print(f"right on 1024 new images: {accuracy:.1%}")
    return accuracy


if __name__ == "__main__":
    try:
        main(tyro.cli(Options, prog="python -m scripts.vit"))
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)
