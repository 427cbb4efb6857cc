"""Summarize a run from the files of its folder: how far it is, how fast, and how its attempts ended."""

from __future__ import annotations

import statistics
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import yaml

from harness.errors import ConfigError, FormatError
from harness.paths import explain_path
from harness.train.attempts import Attempt, read_attempts, read_stop
from harness.train.checkpoints import CHECKPOINTS, whole_checkpoints
from harness.train.lines import MISREAD, StepLine, read_sound_lines
from harness.train.metrics import METRICS_FILE, REPORT_FILE

_RECENT = 20


@dataclass(frozen=True)
class RunStatus:
    """State of a run as its files show it.

    Attributes:
        steps: number of steps that the run is to make; None if it has not begun, or ends with its data.
        step, loss: of the newest step; 0 and None before the first.
        step_s: median seconds of the newest steps, None before the first.
        age_s: seconds since that step.
        stopped: message of the last attempt that ended early and has not been continued.
    """

    folder: str
    steps: int | None
    reported: bool
    step: int
    loss: float | None
    step_s: float | None
    age_s: float | None
    checkpoint: int | None
    attempts: list[Attempt]
    stopped: str | None

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
