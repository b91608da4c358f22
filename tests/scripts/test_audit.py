# SPDX-License-Identifier: Apache-2.0
"""scripts/audit.py: the options of training, and what it prints and writes."""

from __future__ import annotations

import dataclasses
import json
import os
import subprocess
import sys

import pytest

from scripts import audit, train
from tests import ROOT, aot

SMALL = audit.Options(layers=2, seq=16)


def test_every_option_of_training_is_one_of_auditing():
    ours = {field.name: field.default for field in dataclasses.fields(audit.Options)}
    theirs = {field.name: field.default for field in dataclasses.fields(train.Options)}
    assert theirs.items() <= ours.items()


def test_prints_and_writes_the_receipt(capsys, tmp_path):
    files = {"json": tmp_path / "a.json", "picture": tmp_path / "a.png"}
    found = audit.main(dataclasses.replace(SMALL, stage=2, microbatches=2, batch=16, **files))
    text = capsys.readouterr().out
    assert text.strip() == str(found)
    assert "stage 2, manual, 8 devices (simulated:8), 2 microbatches" in text
    assert "5. findings: none" in text
    assert json.loads(files["json"].read_text())["findings"] == []
    assert files["picture"].read_bytes().startswith(b"\x89PNG")


@aot.needed
def test_for_gpus_that_are_not_here(capsys):
    changes = {"target": "h100:2x8", "batch": 16, "link_bandwidth": 100.0, "precision": "bf16"}
    options = dataclasses.replace(SMALL, seq=64, **changes)
    found = audit.main(options)
    text = capsys.readouterr().out
    assert "16 devices (h100:2x8)" in text
    assert "100 GB/s in a host" in text
    assert "XLA's own estimate" in text
    assert found.timeline is not None


@pytest.mark.parametrize(
    ("change", "parts"),
    [
        ({"target": "v100:8"}, ["v100", "h100"]),
        ({"target": "h100:8", "devices": 8}, ["--devices", "--target says how many"]),
        ({"batch": 12}, ["--batch: 12 rows", "8 data-parallel devices"]),
        ({"layers": 0}, ["--layers: 0 is too few"]),
    ],
)
def test_wrong_use_says_where_what_and_the_remedy(change, parts):
    with pytest.raises(ValueError, match=r".") as error:
        audit.audit(dataclasses.replace(SMALL, **change))
    for part in parts:
        assert part in str(error.value)


def test_a_mistake_is_one_line_and_exit_code_2():
    run = subprocess.run(
        [sys.executable, "-m", "scripts.audit", "--batch", "12"],
        cwd=ROOT,
        env={**os.environ, "XLA_FLAGS": ""},
        capture_output=True,
        text=True,
    )
    assert run.returncode == 2
    assert run.stderr.startswith("error: --batch: 12 rows")
    assert len(run.stderr.splitlines()) == 1
