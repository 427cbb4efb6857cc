"""How the attempts of one run ended, and whether a scheduler should start it again.

A run that ends early leaves `_stopped.json` in its folder (one that is killed cannot). `decide` turns it and the exit
code into a line of `attempts.jsonl` and an answer; the batch script asks by `harness requeue`. Where the script is gone
too, with its node, the next attempt notes it by `note_lost`.
"""

from __future__ import annotations

import json
import os
import socket
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from harness.errors import FormatError, HarnessError
from harness.train.metrics import METRICS_FILE, whole_lines

STOPPED_FILE = "_stopped.json"
ATTEMPTS_FILE = "attempts.jsonl"
# Of a process that was asked to stop and has saved its state: "try again later" in sysexits.h.
EXIT_STOPPED = 75
# Of a process that refuses its input: another try would refuse it too.
EXIT_REFUSED = 2
# Of these the run is not to blame, and they may come at any step.
_FROM_OUTSIDE = ("signal", "lost")


@dataclass(frozen=True)
class Stop:
    """Why a run ended before its last step.

    Attributes:
        step: the newest step that was done, 0 for none.
        reason: `signal` (asked to stop, state saved), `hang`, `lost` (nobody was left to tell), or the kind of the
            error.
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
    for attempt in reversed([one for one in earlier if one.reason not in _FROM_OUTSIDE]):
        if (attempt.reason, attempt.step) != (stop.reason, stop.step):
            break
        same += 1
    _note(folder, [stop], exit_code, job=os.environ.get("SLURM_JOB_ID"))
    forget_stop(folder)
    at = f"after step {stop.step}: {stop.message}"
    stalled, furthest = _stalled([*earlier, stop])
    if stalled >= max_stalled:
        return Decision(False, f"ended {at}; the last {stalled} attempts came no further than step {furthest}")
    if stop.reason == "signal":
        return Decision(True, f"asked to stop {at}; it goes on from its checkpoint")
    if not stop.requeue:
        return Decision(False, f"failed {at}; another try would fail in the same way")
    if same >= max_same:
        return Decision(False, f"failed {at}; that was {same} times in the same way at the same step")
    return Decision(True, f"failed {at}; try {same} of {max_same} at this step")


def note_lost(folder: Path, *, job: str, restarts: int, max_stalled: int = 10) -> None:
    """At the begin of an attempt of a Slurm job: note those before it that its script did not ask about.

    Args:
        job: its id.
        restarts: how often Slurm has started it again.

    Raises:
        HarnessError: with them, `max_stalled` attempts in a row came no further than one before.
        FormatError: what an earlier attempt left is unreadable.
    """
    told = sum(line.get("job") == job for line in _lines(folder))
    newest = _read_stop(folder)
    forget_stop(folder)
    lost = Stop(steps_done(folder), "lost", "nobody was left to tell: a node died, or Slurm took it away")
    # A script that Slurm ends may not live to ask; the ranks have left their reason.
    if restarts <= told:
        if newest is not None:  # of another job
            _note(folder, [newest], None, job=None)
        return
    _note(folder, [*[lost] * (restarts - told - 1), newest or lost], None, job=job)
    stalled, furthest = _stalled(_read_attempts(folder))
    if stalled >= max_stalled:
        raise HarnessError(
            f"the last {stalled} attempts came no further than step {furthest}",
            where=str(folder / ATTEMPTS_FILE),
            fix="see what Slurm says of the nodes (sacct, slurmd.log); remove the file and submit the run again",
        )


def _note(folder: Path, stops: Sequence[Stop], exit_code: int | None, *, job: str | None) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / ATTEMPTS_FILE
    more = {"exit_code": exit_code, "time": time.time(), "job": job}
    before = list(whole_lines(path)) if path.exists() else []
    # Whole or not at all: half a line would be read with the one behind it.
    written = path.with_suffix(".rewritten")
    written.write_text("".join([*before, *(json.dumps({**asdict(stop), **more}) + "\n" for stop in stops)]))
    written.replace(path)


def _stalled(attempts: Sequence[Stop]) -> tuple[int, int]:
    """How many of the newest came no further than one before them, and the furthest step."""
    steps = [one.step for one in attempts]
    return len(steps) - 1 - steps.index(max(steps)), max(steps)


def _read_stop(folder: Path) -> Stop | None:
    try:
        return _stop(json.loads((folder / STOPPED_FILE).read_text()))
    except FileNotFoundError:
        return None
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise _unreadable(folder / STOPPED_FILE, error) from None


def _lines(folder: Path) -> list[dict[str, Any]]:
    path = folder / ATTEMPTS_FILE
    try:
        lines = [json.loads(line) for line in whole_lines(path)] if path.exists() else []
        for line in lines:
            _stop(line)
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise _unreadable(path, error) from None
    return lines


def _read_attempts(folder: Path) -> list[Stop]:
    return [_stop(line) for line in _lines(folder)]


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
