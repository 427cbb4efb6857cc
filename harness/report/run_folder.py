"""Where a run keeps what it writes: a new folder for a new run, the same one for a run that goes on."""

from __future__ import annotations

import re
from pathlib import Path

from harness.errors import ConfigError

RESUME = ("false", "true", "auto")
CHECKPOINTS = "checkpoints"


def choose_run_folder(run_dir: str | None, *, runs: str, name: str, resume: str) -> Path:
    """The folder that a run writes to; nothing is created.

    Args:
        run_dir: a folder, or None for `<runs>/<name>-NNN`: the newest of them to resume, else the next number.
        resume: `false` starts anew, `true` goes on, `auto` goes on where there is something to go on from.

    Raises:
        ConfigError: another word for `resume`, nothing to resume, or a folder that holds a run already.
    """
    if resume not in RESUME:
        raise ConfigError(f"resume is {resume!r}", where="resume", fix=f"one of {', '.join(RESUME)}")
    if run_dir is None:
        numbered = _numbered(Path(runs), name)
        newest = max(numbered, default=0)
        if resume == "false" or (resume == "auto" and not newest):
            return Path(runs) / f"{name}-{newest + 1:03d}"
        if not newest:
            raise ConfigError(
                f"there is no run named {name} to resume",
                where=str(Path(runs) / f"{name}-*"),
                fix="resume=auto starts a new one; run_dir=FOLDER names another",
            )
        return numbered[newest]
    folder = Path(run_dir)
    holds_run = folder.is_dir() and any(folder.iterdir())
    if resume == "false" and holds_run:
        raise ConfigError(
            "the run folder is not empty",
            where=str(folder),
            fix="resume=true goes on with the run in it; or name another with run_dir=",
        )
    if resume == "true" and not (folder / CHECKPOINTS).is_dir():
        raise ConfigError(
            "the run folder holds no checkpoints to resume from",
            where=str(folder),
            fix="resume=auto starts anew where there are none",
        )
    return folder


def _numbered(runs: Path, name: str) -> dict[int, Path]:
    pattern = re.compile(rf"{re.escape(name)}-(\d+)")
    found = ((pattern.fullmatch(path.name), path) for path in runs.glob(f"{name}-*"))
    return {int(match[1]): path for match, path in found if match}
