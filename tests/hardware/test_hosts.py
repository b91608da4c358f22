# SPDX-License-Identifier: Apache-2.0
"""Several processes: the numbers of one, and no process left waiting for another that is gone."""

from __future__ import annotations

import dataclasses
import json
import os
import signal
import socket
import subprocess
import sys
import time

import jax
import numpy as np
import pytest

import zerojax as zj
from scripts import launch
from scripts.parts.log import wrap
from scripts.train import Options, main
from tests import ROOT, toy
from tests.hardware import hosts_program
from zerojax.hardware import hosts

PYTHON = [sys.executable, "-W", "error"]
PROGRAM = "tests.hardware.hosts_program"


def launched(*command, grace=1, num_processes=2):
    """The processes of a launcher, with its output to read."""
    options = ["-n", str(num_processes), "--devices-per-process", "4", "--grace", str(grace)]
    return subprocess.Popen(
        [*PYTHON, "-m", "scripts.launch", *options, "--", *map(str, command)],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def children(process):
    """The numbers of a launcher's processes."""
    lines = subprocess.check_output(["ps", "-A", "-o", "ppid=,pid="], text=True).splitlines()
    pairs = [line.split() for line in lines]
    return sorted(int(child) for parent, child in pairs if int(parent) == process.pid)


def finish(process, within):
    """Exit code, output and errors; whatever still runs after so many seconds fails the test."""
    try:
        printed, errors = process.communicate(timeout=within)
    except subprocess.TimeoutExpired:
        for number in [*children(process), process.pid]:
            os.kill(number, signal.SIGKILL)
        raise
    return process.returncode, printed, errors


def free_port():
    with socket.create_server(("127.0.0.1", 0)) as server:
        return server.getsockname()[1]


def by_hand(index, what, port, **more):
    """One process of two, without the launcher."""
    given = launch.environment(launch.Options(), port, index)
    return subprocess.Popen(
        [*PYTHON, "-m", PROGRAM, what],
        cwd=ROOT,
        env={**given, **more},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


@pytest.fixture(scope="module")
def two(tmp_path_factory):
    """What each of 2 processes of 4 devices found."""
    out = tmp_path_factory.mktemp("hosts") / "found"
    code, _, errors = finish(launched("-m", PROGRAM, "train", out), within=240)
    assert code == 0, errors
    return [np.load(f"{out}.{index}.npz") for index in (0, 1)]


def test_processes_and_devices_are_joined(two):
    for found in two:
        assert list(found["devices"]) == [8, 4]
        assert found["again"] == "none"


def test_rows_of_each_process_land_where_they_should(two):
    rows = np.arange(48).reshape(16, 3)
    for index, found in enumerate(two):
        np.testing.assert_array_equal(found["rows"], rows)
        np.testing.assert_array_equal(found["rows_here"], np.split(rows, 2)[index])
        np.testing.assert_array_equal(found["swapped"], np.roll(rows, 8, axis=0))


@pytest.mark.parametrize(("stage", "partitioner"), hosts_program.CASES)
def test_two_processes_compute_what_one_does(two, stage, partitioner):
    """To rounding: the addends of a sum come in another order. Other rows are noticed."""
    values = dict(zip(hosts_program.NAMES, hosts_program.results(stage, partitioner), strict=True))
    wrong = values.pop("wrong")
    for found in two:
        for name, one in values.items():
            several = found[f"{name}_{stage}_{partitioner}"]
            np.testing.assert_allclose(several, one, rtol=1e-5, atol=1e-6, err_msg=name)
            np.testing.assert_array_equal(several, two[0][f"{name}_{stage}_{partitioner}"])
        assert abs(found[f"wrong_{stage}_{partitioner}"] - wrong) > 1e-3


def test_devices_that_leave_a_process_out_are_refused(two):
    for found in two:
        assert "unequal numbers of them: {0: 4} of 2 processes. Use all" in str(found["fewer"])
        assert "unequal numbers of them: {0: 4, 1: 1} of 2" in str(found["unequal"])
        assert "this process already joined as ('127.0.0.1:" in str(found["as_another"])


@pytest.mark.parametrize("killed", [1, pytest.param(0, marks=pytest.mark.full)])
def test_a_process_that_is_killed_ends_the_others_without_a_launcher(killed):
    """After the heartbeat's timeout, 3 s here, or at once."""
    assert hosts.HEARTBEAT_S <= 30
    port = free_port()
    processes = [by_hand(index, "wait", port) for index in (0, 1)]
    assert "running\n" in processes[killed].stdout  # reads until there
    processes[killed].kill()
    code, _, errors = finish(processes[1 - killed], within=30)
    finish(processes[killed], within=10)
    assert code != 0
    assert "Terminating process" in errors or "Gloo" in errors


@pytest.mark.parametrize("what", ["raise", "idle"])
def test_the_error_of_one_process_stops_all_and_is_shown_last(what):
    """Of "idle", process 1 waits for process 0 and is killed: nobody else would notice."""
    process = launched("-m", PROGRAM, what)
    if what == "idle":
        assert "[1] running\n" in process.stdout  # reads until there
        os.kill(children(process)[-1], signal.SIGKILL)
    start = time.monotonic()
    code, _, errors = finish(process, within=60)
    assert time.monotonic() - start < 30
    last = errors[errors.rindex("\nprocess 1 ") :].splitlines()
    if what == "idle":
        assert (code, last[1]) == (137, "process 1 was killed by SIGKILL; all were stopped")
    else:
        assert (code, last[1]) == (1, "process 1 exited with 1; all were stopped")
        assert last[-1] == "  RuntimeError: the mistake of one process"


def read_rows(out):
    return [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]


def flags(options):
    """The command line of options that are not the defaults."""
    for field in dataclasses.fields(options):
        value = getattr(options, field.name)
        if value != field.default:
            name = "--" + field.name.replace("_", "-")
            yield from (name, *map(str, value if isinstance(value, tuple) else (value,)))


@pytest.fixture
def options(tmp_path):
    text = tmp_path / "text.txt"
    text.write_text("".join(f"line {i} of {i * i % 97}\n" for i in range(400)))
    return Options(layers=1, seq=16, eval_batches=1, data=(text,), out=tmp_path / "several")


def test_one_interrupted_process_stops_all_at_one_step(options):
    options = dataclasses.replace(options, steps=9000, eval_every=0)
    process = launched("-m", "scripts.train", *flags(options))
    log = options.out / "metrics.jsonl"
    for _ in range(1200):
        if log.exists() and len(read_rows(options.out)) > 3:
            break
        time.sleep(0.1)
    os.kill(children(process)[-1], signal.SIGINT)  # alone; process 0 is told nothing
    code, printed, errors = finish(process, within=60)
    rows = read_rows(options.out)
    assert code == 130, errors
    assert f"stopped early after {len(rows)} steps" in printed.splitlines()[-2]
    assert (options.out / "checkpoints" / str(len(rows))).is_dir()
    assert not [x for x in printed.splitlines() if x.startswith("[1] ") and "Gloo" not in x]


@pytest.mark.full
def test_training_validation_and_sample_are_those_of_one_process(options, tmp_path):
    options = dataclasses.replace(options, steps=6, eval_every=4, eval_batches=2, sample=40)
    code, printed, errors = finish(launched("-m", "scripts.train", *flags(options)), within=120)
    assert code == 0, errors
    summary = main(dataclasses.replace(options, out=tmp_path / "one"))
    for row, expected in zip(read_rows(options.out), read_rows(tmp_path / "one"), strict=True):
        for name in row.keys() - {"seconds"}:
            assert row[name] == pytest.approx(expected[name], rel=1e-4), name
    assert wrap("continues: ", summary.sample[-40:]).splitlines()[-1] in printed
    assert f"{'params':<16}  " in printed


def test_saved_on_one_process_restored_on_two_and_back(tmp_path):
    """Bit for bit, with a damaged file that one process finds and all go by."""
    plan = toy.make_plan(8, stage=3, precision="bf16_master")
    step = zj.make_train_step(toy.loss_fn, plan)
    state = zj.init_state(plan, jax.random.key(toy.KEY))
    state, _ = step(state, zj.shard_batch(next(toy.batches("unequal")), plan))
    with zj.Checkpointer(tmp_path / "one", plan) as checkpoints:
        checkpoints.save(state, data=hosts_program.Reader(7))
    saved = hosts_program.saved_leaves(plan, state)
    code, _, errors = finish(launched("-m", PROGRAM, "saves", tmp_path), within=240)
    assert code == 0, errors

    def assert_same(found, expected):
        assert found.keys() == set(expected)
        for name, x in found.items():
            np.testing.assert_array_equal(x, expected[name].view(x.dtype), err_msg=name)

    assert_same(saved, np.load(tmp_path / "restored.npz"))
    for num_devices, stage in ((8, 3), (2, 0)):
        here = toy.make_plan(num_devices, stage=stage, precision="bf16_master")
        reader = hosts_program.Reader(0)
        state = zj.restore(tmp_path / "two", here, data=reader)
        assert (reader.at, int(state.step)) == (9, 4)
        assert_same(hosts_program.saved_leaves(here, state), np.load(tmp_path / "last.npz"))
    with pytest.raises(ValueError, match=r"at different places on the 2 processes .*here are 1\."):
        zj.restore(tmp_path / "apart", here, data=reader)


def run_plain(tmp_path, source, *signals, within=30):
    """A launcher of 2 processes without JAX, which gets signals once both have said so."""
    script = tmp_path / "script.py"
    script.write_text(
        "import os, signal, sys, time\nme = int(os.environ['JAX_PROCESS_ID'])\n"
        # One write a line: those of two processes must not mix.
        "say = lambda *words: os.write(1, (' '.join(map(str, words)) + chr(10)).encode())\n"
        + source
    )
    process = launched(script)
    for number in signals:
        said = {process.stdout.readline() for _ in range(2)}
        assert said == {"up\n", "[1] up\n"}
        process.send_signal(number)
    return finish(process, within)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_the_launcher_passes_a_signal_on_once(tmp_path, number):
    source = f"""
heard = []
signal.signal({int(number)}, lambda *_: heard.append(1))
say("up")
while not heard:
    time.sleep(0.01)
time.sleep(0.2)
own = os.getpgrp() == os.getpid()  # the terminal's Ctrl-C would come besides
say(me, "heard", len(heard), "in its own group", own)
sys.exit(128 + {int(number)})
"""
    code, printed, errors = run_plain(tmp_path, source, number)
    assert code == 128 + number
    assert sorted(printed.splitlines()) == [
        "0 heard 1 in its own group True",
        "[1] 1 heard 1 in its own group True",
    ]
    assert not errors


def test_the_launcher_ends_who_does_not_stop_and_exits_as_the_first_that_failed(tmp_path):
    source = """
if me:
    print("what went wrong", file=sys.stderr)
    sys.exit(7)
signal.signal(signal.SIGTERM, signal.SIG_IGN)
time.sleep(600)
"""
    start = time.monotonic()
    code, _, errors = run_plain(tmp_path, source)
    assert code == 7
    assert time.monotonic() - start < 10
    assert errors.endswith("\nprocess 1 exited with 7; all were stopped\n  what went wrong\n")
    assert errors.startswith("[1] what went wrong\n")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("-n 2", "no script: give it, with its arguments, after --"),
        ("-n 0 -- x.py", "--processes and --devices-per-process: give 1 or more"),
    ],
)
def test_mistakes_of_a_launch(arguments, message):
    with pytest.raises(ValueError, match=message):
        launch.main(arguments.split())


@pytest.fixture
def alone(monkeypatch):
    """No variable of a scheduler, nor of ours."""
    names = {name for pair in hosts.LAUNCHERS.values() for name in pair if name}
    for name in names | set(hosts.VARIABLES):
        monkeypatch.delenv(name, raising=False)
    return monkeypatch


def test_a_process_by_itself_joins_nothing(alone):
    zj.start_hosts()
    zj.start_hosts(num_processes=1)
    alone.setenv("SLURM_STEP_NODELIST", "node7")
    alone.setenv("SLURM_NTASKS", "1")
    zj.start_hosts()
    assert not jax.distributed.is_initialized()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("host:1",), r"num_processes and process_id missing, .* \(SLURM, .*set JAX_COORDINATOR_"),
        ((None, 2, 0), r"address missing"),
        (("host", 2, 0), r"address is 'host'; .* such as '10.0.0.1:1234'"),
        (("host:1", 2, 2), r"process_id is 2 of num_processes 2; .* from 0 to num_processes - 1"),
        (("host:1", 2, "1"), r"process_id is '1'"),
        ((f"127.0.0.1:{free_port()}", 2, 0), r"JAX already started .* Call it before any other"),
    ],
)
def test_what_start_hosts_refuses(alone, arguments, message):
    with pytest.raises(ValueError, match=message):
        zj.start_hosts(*arguments)


def test_variables_are_read(alone):
    alone.setenv("JAX_COORDINATOR_ADDRESS", "here:1")
    alone.setenv("JAX_NUM_PROCESSES", "2")
    with pytest.raises(ValueError, match=r"process_id missing"):
        zj.start_hosts()
    alone.setenv("JAX_PROCESS_ID", "first")
    with pytest.raises(ValueError, match=r"JAX_PROCESS_ID is 'first'; set it to a whole number"):
        zj.start_hosts()


def test_nobody_at_the_address(alone):
    address = f"127.0.0.1:{free_port()}"
    with pytest.raises(TimeoutError, match=rf"nothing answers at {address} after 1 s .*refused.*"):
        zj.start_hosts(address, 2, 1, timeout=1)


def test_a_port_in_use(alone):
    with socket.create_server(("", 0)) as server:
        address = f"127.0.0.1:{server.getsockname()[1]}"
        with pytest.raises(OSError, match=rf"cannot listen at {address} \(Address already in use"):
            zj.start_hosts(address, 2, 0)


def test_a_long_wait_for_the_others_is_said(alone, monkeypatch, caplog):
    monkeypatch.setattr(hosts, "NOTICE_S", 0)
    monkeypatch.setattr(hosts, "_JOINED", [])
    monkeypatch.setattr(jax.distributed, "initialize", lambda *_, **__: time.sleep(0.2))
    zj.start_hosts(f"127.0.0.1:{free_port()}", 2, 0)
    assert "waiting for 2 processes at 127.0.0.1:" in caplog.text
    assert "one did not come: start all" in caplog.text


def test_under_slurm_no_arguments_are_needed():
    code = "import jax, zerojax as zj; zj.start_hosts(); print(jax.devices())"
    job = {"SLURM_JOB_ID": str(free_port()), "SLURM_STEP_NODELIST": "localhost"}
    job |= {"SLURM_NTASKS": "2", "JAX_PLATFORMS": "cpu", "JAX_NUM_CPU_DEVICES": "1"}
    processes = []
    for index in "01":
        env = {**os.environ, **job, "SLURM_PROCID": index, "SLURM_LOCALID": index}
        run = [sys.executable, "-c", code]
        processes.append(
            subprocess.Popen(run, cwd=ROOT, env=env, stdout=subprocess.PIPE, text=True)
        )
    for process in processes:
        printed, _ = process.communicate(timeout=60)
        assert printed.count("CpuDevice") == 2

    del job["SLURM_JOB_ID"]
    done = subprocess.run(run, cwd=ROOT, env={**os.environ, **job}, capture_output=True, text=True)
    assert "SLURM started this process, but JAX cannot read what it needs" in done.stderr
