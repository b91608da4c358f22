# SPDX-License-Identifier: Apache-2.0
"""Every notebook runs from start to end, and is kept with the outputs of such a run."""

from __future__ import annotations

import json
import math
import os
import re

import jax
import nbformat
import pytest
from nbclient import NotebookClient
from nbclient.exceptions import CellExecutionError
from nbformat.v4 import new_code_cell, new_notebook, new_output

from scripts.parts import paper
from tests import ROOT, aot

NOTEBOOKS = sorted((ROOT / "notebooks").glob("*.ipynb"))
PLAN = ROOT / "notebooks/03_plan_before_you_rent.ipynb"
QUICK = [path for path in NOTEBOOKS if path != PLAN]
ABSOLUTE_PATH = re.compile(r"(?<![\w.)/])(?:/[\w.+-]+){2,}|file://|\b[A-Za-z]:\\\w")
NUMBER = re.compile(r"\d[\d,]*(?:\.\d+)?(?:e[-+]?\d+)?")
REMEDY = "Run `.venv/bin/jupyter execute --inplace notebooks/*.ipynb`, look at it, and commit it."


def code_cells(notebook):
    return [cell for cell in notebook.cells if cell.cell_type == "code"]


def kinds(cell):
    """What a cell shows, without the values: "stdout", "image/png", "error"."""
    shown = set()
    for output in cell.outputs:
        shown |= {output.name} if output.output_type == "stream" else {*output.get("data", {})}
        shown |= {"error"} if output.output_type == "error" else set()
    return shown


def texts(cell):
    for output in cell.outputs:
        yield output.get("text", "")
        yield from output.get("traceback", [])
        yield from (x for kind, x in output.get("data", {}).items() if kind.startswith("text/"))


def executed(notebook, folder, **environment):
    """The notebook after a run in a fresh kernel that starts in `folder`; raises on any error."""
    run = nbformat.from_dict(notebook)
    resources = {"metadata": {"path": str(folder)}}
    client = NotebookClient(run, timeout=600, kernel_name="python3", resources=resources)
    return client.execute(env={**os.environ, "PYTHONPATH": str(ROOT), **environment})


def printed(cell):
    """What a cell prints: its words, without the rules of tables, and its numbers."""
    text = "".join(output.get("text", "") for output in cell.outputs)
    words = [word for word in NUMBER.sub("#", text).split() if word.strip("-")]
    return words, [float(number.replace(",", "")) for number in NUMBER.findall(text)]


def differs(cell, again):
    """Whether a run prints other words, or a number that is off by more than 2 %."""
    (words, numbers), (words_again, numbers_again) = printed(cell), printed(again)
    if words != words_again or len(numbers) != len(numbers_again):
        return True
    close = (math.isclose(a, b, rel_tol=0.02) for a, b in zip(numbers, numbers_again, strict=True))
    return not all(close)


def faults(kept, run, same_text=True):
    """What is wrong with the outputs kept in the file, given those of a run.

    With `same_text` what is printed must be what the run prints, but for cells tagged `varies`:
    rounding errors and times differ between machines.
    """
    found = []
    for number, (cell, again) in enumerate(zip(code_cells(kept), code_cells(run), strict=True), 1):
        if cell.execution_count != number:
            found.append(f"code cell {number}: not kept from one run from start to end")
        if kinds(cell) != kinds(again):
            found.append(f"code cell {number}: keeps {kinds(cell)}, a run shows {kinds(again)}")
        if same_text and "varies" not in cell.metadata.get("tags", ()) and differs(cell, again):
            found.append(f"code cell {number}: a run prints something else")
        if kinds(cell) & {"error", "stderr"}:
            found.append(f"code cell {number}: keeps an error or a warning")
        for text in texts(cell):
            if "Traceback (most recent" in text:
                found.append(f"code cell {number}: keeps a traceback")
            if path := ABSOLUTE_PATH.search(text):
                found.append(f"code cell {number}: shows the absolute path {path.group()}")
    return found


def check(path, folder, changes=None):
    """Runs in a foreign folder: only imports may depend on where the project is.

    Another JAX compiles other programs, so the text is compared under the one that is kept, and not
    where `changes` are made to the source.
    """
    assert path.stat().st_size < 600_000
    kept = nbformat.read(path, as_version=4)
    nbformat.validate(kept)
    versions = " ".join(texts(code_cells(kept)[0]))
    same_text = f"jax {jax.__version__}:" in versions and not changes
    source = json.dumps(kept)
    for before, after in (changes or {}).items():
        assert before in source, before
        source = source.replace(before, after)
    # JAX keeps programs for GPUs that are not here, and warns that it cannot read them.
    environment = {"JAX_ENABLE_COMPILATION_CACHE": "0"} if path == PLAN else {}
    environment |= {"XLA_FLAGS": ""} if path == PLAN and not changes else {}  # as it is kept
    run = executed(nbformat.from_dict(json.loads(source)), folder, **environment)
    assert faults(kept, run, same_text) == [], REMEDY


@pytest.mark.parametrize("path", QUICK, ids=lambda path: path.stem)
def test_notebook_runs_and_keeps_its_outputs(path, tmp_path):
    check(path, tmp_path)


@aot.needed
@pytest.mark.full
def test_the_plan_of_large_models(tmp_path):
    """Five programs are compiled for H100s, in about 90 seconds of CPU."""
    check(PLAN, tmp_path)


@aot.needed
def test_the_plan_of_large_models_in_short(tmp_path):
    """The same cells: a small model, fewer programs, and options to compile them fast."""
    options = ", ".join(f"{name}={value}" for name, value in paper.QUICK.items())
    step = "zj.make_train_step(loss_fn, plan"
    changes = {
        "llama2-7b": "tiny",
        "llama3-70b": "tiny",
        "ROWS = 2, 4, 8, 16, 32": "ROWS = 2, 4",
        "for n in (0, 1, 2)": "for n in (1,)",
        'receipts[\\"stage 3, prefetch 0': 'receipts[\\"stage 3, prefetch 1',
        "50, 100, 150, 200, 275, 350, 450": "50, 350",
        step: f"{step}, compiler_options=dict({options})",
    }
    check(PLAN, tmp_path, changes)


def test_there_is_a_notebook_with_pictures():
    shown = [kinds(cell) for path in NOTEBOOKS for cell in code_cells(nbformat.read(path, 4))]
    assert sum("image/png" in kind for kind in shown) >= 3


def test_a_cell_that_raises_is_noticed(tmp_path):
    """The sabotaged twin of the run."""
    with pytest.raises(CellExecutionError, match="on purpose"):
        executed(new_notebook(cells=[new_code_cell("raise ValueError('on purpose')")]), tmp_path)


def one_cell(*outputs, count=1):
    return new_notebook(cells=[new_code_cell("", outputs=list(outputs), execution_count=count)])


def stream(text, name="stdout"):
    return new_output("stream", name=name, text=text)


@pytest.mark.parametrize(
    ("kept", "run", "fault"),
    [
        (one_cell(), one_cell(stream("loss 1.0")), "a run shows {'stdout'}"),
        (
            one_cell(stream("x")),
            one_cell(new_output("display_data", {"image/png": ""})),
            "image/png",
        ),
        (one_cell(count=3), one_cell(), "not kept from one run"),
        (one_cell(count=None), one_cell(), "not kept from one run"),
        (one_cell(stream("careful", "stderr")), one_cell(stream("careful", "stderr")), "a warning"),
        (one_cell(new_output("error", ename="E", traceback=["?"])), one_cell(), "an error"),
        (
            one_cell(stream("Traceback (most recent call last)")),
            one_cell(stream("")),
            "a traceback",
        ),
        (one_cell(stream(f"in {ROOT}/models")), one_cell(stream("")), f"the absolute path {ROOT}"),
        (one_cell(stream("'C:\\Users\\me'")), one_cell(stream("")), "the absolute path C:"),
        (one_cell(stream("see file:///a/b")), one_cell(stream("")), "the absolute path file:"),
        (one_cell(stream("peak 1.00 MB")), one_cell(stream("peak 1.10 MB")), "something else"),
        (one_cell(stream("findings: none")), one_cell(stream("findings: 1")), "something else"),
    ],
)
def test_sabotaged_outputs_are_noticed(kept, run, fault):
    assert fault in " ".join(faults(kept, run))


def test_ordinary_outputs_are_not_faults():
    kept = one_cell(
        stream("blocks/kernel 128 / 8, 16/N, https://arxiv.org/abs/1910.02054 loss 1.5")
    )
    again = one_cell(
        stream("blocks/kernel 128 / 8, 16/N, https://arxiv.org/abs/1910.02054\nloss  1.51")
    )
    assert faults(kept, again) == []
    other = one_cell(stream("loss 1.6"))
    assert faults(kept, other, same_text=False) == []
    kept.cells[0].metadata["tags"] = ["varies"]
    assert faults(kept, other) == []
