"""The checkpoints of a run: which are whole, how far each got, the files that it must have, and whose they are.

`identity.json` in a run's folder has the random id of the run, the random token of its last attempt, and the place
(device, inode, path) of the folder. Each attempt that trains writes a new token while it holds the folder's lock. Where
the place differs, the folder is a copy, was moved or was restored: it becomes a new run, with a new id.
"""

from __future__ import annotations

import json
import os
import re
import secrets
import socket
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from harness.errors import CheckpointError, ConfigError, FormatError, LoaderError
from harness.loader import LoaderState
from harness.settings import load
from harness.storage import StoredFile, checksums, read_checksums, write_atomically
from harness.train.lines import MISREAD

CHECKPOINTS = "checkpoints"
# Written into a checkpoint after the weights; without it there is no checkpoint.
RUN_FILE = "run.json"
IDENTITY_FILE = "identity.json"
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
    """Return the folders below `folder` that have the name of a finished checkpoint, oldest first."""
    # Copies that somebody keeps beside them, such as `step-00000100-good`, are none of the run's.
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
    """Complete a checkpoint: write `run.json`, then `checksums.json` with all files of the folder."""
    # Those that were not hashed while they were written are still in memory.
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


@dataclass(frozen=True)
class Identity:
    """Identity of a run and of its last attempt."""

    run: str  # random, 32 hexadecimal digits
    attempt: str  # the same
    place: str  # device, inode and path of the run's folder, which a copy of it does not share
    # Runs of which the folder is a copy, whose checkpoints it has; None where they are unknown.
    earlier: list[str] | None = None


def read_identity(folder: Path) -> Identity | None:
    """Return the identity in a run's folder, which a copy has too; None before training and of an early version."""
    path, unread = folder / IDENTITY_FILE, "the run's identity cannot be read"
    fix = "remove it to resume from the newest checkpoint in the run's folder"
    try:
        return load(Identity, path.read_bytes(), where=path, fix=fix, what=unread, error=CheckpointError)
    except FileNotFoundError:
        return None
    except OSError as error:
        reason = f"{unread}: {error.strerror} (on {socket.gethostname()})"
        raise UnreadableError(reason, where=str(path), fix="check that file system, then resume again") from error


def begin_attempt(folder: Path) -> Identity:
    """Give the attempt that holds the lock of a run's folder its token, and a folder at another place a new id."""
    old, facts = read_identity(folder), folder.stat()
    # The device numbers of network file systems and overlays, whose major is 0, differ between nodes and mounts.
    place = f"{facts.st_dev if os.major(facts.st_dev) else 0}:{facts.st_ino}:{folder.resolve()}"
    # Checkpoints of an early version, or whose identity was removed, may be of any run.
    run = secrets.token_hex(16)
    earlier: list[str] | None = None if whole_checkpoints(folder / CHECKPOINTS) else []
    if old is not None:
        run = old.run if old.place == place else run
        earlier = [*old.earlier, old.run] if old.earlier is not None and old.place != place else old.earlier
    identity = Identity(run, secrets.token_hex(16), place, earlier)
    write_atomically(folder / IDENTITY_FILE, (json.dumps(asdict(identity)) + "\n").encode())
    return identity


def refuse_foreign(folder: Path, checkpoint: Path) -> None:
    """Raise ConfigError for a checkpoint in a run's folder that another run wrote, and no run that this one copies."""
    own, run = read_identity(folder), json.loads((checkpoint / RUN_FILE).read_text()).get("run")
    if own is not None and own.earlier is not None and run not in (None, own.run, *own.earlier):
        what = f"the checkpoint is of another run, {run}"
        fix = "move it out of this folder; model.init_from=PATH starts a new run from its weights. Without "
        raise ConfigError(what, where=str(checkpoint), fix=f"{fix}{IDENTITY_FILE}, the folder resumes from it")
