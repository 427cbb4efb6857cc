"""Checksum file of a folder: sizes and hashes of its files, and a hash of the list itself."""

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
# Files hashed concurrently by one process; reading and hashing release the GIL.
_THREADS = 4


def write_checksums(folder: Path, files: Iterable[StoredFile]) -> None:
    """Write `checksums.json` atomically."""
    write_atomically(folder / CHECKSUMS_FILE, _render(sorted(files, key=lambda stored: stored.path)))


def read_checksums(folder: Path) -> list[StoredFile] | None:
    """Return the files listed in `checksums.json`, or None if it is missing; FormatError if it is damaged."""
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
    """Read files below `folder` and return their sizes and hashes."""
    return [StoredFile(name, (folder / name).stat().st_size, file_digest(folder / name)) for name in names]


def list_size_problems(folder: Path, files: Iterable[StoredFile]) -> list[Problem]:
    """List the files that are missing or have the wrong size, without reading their contents."""
    problems = []
    for stored in files:
        path = folder / stored.path
        size = path.stat().st_size if path.is_file() else None
        if size != stored.num_bytes:
            now = "is missing" if size is None else f"has {size:,} bytes"
            problems.append(Problem(f"the file {stored.path} {now}, expected {stored.num_bytes:,} bytes", str(path)))
    return problems


def list_hash_problems(folder: Path, files: Sequence[StoredFile]) -> list[Problem]:
    """List the files whose contents do not match their hashes; reads several files concurrently."""
    with ThreadPoolExecutor(_THREADS) as pool:
        digests = list(pool.map(lambda stored: file_digest(folder / stored.path), files))
    return [
        Problem(f"the file {stored.path} has the hash {digest}, expected {stored.xxh3}", str(folder / stored.path))
        for stored, digest in zip(files, digests, strict=True)
        if digest != stored.xxh3
    ]


def find_damage(folder: Path, stored: StoredFile) -> list[Problem]:
    """Return the problem of a file that cannot be read or does not match its hash, if any."""
    try:
        return list_hash_problems(folder, [stored])
    except OSError as error:
        return [Problem(f"the file {stored.path} cannot be read: {error.strerror}", str(folder / stored.path))]


def share_of(files: Iterable[StoredFile], rank: int, size: int) -> list[StoredFile]:
    """Return the files that one of `size` ranks checks; all ranks read about the same number of bytes."""
    shares: list[list[StoredFile]] = [[] for _ in range(size)]
    loads = [0] * size
    for stored in sorted(files, key=lambda stored: (-stored.num_bytes, stored.path)):
        least = loads.index(min(loads))
        shares[least].append(stored)
        loads[least] += stored.num_bytes
    return shares[rank]


def _render(files: Iterable[StoredFile]) -> bytes:
    # Damage anywhere in the file, including its own hash, makes it differ from its rendered content.
    facts = {stored.path: {"num_bytes": stored.num_bytes, "xxh3": stored.xxh3} for stored in files}
    digest = xxhash.xxh3_64_hexdigest(json.dumps(facts).encode())
    return (json.dumps({"xxh3": digest, "files": facts}, indent=1) + "\n").encode()
