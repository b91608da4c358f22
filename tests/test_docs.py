# SPDX-License-Identifier: Apache-2.0
"""What the documents say runs: README blocks, docstring examples, commands, file names."""

from __future__ import annotations

import contextlib
import dataclasses
import doctest
import functools
import importlib
import inspect
import io
import re
import shlex
import subprocess
import sys

import jax
import optax
import pytest

import zerojax as zj
from models import transformer
from tests import ROOT, bad
from tests.test_architecture import imported
from zerojax.sharding.precision import PRECISIONS
from zerojax.table import format_bytes
from zerojax.training import compiler_options as compiler

README = (ROOT / "README.md").read_text()
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
DOCUMENTS = [*PAGES, *(ROOT / name for name in ("CHANGELOG.md", "CONTRIBUTING.md"))]
DOCUMENTS += (ROOT / ".github").rglob("*.md")
MAKEFILE = (ROOT / "Makefile").read_text()
MODULES = [
    ".".join(path.relative_to(ROOT).with_suffix("").parts)
    for path in sorted((ROOT / "zerojax").rglob("[!_]*.py"))
]


def fenced(text):
    """The fenced blocks of a page: (language, text)."""
    return re.findall(r"```(\w*)\n(.*?)```", text, re.DOTALL)


def run_page(page):
    """Runs a page's python blocks in one scope; each prints what the text block after it says.

    Returns the scope. Numbers of compiled programs are those of the newest JAX; on older ones the
    blocks run, and what they print may differ.
    """
    scope, printed = {}, ""
    for language, block in fenced(page.read_text()):
        if language == "python":
            with contextlib.redirect_stdout(io.StringIO()) as out:
                exec(compile(block, page.name, "exec"), scope)
            printed = out.getvalue()
            assert max(map(len, printed.splitlines()), default=0) <= 100, printed
        elif language == "text" and jax.__version_info__ >= (0, 12):
            same = doctest.OutputChecker().check_output(block, printed, doctest.ELLIPSIS)
            assert same, f"{page.name}:\n{block}\nprinted:\n{printed}"
    return scope


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_every_block_of_a_page_runs_and_prints_what_the_page_says(page, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    scope = run_page(page)
    if page.stem == "README":
        first = {}
        block = next(block for language, block in fenced(README) if language == "python")
        with contextlib.redirect_stdout(io.StringIO()):
            exec(compile(block, page.name, "exec"), first)
        assert float(first["metrics"]["loss"]) < 0.9
        assert int(scope["state"].step) == 1  # of the second block
        step = zj.make_train_step(scope["loss_fn"], scope["plan"])
        state, losses = zj.init_state(scope["plan"], jax.random.key(0)), []
        for _ in range(5):
            state, metrics = step(state, scope["batch"])
            losses.append(float(metrics["loss"]))
        assert losses[-1] < losses[0]


def test_a_page_that_says_something_else_is_noticed(tmp_path):
    page = tmp_path / "page.md"
    page.write_text("```python\nprint(1 + 1)\n```\n```text\n3\n```\n")
    if jax.__version_info__ >= (0, 12):
        with pytest.raises(AssertionError, match=r"printed:\s+2"):
            run_page(page)
    page.write_text("```python\nundefined\n```\n")
    with pytest.raises(NameError):
        run_page(page)


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


def examples(name):
    """The examples of a public name, those of a class's methods among them."""
    found = doctest.DocTestFinder().find(getattr(zj, name), name)
    return [example for test in found for example in test.examples]


SECTIONS = {  # what a docstring must have beside its first line, and who need not
    "Args:": {"start": "functions", "without": set()},
    "Returns": {"start": "functions", "without": {"draw", "simulate_devices", "start_hosts"}},
    "Raises:": {"start": "functions", "without": {"memory_report"}},
    "Attributes:": {"start": "classes", "without": {"Checkpointer", "LossFn"}},
}


@pytest.mark.parametrize("name", zj.__all__)
def test_every_public_name_is_documented_with_an_example_that_prints_numbers(name):
    value = getattr(zj, name)
    text = inspect.getdoc(value) or ""
    kind = "classes" if inspect.isclass(value) else "functions"
    for section, held in SECTIONS.items():
        if held["start"] == kind and name not in held["without"]:
            assert section in text, (name, section)
    assert re.search(r"\d", "".join(example.want for example in examples(name))), name
    for method, function in vars(value).items() if kind == "classes" else ():
        if inspect.isfunction(function) and not method.startswith("_"):
            assert function.__doc__, (name, method)
    if kind == "functions":
        documented = set(re.findall(r"^  (?:\*\*)?(\w+): ", text, re.MULTILINE))
        assert set(inspect.signature(value).parameters) <= documented, name


def test_a_wrong_example_is_noticed():
    wrong = doctest.DocTestParser().get_doctest(">>> 1 + 1\n3\n", {}, "wrong", None, 0)
    assert doctest.DocTestRunner(verbose=False).run(wrong, out=lambda text: None).failed == 1


def test_the_reference_is_built_without_a_warning_and_has_the_public_names(tmp_path):
    pytest.importorskip("pdoc", reason="pdoc is not installed (the dev extra)")
    recipe = re.search(r"^docs: env\n(.*?)\n\n", MAKEFILE, re.DOTALL | re.MULTILINE)[1]
    command = shlex.split(recipe.replace("\\\n", "").strip().removeprefix("@"))
    assert command[0] == ".venv/bin/python"
    command[command.index("out/docs")] = str(tmp_path)
    subprocess.run([sys.executable, *command[1:]], cwd=ROOT, check=True)
    page = (tmp_path / "zerojax.html").read_text()
    found = re.findall(r'<section id="(\w+)">', page)
    assert sorted(found) == sorted(zj.__all__)
    for heading in ("Arguments", "Returns", "Raises", "Attributes", "Example"):
        assert f"{heading}:</h6>" in page, heading


def test_make_commands_exist():
    targets = set(re.findall(r"^([a-z0-9-]+):", MAKEFILE, re.MULTILINE))
    for document in DOCUMENTS:
        for target in re.findall(r"\bmake ([a-z0-9-]+)", "\n".join(code(document.read_text()))):
            assert target in targets, (document.name, target)


RECIPES = dict(re.findall(r"^([\w-]+): env\n\t@\$\(RUN\) scripts\.(\w+)", MAKEFILE, re.MULTILINE))


@functools.cache
def options_of(script):
    """The options that a script's --help lists."""
    module = importlib.import_module(f"scripts.{script}")
    if script == "gpu_check":
        with contextlib.redirect_stdout(io.StringIO()) as out, pytest.raises(SystemExit):
            module.read_options(["--help"])
        return set(re.findall(r"(--?[a-z][\w-]*)", out.getvalue()))
    names = {field.name.replace("_", "-") for field in dataclasses.fields(module.Options)}
    return {f"--{name}" for name in names} | {"--help"} | ({"-n"} if script == "launch" else set())


def commands(text):
    """(script, its words) of every command of a page that runs one, or a make target of one."""
    for block in code(text):
        for line in block.replace("\\\n", " ").splitlines():
            for target, quoted, bare in re.findall(
                r"\bmake ([\w-]+) ARGS=(?:\"(.*?)\"|(\S+))", line
            ):
                if target in RECIPES:
                    yield RECIPES[target], shlex.split(quoted or bare)
            parts = re.split(r"(?:-m )scripts\.(\w+)", line)
            for script, words in zip(parts[1::2], parts[2::2], strict=True):
                yield script, words.split(" -- ")[0].split()


def test_options_that_documents_give_to_scripts_exist():
    seen = 0
    for document in DOCUMENTS:
        for script, words in commands(document.read_text()):
            for word in words:
                if word.startswith("-") and word != "-m":
                    assert word.split("=")[0] in options_of(script), (document.name, script, word)
                    seen += 1
    assert seen > 20


def test_an_option_that_does_not_exist_is_noticed():
    (found,) = commands('`make plan ARGS="--gpu h100:8"`')
    assert found == ("plan", ["--gpu", "h100:8"])
    assert "--gpu" not in options_of("plan")
    assert "--gpus" in options_of("plan")
    page = "```\nsrun python -m scripts.launch -n 2 -- -m scripts.train --step 5\n```"
    assert [name for name, _ in commands(page)] == ["launch", "train"]
    assert "--step" not in options_of("train")


def anchors(page):
    """What GitHub makes of a page's headings."""
    text = re.sub(r"```.*?```", "", page.read_text(), flags=re.DOTALL)
    for heading in re.findall(r"^#+ (.*)$", text, re.MULTILINE):
        yield re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-")


def test_links_lead_somewhere():
    links = 0
    for document in DOCUMENTS:
        for link in re.findall(r"\]\(([^)\s]+)\)", document.read_text()):
            if link.startswith("http"):
                continue
            path, _, anchor = link.partition("#")
            page = (document.parent / path).resolve() if path else document
            assert page.exists(), (document.name, link)
            assert not anchor or anchor in anchors(page), (document.name, link)
            links += 1
    assert links > 30


def test_every_page_is_reached_from_the_readme():
    linked = set(re.findall(r"\]\(docs/([\w-]+\.md)", README))
    assert linked == {page.name for page in PAGES} - {"README.md"}


def test_pages_say_what_the_code_has():
    receipt = (ROOT / "docs/receipt.md").read_text()
    for name in bad.PROGRAMS:
        assert f"| `{name}` |" in receipt, name
    gpus = (ROOT / "docs/gpus.md").read_text()
    for option in compiler.GPU_OPTIONS:
        assert f"`{option}`" in gpus, option
    precision = (ROOT / "docs/precision.md").read_text()
    for name in PRECISIONS:
        assert f'| `"{name}"` |' in precision, name


def test_the_readme_stays_short():
    """The tree of files, which one looks things up in, aside."""
    assert len(re.sub(r"```\nzerojax/\n.*?```", "", README, flags=re.DOTALL).splitlines()) <= 160


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
        if document.name == "log.md":  # an entry names files as they were on its day
            continue
        for word in code(document.read_text()):
            if re.fullmatch(
                r"[\w/.-]+\.(py|md|toml|txt|sh)|(docs|tests|scripts|models)/[\w/.-]*", word
            ):
                places = (ROOT, *(ROOT / "zerojax").glob("*/"), ROOT / "zerojax", document.parent)
                assert any((place / word).exists() for place in places), (document.name, word)
                names += 1
    assert names > 15


def test_the_reading_order_is_the_tree():
    """Every room and file with a caption, in an order in which imports point up."""
    block = next(b for language, b in fenced(README) if b.startswith("zerojax/\n"))
    room, listed, captions = "zerojax", [], []
    for line in block.splitlines()[1:]:
        name, caption = line.split(maxsplit=1)
        captions.append(caption)
        if name.endswith("/"):
            room = f"zerojax/{name.rstrip('/')}"
        else:
            assert line.startswith(" " * (2 if room == "zerojax" else 4)), line
            listed.append(f"{room}/{name}")
    assert all(len(caption) > 5 for caption in captions)
    rooms = [path.parent for path in (ROOT / "zerojax").glob("*/__init__.py")]
    files = {path.relative_to(ROOT).as_posix() for path in (ROOT / "zerojax").rglob("*.py")}
    assert set(listed) == files - {f"zerojax/{room.name}/__init__.py" for room in rooms}
    seen = set()
    for name in listed[2:]:  # the two with names that Python gives come first
        module = name.removesuffix(".py").replace("/", ".")
        below = set(imported((ROOT / name).read_text())) - seen
        assert not below, (name, below)
        seen.add(module)
