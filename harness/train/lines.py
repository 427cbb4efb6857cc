"""Files of JSON lines that grow step by step, and that a full disk or a kill leaves with whole lines."""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from harness.errors import FormatError, HarnessError, os_errors_as
from harness.settings import load
from harness.storage import write_atomically

ROOM_FIX = "free disk space or check the disk, then continue from the newest checkpoint with resume=true"
# Raised by code that takes values of JSON or YAML for what they are not.
MISREAD = (ValueError, LookupError, TypeError, AttributeError, ArithmeticError, RecursionError)
DAMAGED_FIX = "remove the line, or the file; `harness verify RUN` lists all damage"


@dataclass(frozen=True)
class StepLine:
    """The step of a line of any file of JSON lines, and two values that only `metrics.jsonl` has."""

    step: int
    loss: float | None = None
    step_s: float = 0.0

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            if value is not None and not abs(value) < 1e300:
                raise ValueError(f"{name} is {value}")


class LineFile:
    """A file that lines are appended to; each is handed to the system at once.

    Raise HarnessError, here and in all methods, if the disk refuses; the file then ends before the line.
    """

    def __init__(self, path: Path, contents: str) -> None:
        self._path, self._what = path, f"{contents} cannot be written"
        with os_errors_as(HarnessError, self._what, where=path, fix=ROOM_FIX):
            # Without a buffer: bytes that were refused must not come again when the file is closed.
            self._file = path.open("ab", buffering=0)

    def append(self, text: str) -> None:
        """Add whole lines."""
        with os_errors_as(HarnessError, self._what, where=self._path, fix=ROOM_FIX):
            size = os.fstat(self._file.fileno()).st_size
            rest = memoryview(text.encode())
            try:
                while rest:
                    rest = rest[self._file.write(rest) :]
            except OSError:
                with suppress(OSError):
                    os.ftruncate(self._file.fileno(), size)
                raise

    def sync(self) -> None:
        """Force the lines to disk: a power failure does not take them."""
        with os_errors_as(HarnessError, self._what, where=self._path, fix=ROOM_FIX):
            os.fsync(self._file.fileno())

    def close(self) -> None:
        with os_errors_as(HarnessError, self._what, where=self._path, fix=ROOM_FIX):
            self._file.close()


def whole_lines(path: Path) -> Iterator[str]:
    """Yield the lines that end: a kill may leave half of one.

    Bytes that are not UTF-8 become surrogates. An OSError names the file.
    """
    try:
        with path.open(encoding="utf-8", errors="surrogateescape", newline="\n") as file:
            yield from (line for line in file if line.endswith("\n"))
    except OSError as error:
        error.filename = error.filename or str(path)
        raise


def read_sound_lines(path: Path, newest: int = 0) -> list[StepLine]:
    """Return the newest lines of steps, 0 for all, without damaged ones: `verify_run` names those."""
    lines = []
    for line in deque(whole_lines(path), newest or None):
        with suppress(FormatError):
            lines.append(load(StepLine, line, where=path, lenient=True))
    return lines


def keep_lines_before(path: Path, first_step: int) -> list[int]:
    """Cut a file of JSON lines, one per step, to the whole lines before `first_step`; create it if missing.

    Return the steps of the lines that stay. The file and its name are durable. Raise FormatError for a damaged line,
    and HarnessError if the disk refuses; the file is then as it was.
    """
    with os_errors_as(HarnessError, f"{path.name} cannot be written", where=path, fix=ROOM_FIX):
        kept, steps = [], []
        for number, line in enumerate(whole_lines(path) if path.exists() else (), start=1):
            what = f"line {number} is not a record of a step"
            step = load(StepLine, line, where=path, fix=DAMAGED_FIX, what=what, lenient=True).step
            if step < first_step:
                kept.append(line)
                steps.append(step)
        write_atomically(path, "".join(kept).encode(errors="surrogateescape"))
    return steps


def describe_hole(path: Path, steps: Sequence[int], expected: Iterable[int]) -> str:
    """Return a warning about expected steps that have no line, empty if all have one."""
    missing = sorted(set(expected) - set(steps))
    if not missing:
        return ""
    return (
        f"warning: {path.name} has no records of {len(missing):,} of the trained steps {missing[0]:,} to "
        f"{missing[-1]:,}: they were lost in a power failure, removed, or never written; the run itself is complete"
    )
