"""Real commands in real processes that fail, die (SIGKILL) or stop (SIGSTOP) at a counted call: a write, a rename.

    commands = Commands(folder)                                  # imports once, then forks
    whole = commands.run(["harness", "convert", ...], root=out)  # counts the calls below `out`
    commands.run(["harness", "convert", ...], root=out, at=17)   # dies in call 17
    commands.run(["harness", "convert", ...], root=out, at=17, error=errno.ENOSPC, stays_full=True)

Calls are counted in C (`counted_calls.c`), so those of pyarrow, torch and safetensors count too, and a busy machine
gives the same points as an idle one.
"""

from __future__ import annotations

import ctypes
import json
import mmap
import os
import resource
import shutil
import signal
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Self

import pytest

from harness.parity.running import free_ports

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
KILLED = -signal.SIGKILL


class _State(ctypes.Structure):
    """The state of `counted_calls.c`."""

    _fields_ = [
        *(
            (name, ctypes.c_int)
            for name in ("at", "error", "stays_full", "stops", "everyone", "reads", "count", "smallest")
        ),
        ("root", ctypes.c_char * 512),
        ("forced", ctypes.c_char * 512),
        ("log", (ctypes.c_char * 160) * 16384),
    ]


@dataclass(frozen=True)
class Ran:
    """Outcome of commands.

    Attributes:
        codes: exit codes; the negative number of the signal that ended it, None for one that did not end.
        calls: below the root, as `rename /file`; each is a place to fail in.
        died_in: the call that a process failed, died or stopped in, "" for none.
        output: what each printed, and then its errors.
    """

    codes: list[int | None]
    calls: list[str] = field(repr=False)
    died_in: str
    output: str = field(repr=False)

    @property
    def code(self) -> int | None:
        """None if a command did not end, otherwise the first code that is not 0."""
        return None if None in self.codes else next((code for code in self.codes if code), 0)

    @property
    def count(self) -> int:
        return len(self.calls)


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
        self._folder.mkdir(parents=True, exist_ok=True)
        library, self._counted = self._folder / "counted_calls.so", self._folder / "counted"
        source = HERE / "counted_calls.c"
        subprocess.run([compiler, "-shared", "-fPIC", "-O1", "-o", library, source, "-ldl"], check=True)
        self._counted.write_bytes(bytes(ctypes.sizeof(_State)))
        with self._counted.open("r+b") as file:
            self._state = _State.from_buffer(mmap.mmap(file.fileno(), 0))
        kept = {name: os.environ[name] for name in ("PATH", "HOME", "TMPDIR", "LD_LIBRARY_PATH") if name in os.environ}
        # One thread a library: a fork has none of its parent's.
        alone = {f"{name}_NUM_THREADS": "1" for name in ("OMP", "OPENBLAS", "MKL")} | {
            "TOKENIZERS_PARALLELISM": "false",
            "ARROW_DEFAULT_MEMORY_POOL": "system",
        }
        self._server = subprocess.Popen(
            [sys.executable, HERE / "command_server.py", *self._imports],
            env={**kept, **alone, "COLUMNS": "160", "PYTHONPATH": str(ROOT), "LD_PRELOAD": str(library)},
            cwd=ROOT,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        assert self._server.stdout.readline() == "ready\n"
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._server.stdin.close()
        self._server.wait()
        self._server.stdout.close()

    def limit_memory(self, num_bytes: int) -> None:
        """Refuse the commands that begin from now on more address space than this."""
        resource.prlimit(self._server.pid, resource.RLIMIT_AS, (num_bytes, num_bytes))

    def run(
        self,
        *commands: Sequence[object],
        root: Path,
        at: int = -1,
        error: int = 0,
        stays_full: bool = False,
        stops: bool = False,
        reads: bool = False,
        everyone: bool = False,
        smallest: int = 0,
        forced: Path | None = None,
        counted: int | None = None,
        environments: Sequence[dict[str, str]] = (),
        uids: Sequence[int] = (),
        umask: int = 0o022,
        patience_s: float = 240.0,
        grace_s: float = 240.0,
    ) -> Ran:
        """Run commands side by side until all have ended.

        Args:
            root: calls on files below it are counted.
            at: the call in which a process dies; negative for none.
            error: the call fails with this errno instead.
            stays_full: it and all calls afterwards that need space fail; half of the write at `at` still fits.
            stops: the first command, which alone is counted, stops there instead, until the others have ended.
            reads: count calls that read, too.
            everyone: after that call every other process dies at its next one.
            smallest: bytes of the allocations that are counted in place of calls on files; the one at `at` is refused.
            forced: folder of `keep_forced`, for `lose_power`; on the file system of `root`.
            counted: the only command that is counted; None for all.
            environments: variables of each command.
            uids: user of each command; 0 for that of the tests.
            umask: of all.
            patience_s: the longest wait; then whatever is left is killed.
            grace_s: the longest wait for the others after SIGKILL ended one.
        """
        values = {"at": at, "error": error, "stays_full": stays_full, "stops": stops, "everyone": everyone}
        for name, value in {**values, "reads": reads, "count": 0, "smallest": smallest}.items():
            setattr(self._state, name, int(value))
        self._state.root = str(root.resolve()).encode()
        self._state.forced = str(forced.resolve()).encode() if forced is not None else b""
        outputs = [str(self._folder / f"output-{number}") for number in range(len(commands))]
        request = {
            "commands": [
                {
                    "arguments": [str(word) for word in command],
                    "environment": environments[number] if environments else {},
                    "uid": uids[number] if uids else 0,
                    "umask": umask,
                    "output": outputs[number],
                    "counted": number == (0 if stops else number if counted is None else counted),
                }
                for number, command in enumerate(commands)
            ],
            "stops": stops,
            "folder": str(self._folder),
            "state": str(self._counted),
            "patience_s": patience_s,
            "grace_s": grace_s,
        }
        self._server.stdin.write(json.dumps(request) + "\n")
        self._server.stdin.flush()
        statuses = json.loads(self._server.stdout.readline())
        codes = [None if status is None else os.waitstatus_to_exitcode(status) for status in statuses]
        logged = (self._state.log[number].value for number in range(min(self._state.count, len(self._state.log))))
        calls = [call.decode(errors="replace") for call in logged]
        calls += ["?"] * (self._state.count - len(calls))
        ends = (Path(output + end) for output in outputs for end in (".out", ".err"))
        text = "".join(path.read_text(errors="replace") for path in ends if path.exists())
        return Ran(codes, calls, calls[at] if 0 <= at < len(calls) else "", text)


def environments_of(ranks: int) -> list[dict[str, str]]:
    """Return the variables that make commands the ranks of one job; none for one rank."""
    if ranks == 1:
        return [{}]
    job = {"WORLD_SIZE": f"{ranks}", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": f"{free_ports(1)[0]}"}
    return [{**job, "RANK": f"{rank}", "LOCAL_RANK": f"{rank}"} for rank in range(ranks)]


def keep_forced(root: Path, forced: Path) -> None:
    """Take everything below `root` as forced to disk, in the form in which `counted_calls.c` keeps it."""
    shutil.rmtree(forced, ignore_errors=True)
    forced.mkdir(parents=True)
    for folder in (root, *(path for path in root.rglob("*") if path.is_dir())):
        lines = []
        for entry in os.scandir(folder):
            lines.append(f"{'d' if entry.is_dir() else 'f'} {entry.inode()} {entry.name}\n")
            if entry.is_file():
                os.link(entry.path, forced / f"{entry.inode()}.link")
                shutil.copy2(entry.path, forced / str(entry.inode()))
        (forced / f"{folder.stat().st_ino}.names").write_text("".join(lines))


def lose_power(root: Path, forced: Path, *, names: bool) -> None:
    """Leave below `root` what a power failure does: of each file the bytes that were forced to disk, or none.

    Args:
        names: names that were not forced are lost too; otherwise only bytes are, as on a disk whose journal of names
            is ahead of the bytes.
    """
    after = forced / "after"
    _leave(root, root.stat().st_ino, after, forced, names=names)
    shutil.rmtree(root)
    after.rename(root)


def _leave(folder: Path, inode: int, target: Path, forced: Path, *, names: bool) -> None:
    target.mkdir()
    kept, entries = forced / f"{inode}.names", []
    if not names:
        entries = [("fd"[entry.is_dir()], str(entry.inode()), entry.name) for entry in os.scandir(folder)]
    elif kept.exists():
        entries = [tuple(line.split(" ", 2)) for line in kept.read_text().splitlines()]
    for kind, number, name in entries:
        if kind == "d":
            _leave(folder / name, int(number), target / name, forced, names=names)
        elif (forced / number).exists():
            shutil.copy2(forced / number, target / name)
        else:
            (target / name).touch()
