# SPDX-License-Identifier: Apache-2.0
"""The benchmark runs every program, and its table is readable."""

from __future__ import annotations

import re

from scripts.bench import Options, main


def test_bench_prints_a_ratio_for_every_program(capsys):
    ratios = main(Options(batch=8, rounds=2))
    printed = capsys.readouterr().out
    assert max(map(len, printed.splitlines())) <= 100
    assert ratios["one device, unsharded"] == 1
    expected = {f"stage {n}, {p}" for n in range(4) for p in ("manual", "auto")}
    assert set(ratios) - expected == {"one device, unsharded", "naive NamedSharding"}
    sizes = dict(re.findall(r"^(stage \d, \w+) .* ([\d.]+ MB)$", printed, re.MULTILINE))
    assert sizes["stage 0, manual"] == sizes["stage 0, auto"] == "10.1 MB"
    assert sizes["stage 1, manual"] == sizes["stage 2, auto"] == "4.21 MB"
    assert sizes["stage 3, manual"] == sizes["stage 3, auto"] == "1.26 MB"
