"""A dataset folder, on a disk or in object storage: which files it has, and what is wrong with them."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Iterator
from functools import partial
from pathlib import Path
from typing import Protocol

from harness.errors import FormatError
from harness.formats.base import Format, ShardInfo
from harness.formats.index import INDEX_FOLDER, index_names, load_index
from harness.formats.kept_fingerprint import KeptFingerprint
from harness.formats.manifest import MANIFEST_NAME, Manifest
from harness.formats.reader import PackReader
from harness.storage import StoredFile, file_digest, natural_key

# Present while a writer is at work: tells an interrupted write from a folder of another tool.
MARKER_NAME = "_writing"
_COPY = "copy the dataset again, or write it again with `python -m recipes.prepare`"


class DatasetFolder(Protocol):
    """The files of a folder; their paths are relative to it."""

    def where(self, path: str) -> str:
        """A file's full path, or the folder's for an empty one."""

    def find_size(self, path: str) -> int:
        """Bytes of a file; raises OSError where there is none, FormatError where it must not be read."""

    def digest(self, path: str) -> str:
        """xxh3_64 (hexadecimal) of a file's bytes; raises OSError or FormatError where it cannot be read."""

    def names(self) -> Iterable[str]:
        """Names of what lies in the folder itself."""

    def open_unchecked(self, manifest: Manifest, format: Format) -> PackReader:
        """The dataset, without a look at its shards."""


class LocalFolder:
    """A folder on a disk."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._root = path.resolve()

    def where(self, path: str) -> str:
        return str(self._path / path)

    def find_size(self, path: str) -> int:
        place = self._path / path
        num_bytes = place.stat().st_size
        try:
            inside = place.resolve().is_relative_to(self._root)
        except RuntimeError as error:
            raise OSError(str(error)) from None  # links in a circle
        if not inside:
            raise FormatError("is a link that leaves the dataset's folder", fix="copy the file itself")
        return num_bytes

    def digest(self, path: str) -> str:
        return file_digest(self._path / path)

    def names(self) -> Iterable[str]:
        return [entry.name for entry in os.scandir(self._path)]

    def open_unchecked(self, manifest: Manifest, format: Format) -> PackReader:
        return PackReader(
            path=str(self._path),
            format=format,
            index=load_index(self._path, manifest),
            shards=shard_infos(self._path, manifest),
            pack_size=manifest.pack_size,
            manifest=manifest,
            load_index=partial(load_index, self._path, manifest),
            kept_fingerprint=None if manifest.fingerprint else KeptFingerprint(self._path),
        )


def shard_infos(folder: Path, manifest: Manifest) -> list[ShardInfo]:
    """The shards of a manifest inside a folder on a disk."""
    return [
        ShardInfo(folder / shard.path, num_packs=shard.num_packs, pack_size=manifest.pack_size)
        for shard in manifest.shards
    ]


def list_file_problems(folder: DatasetFolder, manifest: Manifest, format: Format) -> Iterator[FormatError]:
    """What is wrong with existence and size of the listed files, and other files that look like shards."""
    listed = {shard.path.split("/")[0] for shard in manifest.shards}
    for number, shard in enumerate(manifest.shards):
        listed.update(stored.path.split("/")[0] for stored in shard.files)
        for stored in shard.files:
            yield from _size_problems(folder, stored, f"file of shard {number:,}")
    expected = {f"{INDEX_FOLDER}/{name}" for name in index_names(manifest)}
    if {stored.path for stored in manifest.index} != expected:
        yield FormatError(
            f"the manifest lists {len(manifest.index)} index files, expected {', '.join(sorted(expected))}",
            where=folder.where(MANIFEST_NAME),
            fix=_COPY,
        )
    for stored in manifest.index:
        yield from _size_problems(folder, stored, "index file")
    extra = [name for name in folder.names() if name not in listed and _looks_like_shard(name, format)]
    if extra:
        yield FormatError(
            f"{len(extra):,} shards are not in the manifest, such as {min(extra, key=natural_key)}",
            where=folder.where(""),
            fix="remove what does not belong to the dataset, or copy the dataset again",
        )


def _looks_like_shard(name: str, format: Format) -> bool:
    return not name.startswith(".") and re.fullmatch(format.shard_pattern, name) is not None


def _size_problems(folder: DatasetFolder, stored: StoredFile, kind: str) -> Iterator[FormatError]:
    where = folder.where(stored.path)
    try:
        found = folder.find_size(stored.path)
    except OSError as error:
        yield FormatError(f"a {kind} is missing: {error.strerror or error}", where=where, fix=_COPY)
    except FormatError as error:
        yield FormatError(f"a {kind} {error.what}", where=where, fix=error.fix)
    else:
        if found != stored.num_bytes:
            what = f"a {kind} has {found:,} bytes, the manifest says {stored.num_bytes:,}"
            yield FormatError(what, where=where, fix=_COPY)
