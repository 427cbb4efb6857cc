"""Record how each attempt of a run ended, and decide whether a scheduler should start the run again.

A run that ends early leaves `_stopped.json` in its folder (unless it is killed). `decide` turns that file and the exit
code into a line of `attempts.jsonl` and an answer; the batch script asks through `harness requeue`. If the node dies
with the script, the next attempt adds the missing line by `note_lost`.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from itertools import takewhile
from pathlib import Path

from harness.errors import FormatError, HarnessError, os_errors_as
from harness.printing import redact_all
from harness.settings import load
from harness.storage import write_atomically
from harness.train.checkpoints import RUN_FILE
from harness.train.identity import Identity
from harness.train.lines import LineFile, read_sound_lines, whole_lines
from harness.train.metrics import METRICS_FILE

STOPPED_FILE = "_stopped.json"
ATTEMPTS_FILE = "attempts.jsonl"
RESUMES_FILE = "resumes.jsonl"
# Exit code of a process that was asked to stop and saved its state: "try again later" in sysexits.h.
EXIT_STOPPED = 75
# Exit code of a process that refuses its input: another attempt would refuse it too.
EXIT_REFUSED = 2
# Ways in which a run starts again, in `attempts.jsonl`.
IN_JOB, THROUGH_SLURM = "in the job", "through Slurm"
# Lines of metrics that are looked through for a whole one.
_RECENT = 20
# Attempts in a row without progress, after which there are no more.
_MAX_STALLED = 10
_BY_HAND = "remove the file and start the run by hand"
# Reasons that are not the run's fault and may occur at any step.
_EXTERNAL = ("signal", "lost", "straggler")


@dataclass(frozen=True)
class Stop:
    """The reason that a run ended before its last step.

    Attributes:
        step: the last completed step, 0 for none.
        reason: `signal` (asked to stop, state saved), `straggler` (a slow node is left out, state saved), `hang`,
            `lost` (the node died with everything on it), or the class of the error.
        rank: the rank it is about; None for all or unknown.
        requeue: False if another attempt would fail in the same way.
    """

    step: int
    reason: str
    message: str
    rank: int | None = None
    requeue: bool = True


@dataclass(frozen=True)
class Attempt(Stop):
    """One line of `attempts.jsonl`.

    Attributes:
        exit_code: of the launcher of its ranks, None if it left none.
        time: of the record, seconds since 1970.
        again: IN_JOB or THROUGH_SLURM, None if the run was not started again.
        lost_s: seconds from its newest checkpoint to the resume; None, and absent from the file, until then.
    """

    exit_code: int | None = None
    time: float = 0.0
    job: str | None = None
    again: str | None = None
    lost_s: float | None = None

    def describe(self) -> str:
        """Return for people how the attempt ended, how the run started again, and the seconds that were lost."""
        of_job = f" (job {self.job})" if self.job else ""
        again = f", restarted {self.again}" if self.again else ""
        lost = f", {self.lost_s:,.0f} s lost" if self.lost_s is not None else ""
        return f"ended after step {self.step:,}: {self.reason}: {self.message}{of_job}{again}{lost}"


@dataclass(frozen=True)
class Decision:
    """Answer of `harness requeue`, with the reason in words."""

    requeue: bool
    message: str


def write_stop(folder: Path, stop: Stop) -> bool:
    """Write `stop` into the run's folder unless a rank has done so before; return False in that case."""
    text = json.dumps(redact_all(asdict(stop)))
    try:
        with (folder / STOPPED_FILE).open("x") as file:
            file.write(text)
    except FileExistsError:
        return False
    except OSError:
        pass  # no space: half a reason is none, but no other rank has reported a reason either
    return True


def record_resume(
    folder: Path, identity: Identity, step: int, checkpoint: Path, passed_over: Sequence[HarnessError]
) -> None:
    """Append to `resumes.jsonl` which attempt resumes from where, and the damage of newer checkpoints.

    The newest line of `attempts.jsonl` gets `lost_s`: the seconds from that checkpoint to now, in which nothing was
    trained that still counts.
    """
    now = time.time()
    attempts = read_attempts(folder)
    if attempts and attempts[-1].lost_s is None:
        with suppress(OSError):  # a checkpoint that has just gone; it is looked for later
            lost_s = round(max(0.0, now - (checkpoint / RUN_FILE).stat().st_mtime), 1)
            _write(folder, [*attempts[:-1], replace(attempts[-1], lost_s=lost_s)])
    line = {
        "time": now,
        "run": identity.run,
        "attempt": identity.attempt,
        "after_step": step,
        "checkpoint": checkpoint.name,
        "passed_over": [{"what": error.what, "where": error.where} for error in passed_over],
    }
    file = LineFile(folder / RESUMES_FILE, "the record of this resume")
    file.append(json.dumps(line) + "\n")
    file.close()


def decide(folder: Path, *, exit_code: int, max_same: int = 3, in_job: bool = False) -> Decision:
    """Record how this attempt ended, and decide whether to start the run again.

    A run that was asked to stop is always continued. A failed run is tried again until it has failed in the same way
    at the same step `max_same` times in a row, and never if its input was refused. After ten attempts in a row without
    progress, however they ended, there are no more. With `in_job`, the caller starts the ranks again in the same job.
    Raise FormatError if a file of an earlier attempt is unreadable.
    """
    if exit_code == 0:
        return Decision(False, "the run is finished")
    stop = read_stop(folder)
    if stop is None:
        reason, message = {
            # A launcher that ends all ranks when the first one leaves may have ended the one that writes the reason.
            EXIT_STOPPED: ("signal", "the ranks received a signal"),
            EXIT_REFUSED: ("refused", "invalid input"),
        }.get(exit_code, (f"exit code {exit_code}", f"the run ended with exit code {exit_code} and left no reason"))
        stop = Stop(steps_done(folder), reason, message, requeue=exit_code != EXIT_REFUSED)
    earlier = read_attempts(folder)
    own = (attempt for attempt in reversed(earlier) if attempt.reason not in _EXTERNAL)
    same = takewhile(lambda attempt: (attempt.reason, attempt.step) == (stop.reason, stop.step), own)
    decision = _judge(stop, [*earlier, stop], 1 + len([*same]), max_same)
    again = (IN_JOB if in_job else THROUGH_SLURM) if decision.requeue else None
    _append(folder, [stop], exit_code, job=os.environ.get("SLURM_JOB_ID"), again=again)
    (folder / STOPPED_FILE).unlink(missing_ok=True)
    return decision


def _judge(stop: Stop, attempts: Sequence[Stop], same: int, max_same: int) -> Decision:
    at = f"after step {stop.step}: {stop.message}"
    stalled, furthest = _stalled(attempts)
    if stalled >= _MAX_STALLED:
        return Decision(False, f"ended {at}; the last {stalled} attempts made no progress beyond step {furthest}")
    if stop.reason in ("signal", "straggler"):
        what = "stopped by request" if stop.reason == "signal" else "stopped"
        return Decision(True, f"{what} {at}; it will continue from its checkpoint")
    if not stop.requeue:
        return Decision(False, f"failed {at}; a restart would fail in the same way")
    if same >= max_same:
        return Decision(False, f"failed {at}: {same} identical failures at the same step")
    return Decision(True, f"failed {at}; attempt {same} of {max_same} at this step")


def note_lost(folder: Path, *, job: str, restarts: int, predecessor: str | None = None) -> None:
    """Record, at the start of an attempt of a Slurm job, earlier attempts that its script did not record.

    Args:
        restarts: how often Slurm has restarted it.
        predecessor: the job that this one continues, if it waited for that job's end in the queue.

    Raises:
        HarnessError: with these, ten attempts in a row made no progress.
        FormatError: a file of an earlier attempt is unreadable.
    """
    earlier = read_attempts(folder)
    recorded = sum(attempt.job == job and attempt.again != IN_JOB for attempt in earlier)
    newest = read_stop(folder)
    (folder / STOPPED_FILE).unlink(missing_ok=True)
    if restarts <= recorded:
        done = steps_done(folder)
        own = [attempt.step for attempt in earlier if attempt.job == predecessor]
        follows = predecessor is not None and restarts == 0 and not any(attempt.job == job for attempt in earlier)
        if newest is None and follows and (not own or own[-1] < done):
            newest = Stop(done, "lost", "Slurm ended the job; no rank could record the reason")
        if newest is not None:  # of another job
            _append(folder, [newest], None, job=predecessor if follows else None)
            if follows:
                _refuse_stalled(folder)
        return
    lost = Stop(steps_done(folder), "lost", "a node failed or was removed by Slurm; no rank could record the reason")
    # A script that Slurm ends may be killed before it asks; the ranks have left their reason.
    _append(folder, [*[lost] * (restarts - recorded - 1), newest or lost], None, job=job)
    _refuse_stalled(folder)


def _refuse_stalled(folder: Path) -> None:
    stalled, furthest = _stalled(read_attempts(folder))
    if stalled >= _MAX_STALLED:
        what = f"the last {stalled} attempts made no progress beyond step {furthest}"
        fix = "see what Slurm reports about the nodes (sacct, slurmd.log); remove the file and submit again"
        raise HarnessError(what, where=str(folder / ATTEMPTS_FILE), fix=fix)


def _append(
    folder: Path, stops: Sequence[Stop], exit_code: int | None, *, job: str | None, again: str | None = THROUGH_SLURM
) -> None:
    ended = [Attempt(**vars(stop), exit_code=exit_code, time=time.time(), job=job, again=again) for stop in stops]
    _write(folder, [*read_attempts(folder), *ended])


def _write(folder: Path, attempts: Sequence[Attempt]) -> None:
    path = folder / ATTEMPTS_FILE
    fix = "free disk space or check the disk, then start again"
    with os_errors_as(HarnessError, "the record of attempts cannot be written", where=path, fix=fix):
        folder.mkdir(parents=True, exist_ok=True)
        lines = [{k: v for k, v in vars(attempt).items() if (k, v) != ("lost_s", None)} for attempt in attempts]
        # Rewritten as a whole: half a line would be read together with the next one.
        write_atomically(path, "".join(json.dumps(line) + "\n" for line in lines).encode())


def read_attempts(folder: Path) -> list[Attempt]:
    """Return the attempts that ended early, in order; raise FormatError for a damaged or unreadable file."""
    path = folder / ATTEMPTS_FILE
    with os_errors_as(FormatError, "cannot be read", where=path, fix=_BY_HAND), suppress(FileNotFoundError):
        return [load(Attempt, line, where=path, fix=_BY_HAND) for line in whole_lines(path)]
    return []


def read_stop(folder: Path) -> Stop | None:
    """Return why the newest attempt ended; None without a reason, also for one that a kill or a full disk cut short."""
    path = folder / STOPPED_FILE
    with suppress(OSError, FormatError):
        return load(Stop, path.read_bytes(), where=path)
    return None


def _stalled(attempts: Sequence[Stop]) -> tuple[int, int]:
    """Return the number of latest attempts that got no further than an earlier one, and the furthest step."""
    steps = [attempt.step for attempt in attempts]
    return len(steps) - 1 - steps.index(max(steps)), max(steps)


def steps_done(folder: Path) -> int:
    """Return the last step in the run's metrics, 0 for none."""
    with suppress(OSError):
        return max((line.step for line in read_sound_lines(folder / METRICS_FILE, _RECENT)), default=0)
    return 0
