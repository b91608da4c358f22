# SPDX-License-Identifier: Apache-2.0
"""The training script: what it learns, writes, prints and refuses."""

import dataclasses
import json
import math
import signal
import subprocess
import sys
import time
import types
from pathlib import Path

import jax
import numpy as np
import pytest
import tyro

from scripts.train import Log, Options, main

ROOT = Path(__file__).parents[1]
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
    before = (options.out / "metrics.jsonl").read_bytes()
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
    assert any(line.startswith("step     2/2  loss ") and "MFU n/a" in line for line in lines)
    for word in ("blocks/mlp/up/kernel", "bytes per device", "opt_state", "sample, from 17 tokens"):
        assert any(word in line for line in lines), word
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
        ({"batch": 12}, r"12 rows, not a multiple of 8 devices"),
        ({"devices": 9}, r"9 devices wanted, 8 available"),
        ({"steps": 0}, r"steps: 0 is too few; give 1 or more"),
        ({"eval_batches": 0}, r"eval_batches: 0 is too few; give 1 or more"),
        ({"warmup": 6}, r"warmup: 6 of 6 steps; give --warmup fewer"),
        ({"layers": 0}, r"num_layers: 0 is not positive"),
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
    assert done.stderr.startswith("error: data: no file or folder ")
    assert len(done.stderr.splitlines()) == 1
    assert not done.stdout


def test_ctrl_c_finishes_the_step_and_says_so(folder):
    out = folder / "interrupted"
    small = (
        f"--layers 1 --seq 16 --batch 8 --steps 100000 --eval-batches 1 --log-every 50 --out {out}"
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
    assert f"stopped early after {len(rows)} steps" in printed.splitlines()[-1]
    assert "bytes per device" in printed


class Device:
    device_kind = "NVIDIA H100 80GB HBM3"


def test_mfu_of_a_known_device(options, folder, monkeypatch, capsys):
    monkeypatch.setattr(jax, "devices", lambda: [Device])
    log = Log(dataclasses.replace(options, out=folder / "mfu", log_every=1), 989_000, 2)
    with log.files:
        log.row({"step": 1, "loss": 1.0, "weight": 1e9, "seconds": 1.0, "grad_norm": math.inf})
    printed = capsys.readouterr().out
    assert "9.89e+14 FLOP/s (NVIDIA's datasheet, dense bf16)" in printed
    assert "1000000.0k tokens/s  1000 ms" in printed
    assert "MFU 50.0%" in printed
    assert read_rows(folder / "mfu") == [
        {"step": 1, "loss": 1.0, "weight": 1e9, "seconds": 1.0, "grad_norm": None}
    ]
