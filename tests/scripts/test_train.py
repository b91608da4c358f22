# SPDX-License-Identifier: Apache-2.0
"""The training script: what it learns, writes, prints and refuses."""

import dataclasses
import doctest
import json
import math
import os
import shutil
import signal
import subprocess
import sys
import time
import types
from collections import deque
from pathlib import Path

import jax
import numpy as np
import pytest
import tyro

from models import transformer
from scripts.parts import log
from scripts.parts.files import Files
from scripts.parts.log import Screen, Summary, stop_on_signals, wrap
from scripts.parts.model import make_config
from scripts.train import Options, main
from tests import ROOT

TEXT = "".join(f"line {i} of the text is {'abc'[i % 3]} and {i * i % 97}\n" for i in range(400))


def read_rows(out: Path, name: str = "metrics.jsonl") -> list[dict]:
    """The rows of a log; `NaN` and `Infinity`, which are not JSON, fail."""

    def refuse(word):
        raise AssertionError(f"{word} is not JSON")

    lines = (out / name).read_text().splitlines()
    return [json.loads(line, parse_constant=refuse) for line in lines]


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("train")
    (folder / "text.txt").write_text(TEXT)
    return folder


@pytest.fixture(scope="module")
def options(folder) -> Options:
    return Options(
        layers=1,
        seq=16,
        batch=8,
        steps=6,
        lr=1e-2,
        data=(folder / "text.txt",),
        out=folder / "out",
        log_every=2,
        eval_every=4,
        eval_batches=2,
        sample=5,
    )


@pytest.fixture(scope="module")
def stage_3(options):
    """The run that most tests look at."""
    return main(options)


def test_stages_0_and_3_learn_the_same(options, stage_3, folder):
    stage_0 = main(dataclasses.replace(options, stage=0, out=folder / "stage0"))
    losses_0, losses_3 = (
        [row["loss"] for row in read_rows(out)] for out in (folder / "stage0", options.out)
    )
    np.testing.assert_allclose(losses_0, losses_3, rtol=1e-4)
    np.testing.assert_allclose(stage_0.val_loss, stage_3.val_loss, rtol=1e-4)
    assert losses_3[-1] < losses_3[0] - 1


def test_every_step_has_a_row_of_numbers(options, stage_3):
    rows = read_rows(options.out)
    assert [row["step"] for row in rows] == list(range(1, 7))
    assert [row["tokens"] for row in rows] == [8 * 16 * n for n in range(1, 7)]
    assert [row["step"] for row in rows if "val_loss" in row] == [4, 6]
    for row in rows:
        assert {"loss", "grad_norm", "weight", "lr", "seconds"} < set(row)
        assert all(isinstance(x, int | float) for x in row.values())
    rates = [row["lr"] for row in rows]
    assert max(rates) == rates[0] == pytest.approx(options.lr)
    assert rates == sorted(rates, reverse=True)
    saved = json.loads((options.out / "options.json").read_text())
    assert saved["data"] == [str(path) for path in options.data]
    assert saved["stage"] == 3


def test_the_summary(options, stage_3):
    rows = read_rows(options.out)
    assert stage_3.steps == 6
    assert stage_3.tokens == 6 * 8 * 16
    assert stage_3.loss == pytest.approx((rows[-1]["loss"] + rows[-2]["loss"]) / 2)
    assert stage_3.val_loss == rows[-1]["val_loss"]
    assert stage_3.tokens_per_second > 0
    assert (stage_3.skipped, stage_3.stopped_early) == (0, False)
    held_out = TEXT.encode()[-(round((len(TEXT) - 1) // 16 * 0.05) * 16 + 1) :].decode()
    assert stage_3.sample.startswith(held_out[:17])


def test_an_old_log_is_kept_and_the_output_is_plain(options, stage_3, capsys, monkeypatch):
    """A log without a save is of a run that cannot go on."""
    before = (options.out / "metrics.jsonl").read_bytes()
    shutil.rmtree(options.out / "checkpoints")
    board = types.SimpleNamespace(rows=[], closed=False)
    board.add_scalar = lambda *row: board.rows.append(row)
    board.close = lambda: setattr(board, "closed", True)
    module = types.SimpleNamespace(SummaryWriter=lambda folder: board)
    monkeypatch.setitem(sys.modules, "tensorboardX", module)
    main(dataclasses.replace(options, steps=2, microbatches=1, eval_every=0))

    assert (options.out / "metrics.1.jsonl").read_bytes() == before
    assert (options.out / "options.1.json").is_file()
    assert len(read_rows(options.out)) == 2
    assert ("loss", read_rows(options.out)[0]["loss"], 1) in board.rows
    assert board.closed

    printed = capsys.readouterr().out
    assert "metrics.jsonl of an earlier run is now " in printed
    assert "\x1b" not in printed
    assert "\r" not in printed
    lines = printed.splitlines()
    assert max(len(line) for line in lines if str(options.out) not in line) <= 100
    assert lines[0].startswith("tiny: 233,344 parameters; devices: 8 (cpu)")
    assert any(line.startswith("step     2/2  loss ") for line in lines)
    assert [line for line in lines if "MFU" in line] == [
        "MFU is not shown: no peak is known for cpu"
    ]
    for word in ("blocks/mlp/up/kernel", "bytes per device", "opt_state"):
        assert any(word in line for line in lines), word
    waits = ["compiling the step ...", "compiling the validation ..."]
    assert [line for line in lines if line.startswith("compiling")] == waits
    sample = lines.index("sample: 17 tokens held out, continued by 5")
    assert lines[sample + 1].startswith("prompt:    ")
    assert any(line.startswith("continues: ") for line in lines[sample + 2 :])
    assert lines[-1].startswith("done after 2 steps, 0 of them skipped: loss ")


def test_a_loss_that_is_not_finite_stops_the_run(options, folder):
    wild = dataclasses.replace(options, lr=1e30, out=folder / "wild")
    with pytest.raises(FloatingPointError) as error:
        main(wild)
    message = str(error.value)
    rows = read_rows(wild.out)
    assert message.startswith(f"step {len(rows)}: loss ")
    assert message.endswith("; try a lower --lr, --precision fp32 or --skip-nonfinite")
    assert len(rows) < 6
    assert rows[-1]["loss"] is None or rows[-1]["grad_norm"] is None


def test_updates_that_are_not_finite_can_be_skipped(options, folder):
    wild = dataclasses.replace(
        options, lr=1e30, skip_nonfinite=True, sample=0, eval_every=0, out=folder / "skip"
    )
    summary = main(wild)
    rows = read_rows(wild.out)
    assert summary.steps == len(rows) == 6
    assert summary.skipped == sum(row["skipped"] for row in rows) > 0


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            {"batch": 12},
            r"--batch: 12 rows, not a multiple of 8 data-parallel devices .* give --batch 8 or 16",
        ),
        ({"batch": 0}, r"--batch: 0 is too few; give 1 or more"),
        ({"microbatches": 0}, r"--microbatches: 0 is too few; give 1 or more"),
        ({"microbatches": 2}, r"8 data-parallel devices x 2 microbatches = 16; give --batch 16$"),
        ({"devices": 0}, r"--devices: 0 is too few; give 1 or more"),
        ({"devices": 9}, r"--devices: 9 wanted, 8 here \(cpu\); .* only before JAX starts"),
        ({"devices": 3, "batch": 6}, r"max_unsharded.* try --devices 1, 2, 4 or 8"),
        ({"steps": 0}, r"--steps: 0 is too few; give 1 or more"),
        ({"eval_batches": 0}, r"--eval-batches: 0 is too few; give 1 or more"),
        ({"warmup": 6}, r"--warmup: 6 of 6 steps; give fewer"),
        ({"layers": 0}, r"--layers: 0 is too few; give 1 or more"),
        ({"vocab": 100}, r"token id 120 is not below the vocabulary of 100; give --vocab 121"),
        ({"seq": 9000}, r"tokens are too few .*; give more --data or a smaller --seq"),
        ({"eval_batches": 99}, r"validation split has .* 99 x 8 are needed; .* --eval-batches"),
    ],
)
def test_what_it_refuses_before_it_touches_the_old_log(options, folder, change, message):
    out = folder / "refused"
    with pytest.raises(ValueError, match=message):
        main(dataclasses.replace(options, out=out, **change))
    assert not out.exists()


def test_a_folder_that_cannot_be_written_is_refused_before_compiling(options, folder, capsys):
    with pytest.raises(
        OSError, match=r"--out: cannot write to .*text.txt/out \(Not a directory\);"
    ):
        main(dataclasses.replace(options, out=folder / "text.txt" / "out"))
    assert not capsys.readouterr().out


def test_remat_and_prefetch_are_the_presets_unless_given(options):
    preset = transformer.PRESETS["tiny"]
    config = make_config(options, 256)
    assert (config.remat, config.prefetch) == (preset.remat, preset.prefetch)
    config = make_config(dataclasses.replace(options, remat="full", prefetch=2), 256)
    assert (config.remat, config.prefetch) == ("full", 2)


def test_an_unknown_option_is_named(capsys):
    with pytest.raises(SystemExit) as stop:
        tyro.cli(Options, args=["--learning-rate", "1"])
    assert stop.value.code == 2
    assert "--learning-rate" in capsys.readouterr().err


def command(*arguments: str) -> list[str]:
    return [sys.executable, "-W", "error", "-m", "scripts.train", *arguments]


def test_a_mistake_is_one_line_and_exit_code_2(folder):
    done = subprocess.run(
        command("--data", str(folder / "nothing")), cwd=ROOT, capture_output=True, text=True
    )
    assert done.returncode == 2
    assert done.stderr.startswith("error: --data: no file or folder ")
    assert len(done.stderr.splitlines()) == 1
    assert not done.stdout


def test_ctrl_c_finishes_the_step_and_says_so(folder):
    out = folder / "interrupted"
    small = (
        f"--layers 1 --seq 16 --batch 8 --steps 100000 --eval-every 0 --eval-batches 1 --out {out}"
    )
    arguments = [*small.split(), "--data", str(folder / "text.txt")]
    process = subprocess.Popen(command(*arguments), cwd=ROOT, stdout=subprocess.PIPE, text=True)
    try:
        for _ in range(600):
            if (out / "metrics.jsonl").exists() and len(read_rows(out)) > 3:
                break
            time.sleep(0.1)
        process.send_signal(signal.SIGINT)
        printed, _ = process.communicate(timeout=60)
    finally:
        process.kill()
    assert process.returncode == 130
    rows = read_rows(out)
    *_, last, saved = printed.splitlines()
    assert last.startswith(f"stopped early after {len(rows)} steps, 0 of them skipped: loss ")
    assert "validation" not in last
    assert saved == f"saved in {out}/checkpoints; the same command goes on from there"
    assert (out / "checkpoints" / str(len(rows))).is_dir()
    assert "saving after this step, then stopping; press Ctrl-C again to quit at once" in printed
    assert "bytes per device" in printed


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_second_signal_meets_the_default_handler(number):
    said, before = [], signal.getsignal(number)
    with stop_on_signals(said.append) as stop:
        assert not stop.is_set()
        os.kill(os.getpid(), number)
        assert stop.wait(timeout=10)
        assert signal.getsignal(signal.SIGINT) is signal.SIG_DFL
        assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
    assert said == [number] == [stop.number]
    assert signal.getsignal(number) is before


def test_the_last_line_says_no_more_than_there_is():
    summary = Summary(deque(), steps=1, loss=2.0, stopped_early=True)
    assert (
        str(summary) == "stopped early after 1 step, 0 of them skipped: loss 2.000 nats per token"
    )
    summary = Summary(deque(), steps=2, loss=2.0, val_loss=1.5)
    assert str(summary).endswith(
        "2 steps, 0 of them skipped: loss 2.000, validation 1.500 nats per token"
    )


def test_a_sample_is_wrapped_and_cannot_steer_the_terminal():
    long = " ".join(["word"] * 40)
    lines = wrap("prompt: ", f"if x:\n    y\x1b[2J\r\n\n{long}").splitlines()
    assert lines[:3] == ["prompt: if x:", "            y\N{REPLACEMENT CHARACTER}[2J", ""]
    assert all(line.startswith("        word") and len(line) <= 100 for line in lines[3:])
    assert len(lines) == 6
    assert wrap("prompt: ", "") == "prompt:"


class Device:
    device_kind = "NVIDIA H100 80GB HBM3"


def test_mfu_of_a_known_device(folder, monkeypatch, capsys):
    monkeypatch.setattr(jax, "devices", lambda: [Device])
    screen = Screen(steps=1, log_every=1, flops_per_token=989_000, num_devices=2)
    summary = Summary(deque(maxlen=1))
    row = {"step": 1, "loss": 1.0, "weight": 1e9, "tokens": 10**9, "seconds": 1.0}
    screen.legend()
    summary.add(row)
    screen.row(row, summary)
    printed = capsys.readouterr().out
    assert "9.89e+14 FLOP/s (NVIDIA's datasheet, dense bf16)" in printed
    assert "1000000.0k tokens/s  1000 ms" in printed
    assert "MFU 50.0%" in printed


def test_what_is_not_finite_is_null_in_the_file(folder):
    with Files(folder / "files", {"stage": 3}, print) as files:
        assert not list((folder / "files").iterdir())
        files.row({"step": 1, "loss": 1.0, "grad_norm": math.inf})
    assert read_rows(folder / "files") == [{"step": 1, "loss": 1.0, "grad_norm": None}]


def test_on_a_terminal_a_bar_shows_the_steps(monkeypatch, capsys):
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    monkeypatch.setenv("COLUMNS", "100")
    screen = Screen(steps=9, log_every=1, flops_per_token=1, num_devices=1)
    summary = Summary(deque(maxlen=1))
    row = {"step": 1, "loss": 1.0, "weight": 1.0, "tokens": 1, "seconds": 1.0}
    with screen:
        screen.wait("compiling the step ...")
        summary.add(row)
        screen.row(row, summary)
    printed = capsys.readouterr().out
    assert "compiling the step ..." in printed
    assert "step     1/9" not in printed
    assert "1/9" in printed


def test_the_docstring_example_of_the_log():
    assert doctest.testmod(log).attempted == 1
    assert doctest.testmod(log).failed == 0
