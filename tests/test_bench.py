# SPDX-License-Identifier: Apache-2.0
"""The benchmark runs every program, and its table is readable."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from scripts.bench import Options, main

ROOT = Path(__file__).parents[1]


def test_bench_prints_a_ratio_for_every_program(capsys):
    ratios = main(Options(layers=1, seq=16, batch=8, rounds=2))
    printed, said = capsys.readouterr()
    assert max(map(len, printed.splitlines())) <= 100
    table = printed.split("\n\n")[1].splitlines()
    assert max(map(len, table)) <= 90
    assert "time / unsharded  middle half  time / naive" in table[0]
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
        ({"batch": 12}, r"--batch: 12 rows, not a multiple of 8 devices .* --batch 8 or 16"),
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
