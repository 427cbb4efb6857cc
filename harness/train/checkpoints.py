"""The checkpoints of a run: which are whole, how far each got, and the files that it must have."""

from __future__ import annotations

import json
import os
import re
import socket
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from harness.errors import CheckpointError, ConfigError, FormatError, LoaderError
from harness.loader import LoaderState
from harness.storage import StoredFile, checksums, read_checksums
from harness.train.lines import MISREAD

CHECKPOINTS = "checkpoints"
# Written into a checkpoint after the weights; without it there is no checkpoint.
RUN_FILE = "run.json"
# Of `run.json`; files of earlier versions have no number.
FORMAT = 1
_NAME = re.compile(r"step-[0-9]+")
CHECKPOINT_FIX = (
    "resume=auto uses the newest complete checkpoint in this folder; to start from the first step, remove the damaged "
    "ones if none is complete"
)


class UnreadableError(CheckpointError):
    """A checkpoint's file cannot be read, which may succeed at the next attempt."""


@dataclass(frozen=True)
class Progress:
    """Position of a run: optimizer steps done, and the state from which the loader continues."""

    step: int
    loader: LoaderState


def list_checkpoints(folder: Path) -> list[Path]:
    """Return the folders below `folder` that have the name of a finished checkpoint, oldest first.

    Copies that somebody keeps beside them, such as `step-00000100-good`, are none of the run's.
    """
    found = (path for path in folder.glob("step-*") if _NAME.fullmatch(path.name) and path.is_dir())
    # By number: step 100,000,000 has a digit more.
    return sorted(found, key=lambda path: int(path.name.removeprefix("step-")))


def whole_checkpoints(folder: Path) -> list[Path]:
    """Return the checkpoints below `folder` that have been finished, oldest first; their files are not looked at."""
    return [path for path in list_checkpoints(folder) if (path / RUN_FILE).is_file()]


def unreadable(path: Path, error: OSError) -> UnreadableError:
    """Return the error for a checkpoint of which the system refuses to read a file."""
    file = Path(str(error.filename or RUN_FILE)).name
    what = f"the checkpoint's {file} cannot be read: {error.strerror or error} (on {socket.gethostname()})"
    return UnreadableError(what, where=str(path), fix=f"check that file system; {CHECKPOINT_FIX}")


def write_run_file(
    folder: Path, progress: Progress, facts: Mapping[str, Any], hashed: Sequence[StoredFile], others: Sequence[str]
) -> None:
    """Complete a checkpoint: write `run.json`, then `checksums.json` with all files of the folder.

    The hashes of some were taken while they were written; others are still in memory, from which they are hashed now.
    """
    late = checksums.digest_files(folder, others)
    document = {
        "format": FORMAT,
        "step": progress.step,
        "loader": progress.loader.to_json(),
        **facts,
        "hashed_while_written_bytes": sum(file.num_bytes for file in hashed),
        "hashed_after_bytes": sum(file.num_bytes for file in late),
    }
    with (folder / RUN_FILE).open("w") as file:
        json.dump(document, file, indent=2)
        file.flush()
        os.fsync(file.fileno())
    checksums.write_checksums(folder, [*hashed, *late, *checksums.digest_files(folder, [RUN_FILE])])


def read_progress(path: Path) -> Progress:
    """Return the progress in a checkpoint that has been accepted; see `read_checkpoint`."""
    return read_checkpoint(path, unchecked=True)[0]


def read_checkpoint(path: Path, *, unchecked: bool = False) -> tuple[Progress, list[StoredFile]]:
    """Return the progress in a checkpoint, and its files with their hashes.

    Checks the sizes of all files and the hash of `run.json`; `list_hash_problems` checks the other hashes.

    Args:
        unchecked: accept a checkpoint without checksums, and return no files of it.

    Raises:
        CheckpointError: a file is missing, damaged, or has another size than was written, or there are no checksums.
        ConfigError: a newer version of the harness wrote it; no older checkpoint is used in its place.
        UnreadableError: a file cannot be read.
    """
    try:
        document = json.loads((path / RUN_FILE).read_text())
        # First: a newer version may write other checksums.
        if (number := int(document.get("format", FORMAT))) > FORMAT:
            what = f"the checkpoint's {RUN_FILE} has format {number}, but this version supports formats up to {FORMAT}"
            raise ConfigError(what, where=str(path), fix="use the version of the harness that wrote it, or a newer one")
        files = read_checksums(path)
        if files is None and not unchecked:
            fix = f"accept unchecked files with resume_unchecked=true or `harness export --unchecked`; {CHECKPOINT_FIX}"
            raise CheckpointError(f"the checkpoint's {checksums.CHECKSUMS_FILE} is missing", where=str(path), fix=fix)
        own = [file for file in files or () if file.path == RUN_FILE]
        if files is not None and not own:
            raise FormatError(f"{checksums.CHECKSUMS_FILE} does not list {RUN_FILE}", fix=CHECKPOINT_FIX)
        for problem in [*checksums.list_size_problems(path, files or ()), *checksums.list_hash_problems(path, own)]:
            raise FormatError(problem.what.removeprefix("the "), fix=CHECKPOINT_FIX)
        return Progress(int(document["step"]), LoaderState.from_json(document["loader"])), files or []
    except FormatError as error:
        raise CheckpointError(f"the checkpoint's {error.what}", where=str(path), fix=CHECKPOINT_FIX) from error
    except (OSError, LoaderError, *MISREAD) as error:
        if isinstance(error, OSError) and not isinstance(error, FileNotFoundError):
            raise unreadable(path, error) from error
        what = f"the checkpoint's {RUN_FILE} cannot be read: {getattr(error, 'what', error)}"
        raise CheckpointError(what, where=str(path), fix=CHECKPOINT_FIX) from error
