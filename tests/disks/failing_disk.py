"""Commands on a disk that fails at one of its operations, each in a process of its own.

`Disk` starts one process that imports what commands need, with `failing_disk.c` preloaded. Each command is a fork of
it: a fault costs what the command costs, without its imports. C and C++ (pyarrow, torch) are covered like Python.
"""

from __future__ import annotations

import atexit
import ctypes
import gc
import json
import mmap
import os
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NoReturn

import pytest

LOGGED, LINE = 16384, 160
IMPORTS = "harness.cli.app harness.prep pyarrow.parquet"
TORCH_IMPORTS = (
    f"{IMPORTS} matplotlib.figure tensorboard.summary.writer.record_writer tensorboard.compat.proto.event_pb2 "
    "harness.megatron.run harness.megatron.export"
)


class _State(ctypes.Structure):
    _fields_ = [
        *((name, ctypes.c_int) for name in ("armed", "at", "error", "stays_full", "reads", "group", "count", "failed")),
        ("prefix", ctypes.c_char * 512),
        ("log", (ctypes.c_char * LINE) * LOGGED),
    ]


@dataclass(frozen=True)
class Fault:
    """Number `at` of the operations below a folder fails with `error`; `stays_full` as in failing_disk.c."""

    at: int = -1
    error: int = 0
    stays_full: bool = False
    reads: bool = False
    rank: int = 0


@dataclass(frozen=True)
class Ended:
    """The end of a command: its exit code (None if it had to be killed), its output, and the disk's operations."""

    code: int | None
    out: str
    errors: str
    operations: list[str] = field(repr=False)
    failed: int = 0


class Disk:
    """Runs commands of `harness`; those below `folder` count as operations of the disk. A context manager."""

    def __init__(self, scratch: Path, folder: Path, *, imports: str = IMPORTS) -> None:
        compiler = shutil.which("gcc") or shutil.which("cc")
        if compiler is None or sys.platform != "linux":
            pytest.skip("needs a C compiler on Linux")
        scratch.mkdir(parents=True, exist_ok=True)
        self._scratch, self.folder = scratch, folder
        library, state = scratch / "failing_disk.so", scratch / "state"
        source = Path(__file__).with_name("failing_disk.c")
        subprocess.run([compiler, "-shared", "-fPIC", "-O1", "-o", library, source, "-ldl"], check=True)
        state.write_bytes(bytes(ctypes.sizeof(_State)))
        with state.open("r+b") as file:
            self._state = _State.from_buffer(mmap.mmap(file.fileno(), 0))
        root = Path(__file__).resolve().parents[2]
        environment = {
            **os.environ,
            "LD_PRELOAD": str(library),
            "FAILING_DISK_STATE": str(state),
            "PYTHONPATH": str(root),
            "PYTHONDONTWRITEBYTECODE": "1",
            "OMP_NUM_THREADS": "1",
            "TOKENIZERS_PARALLELISM": "false",
            "COLUMNS": "160",
        }
        self._parent = subprocess.Popen(
            [sys.executable, __file__, imports],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env=environment,
            cwd=root,
            text=True,
        )

    def __enter__(self) -> Disk:
        return self

    def __exit__(self, *error: object) -> None:
        self._parent.stdin.close()  # type: ignore[union-attr]
        self._parent.wait(timeout=60)

    def run(
        self,
        *arguments: object,
        fault: Fault | None = None,
        ranks: int = 1,
        logs_into: Path | None = None,
        environment: Mapping[str, str] | None = None,
        limit_s: float = 240.0,
    ) -> Ended:
        """Run `harness ARGUMENTS`; with more than one rank `fault` is that of one.

        Args:
            logs_into: a file for standard output, on the disk.
        """
        fault = fault or Fault()
        outputs = [self._scratch / f"output-{rank}" for rank in range(ranks)]
        temporary = self.folder / "temporary"
        temporary.mkdir(parents=True, exist_ok=True)
        job = {
            "arguments": [str(argument) for argument in arguments],
            "environment": {"TMPDIR": str(temporary), **(environment or {})},
            "out": [str(logs_into or f"{path}.out") for path in outputs],
            "errors": [f"{path}.err" for path in outputs],
            "ranks": ranks,
            "port": _free_port() if ranks > 1 else 0,
            "armed": fault.rank,
            "limit_s": limit_s,
        }
        values = {"at": fault.at, "error": fault.error, "stays_full": fault.stays_full, "reads": fault.reads}
        for name, value in {**values, "armed": 0, "count": 0, "failed": 0, "group": 0}.items():
            setattr(self._state, name, int(value))
        self._state.prefix = str(self.folder.resolve()).encode()
        self._parent.stdin.write(json.dumps(job) + "\n")  # type: ignore[union-attr]
        self._parent.stdin.flush()  # type: ignore[union-attr]
        codes = json.loads(self._parent.stdout.readline())  # type: ignore[union-attr]
        self._state.armed = 0
        count = min(self._state.count, LOGGED)
        operations = [self._state.log[number].value.decode(errors="replace") for number in range(count)]
        errors = "".join(Path(path).read_text(errors="replace") for path in job["errors"])
        out = Path(job["out"][0]).read_text(errors="replace")
        code = None if None in codes else next((code for code in codes if code), 0)
        return Ended(code, out, errors, operations, self._state.failed)


def _free_port() -> int:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        return int(taken.getsockname()[1])


def _wait(process: int, until: float) -> int | None:
    while time.monotonic() < until:
        ended, status = os.waitpid(process, os.WNOHANG)
        if ended:
            return os.waitstatus_to_exitcode(status)
        time.sleep(0.01)
    os.killpg(process, signal.SIGKILL)
    os.waitpid(process, 0)
    return None


def _become(job: dict[str, Any], rank: int, state: _State) -> None:
    """Turn this fork into a command, which begins when this returns."""
    os.setpgid(0, 0)
    if rank == job["armed"]:
        state.group = os.getpid()
    for number, name in ((1, job["out"][rank]), (2, job["errors"][rank])):
        file = os.open(name, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o666)
        os.dup2(file, number)
        os.close(file)
    empty = os.open(os.devnull, os.O_RDONLY)
    os.dup2(empty, 0)
    os.environ.update(job["environment"])
    if job["ranks"] > 1:
        place = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": job["ranks"], "MASTER_PORT": job["port"]}
        os.environ.update({name: str(value) for name, value in place.items()}, MASTER_ADDR="127.0.0.1")
    sys.argv = ["harness", *job["arguments"]]


def _serve(imports: Sequence[str]) -> bool:
    """Start commands as forks until standard input ends; returns True in each of the forks."""
    import importlib

    if any("megatron" in name for name in imports):
        from harness.megatron import prepare_process

        prepare_process()
    for name in imports:
        importlib.import_module(name)
    with Path(os.environ["FAILING_DISK_STATE"]).open("r+b") as file:
        state = _State.from_buffer(mmap.mmap(file.fileno(), 0))
    gc.freeze()  # a fork then copies no page because of the garbage collector
    while line := sys.stdin.readline():
        job = json.loads(line)
        processes = []
        for rank in range(job["ranks"]):
            process = os.fork()
            if process == 0:
                _become(job, rank, state)
                if rank == job["armed"]:
                    state.armed = 1
                return True
            processes.append(process)
        until = time.monotonic() + job["limit_s"]
        codes = [_wait(process, until) for process in processes]
        for process in processes:
            with suppress(ProcessLookupError):
                os.killpg(process, signal.SIGKILL)  # what it left behind
        print(json.dumps(codes), flush=True)
    return False


def _end(code: object) -> NoReturn:
    """End as the interpreter does, but without taking all modules apart, which costs more than a command."""
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    code = code if isinstance(code, int) else int(code is not None)
    try:
        sys.stdout.flush()
    except OSError as error:
        print(f"Exception ignored in: {error}", file=sys.stderr)
        code = 120
    sys.stderr.flush()
    os._exit(code)


if __name__ == "__main__":
    if _serve(sys.argv[1].split()):
        from harness.cli.app import main

        try:
            main()
        except SystemExit as ended:
            _end(ended.code)
        except BaseException:
            sys.excepthook(*sys.exc_info())
            _end(1)
        _end(None)
