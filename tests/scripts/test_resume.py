# SPDX-License-Identifier: Apache-2.0
"""The same command goes on: same losses, same data, whatever stopped the run."""

from __future__ import annotations

import dataclasses
import json
import os
import random
import signal
import subprocess
import time
from collections import deque

import numpy as np
import pytest

import zerojax as zj
from scripts.parts.files import Files
from scripts.parts.log import Summary
from scripts.parts.loop import Progress
from scripts.parts.text import Windows, make_batches
from scripts.parts.weights import write_safetensors
from scripts.train import Options, main
from tests import ROOT, cache
from tests.hardware.test_hosts import children, finish, flags, launched
from tests.scripts.test_train import TEXT, command, read_rows
from zerojax.checkpoint import folder as saves

NUMBERS = ("loss", "grad_norm", "weight", "lr", "tokens", "val_loss", "skipped")


def numbers(out):
    """The rows without what a clock said."""
    return [{name: row[name] for name in NUMBERS if name in row} for row in read_rows(out)]


@pytest.fixture(scope="module")
def options(tmp_path_factory):
    folder = tmp_path_factory.mktemp("resume")
    (folder / "text.txt").write_text(TEXT)
    return Options(
        layers=1,
        seq=16,
        batch=8,
        steps=10,
        lr=1e-2,
        dropout=0.2,
        data=(folder / "text.txt",),
        out=folder / "whole",
        log_every=2,
        eval_every=4,
        eval_batches=2,
        save_every=3,
        sample=0,
    )


@pytest.fixture(scope="module")
def whole(options):
    """The rows of the run that nothing stopped."""
    summary = main(options)
    return numbers(options.out), summary


def stop_at(monkeypatch, step, number=signal.SIGTERM):
    """Sends this process a signal when the row of that step is written."""
    row_of = Files.row

    def row(self, row):
        row_of(self, row)
        if row["step"] == step:
            os.kill(os.getpid(), number)

    monkeypatch.setattr(Files, "row", row)


def test_stopped_twice_is_as_never_stopped(options, whole, monkeypatch, capsys):
    here = dataclasses.replace(options, out=options.out.parent / "stopped")
    for step in (2, 7):
        with monkeypatch.context() as patch:
            stop_at(patch, step)
            summary = main(here)
        assert summary.stopped_early
        assert summary.signal == signal.SIGTERM
        assert "the same command goes on from there" in capsys.readouterr().out
    rows = read_rows(here.out)
    (here.out / "metrics.jsonl").write_text(
        "".join(f"{json.dumps(row)}\n" for row in [*rows, {**rows[-1], "step": 99}]) + '{"step": 1'
    )  # rows of steps that are made again, and half a line
    summary = main(here)
    assert numbers(here.out) == whole[0]
    assert [row["step"] for row in read_rows(here.out)] == list(range(1, 11))
    assert (summary.steps, summary.tokens) == (10, whole[1].tokens)
    assert summary.val_loss == whole[1].val_loss
    assert "going on after step " in capsys.readouterr().out
    assert not list(here.out.glob("*.1.*"))  # one run, one log


def test_a_run_that_forgets_its_data_is_noticed(options, whole, monkeypatch):
    """The same with a reader that begins anew: the losses are others."""
    here = dataclasses.replace(options, out=options.out.parent / "forgets")
    with monkeypatch.context() as patch:
        stop_at(patch, 2)
        main(here)
    restore = zj.Checkpointer.restore

    def forget(self, *, data):
        place = data.batches.get_state()
        state = restore(self, data=data)
        data.batches.set_state(place)
        return state

    monkeypatch.setattr(zj.Checkpointer, "restore", forget)
    main(here)
    assert numbers(here.out) != whole[0]
    assert numbers(here.out)[:2] == whole[0][:2]


def test_batches_of_another_size_go_on_at_the_same_row():
    windows = Windows(np.arange(1000), 8, "training")

    def begin(rows):
        batches = make_batches(windows, rows)
        return batches, Progress(batches, Summary(recent=deque()), rows)

    before, progress = begin(8)
    for _ in range(4):
        next(before)
    saved = progress.get_state()
    following = [next(before)["tokens"] for _ in range(2)]
    for rows in (4, 8, 16):
        after, progress = begin(rows)
        progress.set_state(saved)
        found = [next(after)["tokens"] for _ in range(16 // rows)]
        np.testing.assert_array_equal(np.concatenate(found), np.concatenate(following))


def test_half_a_file_of_options_stops_no_run(options, whole, monkeypatch):
    """What a kill leaves, or a full disk."""
    here = dataclasses.replace(options, out=options.out.parent / "half")
    with monkeypatch.context() as patch:
        stop_at(patch, 2)
        main(here)
    (here.out / "options.json").write_text('{"model": "ti')
    main(here)
    assert numbers(here.out) == whole[0]
    assert json.loads((here.out / "options.json").read_text())["steps"] == 10


def test_sigterm_while_the_last_save_is_written(options, whole, monkeypatch):
    """It is completed, and no sample drawn."""
    here = dataclasses.replace(options, sample=20, out=options.out.parent / "last")
    seal = saves.finalize

    def signalled(folder, manifest):
        if manifest["step"] == 10:
            time.sleep(0.5)
            os.kill(os.getpid(), signal.SIGTERM)
            time.sleep(0.5)
        seal(folder, manifest)

    monkeypatch.setattr(saves, "finalize", signalled)
    summary = main(here)
    assert (summary.signal, summary.steps, summary.stopped_early) == (signal.SIGTERM, 10, False)
    assert not summary.sample
    assert numbers(here.out) == whole[0]
    assert saves.find_saves(here.out / "checkpoints")[0].step == 10


@pytest.mark.parametrize(
    "changes", [{"devices": 4, "stage": 1}, {"stage": 0, "partitioner": "auto"}], ids=str
)
def test_on_other_devices_it_is_the_same_to_rounding(options, whole, monkeypatch, capsys, changes):
    """Without dropout, whose draws are each device's own."""
    plain = dataclasses.replace(options, dropout=0.0)
    reference = dataclasses.replace(plain, out=options.out.parent / "plain")
    if not (reference.out / "metrics.jsonl").exists():
        main(reference)
    here = dataclasses.replace(plain, out=options.out.parent / f"moved-{changes['stage']}")
    with monkeypatch.context() as patch:
        stop_at(patch, 4)
        main(here)
    main(dataclasses.replace(here, **changes))
    for name in ("loss", "grad_norm"):
        found, expected = ([row[name] for row in numbers(x.out)] for x in (here, reference))
        np.testing.assert_allclose(found, expected, rtol=2e-5)
    lr = [[row["lr"] for row in numbers(x.out)] for x in (here, reference)]
    assert lr[0] == lr[1]
    said = capsys.readouterr().out
    assert f"going on with other options than before: --stage 3 -> {changes['stage']}" in said
    assert "the learning rate goes on from" not in said
    assert (here.out / "options.1.json").exists()


def test_a_finished_run_says_so_and_can_be_made_longer(options, whole, capsys):
    summary = main(options)
    said = capsys.readouterr().out
    assert "going on after step 10, from " in said
    assert "all its steps are made; for more give --steps, for a new run another --out" in said
    assert (summary.steps, summary.val_loss) == (10, whole[1].val_loss)
    assert numbers(options.out) == whole[0]
    message = r"--steps: 9, but the run in .*whole has made 10; give more, or another --out"
    with pytest.raises(ValueError, match=message):
        main(dataclasses.replace(options, steps=9))


def test_weights_to_begin_from_come_too_late_for_a_run_that_goes_on(options, whole, tmp_path):
    """The same command goes on, also one that begins from a file; another file is refused."""
    rng = np.random.default_rng(0)
    params = zj.restore_params(options.out / "checkpoints")
    first, other = tmp_path / "first.safetensors", tmp_path / "other.safetensors"
    for path in (first, other):
        write_safetensors(path, {k: x + rng.normal() / 100 for k, x in params.items()})
    here = dataclasses.replace(options, init_from=first, out=tmp_path / "run", steps=4)
    main(here)
    main(here)
    for path in (here.out, options.out):
        late = dataclasses.replace(options, init_from=other, out=path)
        with pytest.raises(
            ValueError, match=r"--init-from: the run in .* did not begin from .*other"
        ):
            main(late)


def test_kept_are_the_latest_and_the_best(options, whole):
    kept = saves.find_saves(options.out / "checkpoints")
    losses = {save.step: save.manifest()["metrics"].get("val_loss") for save in kept}
    assert [save.step for save in kept[:2]] == [10, 9]
    assert losses[10] == whole[1].val_loss


def test_another_model_is_refused(options, whole):
    with pytest.raises(ValueError, match=r"is of another model: .* 'blocks/.*Plan the model that"):
        main(dataclasses.replace(options, layers=2))
    assert numbers(options.out) == whole[0]


def test_a_damaged_save_is_said_and_the_one_before_used(options, whole, monkeypatch, capsys):
    here = dataclasses.replace(options, out=options.out.parent / "damaged")
    with monkeypatch.context() as patch:
        stop_at(patch, 7)
        main(here)
    newest = saves.find_saves(here.out / "checkpoints")[0]
    file = next((newest.path / "params" / "d").iterdir())
    file.write_bytes(file.read_bytes()[:-1])
    capsys.readouterr()
    main(here)
    said = capsys.readouterr().out
    assert f"{file} (" in said
    assert f"does not match its SHA-256 sum (the save is now {newest.step}.damaged)" in said
    assert "using the save of step 6 in its place" in said
    assert "going on after step 6, from " in said
    assert numbers(here.out) == whole[0]


def test_skipped_updates_stay_counted(options, monkeypatch):
    """A skip takes no learning rate, before and after the run was stopped."""
    wild = dataclasses.replace(
        options, lr=1e30, skip_nonfinite=True, eval_every=0, out=options.out.parent / "wild"
    )
    reference = main(wild)
    assert reference.skipped > 2
    here = dataclasses.replace(wild, out=options.out.parent / "wild-stopped")
    with monkeypatch.context() as patch:
        stop_at(patch, 7)
        main(here)
    assert main(here).skipped == reference.skipped
    same = [{name: repr(x) for name, x in row.items()} for row in numbers(wild.out)]
    assert [{name: repr(x) for name, x in row.items()} for row in numbers(here.out)] == same


def read_rows_so_far(out):
    """The rows that are complete, of a run that goes on."""
    path = out / "metrics.jsonl"
    lines = path.read_text().splitlines() if path.exists() else []
    return [json.loads(line) for line in lines if line.endswith("}")]


class Run:
    """`scripts.train` as a process that makes steps until it is stopped."""

    def __init__(self, options, out, **environment):
        small = "--layers 1 --seq 16 --batch 8 --devices 2 --steps 100000 --eval-every 50"
        more = f"--eval-batches 1 --save-every 1 --sample 0 --dropout 0.1 --out {out}"
        data = ["--data", str(options.data[0])]
        self.out = out
        self.environment = {**os.environ, **environment}
        self.arguments = command(*small.split(), *more.split(), *data)

    def rows(self):
        return read_rows_so_far(self.out)

    def start(self):
        self.process = subprocess.Popen(
            self.arguments,
            cwd=ROOT,
            env=self.environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )

    def wait_for_rows(self, more):
        """Until so many rows were written after those that are there."""
        target = len(self.rows()) + more
        for _ in range(2400):
            if self.process.poll() is not None or len(self.rows()) >= target:
                break
            time.sleep(0.05)
        assert self.process.poll() is None, self.process.communicate()[0]
        assert len(self.rows()) >= target

    def end(self, number):
        self.process.send_signal(number)
        said, _ = self.process.communicate(timeout=60)
        return said


def check_after_kill(run):
    """Every save that is there is whole, and the newest is at most two intervals behind."""
    found = saves.find_saves(run.out / "checkpoints")
    assert [saves.find_damage(save, ("params", "optimizer")) for save in found] == [None] * len(
        found
    )
    assert [save.manifest()["step"] for save in found] == [save.step for save in found]
    assert run.rows()[-1]["step"] - found[0].step <= 2
    return found[0].step


def kill_and_compare(options, folder, kills):
    """Kill a run at random moments; its rows are in the end those of a run never killed."""
    chance = random.Random(kills)
    killed = Run(options, folder / "killed", **cache.READ_ONLY)
    newest = 0
    for number in range(kills):
        killed.start()
        if number % 5 == 3:  # while it starts, compiles or restores
            time.sleep(chance.uniform(0, 6))
        else:  # while it steps and saves
            killed.wait_for_rows(1 if number else 9)
            time.sleep(chance.uniform(0, 1))
        killed.end(signal.SIGKILL)
        before, newest = newest, check_after_kill(killed)
        assert newest >= before
    killed.start()
    killed.wait_for_rows(3)
    said = killed.end(signal.SIGTERM)
    assert killed.process.returncode == 0, said
    assert "damaged" not in said

    reference = Run(options, folder / "reference")
    reference.start()
    reference.wait_for_rows(len(killed.rows()))
    reference.end(signal.SIGTERM)
    found, expected = numbers(killed.out), numbers(reference.out)
    assert found == expected[: len(found)]
    assert len(found) > 2 * kills  # the kills did not keep it from going on


def test_sigterm_saves_and_exits_with_0(options, tmp_path):
    """Within a step and a save; this step takes milliseconds, the compile before it seconds."""
    run = Run(options, tmp_path / "run")
    run.start()
    run.wait_for_rows(3)
    begun = time.monotonic()
    said = run.end(signal.SIGTERM)
    assert time.monotonic() - begun < 15
    assert run.process.returncode == 0, said
    assert "saving after this step, then stopping; SIGTERM received" in said
    newest = saves.find_saves(run.out / "checkpoints")[0]
    assert newest.step == run.rows()[-1]["step"]


def test_killed_at_random_moments(options, tmp_path):
    kill_and_compare(options, tmp_path, kills=2)


@pytest.mark.full
def test_killed_at_50_random_moments(options, tmp_path):
    kill_and_compare(options, tmp_path, kills=50)


def test_one_of_two_processes_is_killed_and_the_run_goes_on(options):
    """First by the same command, then by one process with as many devices: one run."""
    folder = options.out.parent
    plain = dataclasses.replace(options, dropout=0.0, steps=100_000, eval_every=0, save_every=1)
    one = dataclasses.replace(plain, out=folder / "one-process")
    two = dataclasses.replace(plain, out=folder / "two-processes")

    def wait_for_rows(process, number):
        for _ in range(1200):
            if process.poll() is not None or len(read_rows_so_far(two.out)) >= number:
                break
            time.sleep(0.05)
        assert process.poll() is None, process.communicate()[1]

    process = launched("-m", "scripts.train", *flags(two))
    wait_for_rows(process, 4)
    os.kill(children(process)[-1], signal.SIGKILL)
    begun = time.monotonic()
    code, _, errors = finish(process, within=60)
    assert time.monotonic() - begun < 60
    assert code == 137
    assert "process 1 was killed by SIGKILL; all were stopped" in errors

    before = saves.find_saves(two.out / "checkpoints")[0].step
    process = launched("-m", "scripts.train", *flags(two))
    wait_for_rows(process, len(read_rows_so_far(two.out)) + 3)
    process.send_signal(signal.SIGTERM)
    code, said, errors = finish(process, within=60)
    assert code == 0, errors
    assert f"going on after step {before}, from " in said
    stopped = saves.find_saves(two.out / "checkpoints")[0].step
    assert stopped == read_rows(two.out)[-1]["step"] > before

    with pytest.MonkeyPatch.context() as patch:
        stop_at(patch, stopped + 3)
        main(two)  # this one process
        main(one)
    assert read_rows(two.out)[-1]["step"] > stopped
    pairs = zip(numbers(two.out), numbers(one.out), strict=False)
    for found, expected in pairs:
        for name in ("loss", "grad_norm", "lr"):
            assert found[name] == pytest.approx(expected[name], rel=1e-4), name
