"""Runs of `recipes.sft` in processes of their own: started, watched, measured, and ended with all they started."""

from __future__ import annotations

import ctypes
import json
import os
import random
import shlex
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import ExitStack, suppress
from pathlib import Path

import psutil

import harness
from harness.errors import ConfigError
from harness.parity.cells import Cell
from harness.train import METRICS_FILE, whole_lines

_ROOT = Path(harness.__file__).resolve().parent.parent
_PR_SET_PDEATHSIG = 1
# Above are those that Linux gives to connections of its own choice.
_PORTS = range(20000, 32768)
# A launcher's, which would make a run that is started from within a job part of it.
_LAUNCHER = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT", "GROUP_RANK", "LOCAL_WORLD_SIZE")


def run_folder(folder: Path, cell: Cell) -> Path:
    return folder / "cells" / cell.folder_name / "run"


def log_file(folder: Path, cell: Cell) -> Path:
    return folder / "cells" / cell.folder_name / "log.txt"


def overrides(cell: Cell) -> list[str]:
    return [*cell.settings, f"trainer.steps={cell.steps}"]


def _launcher(cell: Cell) -> list[str]:
    many = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={cell.case.ranks}"]
    return [cell.python, *(many if cell.case.ranks > 1 else [])]


def command(folder: Path, cell: Cell, start: Cell | None) -> str:
    """What a shell is told to run this cell alone again, in a folder beside its own."""
    again = run_folder(folder, cell).with_name("again")
    copied = f"cp -r {shlex.quote(str(run_folder(folder, start)))} {shlex.quote(str(again))} && " if start else ""
    run = [*_launcher(cell), "-m", "recipes.sft", *overrides(cell), f"run_dir={again}"]
    return f"{copied}OMP_NUM_THREADS=1 {shlex.join(run)}"


class Batch:
    """Cells of one number of ranks that follow each other in the same processes; mostly one.

    Args:
        folder: of the matrix.
        cells: not empty; of one interpreter.
        starts: by name, the cells whose folders these go on from.
    """

    def __init__(self, folder: Path, cells: Sequence[Cell], starts: dict[str, Cell]) -> None:
        self.cells = list(cells)
        self._folder = folder
        self.began = time.monotonic()
        self.measured = self.began
        self.measuring_s = 0.0  # what the last measurement took
        self.peak_memory_bytes = 0
        first = self.cells[0]
        home = run_folder(folder, first).parent
        described = [
            [
                port,
                overrides(cell),
                str(run_folder(folder, cell)),
                str(run_folder(folder, starts[cell.start])) if cell.start else None,
            ]
            for port, cell in zip(free_ports(len(self.cells)), self.cells, strict=True)
        ]
        listed = home / "runs.json"
        listed.write_text(json.dumps(described))
        with log_file(folder, first).open("a") as log:
            try:
                self._process = subprocess.Popen(
                    [*_launcher(first), "-m", "recipes.sft_runs", str(listed)],
                    env=_environment(),
                    stdout=log,
                    stderr=log,
                    start_new_session=True,
                    # Safe here: nothing else of this process runs in a thread meanwhile.
                    preexec_fn=_end_with_parent if sys.platform == "linux" else None,  # noqa: PLW1509
                )
            except OSError as error:
                raise ConfigError(
                    f"the interpreter of {first.name} cannot be started: {error.strerror}",
                    where=first.python,
                    fix="name the python of a virtual environment in `versions`",
                ) from None

    @property
    def ranks(self) -> int:
        return self.cells[0].case.ranks

    def poll(self) -> int | None:
        """The exit code, None while it goes on."""
        return self._process.poll()

    def steps_made(self, cell: Cell) -> int:
        path = run_folder(self._folder, cell) / METRICS_FILE
        with suppress(OSError):
            return sum(1 for _ in whole_lines(path))
        return 0

    def measure(self) -> None:
        """Note the memory of the fullest rank with its workers, where pages that processes share count once."""
        began = time.monotonic()
        with suppress(psutil.Error, OSError):
            top = psutil.Process(self._process.pid)
            ranks = [top] if self.ranks == 1 else top.children()
            for rank in ranks:
                total = sum(_proportional_bytes(one) for one in [rank, *rank.children(recursive=True)])
                self.peak_memory_bytes = max(self.peak_memory_bytes, total)
        self.measured = time.monotonic()
        self.measuring_s = self.measured - began

    def end(self) -> None:
        """Kill it with everything it started; torchrun gives its ranks sessions of their own."""
        with suppress(psutil.Error):
            top = psutil.Process(self._process.pid)
            for one in [top, *top.children(recursive=True)]:
                with suppress(psutil.Error):
                    one.kill()
        self._process.wait()


def _proportional_bytes(process: psutil.Process) -> int:
    with suppress(psutil.Error, OSError, AttributeError):
        return int(process.memory_full_info().pss)
    return 0


def _environment() -> dict[str, str]:
    kept = {name: value for name, value in os.environ.items() if name not in _LAUNCHER}
    paths = [str(_ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
    # One thread a rank: more would fight over the cores, and add in another order on another machine.
    return {"OMP_NUM_THREADS": "1", **kept, "PYTHONPATH": os.pathsep.join(paths)}


def _end_with_parent() -> None:
    """In the child: be ended when the process that watches it is killed, so that a second try finds no rival."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)


def free_ports(count: int) -> list[int]:
    """Ports to meet at one after another: none of those that the kernel gives to connections meanwhile."""
    with ExitStack() as stack:
        found: list[int] = []
        for port in random.sample(_PORTS, len(_PORTS)):
            if len(found) == count:
                break
            one = stack.enter_context(socket.socket())
            with suppress(OSError):
                one.bind(("127.0.0.1", port))
                found.append(port)
        return found
