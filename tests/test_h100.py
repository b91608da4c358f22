# SPDX-License-Identifier: Apache-2.0
"""Layer loops compiled for 8 H100s on a machine without one, in a process of their own."""

from __future__ import annotations

import pathlib
import re
import subprocess
import sys

import pytest

from tests import aot

ROOT = pathlib.Path(__file__).parent.parent


pytestmark = aot.needed


@pytest.fixture(scope="module")
def schedules():
    """For each prefetch: its peak in MiB, and its lines."""
    run = subprocess.run(
        [sys.executable, "-m", "scripts.h100"], cwd=ROOT, capture_output=True, text=True
    )
    assert run.returncode == 0, run.stderr[-2000:]
    assert not run.stderr
    parts = re.split(r"\nprefetch \d: peak (\d+) MiB per device\n", run.stdout)
    return [(int(peak), text) for peak, text in zip(parts[1::2], parts[2::2], strict=True)]


def test_with_prefetch_no_collective_in_a_loop_is_synchronous(schedules):
    for _, text in schedules[1:]:
        assert "synchronous" not in text
        assert text.count("all-gather-start") == text.count("all-gather-done") == 4
        assert text.count("reduce-scatter-start") == 2
        for kind in ("all-gather", "reduce-scatter"):
            lines = re.findall(rf"(\d+) {kind}-(start|done)", text)
            places = [(int(place), what) for place, what in lines]
            for (start, _), (done, what) in zip(places[::2], places[1::2], strict=True):
                assert what == "done"
                assert done - start > 1, f"nothing runs between start and done of a {kind}"
    assert "all-gather (synchronous)" in schedules[0][1]  # the twin: without prefetch it shows


def test_a_prefetched_layer_costs_one_layer(schedules):
    peaks = [peak for peak, _ in schedules]
    assert peaks[1] - peaks[0] <= 64
    assert peaks[2] - peaks[1] == 64
