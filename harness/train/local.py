"""Identity of a run and of its attempts, and checkpoints on the nodes' own disks, which depend on it.

The protocol:

1. `identity.json` in a run's folder has the random id of the run, the random token of its last attempt, and the place
   (device, inode, path) of the folder. Each attempt that trains writes a new token while it holds the folder's lock.
   Where the place differs, the folder is a copy, was moved or was restored: it becomes a new run, with a new id.
2. Local checkpoints lie in `<trainer.local_checkpoints>/run-<id>/attempt-<token>/step-<step>/`: the files that the
   ranks of a node wrote, copies of those of one other node, and on every node the `run.json` (with id and token) and
   `checksums.json` of the whole checkpoint. `local_checkpoints.json` in the run's folder names the newest.
3. A run resumes from local checkpoints only if that record and their `run.json` have its id and the same token, and
   its folder is at its place. It removes only `run-<id>` of its own id: earlier attempts once it trains, all at its
   end. So a copied run neither resumes from files of the original nor removes them. Checkpoints in its own folder,
   which were copied with it, are its own.
"""

from __future__ import annotations

import json
import os
import re
import secrets
import socket
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TypeVar

import xxhash

from harness.errors import CheckpointError, FormatError, os_errors_as
from harness.settings import load
from harness.storage import StoredFile, read_checksums, write_atomically
from harness.storage.checksums import CHECKSUMS_FILE, list_hash_problems
from harness.train.checkpoints import CHECKPOINTS, RUN_FILE, UnreadableError, list_checkpoints, whole_checkpoints
from harness.train.lines import MISREAD

IDENTITY_FILE = "identity.json"
LOCAL_RECORD = "local_checkpoints.json"
# Every node has them; the other files of a checkpoint are on one or two.
MANIFEST = (RUN_FILE, CHECKSUMS_FILE)
_PIECE_BYTES = 1 << 22
_TOKEN = re.compile(r"[0-9a-f]{32}")
T = TypeVar("T", "Identity", "LocalRecord")


@dataclass(frozen=True)
class Identity:
    """Identity of a run and of its last attempt.

    Attributes:
        run: random id of the run, 32 hexadecimal digits.
        attempt: random token of the attempt, the same.
        place: of the run's folder, as `_place_of` returns it.
    """

    run: str
    attempt: str
    place: str


@dataclass(frozen=True)
class LocalRecord:
    """The record of checkpoints on the nodes' own disks in a run's folder.

    Attributes:
        root: `trainer.local_checkpoints` on the node of rank 0.
        run, attempt: of the identity of the attempt that writes them, or wrote them last.
        step: of the newest one that this attempt has written, 0 for none.
    """

    root: str
    run: str
    attempt: str
    step: int = 0
    hosts: tuple[str, ...] = ()

    def folder(self, root: str) -> Path:
        """Return the folder of the attempt on a node whose disk is `root`."""
        return Path(root) / f"run-{self.run}" / f"attempt-{self.attempt}"


@dataclass(frozen=True)
class DiskPart:
    """The part of a checkpoint that one disk holds.

    Attributes:
        manifest: content of `run.json` and `checksums.json`; empty if they are damaged, or of another attempt.
        files: of the whole checkpoint, by `checksums.json`, without the manifest.
    """

    sizes: dict[str, int]
    manifest: dict[str, bytes]
    files: tuple[StoredFile, ...]


def _place_of(folder: Path) -> str:
    """Return device, inode and path of a folder, which a copy of it does not share."""
    facts = folder.stat()
    # The device numbers of network file systems and overlays, whose major is 0, differ between nodes and mounts.
    device = facts.st_dev if os.major(facts.st_dev) else 0
    return f"{device}:{facts.st_ino}:{folder.resolve()}"


def read_identity(folder: Path) -> Identity | None:
    """Return the identity in a run's folder, also if it is that of a run of which the folder is a copy.

    Return None for a run that has not trained, or of an early version.

    Raises:
        CheckpointError: it is damaged.
        UnreadableError: it cannot be read.
    """
    return _read_record(folder / IDENTITY_FILE, Identity, "the run's identity")


def begin_attempt(folder: Path) -> Identity:
    """Give the attempt that holds the lock of a run's folder its token, and a folder at another place a new id."""
    before, place = read_identity(folder), _place_of(folder)
    run = before.run if before is not None and before.place == place else secrets.token_hex(16)
    identity = Identity(run, secrets.token_hex(16), place)
    write_atomically(folder / IDENTITY_FILE, (json.dumps(asdict(identity)) + "\n").encode())
    return identity


def read_local_record(folder: Path) -> LocalRecord | None:
    """Return the record of local checkpoints in a run's folder, None without one; in a copy it is the original's.

    Raises:
        CheckpointError: it is damaged.
        UnreadableError: it cannot be read.
    """
    return _read_record(folder / LOCAL_RECORD, LocalRecord, "the record of local checkpoints")


def own_local_record(folder: Path) -> LocalRecord | None:
    """Return the record of the local checkpoints that a run may resume from; raises as `read_local_record` does."""
    record, identity = read_local_record(folder), read_identity(folder)
    if record is None or identity is None or (record.run, _place_of(folder)) != (identity.run, identity.place):
        return None
    return record


def _read_record(path: Path, schema: type[T], what: str) -> T | None:
    unread, fix = f"{what} cannot be read", "remove it to resume from the newest checkpoint in the run's folder"
    try:
        record = load(schema, path.read_bytes(), where=path, fix=fix, what=unread, error=CheckpointError)
    except FileNotFoundError:
        return None
    except OSError as error:
        reason = f"{unread}: {error.strerror} (on {socket.gethostname()})"
        raise UnreadableError(reason, where=str(path), fix="check that file system, then resume again") from error
    # A folder of local checkpoints with these in its name is removed in the end.
    if odd := next((name for name in ("run", "attempt") if not _TOKEN.fullmatch(getattr(record, name))), None):
        raise CheckpointError(f"{unread}: {odd}", where=str(path), fix=fix)
    return record


def write_local_record(folder: Path, record: LocalRecord) -> None:
    """Write the record, which appears whole or not at all."""
    write_atomically(folder / LOCAL_RECORD, (json.dumps(asdict(record)) + "\n").encode())


def begin_local_attempt(folder: Path, root: str, identity: Identity) -> LocalRecord | None:
    """Record that the run trains from here on, so that what earlier attempts left on disks is never taken for its own.

    Args:
        root: `trainer.local_checkpoints`; empty for none.
    """
    if not root:
        (folder / LOCAL_RECORD).unlink(missing_ok=True)
        return None
    record = LocalRecord(root, identity.run, identity.attempt)
    write_local_record(folder, record)
    return record


def may_resume(folder: Path) -> bool:
    """Return True if a run has a whole checkpoint in its folder, or one on disks of nodes that may be in the job."""
    with suppress(CheckpointError):
        record = own_local_record(folder)
        return bool(whole_checkpoints(folder / CHECKPOINTS)) or (record is not None and record.step > 0)
    return True  # resuming names the damage


def read_disk(record: LocalRecord, root: str) -> dict[str, DiskPart]:
    """Return the parts of the attempt's checkpoints on this node's disk `root`, by `step-...`; never raises."""
    parts = {}
    with suppress(OSError):
        for path in list_checkpoints(record.folder(root)):
            with suppress(OSError):
                sizes = {entry.name: entry.stat().st_size for entry in os.scandir(path) if entry.is_file()}
                parts[path.name] = DiskPart(sizes, *_read_manifest(path, record))
    return parts


def _read_manifest(path: Path, record: LocalRecord) -> tuple[dict[str, bytes], tuple[StoredFile, ...]]:
    with suppress(OSError, FormatError, *MISREAD):
        files = read_checksums(path) or []
        own = [file for file in files if file.path == RUN_FILE]
        content = {name: (path / name).read_bytes() for name in MANIFEST}
        document = json.loads(content[RUN_FILE])
        is_own = (document.get("run"), document.get("attempt")) == (record.run, record.attempt)
        if is_own and own and not list_hash_problems(path, own):
            return content, tuple(file for file in files if file.path != RUN_FILE)
    return {}, ()


def copy_verified(source: Path, target: Path, stored: StoredFile) -> None:
    """Copy a file, and check the bytes on their way.

    Raises:
        FormatError: the source cannot be read, or its bytes are not those that were written.
        OSError: the target cannot be written.
    """
    digest, num_bytes = xxhash.xxh3_64(), 0
    with target.open("wb") as out:
        for piece in _pieces(source):
            digest.update(piece)
            num_bytes += len(piece)
            out.write(piece)
        out.flush()
        os.fsync(out.fileno())
    if (num_bytes, digest.hexdigest()) != (stored.num_bytes, stored.xxh3):
        found = f"has the hash {digest.hexdigest()}, expected {stored.xxh3}"
        raise FormatError(found, where=str(source), fix="use the copy on another node")


def _pieces(path: Path) -> Iterator[bytes]:
    fix = "use the copy on another node"
    with os_errors_as(FormatError, "cannot be read", where=path, fix=fix), path.open("rb") as file:
        while piece := file.read(_PIECE_BYTES):
            yield piece


def prune_local(folder: Path, keep: Sequence[str]) -> list[Path]:
    """Rename what is not to be kept in the folder of an attempt, and return it, to be removed."""
    doomed = []
    for path in folder.glob("step-*"):
        if path.name not in keep:
            gone = path if path.suffix == ".removed" else path.rename(path.with_name(f"{path.name}.removed"))
            doomed.append(gone)
    return doomed
