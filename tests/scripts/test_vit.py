# SPDX-License-Identifier: Apache-2.0
"""The vision transformer: it learns digits, at stage 3 as on one device, layer by layer."""

from __future__ import annotations

import jax
import numpy as np
import optax
import pytest

import zerojax as zj
from scripts import vit
from scripts.vit import Options, main


def test_it_learns_digits_and_agrees_with_one_device(capsys):
    assert main(Options(steps=100)) > 0.9
    printed = capsys.readouterr().out
    assert "All 7 gradients agree" in printed
    assert "stage 3 over 8 devices" in printed
    assert printed.splitlines()[-2].startswith("step 100/100  loss ")
    assert max(map(len, printed.splitlines())) <= 100


def test_images_are_digits():
    """Without noise, the pixels that are lit are those of the glyph, three times as large."""

    class Quiet:
        def __init__(self):
            self.rng = np.random.default_rng(0)

        def normal(self, mean, deviation, shape):
            return np.zeros(shape)

        def integers(self, *args):
            return self.rng.integers(*args)

    batch = vit.draw_images(Quiet(), 40)
    assert set(batch["label"]) == set(range(10))
    for image, label in zip(batch["image"], batch["label"], strict=True):
        assert image.sum() == 9 * vit.DIGITS[:, label].sum()
        rows, columns = np.nonzero(image)
        assert 3 <= np.ptp(columns) + 1 <= 9
        assert np.ptp(rows) == 14
    glyphs = {vit.DIGITS[:, label].tobytes() for label in range(10)}
    assert len(glyphs) == 10


def test_every_layer_is_gathered_in_the_loop():
    plan = zj.make_plan(
        vit.init_params, optax.adam(1e-3), zj.make_mesh(), stage=3, layers=("blocks",)
    )
    step = zj.make_train_step(vit.loss_fn, plan)
    batch = vit.draw_images(np.random.default_rng(0), 8)
    receipt = zj.audit(step, plan.abstract_state, batch).check()
    in_loops = [m.what for m in receipt.moves if m.collective.loops]
    for name in ("qkv", "out", "up", "down"):
        assert any(name in str(what) for what in in_loops), in_loops


def test_patches_are_squares_of_the_image():
    """A change within one square patch changes that row of the embedding alone."""
    params = vit.init_params(jax.random.key(0))
    seen, scan = [], zj.scan_layers
    with pytest.MonkeyPatch.context() as patch:
        keep = lambda block, stack, x: seen.append(x) or scan(block, stack, x)
        patch.setattr(zj, "scan_layers", keep)
        image = np.zeros((2, 16, 16), np.float32)
        image[1, 4:8, 8:12] = 1
        vit.loss_fn(params, {"image": image, "label": np.zeros(2, np.int32)})
    changed = np.any(np.asarray(seen[0][0] != seen[0][1]), axis=-1)
    assert np.flatnonzero(changed).tolist() == [4 * 1 + 2]


def test_what_it_refuses():
    with pytest.raises(ValueError, match="--batch: 12 rows, not a multiple of 8"):
        main(Options(batch=12))
    with pytest.raises(ValueError, match="--steps: 0 is too few"):
        main(Options(steps=0))
