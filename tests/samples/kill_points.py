"""Real commands in real processes that SIGKILL ends, or SIGSTOP stops, at a counted call: a write, a rename, a read.

    commands = Commands(folder)                                  # imports once, then forks
    whole = commands.run(["harness", "convert", ...], root=out)  # counts the calls below `out`
    commands.run(["harness", "convert", ...], root=out, at=17)   # dies in call 17

Calls are counted in C (`kill_points.c`), so those of torch and of safetensors count too, and a busy machine gives the
same points as an idle one.
"""

from __future__ import annotations

import json
import os
import random
import shutil
import signal
import struct
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Self

import pytest

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
_COUNTER = struct.Struct("@lllll208s")


@dataclass(frozen=True)
class Ran:
    """Outcome of commands.

    Attributes:
        codes: exit codes; the negative number of the signal that ended it, None for one that did not end.
        count: calls below the root; one counted call is one place to die in.
        died_in: the call that a process died in, "" for none.
        output: of all commands.
    """

    codes: list[int | None]
    count: int
    died_in: str
    output: str = field(repr=False)

    @property
    def code(self) -> int | None:
        return self.codes[0]


class Commands:
    """Runs commands (`harness ...`, `recipes.sft ...`) in forks of one process; a context manager.

    Args:
        folder: for its own files.
        imports: `training` to import torch and Megatron-Core before the first fork.
    """

    def __init__(self, folder: Path, *imports: str) -> None:
        self._folder = folder
        self._imports = imports

    def __enter__(self) -> Self:
        compiler = shutil.which("cc") or shutil.which("gcc")
        if compiler is None or sys.platform != "linux":
            pytest.skip("needs a C compiler, and Linux")
        library = self._folder / "kill_points.so"
        subprocess.run([compiler, "-shared", "-fPIC", "-O1", "-o", library, HERE / "kill_points.c", "-ldl"], check=True)
        kept = {name: os.environ[name] for name in ("PATH", "HOME", "TMPDIR", "LD_LIBRARY_PATH") if name in os.environ}
        # One thread a library: a fork has none of its parent's.
        alone = {f"{library}_NUM_THREADS": "1" for library in ("OMP", "OPENBLAS", "MKL")}
        self._server = subprocess.Popen(
            [sys.executable, HERE / "command_server.py", *self._imports],
            env={**kept, **alone, "PYTHONPATH": str(ROOT), "LD_PRELOAD": str(library)},
            cwd=ROOT,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        assert self._server.stdout is not None
        assert self._server.stdout.readline() == "ready\n"
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        assert self._server.stdin is not None
        assert self._server.stdout is not None
        self._server.stdin.close()
        self._server.wait()
        self._server.stdout.close()

    def run(
        self,
        *commands: Sequence[object],
        root: Path,
        at: int = -1,
        stops: bool = False,
        reads: bool = False,
        everyone: bool = False,
        environments: Sequence[dict[str, str]] = (),
        uids: Sequence[int] = (),
        umask: int = 0o022,
        patience_s: float = 120.0,
    ) -> Ran:
        """Run commands side by side until all have ended.

        Args:
            root: calls on files below it are counted.
            at: the call in which a process dies; negative for none.
            stops: the first command stops there instead, until the others have ended.
            reads: count calls that read, too.
            everyone: after that call every other process dies at its next one.
            environments: variables of each command.
            uids: user of each command; 0 for that of the tests.
            umask: of all.
            patience_s: the longest wait; then whatever is left is killed.
        """
        counter, log = self._folder / "counter", self._folder / "log"
        counter.write_bytes(_COUNTER.pack(0, at, reads, everyone, stops, b""))
        log.write_bytes(b"")
        request = {
            "commands": [
                {
                    "arguments": [str(word) for word in command],
                    "environment": environments[number] if environments else {},
                    "uid": uids[number] if uids else 0,
                    "umask": umask,
                }
                for number, command in enumerate(commands)
            ],
            "stops": stops,
            "folder": str(self._folder),
            "log": str(log),
            "counter": str(counter),
            "root": f"{root}",
            "patience_s": patience_s,
        }
        assert self._server.stdin is not None
        assert self._server.stdout is not None
        self._server.stdin.write(json.dumps(request) + "\n")
        self._server.stdin.flush()
        statuses = json.loads(self._server.stdout.readline())
        count, *_, what = _COUNTER.unpack(counter.read_bytes())
        codes = [None if status is None else os.waitstatus_to_exitcode(status) for status in statuses]
        return Ran(codes, count, what.rstrip(b"\0").decode(errors="replace"), log.read_text(errors="replace"))


def points_of(count: int, kills: int, *, seed: str) -> list[int]:
    """Return `kills` different calls out of `count`, in order; all of them if there are fewer."""
    return sorted(random.Random(seed).sample(range(count), min(kills, count)))


KILLED = -signal.SIGKILL
