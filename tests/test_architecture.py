# SPDX-License-Identifier: Apache-2.0
"""The shape of the code: imports point down, files stay small, names are public on purpose."""

from __future__ import annotations

import ast
import re

import pytest

import zerojax
from tests import ROOT

FLOORS = {
    "stage": 0,
    "hlo": 0,
    "hosts": 0,
    "precision": 0,
    "partition": 0,
    "paths": 0,
    "table": 0,
    "saves": 0,
    "compiler": 0,
    "targets": 0,
    "ledger": 0,
    "trace": 0,
    "liveness": 1,
    "wire": 1,
    "xla": 1,
    "cost": 1,
    "simulate": 2,
    "collectives": 1,
    "devices": 1,
    "loss": 1,
    "state": 1,
    "entrance": 2,
    "mesh": 2,
    "block": 3,
    "leaves": 3,
    "layers": 4,
    "plan": 4,
    "checks": 5,
    "memory": 5,
    "gradients": 6,
    "entries": 5,
    "restore": 6,
    "checkpoint": 7,
    "given": 6,
    "placement": 7,
    "peak": 7,
    "unsharded": 8,
    "step": 7,
    "arguments": 2,
    "moves": 5,
    "findings": 6,
    "notes": 7,
    "receipt": 8,
    "audit": 9,
    "__init__": 10,
    "__main__": 10,
}
FILES = sorted((ROOT / "zerojax").glob("*.py"))


def imported(tree):
    """Modules of zerojax that a file imports, wherever in the file."""
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.module and node.module.startswith("zerojax"):
            inside = node.module.removeprefix("zerojax").removeprefix(".")
            yield from [inside] if inside else [alias.name for alias in node.names]
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names if alias.name.startswith("zerojax")]
            yield from (name.removeprefix("zerojax").removeprefix(".") for name in names)


def rises(name, source):
    return [other for other in imported(ast.parse(source)) if FLOORS[other] >= FLOORS[name]]


def test_every_file_has_a_floor_and_imports_point_down():
    assert {path.stem for path in FILES} == set(FLOORS)
    for path in FILES:
        assert rises(path.stem, path.read_text()) == [], path.name


def test_an_import_upwards_is_noticed():
    assert rises("plan", "from zerojax.training.step import Step") == ["step"]
    assert rises("plan", "def f():\n    from zerojax import memory") == ["memory"]
    assert rises("plan", "from zerojax.sharding.stage import Stage") == []


def num_lines(source):
    """Lines without the examples that end docstrings: those are tests."""
    examples = re.findall(r"\n *Example:\n(.*?)\n *\"\"\"", source, re.DOTALL)
    return len(source.splitlines()) - sum(len(example.splitlines()) for example in examples)


@pytest.mark.parametrize("folder", ["zerojax", "models", "scripts"])
def test_files_and_functions_are_small(folder):
    """No file over 300 lines, no function over 60 without its docstring."""
    for path in sorted((ROOT / folder).glob("*.py")):
        source = path.read_text()
        assert num_lines(source) <= 300, path.name
        for node in ast.walk(ast.parse(source)):
            if isinstance(node, ast.FunctionDef):
                first = node.body[1] if ast.get_docstring(node) and node.body[1:] else node.body[0]
                length = (node.end_lineno or 0) - first.lineno + 1
                assert length <= 60, f"{path.name}: {node.name} has {length} lines"


RECEIPT = {"hlo", "wire", "cost", "simulate", "targets", "devices", "memory", "moves", "xla"}
RECEIPT |= {
    "arguments",
    "findings",
    "notes",
    "receipt",
    "audit",
    "trace",
    "ledger",
    "liveness",
    "peak",
    "unsharded",
    "__main__",
}
SAVES = {"saves", "entries", "restore", "checkpoint", "given"}


def test_the_library_can_be_read_in_an_afternoon():
    """What trains, what reads what it compiled to, and what keeps it, each by itself."""
    sizes = {path.stem: num_lines(path.read_text()) for path in FILES}
    receipt = sum(size for name, size in sizes.items() if name in RECEIPT)
    saves = sum(size for name, size in sizes.items() if name in SAVES)
    assert receipt < 3600
    assert saves < 1100
    assert sum(sizes.values()) - receipt - saves < 3000


def test_public_names():
    assert sorted(zerojax.__all__) == [
        "Audit",
        "Checkpointer",
        "Comparison",
        "LossFn",
        "Plan",
        "Precision",
        "Stage",
        "Step",
        "TrainState",
        "apply_layer",
        "audit",
        "audit_compiled",
        "check_against_unsharded",
        "compare",
        "draw",
        "init_state",
        "make_eval_step",
        "make_mesh",
        "make_plan",
        "make_train_step",
        "memory_report",
        "restore",
        "restore_params",
        "scan_layers",
        "shard_batch",
        "simulate_devices",
        "start_hosts",
        "target",
    ]
    assert all(getattr(zerojax, name).__doc__ for name in zerojax.__all__)


def test_only_one_file_names_a_collective():
    names = ("psum", "all_gather", "psum_scatter", "ppermute", "pmean", "all_to_all", "axis_index")
    for path in FILES:
        used = {
            n.attr for n in ast.walk(ast.parse(path.read_text())) if isinstance(n, ast.Attribute)
        }
        assert path.stem == "collectives" or not used & set(names), path.name


def test_the_library_imports_neither_flax_nor_private_jax():
    for path in FILES:
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Import | ast.ImportFrom):
                modules = [getattr(node, "module", None) or "", *(a.name for a in node.names)]
                assert not any("flax" in m or m.startswith("jax._src") for m in modules), path.name


def test_the_project_speaks_of_itself_alone():
    """No address of a package index and no absolute path of a machine in any text file."""
    words = ["/" + "work/", "/" + "root/", "index" + "-url", "find" + "-links", "pypi" + ".org"]
    suffixes = {".py", ".md", ".toml", ".txt", ".sh", ".yaml", ".yml", ".ipynb", ""}
    skip = {".git", "out", "dist", "LICENSE"}
    for path in ROOT.rglob("*"):
        parts = path.relative_to(ROOT).parts
        made = parts[0].startswith(".venv") or any(part.endswith("_cache") for part in parts)
        if path.is_file() and path.suffix in suffixes and not made and not skip & set(parts):
            text = path.read_text()
            assert not [word for word in words if word in text], path
