"""The folder of a run: a new one for a new run, the same one for a resumed run, and never two runs in one."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from harness.checks import require_choice
from harness.errors import ConfigError, FormatError, HarnessError, LoaderError, LostRankError
from harness.storage import Marker
from harness.train.attempts import Stop, forget_stop, steps_done, write_stop
from harness.train.checkpoints import CHECKPOINTS, whole_checkpoints

RESUME = ("false", "true", "auto")
# Locked while a run writes to its folder; a killed run leaves it behind unlocked.
_RUNNING = "_running"
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")


def choose_run_folder(run_dir: str | None, *, runs: str, name: str, resume: str) -> Path:
    """Return the folder that a run writes to; nothing is created.

    Args:
        run_dir: a folder, or None for `<runs>/<name>-NNN`: to resume, the newest with a whole checkpoint (a run that
            failed before its first has nothing to resume from); else the next number.
        resume: `false` starts a new run, `true` resumes, `auto` resumes if there is a checkpoint.

    Raises:
        ConfigError: an unknown value of `resume`, a name that cannot name a folder, nothing to resume, or a folder
            that has a run already.
    """
    require_choice(resume, RESUME, setting="resume")
    if not _NAME.fullmatch(name):
        raise ConfigError(
            f"{name!r} cannot name a run's folder", where="name", fix="letters, digits, dots, dashes and underscores"
        )
    if run_dir is None:
        pattern = re.compile(rf"{re.escape(name)}-(\d+)")
        paths = Path(runs).iterdir() if Path(runs).is_dir() else ()
        numbered = {int(match[1]): path for path in paths if (match := pattern.fullmatch(path.name))}
        resumable = [number for number, path in numbered.items() if whole_checkpoints(path / CHECKPOINTS)]
        if resume == "false" or (resume == "auto" and not resumable):
            return Path(runs) / f"{name}-{max(numbered, default=0) + 1:03d}"
        if not resumable:
            raise ConfigError(
                f"there is no run named {name} with a whole checkpoint to resume",
                where=str(Path(runs) / f"{name}-*"),
                fix="resume=auto starts a new one; run_dir=FOLDER names another",
            )
        return numbered[max(resumable)]
    folder = Path(run_dir)
    if resume == "false" and folder.is_dir() and any(folder.iterdir()):
        fix = "resume=true continues the run in it; run_dir= names another folder"
        raise ConfigError("the run folder is not empty", where=str(folder), fix=fix)
    if resume == "true" and not whole_checkpoints(folder / CHECKPOINTS):
        fix = "resume=auto starts a new run in that case"
        raise ConfigError("the run folder has no whole checkpoint to resume from", where=str(folder), fix=fix)
    return folder


@contextmanager
def open_run_folder(folder: Path, *, settings: str, resumes: bool) -> Iterator[None]:
    """Create the folder of a run that is about to train, write its settings, and keep other runs out of it.

    If the settings of an earlier part differ, they are kept as `config.before-N.yaml`.

    Raises:
        ConfigError: another run has just taken the folder, or is still writing to it.
    """
    if not resumes and folder.is_dir() and any(folder.iterdir()):
        raise ConfigError("another run has just taken this folder", where=str(folder), fix="start again")
    folder.mkdir(parents=True, exist_ok=True)
    running = Marker(folder / _RUNNING)
    try:
        running.acquire()
    except FormatError:
        fix = "wait for it or end it, then resume; or name another folder with run_dir="
        raise ConfigError("another run is still writing to this folder", where=str(folder), fix=fix) from None
    try:
        path = folder / "config.yaml"
        if path.exists() and path.read_text() != settings:
            path.rename(folder / f"config.before-{1 + len(list(folder.glob('config.before-*.yaml')))}.yaml")
        path.write_text(settings)
        forget_stop(folder)
        yield
    finally:
        running.release(remove=True)


def leave_refusal(folder: Path, error: HarnessError) -> None:
    """Write an error as the reason of an attempt that ended before it began, after the steps done so far.

    A launcher may turn every exit code into 1, and a scheduler would restart a run that is refused each time.
    """
    requeue = isinstance(error, LoaderError | LostRankError)
    rank = error.about if isinstance(error, LostRankError) else None
    leave_early_stop(folder, Stop(steps_done(folder), type(error).__name__, error.what, rank, requeue))


def leave_early_stop(folder: Path, stop: Stop) -> bool:
    """Write why an attempt ended before it began, unless another run is active in the folder.

    Return False if another rank of this attempt has done so.
    """
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
