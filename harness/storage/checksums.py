"""A file of checksums beside the files of a folder: their sizes and hashes, and a hash of itself."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import xxhash

from harness.errors import FormatError, Problem
from harness.storage.files import StoredFile, file_digest
from harness.storage.folders import write_atomically

CHECKSUMS_FILE = "checksums.json"
# Files hashed at once by one process; both reading and hashing release Python's lock.
_THREADS = 4


def write_checksums(folder: Path, files: Iterable[StoredFile]) -> None:
    """Write `checksums.json`, which appears whole or not at all."""
    write_atomically(folder / CHECKSUMS_FILE, _render(sorted(files, key=lambda stored: stored.path)))


def read_checksums(folder: Path) -> list[StoredFile] | None:
    """Return the files that `checksums.json` lists, None without one; FormatError if its bytes are not as written."""
    path = folder / CHECKSUMS_FILE
    try:
        data = path.read_bytes()
    except FileNotFoundError:
        return None
    try:
        stored = json.loads(data)["files"]
        files = [StoredFile(str(name), int(facts["num_bytes"]), str(facts["xxh3"])) for name, facts in stored.items()]
        if any(Path(file.path).is_absolute() or ".." in Path(file.path).parts for file in files):
            raise ValueError("it names a file outside the folder")
        if _render(files) != data:
            raise ValueError("its own hash does not match")
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        what = f"{CHECKSUMS_FILE} is damaged: {error}"
        raise FormatError(what, where=str(path), fix="copy the folder again") from None
    return files


def digest_files(folder: Path, names: Iterable[str]) -> list[StoredFile]:
    """Return size and hash of files below `folder`, read now."""
    return [StoredFile(name, (folder / name).stat().st_size, file_digest(folder / name)) for name in names]


def list_size_problems(folder: Path, files: Iterable[StoredFile]) -> list[Problem]:
    """Name the files that are missing or have another size than was written. Reads no content."""
    problems = []
    for stored in files:
        path = folder / stored.path
        size = path.stat().st_size if path.is_file() else None
        if size != stored.num_bytes:
            now = "is missing" if size is None else f"has {size:,} bytes"
            problems.append(Problem(f"the file {stored.path} {now}, expected {stored.num_bytes:,} bytes", str(path)))
    return problems


def list_hash_problems(folder: Path, files: Sequence[StoredFile]) -> list[Problem]:
    """Name the files whose bytes are not those that were written. Reads all content, some files at a time."""
    with ThreadPoolExecutor(_THREADS) as pool:
        digests = list(pool.map(lambda stored: file_digest(folder / stored.path), files))
    return [
        Problem(f"the file {stored.path} has the hash {digest}, expected {stored.xxh3}", str(folder / stored.path))
        for stored, digest in zip(files, digests, strict=True)
        if digest != stored.xxh3
    ]


def find_damage(folder: Path, stored: StoredFile) -> list[Problem]:
    """Name a file that cannot be read, or whose bytes are not those that were written."""
    try:
        return list_hash_problems(folder, [stored])
    except OSError as error:
        return [Problem(f"the file {stored.path} cannot be read: {error.strerror}", str(folder / stored.path))]


def share_of(files: Iterable[StoredFile], rank: int, size: int) -> list[StoredFile]:
    """Return the files that one of `size` ranks checks: all ranks read about the same number of bytes."""
    shares: list[list[StoredFile]] = [[] for _ in range(size)]
    loads = [0] * size
    for stored in sorted(files, key=lambda stored: (-stored.num_bytes, stored.path)):
        least = loads.index(min(loads))
        shares[least].append(stored)
        loads[least] += stored.num_bytes
    return shares[rank]


def _render(files: Iterable[StoredFile]) -> bytes:
    # Damage anywhere in the file, its own hash included, makes it differ from what its content renders to.
    facts = {stored.path: {"num_bytes": stored.num_bytes, "xxh3": stored.xxh3} for stored in files}
    digest = xxhash.xxh3_64_hexdigest(json.dumps(facts).encode())
    return (json.dumps({"xxh3": digest, "files": facts}, indent=1) + "\n").encode()
