# SPDX-License-Identifier: Apache-2.0
"""A save written by version 0.1, before the rooms, restores bit for bit.

`saved_by_0_1/` was made at commit 168b93b: the plan below over 4 devices at stage 3, three steps,
`Checkpointer.save` with the iterator's state and a metric. `bits.npz` holds the bytes of every leaf
as they were in memory.
"""

import pathlib
import shutil

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import zerojax as zj
from zerojax.tree import leaves_with_names

SAVED = pathlib.Path(__file__).parent / "saved_by_0_1"
PLACE = {"next_index": 24, "epoch": [1, 2.5, "a"]}


def init_params(key):
    keys = jax.random.split(key, 3)
    return {
        "embed": jax.random.normal(keys[0], (33, 16)),
        "blocks": {"up": jax.random.normal(keys[1], (3, 16, 24)), "scale": jnp.ones((3, 24))},
        "base": {"frozen": jax.random.normal(keys[2], (8, 5))},
        "ids": jnp.arange(7, dtype=jnp.int32),
        "temperature": jnp.ones(()),
    }


def make_plan(num_devices, stage, partitioner="manual"):
    return zj.make_plan(
        init_params,
        optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(1e-2)),
        zj.make_mesh(num_devices),
        stage=stage,
        layers=("blocks",),
        frozen=("base",),
        precision="bf16_master",
        partitioner=partitioner,
        max_unsharded=1.0,
    )


def bits(state):
    """The bytes of every leaf, by its path."""
    found = {}
    for path, x in leaves_with_names(state):
        is_key = jnp.issubdtype(x.dtype, jax.dtypes.prng_key)
        array = np.asarray(jax.random.key_data(x) if is_key else x)
        found[path] = array.reshape(-1).view(np.uint8)
    return found


class Reader:
    place = None

    def get_state(self):
        return self.place

    def set_state(self, state):
        self.place = state


@pytest.mark.parametrize(
    ("num_devices", "stage", "partitioner"), [(4, 3, "manual"), (8, 1, "manual"), (2, 3, "auto")]
)
def test_it_restores_bit_for_bit(num_devices, stage, partitioner):
    reader, expected = Reader(), np.load(SAVED / "bits.npz")
    state = zj.restore(SAVED, make_plan(num_devices, stage, partitioner), data=reader)
    found = bits(state)
    assert set(found) == set(expected)
    for path, was in expected.items():
        np.testing.assert_array_equal(found[path], was, path)
    assert (int(state.step), reader.place) == (3, PLACE)


def test_its_run_goes_on(tmp_path):
    """A Checkpointer of today takes the folder over: it restores, and saves beside it."""
    shutil.copytree(SAVED / "3", tmp_path / "3")
    plan = make_plan(8, 2)
    with zj.Checkpointer(tmp_path, plan) as checkpoints:
        state = checkpoints.restore()
        assert state is not None
        checkpoints.save(state._replace(step=state.step + 1))
    assert sorted(path.name for path in tmp_path.iterdir() if path.name.isdecimal()) == ["3", "4"]


def test_a_changed_bit_is_noticed(tmp_path):
    """The twin: one flipped bit of a leaf is refused."""
    shutil.copytree(SAVED / "3", tmp_path / "3")
    (data,) = (tmp_path / "3" / "params" / "d").iterdir()
    content = bytearray(data.read_bytes())
    content[len(content) // 2] ^= 1
    data.write_bytes(content)
    with pytest.raises(ValueError, match="SHA-256"):
        zj.restore(tmp_path, make_plan(8, 3))
