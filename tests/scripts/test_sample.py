# SPDX-License-Identifier: Apache-2.0
"""Sampling from what a run left: of any stage and devices, on other devices, or from one file."""

from __future__ import annotations

import dataclasses
import json
import subprocess
import sys

import jax
import optax
import pytest

import zerojax as zj
from models import transformer
from scripts.parts.model import make_config, make_plan
from scripts.parts.options import Options as Training
from scripts.parts.weights import write_safetensors
from scripts.sample import Options, complete, main
from tests import ROOT

RUN = Training(layers=2, seq=16, vocab=264)  # 8 more than there are bytes
CONFIG = make_config(RUN, 256)


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """Folders as runs leave them, of stages 3, 1 and 0 on 8 and 4 devices; and a file."""
    out = tmp_path_factory.mktemp("sample")
    for stage, devices in ((3, 8), (1, 4), (0, 8)):
        plan = make_plan(CONFIG, optax.sgd(1.0), zj.make_mesh(devices), stage=stage)
        state = zj.init_state(plan, jax.random.key(4))
        folder = out / f"stage{stage}"
        with zj.Checkpointer(folder / "checkpoints", plan) as saves:
            saves.save(state)
        (folder / "options.json").write_text(json.dumps(vars(RUN), default=str))
    write_safetensors(out / "w.safetensors", state.params)
    return out


def options(run, name="stage3/checkpoints", **changes):
    return Options(checkpoint=run / name, **{"tokens": 40, "prompt": "if x:", **changes})


@pytest.fixture(scope="module")
def text(run):
    text = main(options(run))
    assert len(set(text)) > 9
    return text


@pytest.mark.parametrize(
    ("name", "changes"),
    [
        ("stage3/checkpoints", {"devices": 8}),
        ("stage1/checkpoints", {}),
        ("stage0/checkpoints", {"devices": 4}),
        ("stage3/checkpoints/0", {}),
        ("w.safetensors", {"model": "tiny", "layers": 2, "seq": 16, "vocab": 264}),
    ],
)
def test_the_same_text_of_any_stage_on_any_devices(run, text, name, changes):
    assert main(options(run, name, **changes)) == text


def test_what_it_prints_and_its_options(run, text, capsys):
    drawn = main(options(run, seed=1))
    printed = capsys.readouterr().out
    assert printed.startswith("prompt:    if x:\ncontinues: ")
    assert printed.splitlines()[-1] == "past 16 tokens the window began again with its last half"
    assert drawn != text
    assert drawn == main(options(run, seed=1))
    assert main(options(run, top_k=1)) == main(options(run, temperature=0))
    assert len(main(options(run, dtype="bfloat16", tokens=3))) <= 3
    assert "past 16" not in capsys.readouterr().out.splitlines()[-1]


def test_options_of_the_run_are_those_that_are_not_given(run):
    assert complete(options(run)).layers == 2
    assert complete(options(run, layers=1)).layers == 1
    assert complete(options(run, "stage1/checkpoints/0")).vocab == 264
    assert make_config(RUN, 256) == dataclasses.replace(
        transformer.PRESETS["tiny"], num_layers=2, seq_len=16, vocab_size=264
    )


@pytest.mark.parametrize(
    ("name", "change", "message"),
    [
        ("w.safetensors", {}, r"--model: .*options\.json is not there to say which; give"),
        ("none/checkpoints", {"model": "tiny"}, r"--checkpoint: .* is no folder"),
        ("stage3/checkpoints", {"layers": 3}, r"--checkpoint: .* is of another model"),
        ("stage3/checkpoints", {"prompt": ""}, r"--prompt: it has no token; give one"),
        ("stage3/checkpoints", {"temperature": -1.0}, r"--temperature: -1.0 is negative; give 0"),
        ("stage3/checkpoints", {"tokens": 0}, r"--tokens: 0 is too few; give 1 or more"),
        ("stage3/checkpoints", {"top_k": 0}, r"--top-k: 0 is too few; give 1 or more"),
        ("stage3/checkpoints", {"devices": 9}, r"--devices: 9 wanted, 8 here"),
    ],
)
def test_what_it_refuses(run, name, change, message):
    with pytest.raises((ValueError, OSError), match=message):
        main(options(run, name, **change))


def test_a_mistake_is_one_line_and_exit_code_2(tmp_path):
    command = [sys.executable, "-W", "error", "-m", "scripts.sample", "--checkpoint", "none"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 2
    assert done.stderr.startswith("error: --checkpoint: none is no folder of saves")
    assert len(done.stderr.splitlines()) == 1
