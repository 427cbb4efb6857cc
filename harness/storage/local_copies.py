"""Copies of folders on a local disk of this node, made once before training and read instead of the originals.

The copy of /shared/data/mine is LOCAL/shared/data/mine. LOCAL/shared/data/mine.copied, written last, lists its files
with size and time of the original and the hash of the copy; without this list, the copy does not count. A copy whose
original has changed is updated.

    HARNESS_LOCAL_DIR    the folder LOCAL, for `local_copy`; if unset, originals are read
"""

from __future__ import annotations

import fcntl
import json
import os
import shutil
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path

import xxhash

from harness.errors import HarnessError, os_errors_as
from harness.storage.files import file_digest
from harness.storage.folders import write_atomically

_VARIABLE = "HARNESS_LOCAL_DIR"
_LISTING, _LOCK, _PARTIAL = ".copied", ".lock", ".partial"
_BLOCK_BYTES = 4 << 20
# Files copied concurrently: cluster file systems serve many requests at once, and a single stream is slow.
_THREADS = 8

Progress = Callable[[int], None]


@dataclass(frozen=True)
class CopiedFile:
    """A copied file: size and modification time of the original, and the hash of the copy."""

    num_bytes: int
    mtime_ns: int
    xxh3: str


@dataclass(frozen=True)
class LocalCopy:
    """A complete copy, its files by relative path (empty for a single file), and the bytes copied by this call."""

    path: Path
    files: dict[str, CopiedFile]
    new_bytes: int

    @property
    def num_bytes(self) -> int:
        return sum(file.num_bytes for file in self.files.values())

    @property
    def digest(self) -> str:
        """Digest of names and hashes; equal for equal content."""
        return str(xxhash.xxh3_64_hexdigest("\n".join(f"{n} {f.xxh3}" for n, f in sorted(self.files.items())).encode()))


def local_copy(path: str) -> str:
    """Return the path to read: in a complete local copy of the file, folder or a parent folder, or the original."""
    root = os.environ.get(_VARIABLE, "")
    if not root or "://" in path:
        return path
    original = Path(os.path.normpath(Path(path).absolute()))
    for above in (original, *original.parents):
        if _beside(_copy_of(above, Path(root)), _LISTING).is_file():
            copy = _copy_of(original, Path(root))
            return str(copy) if copy.exists() else path
    return path


def read_originals() -> None:
    """Read originals from now on in this process, which makes the copies."""
    os.environ.pop(_VARIABLE, None)


def copy_to_node(
    path: str, local_dir: Path, *, known: Mapping[str, str] | None = None, progress: Progress = lambda num_bytes: None
) -> LocalCopy:
    """Copy the missing files of a folder, or a file, to the disk of this node; other processes wait for it.

    Links are followed. `known` contains required hashes (xxh3_64) by relative path; `progress` receives byte counts,
    from several threads. Raises HarnessError if the disk is too small or fails, if the original cannot be read, or if
    bytes differ from their hash.
    """
    original = Path(os.path.normpath(Path(path).absolute()))
    copy = _copy_of(original, local_dir.absolute())
    if copy.is_relative_to(original):
        what = f"the folder for copies is part of {path}, and each copy would contain the one before"
        raise HarnessError(what, where=str(local_dir), fix="set cluster.local_dir to a folder outside of it")
    fix = "check the disk and the mount of this node, or set cluster.local_dir to another folder or to an empty value"
    with os_errors_as(HarnessError, f"{path} cannot be copied to this node", where=copy, fix=fix):
        copy.parent.mkdir(parents=True, exist_ok=True)
        with _beside(copy, _LOCK).open("a") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            return _update(original, copy, dict(known or {}), progress)


def _update(original: Path, copy: Path, known: dict[str, str], progress: Progress) -> LocalCopy:
    listing = _beside(copy, _LISTING)
    wanted = {name: (original / name).stat() for name in _names(original)}
    done = {
        name: file
        for name, file in _read_listing(listing).items()
        if name in wanted
        and (file.num_bytes, file.mtime_ns) == (wanted[name].st_size, wanted[name].st_mtime_ns)
        and (copy / name).is_file()
        and (copy / name).stat().st_size == file.num_bytes
        and known.get(name, file.xxh3) == file.xxh3
    }
    missing = [name for name in wanted if name not in done]
    num_bytes = sum(wanted[name].st_size for name in missing)
    if missing or len(done) < len(_read_listing(listing)):
        listing.unlink(missing_ok=True)  # the copy is incomplete until the list is written again
        # Remove files that the original does not have, and partial files of a killed copy.
        for path in list(copy.rglob("*")) if copy.is_dir() else []:
            if path.is_file() and str(path.relative_to(copy)) not in wanted:
                path.unlink()
        free = shutil.disk_usage(copy.parent).free
        if num_bytes > free:
            what = f"{num_bytes / 2**30:,.4g} GiB must be copied, but only {free / 2**30:,.4g} GiB are free"
            fix = "remove unused copies from cluster.local_dir, or set it to a larger disk or to an empty value"
            raise HarnessError(what, where=str(copy), fix=fix)
        with ThreadPoolExecutor(_THREADS) as pool:
            copied = pool.map(lambda name: _copy_file(original / name, copy / name, known.get(name), progress), missing)
            done |= dict(zip(missing, copied, strict=True))
        text = json.dumps({name: asdict(done[name]) for name in sorted(done)}, indent=1)
        write_atomically(listing, f"{text}\n".encode())
    return LocalCopy(copy, done, num_bytes)


def _copy_file(source: Path, target: Path, known: str | None, progress: Progress) -> CopiedFile:
    state, digest = source.stat(), xxhash.xxh3_64()
    target.parent.mkdir(parents=True, exist_ok=True)
    partial = _beside(target, _PARTIAL)
    with source.open("rb", buffering=0) as reading, partial.open("wb") as writing:
        while block := reading.read(_BLOCK_BYTES):
            digest.update(block)
            writing.write(block)
            progress(len(block))
        writing.flush()
        os.fsync(writing.fileno())
        # Drop the page cache, so that the bytes on the disk are compared.
        os.posix_fadvise(writing.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    found, stored = digest.hexdigest(), file_digest(partial)
    progress(state.st_size)
    if known not in (None, found) or stored != found or partial.stat().st_size != state.st_size:
        partial.unlink()
        where, expected, got = (source, known, found) if known not in (None, found) else (target, found, stored)
        fix = "`harness verify` checks the original; if it is valid, the disk of this node is failing"
        raise HarnessError(f"{source.name} has the hash {got}, expected {expected}", where=str(where), fix=fix)
    partial.replace(target)
    return CopiedFile(state.st_size, state.st_mtime_ns, found)


def _names(original: Path) -> list[str]:
    """Return the relative paths of a folder's files; for a single file, one empty path."""
    if original.is_file():
        return [""]

    def refuse(error: OSError) -> None:
        if original.exists() and not isinstance(error, PermissionError):  # such as `lost+found`
            raise error

    names = []
    for folder, inner, files in os.walk(original, onerror=refuse, followlinks=True):
        here = Path(folder).resolve()
        # A link to a parent folder would recurse without end.
        inner[:] = [name for name in inner if not here.is_relative_to(Path(folder, name).resolve())]
        names += [os.path.relpath(Path(folder, name), original) for name in files if Path(folder, name).is_file()]
    if not names:
        raise FileNotFoundError(2, "there are no files", str(original))
    return sorted(names)


def _read_listing(listing: Path) -> dict[str, CopiedFile]:
    try:
        return {name: CopiedFile(**facts) for name, facts in json.loads(listing.read_text()).items()}
    except (OSError, ValueError, TypeError, AttributeError, RecursionError):
        return {}


def _copy_of(original: Path, local_dir: Path) -> Path:
    return local_dir / original.relative_to("/")


def _beside(path: Path, suffix: str) -> Path:
    return path.with_name(path.name + suffix) if path.name else path / suffix
