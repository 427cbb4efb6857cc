"""The folder of a run: a new one for a new run, the same one for a resumed run, and never two runs in one."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from itertools import count
from pathlib import Path
from typing import Any

import yaml

from harness.checks import require_choice
from harness.errors import ConfigError, FormatError, HarnessError, LoaderError, LostRankError, os_errors_as
from harness.paths import is_run, numbered_runs
from harness.plan import PretrainConfig, SftConfig
from harness.printing import count_of
from harness.settings import find_odd, to_plain
from harness.storage import Marker, make_folder, write_atomically
from harness.train.attempts import STOPPED_FILE, Stop, steps_done, write_stop
from harness.train.checkpoints import CHECKPOINTS, Identity, UnreadableError, begin_attempt, whole_checkpoints
from harness.train.lines import MISREAD

RESUME = ("false", "true", "auto")
SETTINGS_FILE = "config.yaml"
# A run of any recipe has these.
_SECTIONS = ("model", "data", "loader", "optimizer", "parallel", "trainer")
SAMPLES_FILE = "samples.jsonl"
# Locked while a run writes to its folder; a killed run leaves it behind unlocked.
_RUNNING = "_running"
_ROOM = "free disk space, or select a folder on another disk with runs= or run_dir="
_RUN_AGAIN = "copy the run again, or use it with the version that wrote it; `harness verify RUN` lists all damage"
# The id of the Slurm job that has the run, written by its batch script.
_JOB = "_job"
# Some network file systems keep the locks of a node that has died for so long.
_LOST_LOCK_S = 150.0


def choose_run_folder(run_dir: str | None, *, runs: str, name: str, resume: str) -> Path:
    """Return the folder that a run writes to; nothing is created.

    Args:
        run_dir: a folder, or None for `<runs>/<name>-NNN`: to resume, the newest with a whole checkpoint (a run that
            failed before its first has nothing to resume from); else the next number.
        resume: `false` starts a new run, `true` resumes, `auto` resumes if there is a checkpoint.
    """
    require_choice(resume, RESUME, setting="resume")
    numbered = numbered_runs(Path(runs), name)
    if run_dir is None:
        resumable = [number for number, path in numbered.items() if whole_checkpoints(path / CHECKPOINTS)]
        if resume == "false" or (resume == "auto" and not resumable):
            return Path(runs) / f"{name}-{max(numbered, default=0) + 1:03d}"
        if not resumable:
            what = f"there is no run named {name} with a complete checkpoint to resume"
            fix = "resume=auto starts a new one; run_dir=FOLDER selects another"
            raise ConfigError(what, where=str(Path(runs) / f"{name}-*"), fix=fix)
        _refuse_if_running(numbered[max(resumable)])
        return numbered[max(resumable)]
    folder = Path(run_dir)
    _refuse_if_running(folder)
    if resume == "false" and folder.is_dir() and any(folder.iterdir()):
        fix = "continue it with resume=true, select another folder with run_dir=, or omit run_dir to create a new one"
        held = f": it has a run of {count_of(steps_done(folder), 'step')}" if is_run(folder) else ""
        raise ConfigError(f"the run folder is not empty{held}", where=str(folder), fix=fix)
    if resume == "true" and not whole_checkpoints(folder / CHECKPOINTS):
        fix = "resume=auto starts a new run in that case"
        raise ConfigError("the run folder has no complete checkpoint to resume from", where=str(folder), fix=fix)
    return folder


def read_settings(path: Path) -> dict[str, Any]:
    """Return the settings of a run from its config.yaml; raise FormatError as `check_settings` does."""
    try:
        values = yaml.safe_load(path.read_text())
    except (OSError, yaml.YAMLError, *MISREAD) as error:
        what = f"the run's settings cannot be read: {' '.join(str(error).split())}"
        raise FormatError(what, where=str(path), fix=_RUN_AGAIN) from None
    return check_settings(values, where=path)


# Settings of `trainer` in runs of earlier versions, which change neither weights nor exports.
_REMOVED = ("local_checkpoints", "local_checkpoint_interval")


def check_settings(values: Any, *, where: Path) -> dict[str, Any]:
    """Return a run's plain settings with the defaults of those that its version lacked; FormatError for others."""
    missing = [name for name in _SECTIONS if not isinstance(values, dict) or name not in values]
    if missing:
        raise FormatError(f"the run's settings lack {', '.join(missing)}", where=str(where), fix=_RUN_AGAIN)
    if isinstance(values["trainer"], dict):
        kept = {name: value for name, value in values["trainer"].items() if name not in _REMOVED}
        values = {**values, "trainer": kept}
    data = values["data"]
    schema = PretrainConfig if isinstance(data, dict) and "sequence_length" in data else SftConfig
    if odd := find_odd(values, schema):
        what = f"the run's settings are damaged, or of another version: {odd}"
        raise FormatError(what, where=str(where), fix=_RUN_AGAIN)
    return _completed(values, to_plain(schema()))


def _completed(values: dict[str, Any], defaults: dict[str, Any]) -> dict[str, Any]:
    inner = {name: _completed(value, defaults[name]) for name, value in values.items() if isinstance(value, dict)}
    return {**defaults, **values, **inner}


@contextmanager
def open_run_folder(folder: Path, *, settings: str, resumes: bool, trains: bool = True) -> Iterator[Identity]:
    """Create the folder of a run that is about to train, write its settings, and keep other runs out of it.

    Yield the identity of the attempt. If the settings of an earlier part differ, they are kept as
    `config.before-N.yaml`. Without `trains`, nothing is left to train, and readable settings stay those that trained.
    """
    if not resumes and folder.is_dir() and any(folder.iterdir()):
        _refuse_if_running(folder)
        raise ConfigError("another run has just started to use this folder", where=str(folder), fix="start again")
    with os_errors_as(ConfigError, "the run's folder cannot be used", where=folder, fix=_ROOM):
        make_folder(folder)
    with alone_in(folder):
        path = folder / SETTINGS_FILE
        if not trains:
            with suppress(FormatError, OSError, ValueError):
                read_settings(path)
                settings = path.read_text()
        with os_errors_as(ConfigError, "the run's settings cannot be written", where=path, fix=_ROOM):
            if not path.exists() or (before := path.read_bytes()) != settings.encode():
                if path.exists():
                    number = next(n for n in count() if not (folder / f"config.before-{n + 1}.yaml").exists())
                    newest = folder / f"config.before-{number}.yaml"
                    if not newest.exists() or newest.read_bytes() != before:
                        write_atomically(folder / f"config.before-{number + 1}.yaml", before)
                write_atomically(path, settings.encode())
            (folder / STOPPED_FILE).unlink(missing_ok=True)  # of the attempt before
            identity = begin_attempt(folder)
        yield identity


@contextmanager
def alone_in(folder: Path) -> Iterator[None]:
    """Lock a run's folder against other runs; raise ConfigError if one is still writing to it."""
    running = Marker(folder / _RUNNING)
    # A Slurm job that has the run waits for the lock of its earlier attempt.
    deadline = time.monotonic() + (_LOST_LOCK_S if has_run(folder) else 0.0)
    while True:
        try:
            with os_errors_as(ConfigError, "the run's folder cannot be used", where=folder, fix=_ROOM):
                running.acquire()
            break
        except FormatError:
            if time.monotonic() >= deadline:
                raise _still_running(folder, running) from None
        time.sleep(1)
    try:
        yield
    finally:
        running.release(remove=True)


def _refuse_if_running(folder: Path) -> None:
    if has_run(folder):
        return  # `alone_in` waits for the lock that an earlier attempt may have left
    running = Marker(folder / _RUNNING)
    try:
        running.refuse_if_held()
    except FormatError:
        raise _still_running(folder, running) from None


def _still_running(folder: Path, running: Marker) -> ConfigError:
    fix = "wait for it or stop it, then resume; or select another folder with run_dir="
    return ConfigError(f"another run is still writing to this folder: {running.holder}", where=str(folder), fix=fix)


def has_run(folder: Path) -> bool:
    """Return True in the Slurm job that has the run of this folder."""
    job = os.environ.get("SLURM_JOB_ID")
    with suppress(OSError):
        return job is not None and (folder / _JOB).read_text().strip() == job
    return False


def leave_refusal(folder: Path, error: HarnessError) -> None:
    """Write an error as the reason of an attempt that ended before it began, after the steps done so far."""
    # A launcher may turn every exit code into 1, and a scheduler would restart a run that is refused each time.
    requeue = isinstance(error, LoaderError | LostRankError | UnreadableError)
    rank = error.about if isinstance(error, LostRankError) else None
    leave_early_stop(folder, Stop(steps_done(folder), type(error).__name__, error.what, rank, requeue))


def leave_early_stop(folder: Path, stop: Stop) -> bool:
    """Write why an attempt ended before it began, unless another run is active; False if another rank has done so."""
    if not folder.is_dir():
        return True
    running = Marker(folder / _RUNNING)
    with suppress(FormatError, OSError):
        running.acquire()
        try:
            return write_stop(folder, stop)
        finally:
            running.release(remove=True)
    return True
