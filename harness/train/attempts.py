"""Record how each attempt of a run ended, decide whether a scheduler should start it again, and tell how far it is.

A run that ends early leaves `_stopped.json` in its folder (unless it is killed). `decide` turns that file and the exit
code into a line of `attempts.jsonl` and an answer; the batch script asks through `harness requeue`. If the node dies
with the script, the next attempt adds the missing line by `note_lost`.
"""

from __future__ import annotations

import json
import os
import statistics
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from itertools import takewhile
from pathlib import Path

import yaml

from harness.errors import ConfigError, FormatError, HarnessError, os_errors_as
from harness.paths import explain_path
from harness.printing import redact_all
from harness.settings import load
from harness.storage import write_atomically
from harness.train.checkpoints import CHECKPOINTS, RUN_FILE, Identity, whole_checkpoints
from harness.train.lines import MISREAD, LineFile, StepLine, read_sound_lines, whole_lines
from harness.train.metrics import METRICS_FILE, REPORT_FILE

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

    Reasons are `signal` (asked to stop, state saved), `straggler` (a slow node is left out, state saved), `hang`,
    `lost` (the node died with everything on it), or the class of the error.
    """

    step: int  # the last completed one, 0 for none
    reason: str
    message: str
    rank: int | None = None  # that it is about; None for all or unknown
    requeue: bool = True  # False if another attempt would fail in the same way


@dataclass(frozen=True)
class Attempt(Stop):
    """One line of `attempts.jsonl`."""

    exit_code: int | None = None  # of the launcher of its ranks, None if it left none
    time: float = 0.0  # of the record, seconds since 1970
    job: str | None = None
    again: str | None = None  # IN_JOB or THROUGH_SLURM, None if the run was not started again
    lost_s: float | None = None  # from its newest checkpoint to the resume; absent from the file until then

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

    The newest line of `attempts.jsonl` gets its `lost_s`.
    """
    now = time.time()
    attempts = read_attempts(folder)
    if attempts and attempts[-1].lost_s is None:
        with suppress(OSError):  # a checkpoint that has just gone; it is looked for later
            # From then to now, nothing was trained that still counts.
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
    same = 1 + len([*takewhile(lambda attempt: (attempt.reason, attempt.step) == (stop.reason, stop.step), own)])
    at = f"after step {stop.step}: {stop.message}"
    if stalled := _no_progress([*earlier, stop]):
        decision = Decision(False, f"ended {at}; {stalled}")
    elif stop.reason in ("signal", "straggler"):
        what = "stopped by request" if stop.reason == "signal" else "stopped"
        decision = Decision(True, f"{what} {at}; it will continue from its checkpoint")
    elif not stop.requeue:
        decision = Decision(False, f"failed {at}; a restart would fail in the same way")
    elif same >= max_same:
        decision = Decision(False, f"failed {at}: {same} identical failures at the same step")
    else:
        decision = Decision(True, f"failed {at}; attempt {same} of {max_same} at this step")
    again = (IN_JOB if in_job else THROUGH_SLURM) if decision.requeue else None
    job, now = os.environ.get("SLURM_JOB_ID"), time.time()
    _write(folder, [*earlier, Attempt(**vars(stop), exit_code=exit_code, time=now, job=job, again=again)])
    (folder / STOPPED_FILE).unlink(missing_ok=True)
    return decision


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
    missing = restarts - sum(attempt.job == job and attempt.again != IN_JOB for attempt in earlier)
    newest, done, owner = read_stop(folder), steps_done(folder), job if missing > 0 else None
    (folder / STOPPED_FILE).unlink(missing_ok=True)
    if missing <= 0:  # the newest reason is of another job
        own = [attempt.step for attempt in earlier if attempt.job == predecessor]
        follows = predecessor is not None and restarts == 0 and not any(attempt.job == job for attempt in earlier)
        if newest is None and follows and (not own or own[-1] < done):
            newest = Stop(done, "lost", "Slurm ended the job; no rank could record the reason")
        if newest is None:
            return
        owner = predecessor if follows else None
    lost = Stop(done, "lost", "a node failed or was removed by Slurm; no rank could record the reason")
    # A script that Slurm ends may be killed before it asks; the ranks have left their reason.
    ended = [*[lost] * (missing - 1), newest or lost]
    now = time.time()
    attempts = [*earlier, *(Attempt(**vars(stop), time=now, job=owner, again=THROUGH_SLURM) for stop in ended)]
    _write(folder, attempts)
    if owner is not None and (stalled := _no_progress(attempts)):
        fix = "see what Slurm reports about the nodes (sacct, slurmd.log); remove the file and submit again"
        raise HarnessError(stalled, where=str(folder / ATTEMPTS_FILE), fix=fix)


def _no_progress(attempts: Sequence[Stop]) -> str:
    """Return what is wrong where too many of the latest attempts got no further than an earlier one; else nothing."""
    steps = [attempt.step for attempt in attempts]
    stalled = len(steps) - 1 - steps.index(max(steps))
    return f"the last {stalled} attempts made no progress beyond step {max(steps)}" if stalled >= _MAX_STALLED else ""


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


def steps_done(folder: Path) -> int:
    """Return the last step in the run's metrics, 0 for none."""
    with suppress(OSError):
        return max((line.step for line in read_sound_lines(folder / METRICS_FILE, _RECENT)), default=0)
    return 0


@dataclass(frozen=True)
class RunStatus:
    """State of a run as its files show it."""

    folder: str
    steps: int | None  # that the run is to make; None if it has not begun, or ends with its data
    reported: bool
    step: int  # the newest; 0 before the first
    loss: float | None
    step_s: float | None  # median seconds of the newest steps
    age_s: float | None  # seconds since the newest step
    checkpoint: int | None
    attempts: list[Attempt]
    stopped: str | None  # message of the last attempt that ended early and has not been continued

    @property
    def is_finished(self) -> bool:
        if self.steps is None:
            return self.reported and self.step == self.checkpoint
        return self.step >= self.steps == self.checkpoint

    @property
    def left_s(self) -> float | None:
        """Seconds that the steps left take at the present speed, without validations and checkpoints."""
        return None if self.step_s is None or self.steps is None else self.step_s * (self.steps - self.step)


def read_status(folder: Path) -> RunStatus:
    """Return the state of a run; raise ConfigError if the folder is not one of a run."""
    if not (folder / "config.yaml").exists() and not (folder / "job.sbatch").exists():
        usual = ("there is no run in this folder", "specify the folder of a run")
        what, fix = explain_path(folder, expected="a run") or usual
        raise ConfigError(what, where=str(folder), fix=fix)
    steps = None
    with suppress(OSError, yaml.YAMLError, *MISREAD):
        steps = int(yaml.safe_load((folder / "config.yaml").read_text())["trainer"]["steps"])
    newest: list[StepLine] = []
    age_s = None
    with suppress(OSError):
        path = folder / METRICS_FILE
        newest = read_sound_lines(path, _RECENT)
        age_s = max(0.0, time.time() - path.stat().st_mtime) if newest else None
    checkpoints = whole_checkpoints(folder / CHECKPOINTS)
    attempts: list[Attempt] = []
    with suppress(FormatError):
        attempts = read_attempts(folder)
    stop = read_stop(folder)
    return RunStatus(
        folder=str(folder),
        steps=steps,
        reported=(folder / REPORT_FILE).exists(),
        step=newest[-1].step if newest else 0,
        loss=newest[-1].loss if newest else None,
        step_s=statistics.median(line.step_s for line in newest) if newest else None,
        age_s=age_s,
        checkpoint=int(checkpoints[-1].name.removeprefix("step-")) if checkpoints else None,
        attempts=attempts,
        stopped=None if stop is None else stop.message,
    )
