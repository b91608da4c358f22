# SPDX-License-Identifier: Apache-2.0
"""The planning script: the ZeRO paper's table, what it prints, recommends and refuses."""

from __future__ import annotations

import doctest
import json
import subprocess
import sys
import types

import jax
import jax.numpy as jnp
import optax
import pytest

import zerojax as zj
from scripts.parts import paper
from scripts.plan import Options, main
from tests import ROOT, aot

# Rajbhandari et al., arXiv 1910.02054, Table I: devices | 7.5B | 128B | 1T, stages 1 / 2 / 3.
TABLE = """
1    | 120 / 120 / 120    | 2048 / 2048 / 2048 | 16000 / 16000 / 16000
4    | 52.5 / 41.3 / 30   | 896 / 704 / 512    | 7000 / 5500 / 4000
16   | 35.6 / 21.6 / 7.5  | 608 / 368 / 128    | 4750 / 2875 / 1000
64   | 31.4 / 16.6 / 1.88 | 536 / 284 / 32     | 4187 / 2218 / 250
256  | 30.4 / 15.4 / 0.47 | 518 / 263 / 8      | 4046 / 2054 / 62.5
1024 | 30.1 / 15.1 / 0.12 | 513 / 257 / 2      | 4011 / 2013 / 15.6
"""


def test_all_54_cells_of_the_papers_table():
    found, cells = paper.cells(), 0
    for line in TABLE.strip().splitlines():
        devices, *columns = line.split("|")
        for model, column in zip(paper.SIZES, columns, strict=True):
            expected = [cell.strip() for cell in column.split("/")]
            assert found[int(devices), model] == expected
            cells += len(expected)
    assert cells == 54
    assert doctest.testmod(paper).failed == 0


@aot.needed
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_the_7_5b_row_of_64_devices_from_compiled_programs(stage):
    expected = (120, 31.4, 16.6, 1.88)[stage]
    assert paper.compiled_gigabytes(64, stage) == pytest.approx(expected, rel=0.005)


@aot.needed
def test_it_prints_a_table_and_recommends(capsys):
    rows = main(Options(model="tiny", compile_seconds=0))
    printed, said = capsys.readouterr()
    assert max(map(len, printed.splitlines())) <= 100
    assert "8 x NVIDIA H100 80GB HBM3: 79.8 GB of memory, after 6% for" in printed
    table = printed.split("\n\n")[1].splitlines()
    assert len(table) == 2 + len(rows) == 12
    assert sum(" predicted " in line for line in table) == 10
    assert "predicting stage 3" in said
    assert printed.split("\n\n")[2].startswith("Take stage 0, remat none: by formula it fits")


@aot.needed
def test_a_large_model_is_ranked_by_formula_alone(capsys):
    options = Options(model="llama3-70b", gpus="h100:64x8", compile_seconds=0, link_bandwidth=200)
    rows = main(options)
    printed = capsys.readouterr().out
    assert max(map(len, printed.splitlines())) <= 100
    fit = {row.case.stage for row in rows if row.fits(79.8e9)}
    assert fit == {3}
    assert "rates: 200 GB/s in a host, 45 GB/s a card between hosts" in printed
    last = printed.split("\n\n")[2].replace("\n", " ")
    assert last.startswith("Take stage 3, remat full, prefetch 1: by formula it fits, 37")
    assert last.endswith("Nothing was compiled. ")


def mlp():
    """What a user's function returns."""

    def loss_fn(params, batch, key):
        x = zj.scan_layers(lambda p, x: jnp.tanh(x @ p["w"]), params["blocks"], batch)
        return jnp.sum(x**2), x.size

    init = lambda key: {"blocks": {"w": jnp.zeros((4, 64, 64))}}
    return init, loss_fn, optax.adam(1e-3), jax.ShapeDtypeStruct((2, 64), jnp.bfloat16), ("blocks",)


@pytest.fixture
def fn(monkeypatch):
    module = types.ModuleType("own_model")
    module.make, module.bad = mlp, lambda: mlp()[:3]
    monkeypatch.setitem(sys.modules, "own_model", module)
    return "own_model:make"


@aot.needed
def test_a_users_function_is_planned_and_compiled(fn, tmp_path, capsys):
    out = tmp_path / "plan.json"
    rows = main(Options(fn=fn, compile_seconds=1e-9, microbatches=2, json=out))
    printed, said = capsys.readouterr()
    assert [row.case.stage for row in rows] == [0, 1, 2, 3]
    assert rows[3].case.plan.rest_bytes() == pytest.approx(4 * 64 * 64 * 14 / 8, rel=0.01)
    assert rows[3].theory_bytes == 4 * 64 * 64 * 7 / 8 * 2 * 6
    assert "own_model:make: 16,384 parameters, bf16_master, own optimizer" in printed
    assert "compiling 1 of at most 4: stage 0" in said
    assert printed.split("\n\n")[2].startswith("Take stage 0: it fits, and promised most: ")
    figures = json.loads(out.read_text())
    (made,) = [row for row in figures["rows"] if row["compiled"]]
    theory = made["theory_wire_bytes"]
    assert made["compiled"]["wire_bytes"] == pytest.approx(theory, rel=0.01)
    assert 0 < made["compiled"]["exposed_seconds"] < made["compiled"]["seconds"]
    assert made["compiled"]["peak_bytes"] <= made["compiled"]["allocated_bytes"]
    assert figures["target"]["link_bandwidth"] == 350e9


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"batch": 0}, r"--batch: 0 is too few; give 1 or more"),
        ({"batch": 3, "microbatches": 2}, r"--batch: 3 rows .* 2 microbatches; give --batch 4"),
        (
            {"fn": "own_model:make", "seq": 9},
            r"--seq: with --fn, what the function returns says it",
        ),
        ({"gpus": "h100"}, r"target is 'h100'; write GPU:COUNT"),
        ({"gpus": "simulated:8"}, r"--gpus: 'simulated:8' has no GPU to plan for; .* h100:8"),
        ({"link_bandwidth": -1.0}, r"link_bandwidth is -1000000000.0; give a positive number"),
        ({"fn": "no_such_module:make"}, r"--fn: 'no_such_module:make': No module named"),
        ({"fn": "json:make"}, r"--fn: 'json:make': module 'json' has no attribute 'make'"),
        ({"fn": "json"}, r"--fn: 'json': .*give it as package.module:make"),
        ({"fn": "own_model:bad"}, r"--fn: 'own_model:bad' returned tuple; return a tuple of \("),
    ],
)
def test_what_it_refuses(change, message, fn, capsys):
    with pytest.raises(ValueError, match=message):
        main(Options(**change))
    assert capsys.readouterr() == ("", "")


@aot.needed
def test_nothing_fits(capsys):
    main(Options(model="llama3-70b", compile_seconds=0))
    last = capsys.readouterr().out.split("\n\n")[2].replace("\n", " ")
    assert last.startswith("Nothing fits: stage 3, remat full, prefetch 0 takes least, ")
    assert last.endswith("Give each GPU fewer or shorter rows, or take more GPUs. ")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--gpus", "x100:8"], "error: target 'x100:8': 'x100' is not a known GPU"),
        (["--model", "huge"], "run python -m scripts.plan --help"),
    ],
)
def test_a_mistake_is_exit_code_2_without_a_traceback(arguments, message):
    command = [sys.executable, "-W", "error", "-m", "scripts.plan", *arguments]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 2
    assert message in done.stderr
    assert "Traceback" not in done.stderr
