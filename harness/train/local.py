"""Checkpoints on the nodes' own disks: the record of them in the run's folder, and the part that one disk holds.

`<trainer.local_checkpoints>/<run>-<id>/attempt-<n>/step-<step>/` has the files that the ranks of a node wrote, copies
of those of one other node, and on every node the `run.json` and `checksums.json` of the whole checkpoint. Every attempt
of a run that trains has a folder of its own: what an earlier one left on a node that was away is of another past.
"""

from __future__ import annotations

import json
import os
import secrets
import socket
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import xxhash

from harness.errors import CheckpointError, FormatError
from harness.settings import find_odd
from harness.storage import CHECKSUMS_FILE, StoredFile, list_hash_problems, read_checksums, write_atomically
from harness.train.checkpoints import CHECKPOINTS, RUN_FILE, UnreadableError, list_checkpoints, whole_checkpoints

LOCAL_RECORD = "local_checkpoints.json"
# Every node has them; the other files of a checkpoint are on one or two.
MANIFEST = (RUN_FILE, CHECKSUMS_FILE)
_PIECE_BYTES = 1 << 22


@dataclass(frozen=True)
class LocalRecord:
    """The record of checkpoints on the nodes' own disks in a run's folder.

    Attributes:
        root: `trainer.local_checkpoints` on the node of rank 0.
        run: folder below it, which no other run has.
        attempt: number of the attempt that trains, or trained last.
        step: of the newest one that this attempt has written, 0 for none.
        hosts: nodes that wrote it.
    """

    root: str
    run: str
    attempt: int
    step: int = 0
    hosts: tuple[str, ...] = ()

    def folder(self, root: str) -> Path:
        """Return the folder of the attempt on a node whose disk is `root`."""
        return Path(root) / self.run / f"attempt-{self.attempt}"


@dataclass(frozen=True)
class DiskPart:
    """The part of a checkpoint that one disk holds.

    Attributes:
        sizes: bytes of its files, by name.
        manifest: content of `run.json` and `checksums.json`; empty if they are damaged.
        files: of the whole checkpoint, by `checksums.json`, without the manifest.
    """

    sizes: dict[str, int]
    manifest: dict[str, bytes]
    files: tuple[StoredFile, ...]


def read_local_record(folder: Path) -> LocalRecord | None:
    """Return the record of a run, None if it never had one.

    Raises:
        CheckpointError: it is damaged.
        UnreadableError: it cannot be read.
    """
    path = folder / LOCAL_RECORD
    try:
        values = json.loads(path.read_text())
        if odd := find_odd(values, LocalRecord):
            raise ValueError(odd)
        # All that lies there is removed when the run ends.
        if values["run"] in ("", "..") or Path(values["run"]).name != values["run"]:
            raise ValueError(f"{values['run']!r} is no folder of a run")
        return LocalRecord(**{**values, "hosts": tuple(values["hosts"])})
    except FileNotFoundError:
        return None
    except OSError as error:
        what = f"the record of local checkpoints cannot be read: {error.strerror} (on {socket.gethostname()})"
        raise UnreadableError(what, where=str(path), fix="look at that file system, then resume again") from error
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise CheckpointError(
            f"the record of local checkpoints cannot be read: {error}",
            where=str(path),
            fix="remove it to resume from the newest checkpoint in the run's folder",
        ) from error


def write_local_record(folder: Path, record: LocalRecord) -> None:
    """Write the record, which appears whole or not at all."""
    write_atomically(folder / LOCAL_RECORD, (json.dumps(asdict(record)) + "\n").encode())


def begin_local_attempt(folder: Path, root: str) -> LocalRecord | None:
    """Record that the run trains from here on, so that what earlier attempts left on disks is never taken for its own.

    Args:
        root: `trainer.local_checkpoints`; empty for none.
    """
    before = read_local_record(folder)
    if not root:
        (folder / LOCAL_RECORD).unlink(missing_ok=True)
        return None
    if before is None:
        record = LocalRecord(root, f"{folder.name}-{secrets.token_hex(4)}", 1)
    else:
        record = replace(before, root=root, attempt=before.attempt + 1, step=0, hosts=())
    write_local_record(folder, record)
    return record


def may_resume(folder: Path) -> bool:
    """Return True if a run has a whole checkpoint in its folder, or one on disks of nodes that may be in the job."""
    with suppress(CheckpointError):
        record = read_local_record(folder)
        return bool(whole_checkpoints(folder / CHECKPOINTS)) or (record is not None and record.step > 0)
    return True  # resuming names the damage


def read_disk(folder: Path) -> dict[str, DiskPart]:
    """Return the parts of checkpoints in the folder of an attempt on this node's disk, by `step-...`; never raises."""
    parts = {}
    with suppress(OSError):
        for path in list_checkpoints(folder):
            with suppress(OSError):
                sizes = {entry.name: entry.stat().st_size for entry in os.scandir(path) if entry.is_file()}
                parts[path.name] = DiskPart(sizes, *_read_manifest(path))
    return parts


def _read_manifest(path: Path) -> tuple[dict[str, bytes], tuple[StoredFile, ...]]:
    with suppress(OSError, FormatError):
        files = read_checksums(path) or []
        own = [file for file in files if file.path == RUN_FILE]
        if own and not list_hash_problems(path, own):
            content = {name: (path / name).read_bytes() for name in MANIFEST}
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
        found = f"has the hash {digest.hexdigest()}, {stored.xxh3} was written"
        raise FormatError(found, where=str(source), fix="use the copy on another node")


def _pieces(path: Path) -> Iterator[bytes]:
    try:
        with path.open("rb") as file:
            while piece := file.read(_PIECE_BYTES):
                yield piece
    except OSError as error:
        fix = "use the copy on another node"
        raise FormatError(f"cannot be read: {error.strerror}", where=str(path), fix=fix) from error


def prune_local(folder: Path, keep: Sequence[str]) -> list[Path]:
    """Rename what is not to be kept in the folder of an attempt, and return it, to be removed."""
    doomed = []
    for path in folder.glob("step-*"):
        if path.name not in keep:
            gone = path if path.suffix == ".removed" else path.rename(path.with_name(f"{path.name}.removed"))
            doomed.append(gone)
    return doomed
