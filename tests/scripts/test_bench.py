# SPDX-License-Identifier: Apache-2.0
"""The benchmark runs every program, and its table is readable."""

from __future__ import annotations

import re
import subprocess
import sys

import pytest

from scripts.bench import Options, main
from scripts.parts import bench_sweep
from scripts.parts.bench_sweep import Point, choose_points
from tests import ROOT


def test_bench_prints_a_ratio_for_every_program(capsys):
    ratios = main(Options(layers=1, seq=16, batch=8, rounds=2))
    printed, said = capsys.readouterr()
    assert max(map(len, printed.splitlines())) <= 100
    table = printed.split("\n\n")[1].splitlines()
    assert max(map(len, table)) <= 90
    columns = re.split(r"\s{2,}", table[0].strip())
    assert columns[1:4] == ["time / unsharded", "middle half", "time / naive"]
    naive = next(line.split() for line in table if line.startswith("naive NamedSharding "))
    assert naive[-3] == "1.00"
    assert ratios["one device, unsharded"] == 1
    expected = {f"stage {n}, {p}" for n in range(4) for p in ("manual", "auto")}
    expected |= {f"stage 3, {p}, prefetch 0" for p in ("manual", "auto")}
    assert set(ratios) - expected == {"one device, unsharded", "naive NamedSharding"}
    sizes = dict(re.findall(r"^(stage \d, \w+) .* ([\d.]+ [kM]B)$", printed, re.MULTILINE))
    assert sizes["stage 0, manual"] == sizes["stage 0, auto"] == "2.80 MB"
    assert sizes["stage 1, manual"] == sizes["stage 2, auto"] == "1.17 MB"
    assert sizes["stage 3, manual"] == sizes["stage 3, auto"] == "350 kB"
    assert printed.splitlines()[-1] == (
        "Simulated devices share this machine's cores: "
        "a ratio below 1.00 is not a speed-up by ZeRO."
    )
    assert "compiling 3 of 12: stage 0, manual" in said.splitlines()
    assert "\r" not in said


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"rounds": 1}, r"--rounds: 1 is too few; give 2 or more"),
        ({"layers": 0}, r"--layers: 0 is too few; give 1 or more"),
        ({"devices": 0}, r"--devices: 0 is too few; give 1 or more"),
        ({"devices": 9}, r"--devices: 9 wanted, 8 here \(cpu\); give --devices 8 or fewer"),
        ({"devices": 3, "batch": 6}, r"max_unsharded.* try --devices 1, 2, 4 or 8"),
        (
            {"batch": 12},
            r"--batch: 12 rows, not a multiple of 8 data-parallel devices .* --batch 8 or 16",
        ),
    ],
)
def test_what_it_refuses_before_it_compiles(change, message, capsys):
    with pytest.raises(ValueError, match=message):
        main(Options(**change))
    assert capsys.readouterr() == ("", "")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--rounds", "1"], "error: --rounds: 1 is too few; give 2 or more\n"),
        (["--model", "huge"], "run python -m scripts.bench --help"),
    ],
)
def test_a_mistake_is_exit_code_2_without_a_traceback(arguments, message):
    command = [sys.executable, "-W", "error", "-m", "scripts.bench", *arguments]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 2
    assert message in done.stderr
    assert "Traceback" not in done.stderr


def test_what_is_varied():
    """One thing at a time; nothing twice."""
    points = choose_points(8)
    assert len(points) == len(set(points)) == 14
    assert {(p.stage, p.devices) for p in points} == {(s, n) for s in range(4) for n in (2, 8)}
    assert {p.prefetch for p in points if p.stage == 3} == {0, 1, 2}
    assert max(sum(x != y for x, y in zip(p[2:], (1, 1), strict=True)) for p in points) == 1
    assert choose_points(2)[:4] == [Point(s, 2) for s in range(4)]


def test_the_sweep_writes_a_table_and_a_picture(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(bench_sweep, "PREFETCHES", (0, 1))
    monkeypatch.setattr(bench_sweep, "MICROBATCHES", (1,))
    out = tmp_path / "sweep"
    ratios = main(Options(layers=1, seq=16, batch=8, rounds=2, devices=2, out=out))
    printed, said = capsys.readouterr()
    assert printed == f"wrote {out / 'bench.md'} and {out / 'bench.png'}\n"
    assert "compiling 1 of 5: Point(stage=0, devices=2, prefetch=1, microbatches=1)" in said
    text = (out / "bench.md").read_text()
    assert text.startswith(
        "# Step time and bytes: tiny, 8 rows of 16 tokens, 2 simulated devices (cpu)\n"
    )
    assert "![step time and bytes](bench.png)" in text
    assert max(map(len, text.splitlines())) <= 100
    lines = [line for line in text.splitlines() if line.startswith("| ")]
    assert len(lines) == 2 + len(ratios) == 2 + 5
    header, alone, *rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in lines]
    assert alone[:5] == ["-", "1", "-", "1", "1.00"]
    assert {len(row) for row in rows} == {len(header)}
    rest = {row[0]: row[6] for row in rows}
    assert rest["0"] == alone[6] == "2.80 MB"
    assert (rest["1"], rest["3"]) == ("1.87 MB", "1.40 MB")
    assert {row[2] for row in rows if row[0] == "3"} == {"0", "1"}
    assert (out / "bench.png").read_bytes().startswith(b"\x89PNG")
    for row in rows:
        low, high = map(float, row[5].split(" - "))
        assert low <= float(row[4]) <= high


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"devices": 1}, r"--devices: a sweep with 1 device shows nothing; give 2 or more"),
        ({"batch": 16}, r"8 data-parallel devices x 4 microbatches = 32; give --batch 32"),
        ({"out": ROOT / "Makefile" / "x"}, r"--out: cannot make the folder .*Makefile/x \(Not a"),
    ],
)
def test_what_the_sweep_refuses(change, message, tmp_path):
    with pytest.raises(ValueError, match=message):
        main(Options(**{"out": tmp_path / "out", **change}))
    assert not (tmp_path / "out").exists()


def test_the_time_that_a_save_takes(capsys):
    found = main(Options(checkpoint=True, params_mb=1, rounds=2))
    table = capsys.readouterr().out.splitlines()
    assert table[0] == "3 MB of state (fp32, Adam), medians of 2 rounds"
    assert [line.split("  ")[0] for line in table[4:]] == [
        "the step waits for a save",
        "until it is complete",
        "a save that is waited for",
        "restore",
    ]
    assert table[6].endswith(" 100.0 %")
    assert 0 < found["blocked"] < 1
