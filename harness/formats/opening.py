"""Finding out what a path is: a dataset folder, bare files of some tool, or nothing."""

from __future__ import annotations

import difflib
import glob
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np

from harness.errors import FormatError
from harness.formats.base import BareShard, Format, ShardInfo
from harness.formats.folders import MARKER_NAME, LocalFolder, list_file_problems
from harness.formats.index import PackIndex, build_index
from harness.formats.manifest import MANIFEST_NAME, Manifest, load_manifest
from harness.formats.reader import PackReader
from harness.storage import is_uri, natural_key, redact


def open_path(path: str, names: Sequence[str], load: Callable[[str], Format]) -> PackReader:
    """What `open_dataset` does, over the formats of these names, each loaded when it is needed."""
    try:
        return _open(path, names, load)
    except OSError as error:
        raise FormatError(
            f"reading failed: {error.strerror or error}",
            where=redact(str(error.filename or path)),
            fix="check permissions, mounts and limits of open files",
        ) from error


def _open(path: str, names: Sequence[str], load: Callable[[str], Format]) -> PackReader:
    if is_uri(path):
        from harness.formats.remote import open_remote

        return open_remote(path, names, load)
    place = Path(path)
    if place.is_dir():
        manifest = load_manifest(place)
        if manifest is not None:
            return _open_folder(place, manifest, names, load)
        if (place / MARKER_NAME).exists():
            raise interrupted(str(place), [entry.name for entry in place.iterdir()])
    elif not place.exists() and glob.has_magic(path):
        return _open_glob(path, [load(name) for name in names])
    for format in (load(name) for name in names):
        shards = format.find_bare(place)
        if shards:
            return open_bare(path, format, [format.inspect_bare(shard) for shard in shards])
    raise _nothing(place, [load(name) for name in names])


def _open_folder(folder: Path, manifest: Manifest, names: Sequence[str], load: Callable[[str], Format]) -> PackReader:
    if manifest.format not in names:
        raise FormatError(
            f"the manifest names the format {manifest.format[:40]!r}",
            where=str(folder / MANIFEST_NAME),
            fix=f"known are {', '.join(names)}",
        )
    format = load(manifest.format)
    found = LocalFolder(folder)
    for error in list_file_problems(found, manifest, format):
        raise error
    return found.open_unchecked(manifest, format)


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
            return open_bare(pattern, format, [format.inspect_bare(shard) for shard in shards])
    raise FormatError(f"no format knows {paths[0]}", where=pattern, fix=_suffixes(formats))


def open_bare(path: str, format: Format, found: Sequence[BareShard]) -> PackReader:
    """Files without a manifest, whose lengths were read; their packs are read later."""
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


def interrupted(where: str, names: Sequence[str]) -> FormatError:
    """The error for a folder whose writer did not come to its end."""
    return FormatError(
        f"no {MANIFEST_NAME}: a write is in progress or was interrupted (found {len(names):,} files: {some(names)})",
        where=where,
        fix="wait for the writer, or run the command that wrote it again",
    )


def some(names: Sequence[str]) -> str:
    """The first few names in natural order."""
    shown = sorted(names, key=natural_key)[:4]
    return ", ".join(shown) + (", ..." if len(names) > len(shown) else "") if names else "nothing"


def _nothing(path: Path, formats: Sequence[Format]) -> FormatError:
    if path.is_dir():
        names = [entry.name for entry in path.iterdir()]
        datasets = sorted((name for name in names if (path / name / MANIFEST_NAME).is_file()), key=natural_key)
        if datasets:
            return FormatError(
                f"a folder of {len(datasets):,} datasets and none itself ({some(datasets)})",
                where=str(path),
                fix=f"name one of them, such as {path / datasets[0]}",
            )
        return FormatError(
            f"no {MANIFEST_NAME} and no known layout: an interrupted write or no dataset "
            f"(found {len(names):,} files: {some(names)})",
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
