# SPDX-License-Identifier: Apache-2.0
"""What the documents say runs: README blocks, docstring examples, commands, file names."""

from __future__ import annotations

import doctest
import functools
import importlib
import pathlib
import re

import jax
import optax
import pytest

import zerojax as zj
from models import transformer
from zerojax.table import format_bytes

ROOT = pathlib.Path(__file__).parent.parent
README = (ROOT / "README.md").read_text()
DOCUMENTS = [ROOT / name for name in ("README.md", "CHANGELOG.md", "CONTRIBUTING.md")]
DOCUMENTS += [*(ROOT / "docs").glob("*.md"), *(ROOT / ".github").rglob("*.md")]
MODULES = [f"zerojax.{path.stem}" for path in sorted((ROOT / "zerojax").glob("[!_]*.py"))]


def test_readme_snippet_runs(capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    blocks = re.findall(r"```python\n(.*?)```", README, re.DOTALL)
    assert len(blocks) == 3
    scope = {}
    exec(compile(blocks[0], "README.md", "exec"), scope)
    assert float(scope["metrics"]["loss"]) < 0.9
    exec(compile(blocks[1], "README.md", "exec"), scope)
    step = zj.make_train_step(scope["loss_fn"], scope["plan"])
    state = zj.init_state(scope["plan"], jax.random.key(0))
    batch, losses = {"x": scope["x"], "y": 2 * scope["x"]}, []
    for _ in range(5):
        state, metrics = step(state, batch)
        losses.append(float(metrics["loss"]))
    assert losses[-1] < losses[0]
    exec(compile(blocks[2], "README.md", "exec"), scope | {"batch": batch})
    assert sorted(x.name for x in (tmp_path / "out/checkpoints").iterdir()) == [".lock", "15", "20"]
    printed = capsys.readouterr().out
    assert "stage 3 over 8 devices" in printed
    assert max(map(len, printed.splitlines())) <= 100


def test_readme_stage_table_is_measured():
    config = transformer.PRESETS["tiny"]
    assert f"{transformer.num_params(config) / 1e6:.2f}M-parameter" in README
    for stage in range(4):
        plan = zj.make_plan(
            functools.partial(transformer.init_params, config),
            optax.adamw(1e-3),
            zj.make_mesh(8),
            stage=stage,
            layers=("blocks",),
            precision="bf16_master",
        )
        report = zj.memory_report(plan, zj.init_state(plan, jax.random.key(0)))
        live = format_bytes(sum(row.live or 0 for row in report))
        grads = next(format_bytes(row.planned) for row in report if row.kind == "grads")
        row = next(line for line in README.splitlines() if line.startswith(f"| {stage} |"))
        assert row.endswith(f"| {live} | {grads} |")


@pytest.mark.parametrize("module", MODULES)
def test_docstring_examples(module):
    result = doctest.testmod(importlib.import_module(module))
    assert result.failed == 0


def test_examples_exist_and_a_wrong_one_is_noticed():
    finder = doctest.DocTestFinder()
    found = {name: finder.find(importlib.import_module(name)) for name in MODULES}
    assert sum(len(test.examples) for tests in found.values() for test in tests) > 20
    wrong = doctest.DocTestParser().get_doctest(">>> 1 + 1\n3\n", {}, "wrong", None, 0)
    assert doctest.DocTestRunner(verbose=False).run(wrong, out=lambda text: None).failed == 1


def test_make_commands_exist():
    targets = set(re.findall(r"^([a-z0-9-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    for document in DOCUMENTS:
        for target in re.findall(r"\bmake ([a-z0-9-]+)", "\n".join(code(document.read_text()))):
            assert target in targets, (document.name, target)


def code(text):
    """Fenced blocks, and the inline code outside them."""
    fenced = r"```\w*\n(.*?)```"
    return [
        *re.findall(fenced, text, re.DOTALL),
        *re.findall(r"`([^`\n]+)`", re.sub(fenced, "", text, flags=re.DOTALL)),
    ]


def test_files_that_documents_name_exist():
    names = 0
    for document in DOCUMENTS:
        for word in code(document.read_text()):
            if re.fullmatch(r"[\w/.-]+\.(py|md|toml|txt|sh)", word):
                assert (ROOT / word).exists() or (ROOT / "zerojax" / word).exists(), word
                names += 1
    assert names > 15


def test_reading_order_names_every_file():
    for path in (ROOT / "zerojax").glob("[!_]*.py"):
        assert f"`{path.name}`" in README, path.name
