# SPDX-License-Identifier: Apache-2.0
"""The shape of the code: rooms in their order, small files, names that are public on purpose."""

from __future__ import annotations

import ast
import graphlib
import importlib
import os
import pathlib
import re
import subprocess
import sys

import pytest

import zerojax
from tests import ROOT

# Who may import whom: a room imports rooms above it in this list. The receipt and the checkpoints
# stand side by side.
FLOORS = {"tree": 0, "table": 0, "hardware": 1, "sharding": 2, "engine": 3, "training": 4}
FLOORS |= {"checkpoint": 5, "receipt": 5, "__init__": 6, "__main__": 6}
ROOMS = sorted(zerojax.ROOMS)
FILES = sorted((ROOT / "zerojax").rglob("*.py"))


def room_of(module):
    """The room, or the file beside the rooms, in which a module of zerojax is."""
    return module.removeprefix("zerojax").removeprefix(".").split(".")[0] or "__init__"


def module_of(path):
    return ".".join(path.relative_to(ROOT).with_suffix("").parts)


def imported(source):
    """Modules of zerojax that a file imports, wherever in the file."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "zerojax":
            is_room = node.module == "zerojax" or node.module.removeprefix("zerojax.") in ROOMS
            names = [f"{node.module}.{alias.name}" for alias in node.names]
            yield from names if is_room else [node.module]
        if isinstance(node, ast.Import):
            yield from (x.name for x in node.names if x.name.split(".")[0] == "zerojax")


def rises(module, source):
    """What a module imports that is not below its room, its own room aside."""
    own = room_of(module)
    return [
        other
        for other in imported(source)
        if room_of(other) != own and FLOORS.get(room_of(other), 6) >= FLOORS[own]
    ]


def test_every_file_has_a_room_and_imports_point_down():
    assert {room_of(module_of(path)) for path in FILES} == set(FLOORS)
    for path in FILES:
        assert rises(module_of(path), path.read_text()) == [], path


def test_an_import_upwards_is_noticed():
    assert rises("zerojax.sharding.plan", "from zerojax.training.step import Step")
    assert rises("zerojax.sharding.plan", "def f():\n    from zerojax.receipt import memory")
    assert rises("zerojax.engine.scan", "import zerojax.receipt.recorder")
    assert rises("zerojax.receipt.audit", "from zerojax.checkpoint.folder import Save")
    assert rises("zerojax.checkpoint.restore", "from zerojax.receipt.memory import live_bytes")
    assert rises("zerojax.training.step", "from zerojax import audit")
    assert not rises("zerojax.sharding.plan", "from zerojax.sharding.stage import Stage")
    assert not rises("zerojax.training.step", "from zerojax.engine import scan")


def test_the_files_of_a_room_import_each_other_in_one_order():
    graph = {module_of(path): set(imported(path.read_text())) for path in FILES}
    list(graphlib.TopologicalSorter(graph).static_order())  # raises CycleError
    with pytest.raises(graphlib.CycleError):
        list(graphlib.TopologicalSorter({"a": {"b"}, "b": {"a"}}).static_order())


LOADED = """
import sys
sys.modules["zerojax.receipt"] = {poison}
import zerojax.training.step
print([name for name in sys.modules if name.startswith("zerojax.receipt.")])
import zerojax
{more}
print([name for name in sys.modules if name.startswith("zerojax.receipt.")])
"""


def test_training_loads_nothing_of_the_receipt():
    program = LOADED.format(poison="None", more="")  # None: an import of it would raise
    run = [sys.executable, "-c", program]
    assert subprocess.check_output(run, cwd=ROOT, text=True).split("\n")[:2] == ["[]", "[]"]


def test_loading_the_receipt_is_noticed():
    program = LOADED.format(poison="None", more="zerojax.audit")
    run = subprocess.run(
        [sys.executable, "-c", program], cwd=ROOT, text=True, capture_output=True, check=False
    )
    assert run.returncode == 1
    assert "zerojax.receipt" in run.stderr


def num_lines(source):
    """Lines without the examples that end docstrings: those are tests."""
    examples = re.findall(r"\n *Example:\n(.*?)\n *\"\"\"", source, re.DOTALL)
    return len(source.splitlines()) - sum(len(example.splitlines()) for example in examples)


@pytest.mark.parametrize("folder", ["zerojax", "models", "scripts"])
def test_files_and_functions_are_small(folder):
    """No file over 300 lines, no function over 60 without its docstring."""
    for path in sorted((ROOT / folder).rglob("*.py")):
        source = path.read_text()
        assert num_lines(source) <= 300, path
        for node in ast.walk(ast.parse(source)):
            if isinstance(node, ast.FunctionDef):
                first = node.body[1] if ast.get_docstring(node) and node.body[1:] else node.body[0]
                length = (node.end_lineno or 0) - first.lineno + 1
                assert length <= 60, f"{path}: {node.name} has {length} lines"


def test_the_library_can_be_read_in_an_afternoon():
    """What trains, what reads what it compiled to, and what keeps it, each by itself."""
    sizes = dict.fromkeys(FLOORS, 0)
    for path in FILES:
        sizes[room_of(module_of(path))] += num_lines(path.read_text())
    assert sizes["sharding"] + sizes["engine"] + sizes["training"] <= 3000
    assert sizes["receipt"] <= 3700
    assert sizes["checkpoint"] <= 1100
    assert sizes["hardware"] <= 700


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
    assert set(dir(zerojax)) == {*zerojax.__all__, *ROOMS}
    assert all(getattr(zerojax, room).__doc__ for room in ROOMS)
    with pytest.raises(AttributeError, match="has no attribute 'audits'"):
        zerojax.audits  # noqa: B018


@pytest.mark.parametrize("name", zerojax.__all__)
def test_no_module_hides_behind_a_public_name(name):
    with pytest.raises(ModuleNotFoundError):
        importlib.import_module(f"zerojax.{name}")


def test_only_one_file_names_a_collective():
    names = ("psum", "all_gather", "psum_scatter", "ppermute", "pmean", "all_to_all", "axis_index")
    for path in FILES:
        used = {
            n.attr for n in ast.walk(ast.parse(path.read_text())) if isinstance(n, ast.Attribute)
        }
        assert path.stem == "collectives" or not used & set(names), path


def test_axes_are_named_in_one_file():
    """Elsewhere nobody writes the name of an axis, or takes its size from a mesh."""
    for path in FILES:
        if module_of(path) in ("zerojax.sharding.axes", "zerojax.sharding.mesh"):
            continue
        for node in ast.walk(ast.parse(path.read_text())):
            is_axis = isinstance(node, ast.Constant) and node.value in ("data", "replica", "pipe")
            is_key = isinstance(node, ast.Constant) and node.value == "data"  # of a manifest
            assert not is_axis or (is_key and room_of(module_of(path)) == "checkpoint"), path
            of_mesh = isinstance(node, ast.Subscript) and ast.unparse(node.value).endswith(
                "mesh.shape"
            )
            assert not of_mesh, path


def test_platforms_are_asked_for_in_one_room():
    """Whether devices are CPUs or GPUs is a question for `hardware/`, whatever JAX calls them."""
    for path in FILES:
        used = [n for n in ast.walk(ast.parse(path.read_text())) if isinstance(n, ast.Attribute)]
        asked = [n for n in used if n.attr == "platform"]
        assert room_of(module_of(path)) in ("hardware", "__main__") or not asked, path


def test_the_library_imports_neither_flax_nor_private_jax():
    for path in FILES:
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Import | ast.ImportFrom):
                modules = [getattr(node, "module", None) or "", *(a.name for a in node.names)]
                assert not any("flax" in m or m.startswith("jax._src") for m in modules), path


def scripts_imported(source):
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "scripts":
            is_folder = node.module in ("scripts", "scripts.parts")
            names = [f"{node.module}.{alias.name}" for alias in node.names]
            yield from names if is_folder else [node.module]


def test_programs_are_made_of_parts():
    """No program and no part imports a program; parts import each other in one order."""
    programs = {f"scripts.{path.stem}" for path in (ROOT / "scripts").glob("[!_]*.py")}
    graph = {}
    for path in sorted((ROOT / "scripts").rglob("*.py")):
        graph[module_of(path)] = set(scripts_imported(path.read_text()))
        assert not graph[module_of(path)] & programs, path
    list(graphlib.TopologicalSorter(graph).static_order())
    for path in [*FILES, *(ROOT / "models").glob("*.py")]:
        assert not list(scripts_imported(path.read_text())), path
    assert list(scripts_imported("from scripts import train")) == ["scripts.train"]


def test_tests_mirror_the_rooms():
    rooms = {path.name for path in (ROOT / "tests").iterdir() if any(path.glob("test_*.py"))}
    assert rooms == {*ROOMS, "models", "scripts"}


def test_the_project_speaks_of_itself_alone():
    """No address of a package index and no absolute path of a machine in any file."""
    words = ["/" + "work/", "/" + "root/", "index" + "-url", "find" + "-links", "pypi" + ".org"]
    made = re.compile(r"\.git|\.venv.*|.*_cache|__pycache__|out|dist")
    for folder, folders, names in os.walk(ROOT):
        folders[:] = [name for name in folders if not made.fullmatch(name)]
        for path in (pathlib.Path(folder, name) for name in names if name != "LICENSE"):
            content = path.read_bytes()
            assert not [word for word in words if word.encode() in content], path
