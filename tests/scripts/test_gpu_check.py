# SPDX-License-Identifier: Apache-2.0
"""The check for a GPU: a dry run on the CPU, its clock, its errors; that its checks can fail."""

from __future__ import annotations

import functools
import json
import os
import signal
import subprocess
import sys

import jax
import numpy as np
import pytest

from scripts import gpu_check
from scripts.parts import gpu_parts
from scripts.parts.gpu_parts import Job
from tests import ROOT


def run(*arguments: str, **environment: str):
    command = [sys.executable, "-m", "scripts.gpu_check", *arguments]
    return subprocess.run(
        command, cwd=ROOT, env=os.environ | environment, capture_output=True, text=True
    )


def test_a_dry_run_does_every_part_and_measures_nothing(tmp_path):
    done = run("--dry-run", "--out", str(tmp_path))
    assert (done.returncode, done.stderr) == (0, "")
    lines = done.stdout.splitlines()
    assert max(map(len, lines)) <= 100
    assert [line[10:25].strip() for line in lines if line.startswith("ok")] == list(gpu_parts.PARTS)
    row = next(line for line in lines if line.startswith("llama2-7b, 2 layers"))  # 3 do not fit
    assert row.split()[-3:] == ["-", "-", "-"]
    assert "failed: nothing; left out: nothing; all figures:" in done.stdout
    found = json.loads((tmp_path / "results.json").read_text())
    assert found["exit_code"] == 0
    sizes = [x for x in found["parts"] if x["part"] in gpu_parts.SIZES]
    assert all(x["formula_bytes"] and x["compiled_bytes"] and x["loss"] > 0 for x in sizes)
    assert all(x["measured_bytes"] is None and "measured_seconds" not in x for x in sizes)
    receipts = {path.name for path in tmp_path.glob("receipt-*.txt")}
    assert receipts == {f"receipt-{name}.txt" for name in ("small", *gpu_parts.SIZES)}


def test_what_does_not_fit_into_the_time_is_left_out_and_named(tmp_path, capsys):
    assert gpu_check.too_late("receipt", deadline=130, now=100) is None
    assert gpu_check.too_late("receipt", deadline=130, now=103.4) == (
        "27 s were left of the time, and it may take 30"
    )
    assert gpu_check.main(["--dry-run", "--minutes", "0.1", "--out", str(tmp_path)]) == 0
    printed = capsys.readouterr().out
    assert "left out: device, donation, bf16 step, cuDNN attention, skip_nonfinite," in printed
    assert max(map(len, printed.splitlines())) <= 100
    parts = json.loads((tmp_path / "results.json").read_text())["parts"]
    assert all("s were left of the time" in x["left_out"] for x in parts)
    gpu_check.run_parts(Job(tmp_path, True, None), ["receipt"], deadline=0)
    assert "left_out" in json.loads(capsys.readouterr().out)


def test_a_part_that_hangs_ends_its_process(tmp_path):
    program = "import time; from scripts import gpu_check as g; g.LONGEST = 1\n"
    program += "g.PARTS['receipt'] = lambda job, figures: time.sleep(60)\n"
    program += "g.run_parts(None, ['receipt'], time.time() + 100)"
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT)
    assert done.returncode == -signal.SIGALRM


def test_after_a_part_that_ends_the_process_the_others_run(tmp_path, monkeypatch):
    fake = tmp_path / "python"
    fake.write_text(
        """#!/bin/sh
        while [ "$1" != --parts ]; do shift; done
        case "$2" in
        donation) echo noise; echo '{"part": "donation", "passed": true}'; kill -ALRM $$ ;;
        cuDNN*) kill -KILL $$ ;;
        *) echo '{"part": "receipt", "passed": true}' ;;
        esac\n"""
    )
    fake.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(fake))
    options = gpu_check.read_options(["--dry-run", "--out", str(tmp_path)])
    found = []
    names = ["donation", "bf16 step", "cuDNN attention", "receipt"]
    gpu_check.run_group(options, names, 1e12, found.append)
    assert [x["part"] for x in found] == names
    assert found[1]["left_out"] == "it was stopped, as it took too long"
    assert found[2]["what"] == f"the process ended with -9; see {tmp_path / 'log.txt'}"
    assert [x.get("passed") for x in found] == [True, None, False, True]


def test_without_a_gpu_it_says_so(tmp_path):
    done = run("--out", str(tmp_path / "none"), JAX_PLATFORMS="cpu")
    assert done.returncode == 2
    assert done.stderr == f"error: no NVIDIA GPU here; {gpu_check.REMEDY}\n"
    assert not (tmp_path / "none").exists()
    done = run("--out", str(tmp_path), JAX_PLATFORMS="cpu,cpu")  # only JAX itself can tell
    assert done.returncode == 2
    assert done.stderr.startswith("error: ValueError: JAX sees no NVIDIA GPU here, only 'cpu'; ")
    assert done.stdout.startswith("FAILED    device")
    assert "donation" not in done.stdout
    with pytest.raises(ValueError, match=r"JAX sees no NVIDIA GPU here, only 'cpu'; .*--dry-run"):
        gpu_parts.device(Job(tmp_path, False, None), {})
    done = run("--minutes", "0")
    assert done.returncode == 2
    assert done.stderr.endswith("error: --minutes: 0.0 is no time; give more than 0\n")


def test_the_checks_can_fail(tmp_path, monkeypatch, capsys):
    assert not gpu_parts.judge_donation(False, 100, None)["passed"]
    assert not gpu_parts.judge_donation(True, 100, 201)["passed"]
    assert gpu_parts.judge_donation(True, 100, 140)["passed"]

    real = jax.nn.dot_product_attention

    def other(*args, is_causal, implementation):
        return real(*args, is_causal=implementation == "xla")

    monkeypatch.setattr(jax.nn, "dot_product_attention", other)
    job, figures = Job(tmp_path, True, None), {}
    gpu_parts.cudnn_attention(job, figures)
    assert not figures["passed"]

    monkeypatch.setattr(gpu_parts, "raw", lambda state: [np.random.bytes(8)])
    gpu_parts.skip_nonfinite(job, figures)
    assert not figures["passed"]


def test_a_failed_check_is_exit_code_1(tmp_path, monkeypatch, capsys):
    def fail(options, names, deadline, record):
        for name in names:
            record({"part": name, "passed": name != "receipt", "what": "x " * 200})

    monkeypatch.setattr(gpu_check, "run_group", fail)
    assert gpu_check.main(["--dry-run", "--out", str(tmp_path)]) == 1
    printed = capsys.readouterr().out
    assert "failed: receipt; left out: nothing" in printed
    assert max(map(len, printed.splitlines())) <= 100
    assert json.loads((tmp_path / "results.json").read_text())["exit_code"] == 1


def test_the_summary_of_measured_figures(tmp_path, capsys):
    report = gpu_check.Report(tmp_path)
    size = {"part": "llama2-7b", "size": "llama2-7b, 10 layers", "rows": 2, "tokens": 4096}
    size |= {"formula_bytes": 40e9, "compiled_bytes": 38e9, "init_peak_bytes": 30_000_000_000}
    size |= {"measured_bytes": 39e9, "predicted_seconds": 0.25, "measured_seconds": 0.2}
    report.add({**size, "mfu": 0.4321, "passed": True, "what": "0 findings, 0 unread"})
    report.add({**size, "init_peak_bytes": 39e9, "passed": True, "what": ""})
    printed = capsys.readouterr().out + report.summary()
    assert max(map(len, printed.splitlines())) <= 100
    assert "peak 40.0 GB formula, 38.0 GB compiled, 39.0 GB measured; step 250.0 ms" in printed
    first, second, *_ = [x.split("  ") for x in printed.splitlines() if x.startswith("llama2-7b,")]
    assert [x.strip() for x in first if x][-3:] == ["39.0 GB", "0.975", "1.026"]
    assert "<= 39.0 GB" in [x.strip() for x in second]  # the initialisation held as much
    assert "250.0 ms  200.0 ms                 0.800  43.2%" in printed


def test_layers_are_cut_to_the_room():
    config = gpu_parts.tiny(gpu_parts.transformer.PRESETS["llama2-7b"], num_layers=9)
    fit = functools.partial(gpu_parts.fit_layers, config, 2)
    assert (fit(0), fit(1e9)) == (1, 9)
    assert fit(6e5) == 2
