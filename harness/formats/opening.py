"""Opening of datasets: dataset folders, and bare files of other tools, on a disk or in a bucket.

A dataset without its manifest may also lack shards, which its files would not show. Therefore, names of this package's
index or shards make a folder an incomplete dataset, unless the files belong to another tool that uses such names.
"""

from __future__ import annotations

import glob
import os
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from os import PathLike
from pathlib import Path
from typing import Any

import numpy as np

from harness.errors import FormatError
from harness.formats.base import FORMATS, Format, ShardReader, load_format
from harness.formats.index import (
    INDEX_FOLDER,
    INDEX_NAMES,
    IndexPart,
    KeptFingerprint,
    PackIndex,
    index_names,
    load_index,
)
from harness.formats.manifest import MANIFEST_NAME, Manifest, Shard, file_problems, load_manifest, restore_hint
from harness.formats.media import INDEX, SHARDS
from harness.formats.reader import MAX_OPEN_FILES, PackReader, explained, stamp_shard
from harness.paths import explain_path, is_run, near_paths
from harness.printing import count_of
from harness.storage import (
    BucketFolder,
    Folder,
    LocalFolder,
    ObjectPath,
    Place,
    is_uri,
    join_path,
    natural_key,
    open_folder,
)
from harness.storage.bucket import check_bucket, find_size
from harness.storage.inputs import match_objects

# Exists while a writer is active; distinguishes an interrupted write from a folder of another tool.
MARKER_NAME = "_writing"


def open_dataset(path: str | PathLike[str]) -> PackReader:
    """Open a stored dataset.

    Args:
        path: a dataset folder; a folder, file or prefix of another tool in a supported layout; a glob of files, opened
            in natural order; or any of these in a bucket (`s3://`, `gs://`, `abfs://`, `az://`), where Parquet is read
            by ranges and other formats from local copies (see `harness.storage`).

    Returns:
        a reader; no packs are read yet. Files of other tools are first scanned for their lengths.

    Raises:
        FormatError: the path does not exist, a write was interrupted, a dataset lacks its manifest, or shards are
            missing, truncated, unexpected or of another schema.
    """
    text = str(path)
    try:
        return _open(text, open_folder(text))
    except (OSError, MemoryError) as error:
        raise explained(error, text) from error


def holds_manifest(path: str | PathLike[str]) -> bool:
    """Return True if a folder, on a disk or in object storage, has a manifest, without reading it."""
    return open_folder(path).exists(MANIFEST_NAME)


def holds_dataset(path: str | PathLike[str]) -> bool:
    """Return True if a folder, on a disk or in object storage, contains a complete or incomplete dataset."""
    folder = open_folder(path)
    if isinstance(folder, LocalFolder) and not folder.place.is_dir():
        return False
    return folder.exists(MANIFEST_NAME) or MARKER_NAME in folder.names() or bool(find_traces(folder))


def find_splits(path: str) -> dict[str, str]:
    """Return the existing `train` and `validation` folders of a prepared folder; none if it is a dataset itself.

    Folders without a manifest are included, so that they are refused instead of skipped. In object storage, a folder
    exists if it contains files of a dataset.
    """
    inner = {} if holds_manifest(path) else {name: join_path(path, name) for name in ("train", "validation")}
    return {name: one for name, one in inner.items() if (holds_dataset(one) if is_uri(one) else Path(one).is_dir())}


def _open(path: str, folder: Folder) -> PackReader:
    place = folder.place
    if isinstance(place, ObjectPath):
        is_file = place.name.endswith(_suffixes()) and find_size(place) is not None
        is_pattern, is_folder = glob.has_magic(place.key), not is_file
    else:
        is_pattern, is_folder = glob.has_magic(path) and not place.exists(), place.is_dir()
    if is_pattern:
        places: list[Place]
        if isinstance(place, ObjectPath):
            places = [*match_objects(place)]
        else:  # Path.glob refuses absolute patterns; skip folders that only `**` matches
            folders, names = set(glob.glob(path)), glob.glob(path, recursive=True)  # noqa: PTH207
            places = [Path(name) for name in names if name in folders or Path(name).is_file()]
        refuse_parts(places, of_pattern=True)
        if not places:
            raise FormatError("no file matches the pattern", where=path, fix="check the path")
        return _open_files(path, places)
    if is_folder:
        if isinstance(place, ObjectPath) and not folder.names():
            check_bucket(place)
            raise FormatError("there is no dataset", where=path, fix="check bucket and key")
        manifest = load_manifest(folder)
        if manifest is not None:
            _check_files(folder, manifest)
            return open_unchecked(folder, manifest)
        if isinstance(place, Path) and is_run(place):  # its metrics are not packs
            raise _nothing(place)
        if isinstance(place, ObjectPath):
            _refuse_traces(folder)
            if objects := [place / name for name in folder.names() if name.endswith(_suffixes())]:
                return _open_files(folder.where(), objects)
            raise _incomplete(folder)
    refuse_parts([place])
    return _open_files(path, [place])


def refuse_parts(places: Sequence[Place], *, of_pattern: bool = False) -> None:
    """Raise FormatError if places are incomplete datasets, or shards in a folder without a complete dataset.

    A single shard of a complete dataset may be opened by name. A pattern that matches shards means all of them, so all
    files of the dataset must exist. A pattern must not match the folder of a dataset.
    """
    # Make paths absolute: a relative path such as `.` does not end with the name of a shard.
    whole = [Path(os.path.abspath(place)) if isinstance(place, Path) else place for place in places]  # noqa: PTH100
    for parent in dict.fromkeys(place.parent for place in whole):
        folder = BucketFolder(parent) if isinstance(parent, ObjectPath) else LocalFolder(parent)
        if find_own_shards(folder, [place.name for place in whole if place.parent == parent]):
            manifest = load_manifest(folder)
            if manifest is None:
                _refuse_traces(folder)
            elif manifest.num_media:
                what = "a shard of a dataset with media cannot be opened alone: only the dataset names its media"
                raise FormatError(what, where=str(whole[0]), fix=f"open the dataset, {folder.where()}")
            elif of_pattern:
                _check_files(folder, manifest)
    for inner in (LocalFolder(place) for place in places if isinstance(place, Path) and place.is_dir()):
        if load_manifest(inner) is None:
            _refuse_traces(inner)
        elif of_pattern:
            what = "the pattern matches the folder of a dataset, expected files"
            raise FormatError(what, where=inner.where(), fix="open the folder itself")


def _refuse_traces(folder: Folder) -> None:
    """Raise FormatError if a folder without a manifest contains an interrupted write or parts of a dataset."""
    if folder.exists(MARKER_NAME):
        raise _incomplete(folder)
    refuse_traces(folder)


# ---- traces of a dataset


@dataclass
class Traces:
    """Names in a folder that only this package writes: index files, and shards of each format by number."""

    index: list[str]
    shards: dict[str, dict[int, str]]

    def __bool__(self) -> bool:
        return bool(self.index or self.shards)


def find_traces(folder: Folder) -> Traces:
    """Find traces of a dataset in a folder: index files, and shards written by this package."""
    names, index = folder.names(), []
    if INDEX_FOLDER in names:
        index = [name for name in (*INDEX_NAMES, INDEX) if folder.exists(name)]
        if isinstance(folder, LocalFolder) and (folder.place / INDEX_FOLDER).is_dir():
            index += [f"{INDEX_FOLDER}/{one.name}" for one in (folder.place / INDEX_FOLDER).glob("*.part")]
    return Traces(index, find_own_shards(folder, names))


def find_own_shards(folder: Folder, names: Sequence[str]) -> dict[str, dict[int, str]]:
    """Return this package's shards among names in a folder, by format and number."""

    def is_own(format: Format, shard: str) -> bool:
        if isinstance(folder, BucketFolder) and not format.in_buckets:
            return True  # Files of other tools in these formats cannot be opened there.
        try:
            return format.is_own(folder.place / shard)
        except (OSError, FormatError, ValueError, MemoryError):
            return False

    found = {}
    for format in map(load_format, FORMATS):
        shards = format.find_shards(name + end for name in names for end in {"", *format.shard_files})
        # Check the first and the last, because either can be damaged beyond recognition.
        if shards and any(is_own(format, shards[number]) for number in {min(shards), max(shards)}):
            found[format.name] = shards
    return found


def refuse_traces(folder: Folder) -> None:
    """Raise FormatError for a folder with traces of a dataset but no manifest, listing what is missing."""
    if not (traces := find_traces(folder)):
        return
    missing = [MANIFEST_NAME, *(name for name in INDEX_NAMES if name not in traces.index)]
    for name, shards in traces.shards.items():
        missing += [load_format(name).shard_name(number) for number in find_gaps(shards)]
    shown = ", ".join(missing[:8]) + (f" and {len(missing) - 8:,} more" if len(missing) > 8 else "")
    found = count_of(sum(map(len, traces.shards.values())), "shard")
    what = f"the dataset is incomplete: {shown} missing ({found} found)"
    raise FormatError(what, where=folder.where(), fix=restore_hint(folder.where()))


def find_gaps(shards: dict[int, str]) -> list[int]:
    # Limit the result, because a shard number may be damaged.
    gaps = (number for number in range(max(shards, default=-1)) if number not in shards)
    return [number for number, _ in zip(gaps, range(len(shards) + 1), strict=False)]


# ---- datasets with a manifest


def _check_files(folder: Folder, manifest: Manifest) -> None:
    if manifest.format not in FORMATS:
        what = f"the manifest contains an unknown format, {manifest.format[:40]!r}"
        raise FormatError(what, where=folder.where(MANIFEST_NAME), fix=f"known formats: {', '.join(FORMATS)}")
    for error in list_file_problems(folder, manifest):
        raise error


def open_unchecked(folder: Folder, manifest: Manifest) -> PackReader:
    """Open a dataset folder without checking its shards."""
    format = load_format(manifest.format)
    is_plan = not manifest.fingerprint
    # A plan stores the path of its store relative to its own folder.
    open_shard = partial(format.open_shard, folder=folder) if is_plan else format.open_shard
    # Packs of a plan have no checksums, so its own files are compared with the manifest.
    if is_plan or (isinstance(folder, BucketFolder) and not format.in_buckets):
        format = replace(format, open_shard=partial(_open_own, folder, manifest.shards, open_shard))
    return PackReader(
        path=folder.where(),
        format=format,
        index=load_index(folder, manifest),
        shards=[(folder.place / shard.path, shard.num_packs) for shard in manifest.shards],
        pack_size=manifest.pack_size,
        manifest=manifest,
        load_index=partial(load_index, folder, manifest),
        kept_fingerprint=KeptFingerprint.of(folder, manifest) if is_plan else None,
    )


def _open_own(
    folder: Folder,
    shards: Sequence[Shard],
    open_shard: Callable[[Any, int | None], ShardReader],
    place: Place,
    pack_size: int | None,
) -> ShardReader:
    """Open a shard from local copies of a bucket, or from files on a disk that match the manifest.

    Files are compared after they were opened, because a writer that replaces a dataset first removes all of it.
    """
    shard = next(shard for shard in shards if folder.place / shard.path == place)
    if isinstance(folder, BucketFolder):
        entry = folder.fetch(shard.files)
        handle = open_shard(entry.folder / shard.path, pack_size)
        handle.entry = entry
        return handle
    handle = open_shard(place, pack_size)
    for error in file_problems(folder, shard.files, "file of the plan", hashes=True):
        handle.close()
        raise error
    return handle


def list_file_problems(folder: Folder, manifest: Manifest, *, hashes: bool = False) -> Iterator[FormatError]:
    """Yield problems with existence and size of the listed files, and unlisted files that look like shards.

    With `hashes`, also read all files and compare their hashes.
    """
    format = load_format(manifest.format)
    listed = {shard.path.split("/")[0] for shard in manifest.shards}
    for number, shard in enumerate(manifest.shards):
        listed.update(stored.path.split("/")[0] for stored in shard.files)
        yield from file_problems(folder, shard.files, f"file of shard {number:,}", hashes=hashes)
    expected = set(index_names(manifest))
    if {stored.path for stored in manifest.index} != expected:
        yield FormatError(
            f"the manifest lists {len(manifest.index)} index files, expected {', '.join(sorted(expected))}",
            where=folder.where(MANIFEST_NAME),
        )
    yield from file_problems(folder, manifest.index, "file of the index", hashes=hashes)
    extra = [
        name
        for name in folder.names()
        if name not in listed and not name.startswith(".") and re.fullmatch(f"{format.shard_pattern}|{SHARDS}", name)
    ]
    if extra:
        yield FormatError(
            f"shards not in the manifest: {len(extra):,}, such as {min(extra, key=natural_key)}",
            where=folder.where(),
            fix="remove what does not belong to the dataset, or copy the dataset again",
        )


# ---- files without a manifest


def _find_bare(format: Format, place: Place) -> Sequence[Place]:
    if isinstance(place, Path):
        return format.find_bare(place)
    return [place] if format.in_buckets and place.name.endswith(format.suffixes) else []


def _open_files(path: str, places: Sequence[Place]) -> PackReader:
    places = sorted(places, key=lambda place: natural_key(str(place)))
    for format in map(load_format, FORMATS):
        if shards := [shard for place in places for shard in _find_bare(format, place)]:
            if others := [place for place in places if not _find_bare(format, place)]:
                what = f"{len(others):,} of {len(places):,} files are not {format.name}, such as {others[0]}"
                raise FormatError(what, where=path, fix="write a pattern that matches files of one format")
            # A pattern may match several files of one shard, or a folder and the files in it.
            return _open_bare(path, format, [*dict.fromkeys(shards)])
    if isinstance(places[0], Path):
        raise _nothing(places[0])
    readable = ", ".join(format.name for format in map(load_format, FORMATS) if format.in_buckets)
    what = f"objects without a manifest open in object storage as {readable} only, not {places[0].name}"
    raise FormatError(what, where=path, fix="copy them to a folder and convert them there")


def _open_bare(path: str, format: Format, places: Sequence[Place]) -> PackReader:
    """Open shards without a manifest and read their lengths; packs are read later."""
    stamps = [stamp_shard(format, place) for place in places]
    handles: list[ShardReader] = []
    contents: list[IndexPart] = []
    for place in places:
        handle = format.open_shard(place, None)
        contents.append(handle.contents())
        if len(handles) < MAX_OPEN_FILES // format.files_per_shard:
            handles.append(handle)
        else:  # there can be more files than a process may have open
            handle.close()
    if not any(one.sequence_counts.shape[0] for one in contents):
        what = "the file contains no packs" if len(places) == 1 else f"the {len(places):,} files contain no packs"
        raise FormatError(what, where=path, fix="write at least one pack")
    ends = np.cumsum(np.concatenate([one.sequence_counts for one in contents]), dtype=np.int64)
    offsets = np.concatenate([np.zeros(1, np.int64), ends])
    lengths = np.concatenate([one.sequence_lengths for one in contents]).astype(np.int32, copy=False)
    offsets.flags.writeable = lengths.flags.writeable = False
    checksums = np.concatenate([one.checksums for one in contents])
    index = PackIndex(offsets, lengths, checksums if len(checksums) == len(ends) else None)
    manifest = contents[0].manifest if len(contents) == 1 else None
    # As stored, or the longest pack if that is larger.
    longest = int(np.add.reduceat(lengths, offsets[:-1], dtype=np.int64).max())
    reader = PackReader(
        path=path,
        format=format,
        index=index,
        shards=[(place, one.sequence_counts.shape[0]) for place, one in zip(places, contents, strict=True)],
        pack_size=max(longest, *(one.pack_size or 0 for one in contents)) if manifest is None else manifest.pack_size,
        manifest=manifest,
        stamps=stamps if index.checksums is None else None,
    )
    for number, handle in enumerate(handles):
        reader.adopt(number, handle)
    return reader


# ---- errors


def _incomplete(folder: Folder) -> FormatError:
    names, what = folder.names(), " and no known layout: an interrupted write or no dataset"
    fix = "run the command that wrote it again, or specify the right folder"
    if MARKER_NAME in names:
        what, fix = ": a write is in progress or was interrupted", f"wait for the writer, or {fix}"
    found = ", ".join([*sorted(names, key=natural_key)[:4], *(["..."] if len(names) > 4 else [])]) or "nothing"
    return FormatError(f"no {MANIFEST_NAME}{what} (found {found})", where=folder.where(), fix=fix)


def _nothing(path: Path) -> FormatError:
    if explained := explain_path(path, expected="a dataset"):
        return FormatError(explained[0], where=str(path), fix=explained[1])
    if path.is_dir():
        return _incomplete(LocalFolder(path))
    if path.exists():
        fix = f"supported are {', '.join(_suffixes())} and dataset folders"
        return FormatError(f"no format has the suffix {path.suffix!r}", where=str(path), fix=fix)
    return FormatError("there is no dataset", where=str(path), fix=near_paths(path) or "`harness prepare` writes one")


def _suffixes() -> tuple[str, ...]:
    return tuple(sorted({suffix for format in map(load_format, FORMATS) for suffix in format.suffixes}))
