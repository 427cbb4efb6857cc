"""Where a run keeps what it writes: a new folder for a new run, the same one for a run that goes on."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from harness.errors import ConfigError, FormatError, HarnessError, LoaderError, LostRankError
from harness.storage import Marker
from harness.train.attempts import Stop, forget_stop, steps_done, write_stop

RESUME = ("false", "true", "auto")
CHECKPOINTS = "checkpoints"
# Written last into a checkpoint.
RUN_FILE = "run.json"
# Locked while a run writes to its folder; one that was killed leaves it behind unlocked.
_RUNNING = "_running"
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")


def whole_checkpoints(folder: Path) -> list[Path]:
    """Whole checkpoints below `folder`, oldest first."""
    return sorted(path for path in folder.glob("step-*") if path.suffix == "" and (path / RUN_FILE).is_file())


def choose_run_folder(run_dir: str | None, *, runs: str, name: str, resume: str) -> Path:
    """The folder that a run writes to; nothing is created.

    Args:
        run_dir: a folder, or None for `<runs>/<name>-NNN`: to resume, the newest of them with a whole checkpoint
            (one that failed before its first has nothing to go on from); else the next number.
        resume: `false` starts anew, `true` goes on, `auto` goes on where there is something to go on from.

    Raises:
        ConfigError: another word for `resume`, a name that is no folder name, nothing to resume, or a folder that
            holds a run already.
    """
    if resume not in RESUME:
        raise ConfigError(f"resume is {resume!r}", where="resume", fix=f"one of {', '.join(RESUME)}")
    if not _NAME.fullmatch(name):
        raise ConfigError(
            f"{name!r} cannot name a run's folder", where="name", fix="letters, digits, dots, dashes and underscores"
        )
    if run_dir is None:
        numbered = _numbered(Path(runs), name)
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
        raise ConfigError(
            "the run folder is not empty",
            where=str(folder),
            fix="resume=true goes on with the run in it; or name another with run_dir=",
        )
    if resume == "true" and not whole_checkpoints(folder / CHECKPOINTS):
        raise ConfigError(
            "the run folder holds no whole checkpoint to resume from",
            where=str(folder),
            fix="resume=auto starts anew where there is none",
        )
    return folder


@contextmanager
def open_run_folder(folder: Path, *, settings: str, goes_on: bool) -> Iterator[None]:
    """Make the folder of a run that is about to train, write its settings down, and keep other runs out of it.

    Those of the part before, where they differ, are kept as `config.before-N.yaml`.

    Raises:
        ConfigError: another run has taken the folder meanwhile, or is still writing to it.
    """
    if not goes_on and folder.is_dir() and any(folder.iterdir()):
        raise ConfigError("another run has just taken this folder", where=str(folder), fix="start again")
    folder.mkdir(parents=True, exist_ok=True)
    running = Marker(folder / _RUNNING)
    try:
        running.acquire()
    except FormatError:
        raise ConfigError(
            "another run is still writing to this folder",
            where=str(folder),
            fix="wait for it or end it, then resume; or name another folder with run_dir=",
        ) from None
    try:
        _write_settings(folder, settings)
        forget_stop(folder)
        yield
    finally:
        running.release(remove=True)


def leave_refusal(folder: Path, error: HarnessError) -> None:
    """`leave_early_stop` of an error, after the steps that the run has done.

    A launcher may turn every exit code into 1; a scheduler would start again what is refused each time.
    """
    requeue = isinstance(error, LoaderError | LostRankError)
    rank = error.about if isinstance(error, LostRankError) else None
    leave_early_stop(folder, Stop(steps_done(folder), type(error).__name__, error.what, rank, requeue))


def leave_early_stop(folder: Path, stop: Stop) -> bool:
    """Leave in a run's folder why a try of it ended before it began, where no other run is at work in it; False where
    one of its ranks has."""
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


def _write_settings(folder: Path, settings: str) -> None:
    path = folder / "config.yaml"
    if path.exists() and path.read_text() != settings:
        number = 1 + len(list(folder.glob("config.before-*.yaml")))
        path.rename(folder / f"config.before-{number}.yaml")
    path.write_text(settings)


def _numbered(runs: Path, name: str) -> dict[int, Path]:
    pattern = re.compile(rf"{re.escape(name)}-(\d+)")
    if not runs.is_dir():
        return {}
    found = ((pattern.fullmatch(path.name), path) for path in runs.iterdir())
    return {int(match[1]): path for match, path in found if match}
