"""How the attempts of one run ended, and whether a scheduler should start it again.

A run that ends early leaves `_stopped.json` in its folder (one that is killed cannot). `decide` turns it and the exit
code into a line of `attempts.jsonl` and an answer; the batch script asks by `harness requeue`.
"""

from __future__ import annotations

import json
import os
import socket
import time
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from harness.errors import FormatError
from harness.report.metrics import METRICS_FILE, whole_lines

STOPPED_FILE = "_stopped.json"
ATTEMPTS_FILE = "attempts.jsonl"
# Of a process that was asked to stop and has saved its state: "try again later" in sysexits.h.
EXIT_STOPPED = 75
# Of a process that refuses its input: another try would refuse it too.
EXIT_REFUSED = 2


@dataclass(frozen=True)
class Stop:
    """Why a run ended before its last step.

    Attributes:
        step: the newest step that was done, 0 for none.
        reason: `signal` (asked to stop, state saved), `hang`, or the kind of the error.
        message: for a person.
        rank: that it is about, None for all or unknown.
        requeue: False where another try fails in the same way.
    """

    step: int
    reason: str
    message: str
    rank: int | None = None
    requeue: bool = True


@dataclass(frozen=True)
class Decision:
    requeue: bool
    message: str


def write_stop(folder: Path, stop: Stop) -> bool:
    """Leave `stop` in the run's folder; of several ranks the first is kept. False where there is one already."""
    path = folder / STOPPED_FILE
    temporary = folder / f"{STOPPED_FILE}.{socket.gethostname()}.{os.getpid()}"
    text = json.dumps(asdict(stop))
    try:
        temporary.write_text(text)
        os.link(temporary, path)
    except FileExistsError:
        return False
    except OSError:  # no room, or a file system without links
        try:
            with path.open("x") as file:
                file.write(text)
        except FileExistsError:
            return False
        except OSError:
            return True  # left nowhere, but nobody else has told either
    finally:
        with suppress(OSError):
            temporary.unlink()
    return True


def forget_stop(folder: Path) -> None:
    """A new attempt begins: how the last one ended says nothing about it."""
    (folder / STOPPED_FILE).unlink(missing_ok=True)


def decide(folder: Path, *, exit_code: int, max_same: int = 3, max_stalled: int = 10) -> Decision:
    """Note how this attempt ended, and say whether to start the run again.

    A run that was asked to stop goes on, however often. One that failed is tried again until it has failed in the
    same way at the same step `max_same` times in a row, and never when its input was refused. However it ends,
    `max_stalled` attempts in a row that came no further than one before are the last.

    Raises:
        FormatError: what an earlier attempt left is unreadable.
    """
    if exit_code == 0:
        return Decision(False, "the run is finished")
    stop = _read_stop(folder)
    if stop is None and exit_code == EXIT_STOPPED:
        # A launcher that ends all ranks when the first one leaves may have ended the one that writes it down.
        stop = Stop(steps_done(folder), "signal", "the ranks were told")
    if stop is None:
        refused = exit_code == EXIT_REFUSED
        told = "the run refused its input" if refused else f"the run ended with exit code {exit_code} and said no more"
        reason = "refused" if refused else f"exit code {exit_code}"
        stop = Stop(steps_done(folder), reason, told, requeue=not refused)
    earlier = _read_attempts(folder)
    same = 1
    for attempt in reversed([one for one in earlier if one.reason != "signal"]):
        if (attempt.reason, attempt.step) != (stop.reason, stop.step):
            break
        same += 1
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / ATTEMPTS_FILE).open("a") as file:
        line = {**asdict(stop), "exit_code": exit_code, "time": time.time(), "job": os.environ.get("SLURM_JOB_ID")}
        file.write(json.dumps(line) + "\n")
    forget_stop(folder)
    at = f"after step {stop.step}: {stop.message}"
    steps = [one.step for one in (*earlier, stop)]
    stalled = len(steps) - 1 - steps.index(max(steps))
    if stalled >= max_stalled:
        return Decision(False, f"ended {at}; the last {stalled} attempts came no further than step {max(steps)}")
    if stop.reason == "signal":
        return Decision(True, f"asked to stop {at}; it goes on from its checkpoint")
    if not stop.requeue:
        return Decision(False, f"failed {at}; another try would fail in the same way")
    if same >= max_same:
        return Decision(False, f"failed {at}; that was {same} times in the same way at the same step")
    return Decision(True, f"failed {at}; try {same} of {max_same} at this step")


def _read_stop(folder: Path) -> Stop | None:
    try:
        return _stop(json.loads((folder / STOPPED_FILE).read_text()))
    except FileNotFoundError:
        return None
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise _unreadable(folder / STOPPED_FILE, error) from None


def _read_attempts(folder: Path) -> list[Stop]:
    path = folder / ATTEMPTS_FILE
    try:
        return [_stop(json.loads(line)) for line in whole_lines(path)] if path.exists() else []
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise _unreadable(path, error) from None


def _stop(values: dict[str, Any]) -> Stop:
    return Stop(**{name: values[name] for name in ("step", "reason", "message", "rank", "requeue")})


def _unreadable(path: Path, error: Exception) -> FormatError:
    return FormatError(f"cannot be read: {error}", where=str(path), fix="remove the file and start the run by hand")


def steps_done(folder: Path) -> int:
    """The newest step that the run's metrics tell of, 0 for none."""
    newest = 0
    with suppress(OSError, ValueError, KeyError):
        for line in whole_lines(folder / METRICS_FILE):
            newest = json.loads(line)["step"]
    return newest
