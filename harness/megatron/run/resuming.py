"""Choose the folder of a run, and the checkpoint that it resumes from."""

from __future__ import annotations

import json
import math
import os
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import yaml

from harness.errors import CheckpointError, ConfigError
from harness.megatron.model.lora import check_same_adapters
from harness.megatron.state.checkpoint import find_newest, stored_moments
from harness.plan import OptimizerConfig, RunConfig
from harness.train import METRICS_FILE, Progress, alone_in, read_metrics
from harness.train.attempts import note_lost, record_resume
from harness.train.checkpoints import CHECKPOINTS, RUN_FILE, Identity, read_progress, refuse_foreign
from harness.train.folder import choose_run_folder
from harness.train.lines import MISREAD
from harness.train.metrics import Log


def choose_folder(config: RunConfig) -> Path:
    folder = choose_run_folder(config.run_dir, runs=config.runs, name=config.name, resume=config.resume)
    job, restarts = os.environ.get("SLURM_JOB_ID"), os.environ.get("SLURM_RESTART_COUNT", "0")
    # The jobs of a sweep create their folder only when they train.
    if job is not None and config.run_dir is not None and restarts.isdecimal() and folder.is_dir():
        # Take the lock, so that the records of another active run do not change.
        with alone_in(folder):
            note_lost(folder, job=job, restarts=int(restarts), predecessor=os.environ.get("HARNESS_PREDECESSOR"))
    return folder


def find_start(config: RunConfig, folder: Path) -> tuple[Path | None, list[CheckpointError]]:
    """Return the checkpoint to resume from, or None, and the errors of newer, damaged ones."""
    if config.resume == "false":
        return None, []
    newest, passed_over = find_newest(folder / CHECKPOINTS, unchecked=config.resume_unchecked)
    if newest is None and config.resume == "true":
        fix = "resume=auto starts from the first step"
        error = ConfigError("there is no complete checkpoint to resume from", where=str(folder), fix=fix)
        error.is_shared = True
        raise error
    return newest, passed_over


def check_resumed(config: RunConfig, folder: Path, newest: Path) -> Progress:
    """Return the progress of the checkpoint to resume from; raise ConfigError if the settings cannot continue it."""
    progress = read_progress(newest)
    refuse_foreign(folder, newest)
    # Older checkpoints do not contain the settings. Unreadable settings do not prevent a resume; they are kept as
    # config.before-N.yaml.
    with suppress(OSError, yaml.YAMLError, *MISREAD):
        before = json.loads((newest / RUN_FILE).read_text()).get("settings")
        before = before or yaml.safe_load((folder / "config.yaml").read_text())
        check_same_adapters(config.model, before["model"], str(folder))
    if progress.step > config.trainer.last_step:
        what = f"{progress.step} steps are complete, but trainer.steps is {config.trainer.steps}"
        raise ConfigError(what, where=str(newest), fix=f"trainer.steps={progress.step} or more, or start a new run")
    return progress


def keep_recorded(optimizer: OptimizerConfig, folder: Path) -> OptimizerConfig:
    """Return the optimizer's settings, with null values replaced by the values that the run recorded."""
    with suppress(OSError, yaml.YAMLError, ConfigError, *MISREAD):
        recorded = yaml.safe_load((folder / "config.yaml").read_text())["optimizer"]
        unset = [name for name in ("lr", "warmup_steps", "decay_steps") if getattr(optimizer, name) is None]
        return replace(optimizer, **{name: recorded[name] for name in unset})
    return optimizer


def read_validations(folder: Path, first_step: int) -> list[float]:
    """Return the losses of the validations before `first_step`."""
    path = folder / METRICS_FILE
    steps = read_metrics(path) if path.exists() else []
    found = [step.validation_loss for step in steps if step.step < first_step and step.validation_loss is not None]
    return [loss if math.isfinite(loss) else math.inf for loss in found]


def report_resume(
    config: RunConfig, folder: Path, identity: Identity, newest: Path, passed_over: list[CheckpointError], log: Log
) -> None:
    """Log and record which checkpoint a run resumes from."""
    done, last = read_progress(newest).step, config.trainer.last_step
    log(f"resuming after step {done}, from {newest}")
    written_by = json.loads((newest / RUN_FILE).read_text()).get("run", identity.run)
    if written_by != identity.run:
        was = f"this folder was copied, moved or restored: its checkpoint belongs to run {written_by}"
        log(f"{was}, and the resumed run is {identity.run}")
    stored, now = stored_moments(newest), config.optimizer.moments_dtype
    if stored not in (None, now):
        log(f"its optimizer moments were stored as {stored} and converted to {now}")
    if done >= last:
        more = f"to train more, resume with a higher number, such as trainer.steps={2 * last}"
        log(f"nothing to train: step {last:,} of {last:,} is complete; {more}")
    record_resume(folder, identity, done, newest, passed_over)
