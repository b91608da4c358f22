# SPDX-License-Identifier: Apache-2.0
"""LoRA: adapters learn beside frozen weights, begin as nothing, and merge into the weights."""

from __future__ import annotations

import dataclasses
import functools
import re
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from safetensors import safe_open
from safetensors.numpy import load_file

import zerojax as zj
from models import lora, transformer
from scripts.lora import Options, main
from scripts.parts.weights import write_safetensors
from tests import ROOT
from tests.models.test_transformer import GPT, LLAMA, make_batch, make_params
from tests.scripts.test_train import TEXT

CONFIG = dataclasses.replace(transformer.PRESETS["tiny"], num_layers=2, seq_len=16)


@pytest.fixture(scope="module")
def options(tmp_path_factory) -> Options:
    folder = tmp_path_factory.mktemp("lora")
    (folder / "text.txt").write_text(TEXT)
    params = jax.jit(functools.partial(transformer.init_params, CONFIG))(jax.random.key(9))
    write_safetensors(folder / "base.safetensors", params)
    return Options(
        base=folder / "base.safetensors",
        layers=2,
        seq=16,
        rank=4,
        data=(folder / "text.txt",),
        out=folder / "out",
        steps=12,
        lr=1e-2,
    )


@pytest.fixture(scope="module")
def trained(options):
    """The losses of the run that most tests look at, and the state that it ended with."""
    states = []
    with pytest.MonkeyPatch.context() as patch:
        keep = lambda state: states.append(state) or state.params
        patch.setattr("scripts.lora.finest_params", keep)
        losses = main(options)
    return losses, states[0]


def loss(params, batch, config=CONFIG, graph=None):
    fn = jax.jit(functools.partial(transformer.loss_fn, config, graph=graph))
    loss_sum, weight = fn(params, batch)
    return float(loss_sum / weight)


def nested(flat):
    tree = {}
    for name, x in flat.items():
        *path, last = name.split(".")
        functools.reduce(lambda node, key: node.setdefault(key, {}), path, tree)[last] = x
    return tree


def test_the_adapters_learn_and_the_weights_stay_as_they_were(options, trained):
    (before, after), state = trained
    assert after < before - 0.3
    found = dict(nested_paths(lora.select(state.params, adapters=False)))
    given = load_file(options.base)
    assert found.keys() == given.keys()
    for name, x in given.items():
        assert np.array_equal(np.asarray(found[name]), x), name
    adapters = dict(nested_paths(lora.select(state.params, adapters=True)))
    assert len(adapters) == 2 * 6
    assert all(np.any(np.asarray(x)) for x in adapters.values())


def nested_paths(params):
    for path, x in jax.tree.leaves_with_path(params):
        yield jax.tree_util.keystr(path, simple=True, separator="."), x


@pytest.mark.parametrize("config", [GPT, LLAMA], ids=["gpt", "llama"])
def test_adapters_begin_as_the_identity_and_merge_into_the_weights(config):
    """The twin: adapters that are not zero change the loss, and merging keeps that change."""
    base, batch = make_params(config), make_batch()
    graph = lora.make_graph(config, 3, 0.5)
    drawn = lora.init_params(config, 3, jax.random.key(1))
    both = jax.tree.map(
        lambda x, y: y if x is None else x,
        lora.select(drawn, adapters=True),
        combine(drawn, base),
        is_leaf=lambda x: x is None,
    )
    assert loss(both, batch, config, graph) == loss(base, batch, config)
    assert jax.tree.structure(lora.merge(both, 0.5)) == jax.tree.structure(base)
    changed = jax.tree.map_with_path(
        lambda path, x: jnp.cos(x) if path[-1].key == "lora_b" else x, both
    )
    adapted = loss(changed, batch, config, graph)
    assert abs(adapted - loss(base, batch, config)) > 1e-2
    np.testing.assert_allclose(loss(lora.merge(changed, 0.5), batch, config), adapted, rtol=1e-5)


def combine(tree, base):
    """The tree with the leaves of `base` where it has them."""
    if not isinstance(tree, dict):
        return tree if base is None else base
    return {name: combine(x, (base or {}).get(name)) for name, x in tree.items()}


def test_what_it_writes(options, trained):
    """The merged file is a model like the base; the adapters alone are what is trained."""
    _, state = trained
    merged, base = (load_file(p) for p in (options.out / "merged.safetensors", options.base))
    assert {name: x.shape for name, x in merged.items()} == {n: x.shape for n, x in base.items()}
    with safe_open(options.out / "adapters.safetensors", "np") as file:
        assert (file.metadata()["rank"], file.metadata()["alpha"]) == ("4", "8.0")
        assert len(file.keys()) == 12
    batch = {"tokens": np.arange(8 * 17, dtype=np.int32).reshape(8, 17) % 100}
    graph = lora.make_graph(CONFIG, 4, 2.0)
    params = jax.device_put(jax.device_get(state.params), jax.devices()[0])
    np.testing.assert_allclose(
        loss(nested(merged), batch), loss(params, batch, graph=graph), rtol=1e-5
    )


def test_it_goes_on_from_adapters_and_says_what_freezing_saves(options, trained, capsys):
    again = dataclasses.replace(
        options,
        adapters=options.out / "adapters.safetensors",
        out=options.out / "again",
        steps=1,
        stage=1,
        precision="bf16_master",
        devices=4,
    )
    before, _ = main(again)
    assert abs(before - trained[0][1]) < 0.05
    printed = capsys.readouterr().out
    assert "; frozen" in printed
    few = 12 * sum(x.size for x in load_file(again.adapters).values()) + 8  # Adam's 2 counters
    assert f"optimizer state on all devices: {few / 1e3:.0f} kB; if all were" in printed
    assert re.search(r"^[\d.]+ MB: freezing the base saves [\d.]+ MB$", printed, re.MULTILINE)


def test_stage_3_gathers_no_stack(options):
    """The layer engine runs the adapted blocks: only what is used outside of them is gathered."""
    plan = zj.make_plan(
        functools.partial(lora.init_params, CONFIG, 8),
        optax.adamw(1e-3),
        zj.make_mesh(),
        stage=3,
        layers=("blocks",),
        frozen=lambda path: not lora.is_adapter(path),
    )
    graph = lora.make_graph(CONFIG, 8, 2.0)
    step = zj.make_train_step(functools.partial(transformer.loss_fn, CONFIG, graph=graph), plan)
    batch = {"tokens": jax.ShapeDtypeStruct((8, 17), jnp.int32)}
    receipt = zj.audit(step, plan.abstract_state, batch).check()
    layers = [m for m in receipt.moves if m.collective.loops and "gather" in m.collective.kind]
    assert len(layers) > 12


@pytest.mark.parametrize(
    ("change", "parts"),
    [
        ({"rank": 0}, ["--rank: 0 is too few"]),
        ({"layers": 3}, ["base.safetensors: ", "do not fit the plan"]),
        ({"adapters": ROOT / "none"}, ["no file "]),
        ({"batch": 12}, ["--batch: 12 rows"]),
    ],
)
def test_what_it_refuses(options, change, parts, tmp_path):
    with pytest.raises((ValueError, OSError)) as error:
        main(dataclasses.replace(options, out=tmp_path / "out", **change))
    for part in parts:
        assert part in str(error.value)
    assert not (tmp_path / "out").exists()


def test_a_mistake_is_one_line_and_exit_code_2(tmp_path):
    command = [sys.executable, "-W", "error", "-m", "scripts.lora", "--base", str(tmp_path / "no")]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 2
    assert (
        done.stderr == f"error: no file {tmp_path / 'no'}; give the path of a .safetensors file\n"
    )
