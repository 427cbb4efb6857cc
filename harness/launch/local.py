"""Start the ranks of a job, or the stages of a command, as local processes, and return their exit code."""

from __future__ import annotations

import ctypes
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager
from types import FrameType
from typing import Any

from harness.printing import UNREAD

# Variable that contains the file descriptor of the job's store, a listening socket that rank 0 inherits.
STORE_FD = "HARNESS_STORE_FD"
# Signals that are forwarded to every rank; ranks checkpoint on the first two. A hangup is forwarded as SIGTERM.
_FORWARDED = {number: number for number in (signal.SIGTERM, signal.SIGUSR2, signal.SIGINT)}
_FORWARDED |= {signal.SIGHUP: signal.SIGTERM}
# Seconds after the failure of a rank. Until the first, the others can report it and exit by themselves; then they get
# SIGTERM, and after the second SIGKILL.
_GRACE_S, _KILL_S = 15.0, 45.0
_POLL_S = 0.05
_PR_SET_PDEATHSIG = 1


@contextmanager
def _forwarding() -> Iterator[tuple[Callable[..., None], list[subprocess.Popen[bytes]]]]:
    """Yield a function that starts a process and forwards stop signals to it, and the list of started processes.

    Processes that still run at the end are killed.
    """
    processes: list[subprocess.Popen[bytes]] = []
    received: list[signal.Signals] = []

    def start(command: Sequence[str], **options: Any) -> None:
        # Ctrl-C in a terminal reaches only this process, which forwards it. The hook only makes two system calls.
        options |= {"start_new_session": True, "preexec_fn": end_with_parent()}
        processes.append(subprocess.Popen(command, **options))
        for number in received:  # signals that arrived before it was in the list
            processes[-1].send_signal(number)

    def forward(number: int, frame: FrameType | None) -> None:
        received.append(_FORWARDED[signal.Signals(number)])
        for process in processes:
            process.send_signal(received[-1])

    # Under `nohup` and in background jobs of a shell, some of these signals are ignored.
    before = {number: was for number in _FORWARDED if (was := signal.getsignal(number)) is not signal.SIG_IGN}
    try:
        for number in before:
            signal.signal(number, forward)
        yield start, processes
    finally:
        for process in processes:
            if process.poll() is None:
                process.kill()
        for number, handler in before.items():
            signal.signal(number, handler)


def run_command(command: Sequence[str]) -> int:
    """Run a program until it ends, forwarding stop signals; return its exit code, as `start_ranks` does."""
    with _forwarding() as (start, processes):
        start(command)
        return _wait_for(processes)


def start_ranks(command: Sequence[str], num_ranks: int) -> int:
    """Run `command` as every rank of a job on this machine; return 0, or the exit code of the rank that failed first.

    The code is 128 plus the signal's number for a rank that was killed. Stop signals are forwarded to the ranks, which
    may take any time to end; if this process is killed, they get SIGTERM.
    """
    # The rendezvous store listens before rank 0 starts, so that no other process can take its port.
    store = socket.create_server(("127.0.0.1", 0))
    place = dict.fromkeys(("WORLD_SIZE", "LOCAL_WORLD_SIZE"), str(num_ranks))
    place |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(store.getsockname()[1])}
    if num_ranks > 1:  # they share the cores of the machine
        place["OMP_NUM_THREADS"] = os.environ.get("OMP_NUM_THREADS", "1")
    with closing(store), _forwarding() as (start, processes):
        for rank in range(num_ranks):
            own = {"RANK": str(rank), "LOCAL_RANK": str(rank)} | ({} if rank else {STORE_FD: str(store.fileno())})
            environment = {**os.environ, **place, **own}
            passed = [] if rank else [store.fileno()]
            start(command, stdin=subprocess.DEVNULL, env=environment, pass_fds=passed)
        store.close()
        return _wait_for(processes)


def _wait_for(ranks: Sequence[subprocess.Popen[bytes]]) -> int:
    """Wait until every rank has ended, killing the rest some time after a failure; return the first failure's code."""
    failed: int | None = None
    since, asked = 0.0, False
    while left := [rank for rank in ranks if rank.poll() is None]:
        codes = [rank.returncode for rank in ranks if rank.returncode]
        if codes and failed is None:
            failed, since = codes[0], time.monotonic()
        waited = time.monotonic() - since if failed is not None else 0.0
        if waited > _KILL_S or failed == UNREAD:  # the output of the other processes has no reader
            for rank in left:
                os.killpg(rank.pid, signal.SIGKILL)
        elif waited > _GRACE_S and not asked:
            asked = True
            for rank in left:
                rank.terminate()
        time.sleep(_POLL_S)
    code = failed or next((rank.returncode for rank in ranks if rank.returncode), 0)
    return code if code >= 0 else 128 - code


def end_with_parent() -> Callable[[], None] | None:
    """Return a function by which a new process gets SIGTERM when this one is killed; None if it is unsupported."""
    if sys.platform != "linux":
        return None
    libc, parent = ctypes.CDLL(None), os.getpid()

    def prepare() -> None:
        libc.prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
        if os.getppid() != parent:
            os._exit(128 + signal.SIGTERM)

    return prepare
