# SPDX-License-Identifier: Apache-2.0
"""Run a script as several processes on this machine, each with simulated CPU devices.

  python -m scripts.launch -n 2 --devices-per-process 4 -- scripts/train.py --steps 50

For tests and tours of what runs on several hosts, where a scheduler starts the processes.
"""

import dataclasses
import os
import queue
import signal
import socket
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Sequence
from typing import IO, Annotated

import tyro

TAIL = 20  # lines of a failed process's errors that are shown again at the end


@dataclasses.dataclass(frozen=True)
class Options:
    """Run a script, given after `--`, as several processes on this machine's CPU."""

    processes: Annotated[int, tyro.conf.arg(aliases=["-n"])] = 2
    """Processes to start."""
    devices_per_process: int = 4
    """CPU devices that each of them simulates."""
    grace: float = 5.0
    """Seconds from asking the others to stop (SIGTERM) to ending them (SIGKILL)."""


def environment(options: Options, port: int, index: int) -> dict[str, str]:
    """Return what tells a process its place, and its simulated devices."""
    joined = {
        "JAX_COORDINATOR_ADDRESS": f"127.0.0.1:{port}",
        "JAX_NUM_PROCESSES": str(options.processes),
        "JAX_PROCESS_ID": str(index),
        "JAX_PLATFORMS": "cpu",
        "JAX_NUM_CPU_DEVICES": str(options.devices_per_process),
        "PJRT_NPROC": str(4 * options.devices_per_process),  # as zerojax.simulate_devices does
    }
    path = os.pathsep.join(filter(None, [os.getcwd(), os.environ.get("PYTHONPATH")]))
    return {**os.environ, "PYTHONUNBUFFERED": "1", "PYTHONPATH": path, **joined}


def relay(source: IO[str], target: IO[str], prefix: str, tail: deque[str]) -> None:
    """Pass lines on, and keep the last ones."""
    with source:
        for line in source:
            tail.append(line)
            target.write(prefix + line)
            target.flush()


def run(options: Options, command: Sequence[str]) -> int:
    """Run the command until all processes are done or one fails; return the exit code."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    processes, threads, tails = [], [], []
    ended: queue.Queue[tuple[int, int]] = queue.Queue()

    def wait(index: int, process: subprocess.Popen) -> None:
        ended.put((index, process.wait()))

    def send(number: int, *_: object) -> None:
        for process in processes:
            process.send_signal(number)  # none to a process that has ended

    passed_on: list[int] = []
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda number, _: (passed_on.append(number), send(number)))
    for index in range(options.processes):
        process = subprocess.Popen(
            [sys.executable, *command],
            env=environment(options, port, index),
            stdout=subprocess.PIPE if index else None,
            stderr=subprocess.PIPE,
            text=True,
            errors="replace",
            start_new_session=True,  # the terminal's Ctrl-C reaches it through `send` alone
        )
        prefix = f"[{index}] " if index else ""
        processes.append(process)
        tails.append(deque(maxlen=TAIL))
        jobs = [(wait, index, process), (relay, process.stderr, sys.stderr, prefix, tails[-1])]
        if index:
            jobs.append((relay, process.stdout, sys.stdout, prefix, deque(maxlen=1)))
        threads += [threading.Thread(target=job, args=args) for job, *args in jobs]
    for thread in threads:
        thread.start()

    failed, code = None, 0
    for _ in processes:
        index, code_of_this = ended.get()
        if code_of_this:
            failed, code = index, code_of_this
            break
    if failed is not None:
        for after, number in ((1.0, signal.SIGTERM), (options.grace, signal.SIGKILL)):
            until = time.monotonic() + after  # most fail alike: first let them end by themselves
            while time.monotonic() < until and any(p.poll() is None for p in processes):
                time.sleep(0.05)
            send(number)
    for thread in threads:
        thread.join()
    if failed is not None and -code not in passed_on and code - 128 not in passed_on:
        how = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"exited with {code}"
        print(f"\nprocess {failed} {how}; all were stopped", file=sys.stderr)
        print("".join(f"  {line}" for line in tails[failed]), file=sys.stderr, end="")
    return 128 - code if code < 0 else code


def main(arguments: Sequence[str]) -> int:
    """Read the options before `--` and run what follows it."""
    own, command = list(arguments), []
    if "--" in own:
        cut = own.index("--")
        own, command = own[:cut], own[cut + 1 :]
    options = tyro.cli(Options, args=own, prog="python -m scripts.launch")
    if options.processes < 1 or options.devices_per_process < 1:
        raise ValueError("--processes and --devices-per-process: give 1 or more")
    if not command:
        raise ValueError("no script: give it, with its arguments, after --, as in -- script.py")
    return run(options, command)


if __name__ == "__main__":
    try:
        sys.exit(main(sys.argv[1:]))
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)
