"""Identity of a run and of its attempts.

`identity.json` in a run's folder has the random id of the run, the random token of its last attempt, and the place
(device, inode, path) of the folder. Each attempt that trains writes a new token while it holds the folder's lock. Where
the place differs, the folder is a copy, was moved or was restored: it becomes a new run, with a new id.
"""

from __future__ import annotations

import json
import os
import secrets
import socket
from dataclasses import asdict, dataclass
from pathlib import Path

from harness.errors import CheckpointError, ConfigError
from harness.settings import load
from harness.storage import write_atomically
from harness.train.checkpoints import CHECKPOINTS, RUN_FILE, UnreadableError, whole_checkpoints

IDENTITY_FILE = "identity.json"


@dataclass(frozen=True)
class Identity:
    """Identity of a run and of its last attempt.

    Attributes:
        run: random id of the run, 32 hexadecimal digits.
        attempt: random token of the attempt, the same.
        place: device, inode and path of the run's folder, which a copy of it does not share.
        earlier: ids of the runs of which the folder is a copy, whose checkpoints it has; None where they are unknown.
    """

    run: str
    attempt: str
    place: str
    earlier: list[str] | None = None


def read_identity(folder: Path) -> Identity | None:
    """Return the identity in a run's folder, also if it is that of a run of which the folder is a copy.

    Return None for a run that has not trained, or of an early version.
    """
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
