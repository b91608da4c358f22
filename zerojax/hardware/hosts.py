# SPDX-License-Identifier: Apache-2.0
"""Several processes, on one host or on many, that train together: JAX joins their devices."""

from __future__ import annotations

import atexit
import logging
import os
import socket
import sys
import threading
import time
from typing import NoReturn

import jax

VARIABLES = ("JAX_COORDINATOR_ADDRESS", "JAX_NUM_PROCESSES", "JAX_PROCESS_ID")

# What started this process beside others: a variable that says so, and the one that counts them.
LAUNCHERS = {
    "SLURM": ("SLURM_STEP_NODELIST", "SLURM_NTASKS"),
    "Open MPI": ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE"),
    "Kubernetes": ("JOB_COMPLETION_INDEX", ""),
}
HEARTBEAT_S = 30  # a process not heard of for so long is dead, and JAX ends the others
NOTICE_S = 10  # waiting for longer is said

_JOINED: list[tuple[str | None, int | None, int | None]] = []  # as what this process joined


def start_hosts(
    address: str | None = None,
    num_processes: int | None = None,
    process_id: int | None = None,
    *,
    timeout: int = 60,
) -> None:
    """Joins this process with those on other hosts; then `jax.devices()` are the devices of all.

    Call it in every process, before anything touches a JAX array. Under SLURM, Open MPI and
    Kubernetes (an indexed Job) it needs no arguments, and in a process by itself it then does
    nothing. Elsewhere give all three arguments, or set JAX_COORDINATOR_ADDRESS, JAX_NUM_PROCESSES
    and JAX_PROCESS_ID. Calling it again is fine, so a notebook cell can be run twice.

    Under SLURM and Open MPI, JAX takes one GPU for each process of a host; for one process with
    all GPUs of its host, set JAX_LOCAL_DEVICE_IDS=0,1,... On CPUs the processes talk over gloo;
    `zerojax.simulate_devices`, called after this, says how many devices each process brings.

    A process that dies ends the others, with an error, within 30 seconds. A process that is done
    waits up to 5 minutes for the others before it exits.

    Args:
      address: host and port of process 0, such as "10.0.0.1:1234": any free port.
      num_processes: how many processes there are; 1 does nothing.
      process_id: which of them this is, from 0.
      timeout: seconds within which all processes must have called this.

    Raises:
      ValueError: some arguments are missing or make no sense, JAX already started, or this
        process already joined as another.
      OSError: the port is in use (process 0), or nothing answers at the address (all others).
        If any process does not come, JAX ends those that wait with an error of its own.

    Example:
      >>> start_hosts()  # a process by itself
      >>> jax.process_count()
      1
    """
    asked = (address, num_processes, process_id)
    if jax.distributed.is_initialized():
        joined = _JOINED[-1] if _JOINED else asked
        if any(None not in pair and pair[0] != pair[1] for pair in zip(asked, joined, strict=True)):
            raise ValueError(
                f"start_hosts{asked}: this process already joined as {joined}. Restart it, or "
                "leave the arguments as they were."
            )
        return
    address = address or os.environ.get(VARIABLES[0]) or None
    num_processes = _number(VARIABLES[1]) if num_processes is None else num_processes
    process_id = _number(VARIABLES[2]) if process_id is None else process_id
    launcher = _launcher()
    nothing = not launcher and address is num_processes is process_id is None
    if nothing or num_processes == 1:
        return
    _check(launcher, address, num_processes, process_id)
    until = time.monotonic() + timeout
    if address is not None and process_id is not None:
        _check_port(address) if process_id == 0 else _wait_for_port(address, timeout)
    notice = threading.Timer(NOTICE_S, _say_waiting, [address, num_processes, timeout])
    notice.daemon = True
    notice.start()
    try:
        jax.distributed.initialize(
            address,
            num_processes,
            process_id,
            cluster_detection_method=None if launcher else "deactivate",
            initialization_timeout=max(1, round(until - time.monotonic())),
            heartbeat_timeout_seconds=HEARTBEAT_S,
        )
    except RuntimeError as error:
        if "must be called before" not in str(error):
            raise
        raise ValueError(
            "start_hosts: JAX already started in this process, and cannot join others any more. "
            "Call it before any other use of JAX, zerojax.simulate_devices and make_mesh included: "
            "restart the notebook kernel, or move the call to the top of the script."
        ) from error
    except ValueError as error:
        if not launcher:
            raise
        raise ValueError(
            f"start_hosts: {launcher} started this process, but JAX cannot read what it needs "
            f"from its variables ({error}). Set {', '.join(VARIABLES)}."
        ) from error
    finally:
        notice.cancel()
    _JOINED.append((address, num_processes, process_id))
    atexit.register(_leave_after_error)


def _say_waiting(address: str | None, num_processes: int | None, timeout: int) -> None:
    logging.getLogger("zerojax").warning(
        f"start_hosts: waiting for {num_processes or 'all'} processes at "
        f"{address or 'the address that the scheduler gave'}, for {timeout} s in all. If JAX then "
        "ends this process, one did not come: start all, with the same address and number."
    )


def exit_process(code: int) -> NoReturn:
    """Ends this process; among several at once, for those that wait for it wait in vain.

    An ordinary exit first waits minutes for the others, which may be waiting for this process in
    a collective.
    """
    if not jax.distributed.is_initialized():
        sys.exit(code)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def _leave_after_error() -> None:
    printed = hasattr(sys, "last_exc")  # set where Python has printed an uncaught error
    if printed and jax.distributed.is_initialized():
        exit_process(1)


def _number(name: str) -> int | None:
    value = os.environ.get(name)
    try:
        return int(value) if value else None
    except ValueError as error:
        raise ValueError(f"{name} is {value!r}; set it to a whole number.") from error


def _launcher() -> str:
    """The scheduler that started this process beside others, or ""."""
    for name, (sign, count) in LAUNCHERS.items():
        if sign in os.environ and os.environ.get(count, "") != "1":
            return name
    return ""


def _check(launcher: str, address, num_processes, process_id) -> None:
    named = {"address": address, "num_processes": num_processes, "process_id": process_id}
    missing = [name for name, value in named.items() if value is None]
    if missing and not launcher:
        raise ValueError(
            f"start_hosts: {' and '.join(missing)} missing, and no scheduler started this process "
            f"({', '.join(LAUNCHERS)}). Pass all three, or set {', '.join(VARIABLES)}."
        )
    if address is not None and not str(address).rpartition(":")[2].isdigit():
        raise ValueError(
            f"address is {address!r}; pass host and port of process 0, such as '10.0.0.1:1234'."
        )
    whole = all(value is None or type(value) is int for value in (num_processes, process_id))
    if not whole or not 0 <= (process_id or 0) < (num_processes or sys.maxsize):
        raise ValueError(
            f"process_id is {process_id!r} of num_processes {num_processes!r}; the processes are "
            "numbered from 0 to num_processes - 1."
        )


def _check_port(address: str) -> None:
    port = int(address.rpartition(":")[2])
    try:
        socket.create_server(("", port)).close()
    except OSError as error:
        raise OSError(
            f"start_hosts: process 0 cannot listen at {address} ({error.strerror}). Give all "
            "processes an address of this host with another port."
        ) from error


def _wait_for_port(address: str, timeout: int) -> None:
    """Waits until process 0 listens; JAX itself would abort the process, with no remedy."""
    host, _, port = address.rpartition(":")
    until = time.monotonic() + timeout
    while True:
        try:
            return socket.create_connection((host.strip("[]"), int(port)), timeout=5).close()
        except OSError as error:
            if time.monotonic() > until:
                raise TimeoutError(
                    f"start_hosts: nothing answers at {address} after {timeout} s ({error}). Start "
                    "process 0 on that host with the same address, and let its firewall pass the "
                    "port; timeout= waits longer."
                ) from error
        time.sleep(0.1)
