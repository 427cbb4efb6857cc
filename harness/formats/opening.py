"""Finding out what a path is: a dataset folder, bare files of some tool, or nothing."""

from __future__ import annotations

import difflib
import glob
import os
import re
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import numpy as np

from harness.errors import FormatError
from harness.formats.base import Format, ShardInfo
from harness.formats.files import natural_key
from harness.formats.index import INDEX_FOLDER, INDEX_NAMES, PackIndex, build_index, load_index
from harness.formats.manifest import MANIFEST_NAME, Manifest, StoredFile, load_manifest
from harness.formats.reader import PackReader
from harness.formats.writer import MARKER_NAME

_COPY = "copy the dataset again, or write it again with `python -m recipes.prepare`"


def is_uri(path: str) -> bool:
    """Whether a path has a scheme, such as `s3://`: as a local path it would silently be a folder `s3:`."""
    return re.match(r"[a-zA-Z][a-zA-Z0-9+.-]*://", path) is not None


def open_path(path: str, names: Sequence[str], load: Callable[[str], Format]) -> PackReader:
    """What `open_dataset` does, over the formats of these names, each loaded when it is needed."""
    try:
        return _open(path, names, load)
    except OSError as error:
        raise FormatError(
            f"reading failed: {error.strerror or error}",
            where=str(error.filename or path),
            fix="check permissions, mounts and limits of open files",
        ) from error


def _open(path: str, names: Sequence[str], load: Callable[[str], Format]) -> PackReader:
    if is_uri(path):
        raise FormatError("object storage cannot be read yet", where=path, fix="copy the dataset to a folder")
    place = Path(path)
    if place.is_dir():
        manifest = load_manifest(place)
        if manifest is not None:
            return _open_folder(place, manifest, names, load)
        if (place / MARKER_NAME).exists():
            raise _interrupted(place)
    elif not place.exists() and glob.has_magic(path):
        return _open_glob(path, [load(name) for name in names])
    for format in (load(name) for name in names):
        shards = format.find_bare(place)
        if shards:
            return _open_bare(path, format, shards)
    raise _nothing(place, [load(name) for name in names])


def _open_folder(folder: Path, manifest: Manifest, names: Sequence[str], load: Callable[[str], Format]) -> PackReader:
    if manifest.format not in names:
        raise FormatError(
            f"the manifest names the format {manifest.format[:40]!r}",
            where=str(folder / MANIFEST_NAME),
            fix=f"known are {', '.join(names)}",
        )
    format = load(manifest.format)
    for error in list_file_problems(folder, manifest, format):
        raise error
    return open_unchecked(folder, manifest, format)


def open_unchecked(folder: Path, manifest: Manifest, format: Format) -> PackReader:
    """A dataset folder, without a look at its shards."""
    shards = [
        ShardInfo(folder / shard.path, num_packs=shard.num_packs, pack_size=manifest.pack_size)
        for shard in manifest.shards
    ]
    return PackReader(
        path=str(folder),
        format=format,
        index=load_index(folder, manifest),
        shards=shards,
        pack_size=manifest.pack_size,
        manifest=manifest,
        index_folder=folder,
    )


def list_file_problems(folder: Path, manifest: Manifest, format: Format) -> Iterator[FormatError]:
    """What is wrong with existence and size of the listed files, and other files that look like shards."""
    root = folder.resolve()
    listed = {shard.path.split("/")[0] for shard in manifest.shards}
    for number, shard in enumerate(manifest.shards):
        listed.update(stored.path.split("/")[0] for stored in shard.files)
        for stored in shard.files:
            yield from _size_problems(folder, root, stored, f"file of shard {number:,}")
    expected = {f"{INDEX_FOLDER}/{name}" for name in INDEX_NAMES}
    if {stored.path for stored in manifest.index} != expected:
        yield FormatError(
            f"the manifest lists {len(manifest.index)} index files, expected {', '.join(sorted(expected))}",
            where=str(folder / MANIFEST_NAME),
            fix=_COPY,
        )
    for stored in manifest.index:
        yield from _size_problems(folder, root, stored, "index file")
    with os.scandir(folder) as entries:
        extra = [entry.name for entry in entries if entry.name not in listed and _looks_like_shard(entry, format)]
    if extra:
        yield FormatError(
            f"{len(extra):,} shards are not in the manifest, such as {min(extra, key=natural_key)}",
            where=str(folder),
            fix="remove what does not belong to the dataset, or copy the dataset again",
        )


def _looks_like_shard(entry: os.DirEntry[str], format: Format) -> bool:
    return not entry.name.startswith(".") and re.fullmatch(format.shard_pattern, entry.name) is not None


def _size_problems(folder: Path, root: Path, stored: StoredFile, kind: str) -> Iterator[FormatError]:
    path = folder / stored.path
    try:
        found = path.stat().st_size
        inside = path.resolve().is_relative_to(root)
    except (OSError, RuntimeError) as error:  # RuntimeError: links in a circle
        yield FormatError(f"a {kind} is missing: {getattr(error, 'strerror', error)}", where=str(path), fix=_COPY)
        return
    if not inside:
        yield FormatError(
            f"a {kind} is a link that leaves the dataset's folder", where=str(path), fix="copy the file itself"
        )
    elif found != stored.num_bytes:
        what = f"a {kind} has {found:,} bytes, the manifest says {stored.num_bytes:,}"
        yield FormatError(what, where=str(path), fix=_COPY)


def _open_glob(pattern: str, formats: Sequence[Format]) -> PackReader:
    # Not Path.glob, which takes no absolute pattern.
    found = glob.glob(pattern)  # noqa: PTH207
    paths = sorted((Path(one) for one in found), key=lambda path: natural_key(str(path)))
    if not paths:
        raise FormatError("no file matches the pattern", where=pattern, fix="check the path")
    for format in formats:
        shards = [shard for path in paths for shard in format.find_bare(path)]
        if shards:
            others = [path for path in paths if not format.find_bare(path)]
            if others:
                raise FormatError(
                    f"{len(others):,} of {len(paths):,} files are not {format.name}, such as {others[0]}",
                    where=pattern,
                    fix="write a pattern that matches files of one format",
                )
            return _open_bare(pattern, format, shards)
    raise FormatError(f"no format knows {paths[0]}", where=pattern, fix=_suffixes(formats))


def _open_bare(path: str, format: Format, shards: list[Path]) -> PackReader:
    """Open files without a manifest: their lengths are read now, their packs later."""
    found = [format.inspect_bare(shard) for shard in shards]
    for shard in found:
        if shard.sequence_counts.shape[0] == 0 and len(found) == 1:
            raise FormatError("the file holds no packs", where=str(shard.path))
    index = build_index([one.sequence_counts for one in found], [one.sequence_lengths for one in found])
    longest = _longest_pack(index)
    pack_size = max([longest, *(one.pack_size for one in found if one.pack_size is not None)])
    manifest = None
    if len(found) == 1 and found[0].manifest is not None:
        manifest = found[0].manifest
        index = PackIndex(index.pack_offsets, index.sequence_lengths, found[0].checksums)
        pack_size = manifest.pack_size
    elif all(one.checksums is not None for one in found):
        index = PackIndex(
            index.pack_offsets,
            index.sequence_lengths,
            np.concatenate([one.checksums for one in found if one.checksums is not None]),
        )
    infos = [ShardInfo(one.path, num_packs=one.sequence_counts.shape[0], pack_size=pack_size) for one in found]
    reader = PackReader(path=path, format=format, index=index, shards=infos, pack_size=pack_size, manifest=manifest)
    for number, one in enumerate(found):
        if one.reader is not None:
            reader.adopt(number, one.reader)
    return reader


def _longest_pack(index: PackIndex) -> int:
    if index.pack_offsets.shape[0] < 2:
        return 0
    return int(np.add.reduceat(index.sequence_lengths, index.pack_offsets[:-1], dtype=np.int64).max())


def _interrupted(folder: Path) -> FormatError:
    names = sorted((entry.name for entry in folder.iterdir()), key=natural_key)
    shown = ", ".join(names[:4]) + (", ..." if len(names) > 4 else "")
    return FormatError(
        f"no {MANIFEST_NAME}: a write is in progress or was interrupted (found {len(names):,} files: {shown})",
        where=str(folder),
        fix="wait for the writer, or run the command that wrote it again",
    )


def _nothing(path: Path, formats: Sequence[Format]) -> FormatError:
    if path.is_dir():
        names = sorted((entry.name for entry in path.iterdir()), key=natural_key)
        shown = ", ".join(names[:4]) + (", ..." if len(names) > 4 else "") if names else "nothing"
        return FormatError(
            f"no {MANIFEST_NAME} and no known layout: an interrupted write or no dataset "
            f"(found {len(names):,} files: {shown})",
            where=str(path),
            fix="run the command that wrote it again, or name the right folder",
        )
    if path.exists():
        return FormatError(f"no format knows the suffix {path.suffix!r}", where=str(path), fix=_suffixes(formats))
    near: list[str] = []
    if path.parent.is_dir():
        near = difflib.get_close_matches(path.name, [entry.name for entry in path.parent.iterdir()], n=2, cutoff=0.6)
    fix = f"did you mean {' or '.join(str(path.parent / name) for name in near)}?" if near else "check the path"
    return FormatError("no dataset there", where=str(path), fix=fix)


def _suffixes(formats: Sequence[Format]) -> str:
    known = sorted({suffix for format in formats for suffix in format.suffixes})
    return f"known are {', '.join(known)} and dataset folders"
