"""Reading datasets in object storage: Parquet by ranges, everything else from a local copy of a shard at a time."""

from __future__ import annotations

import fnmatch
import glob
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import xxhash

from harness.errors import FormatError
from harness.formats.base import Format, ShardInfo, ShardReader
from harness.formats.folders import MARKER_NAME, list_file_problems
from harness.formats.index import PackIndex, load_index
from harness.formats.manifest import MANIFEST_NAME, MAX_MANIFEST_BYTES, Manifest, Shard, parse_manifest
from harness.formats.opening import interrupted, open_bare, some
from harness.formats.reader import PackReader
from harness.records import Pack
from harness.storage import REQUEST_BYTES, Entry, LocalCache, ObjectPath, ObjectStore, StoredFile, natural_key


def open_remote(uri: str, names: Sequence[str], load: Callable[[str], Format]) -> PackReader:
    """What `open_dataset` does with a URI.

    Raises:
        ConfigError: the URI is none of object storage, or has credentials in it.
        FormatError: nothing is there, or the store cannot be reached or denies access.
    """
    place = ObjectPath.parse(uri)
    store = ObjectStore(place)
    formats = [load(name) for name in names]
    if glob.has_magic(place.key):
        return _open_objects(str(place), _glob(store, place), formats)
    suffixes = tuple(suffix for format in formats for suffix in format.suffixes)
    if place.name.endswith(suffixes) and store.find_size(place) is not None:
        return _open_objects(str(place), [place], formats)
    folder = RemoteFolder.find(uri)
    if folder is None:
        store.check_bucket()
        raise FormatError("no dataset there", where=str(place), fix="check bucket and key")
    manifest = folder.load_manifest()
    if manifest is None:
        found = sorted((name for name in folder.names()), key=natural_key)
        if MARKER_NAME in found:
            raise interrupted(str(place), found)
        inner = [place / name for name in found]
        if not any(name.endswith(suffixes) for name in found):
            raise FormatError(
                f"no {MANIFEST_NAME} and no known layout: an interrupted write or no dataset "
                f"(found {len(found):,} names: {some(found)})",
                where=str(place),
                fix="run the command that wrote it again, or name the right place",
            )
        return _open_objects(str(place), [one for one in inner if one.name.endswith(suffixes)], formats)
    if manifest.format not in names:
        raise FormatError(
            f"the manifest names the format {manifest.format[:40]!r}",
            where=folder.where(MANIFEST_NAME),
            fix=f"known are {', '.join(names)}",
        )
    format = load(manifest.format)
    for error in list_file_problems(folder, manifest, format):
        raise error
    return folder.open_unchecked(manifest, format)


class RemoteFolder:
    """A prefix in object storage as a dataset folder."""

    def __init__(self, place: ObjectPath, sizes: dict[str, int]) -> None:
        self._place = place
        self._store = ObjectStore(place)
        self._sizes = sizes

    @classmethod
    def find(cls, uri: str) -> RemoteFolder | None:
        """The folder with a listing of its objects, or None where there are none."""
        place = ObjectPath.parse(uri)
        found = ObjectStore(place).list(place)
        return cls(place, {one.name: one.num_bytes for one in found}) if found else None

    def load_manifest(self) -> Manifest | None:
        """As `load_manifest` of a local folder."""
        if MANIFEST_NAME not in self._sizes:
            return None
        place = self._place / MANIFEST_NAME
        return parse_manifest(self._store.read_whole(place, MAX_MANIFEST_BYTES), where=str(place))

    def where(self, path: str) -> str:
        return str(self._place / path) if path else str(self._place)

    def find_size(self, path: str) -> int:
        if path not in self._sizes:
            raise FileNotFoundError(2, "No such object")
        return self._sizes[path]

    def digest(self, path: str) -> str:
        place, total = self._place / path, xxhash.xxh3_64()
        file = self._store.open(place)
        num_bytes = self.find_size(path)
        for start in range(0, num_bytes, REQUEST_BYTES):
            total.update(self._store.read(place, file, start, min(REQUEST_BYTES, num_bytes - start)))
        return str(total.hexdigest())

    def names(self) -> Iterable[str]:
        return {name.partition("/")[0] for name in self._sizes}

    def open_unchecked(self, manifest: Manifest, format: Format) -> PackReader:
        if not manifest.fingerprint:
            raise FormatError(
                "a plan over a sequence store is read from disks only",
                where=str(self._place),
                fix="copy plan and store to a disk, or write its packs there: harness convert PLAN DST --to parquet",
            )
        shards = [
            ShardInfo(self._place / shard.path, num_packs=shard.num_packs, pack_size=manifest.pack_size)
            for shard in manifest.shards
        ]
        if format.inspect_remote is None:
            format = replace(format, open_shard=CachedShards(self._place, manifest.shards, format.open_shard))
        load = partial(load_remote_index, self._place, manifest)
        return PackReader(
            path=str(self._place),
            format=format,
            index=load(),
            shards=shards,
            pack_size=manifest.pack_size,
            manifest=manifest,
            load_index=load,
        )


def load_remote_index(place: ObjectPath, manifest: Manifest) -> PackIndex:
    """The index of a remote dataset, mapped from a local copy. Eviction of the copy does not harm the map."""
    entry = LocalCache.from_environment().get(manifest.index, _Download(place))
    return load_index(entry.folder, manifest)


@dataclass(frozen=True)
class CachedShards:
    """Opens shards from local copies: the `open_shard` of a format that takes files on a disk."""

    place: ObjectPath
    shards: tuple[Shard, ...]
    open_local: Callable[[ShardInfo], ShardReader]

    def __call__(self, info: ShardInfo) -> ShardReader:
        shard = next(one for one in self.shards if self.place / one.path == info.place)
        entry = LocalCache.from_environment().get(shard.files, _Download(self.place))
        local = replace(info, place=entry.folder / shard.path)
        try:
            return _CachedShard(self.open_local(local), entry, info.place)
        except BaseException:
            entry.release()
            raise


class _CachedShard:
    """An open shard whose local copy is not evicted while it is open."""

    def __init__(self, shard: ShardReader, entry: Entry, place: ObjectPath | Path) -> None:
        self._shard = shard
        self._entry = entry
        self._place = place

    def read(self, rows: Sequence[int]) -> list[Pack]:
        return self._shard.read(rows)

    def read_row(self, row: int) -> Pack:
        return self._shard.read_row(row)

    def where(self, row: int) -> str:
        return f"{self._shard.where(row)} (the copy of {self._place})"

    def close(self) -> None:
        self._shard.close()
        self._entry.release()


@dataclass(frozen=True)
class _Download:
    """Copies one file of a remote folder."""

    place: ObjectPath

    def __call__(self, stored: StoredFile, path: Path) -> None:
        place, store = self.place / stored.path, ObjectStore(self.place)
        file = store.open(place)
        with path.open("wb", buffering=0) as copy:
            for start in range(0, stored.num_bytes, REQUEST_BYTES):
                copy.write(store.read(place, file, start, min(REQUEST_BYTES, stored.num_bytes - start)))


def _open_objects(path: str, places: Sequence[ObjectPath], formats: Sequence[Format]) -> PackReader:
    """Objects without a manifest; only formats that are read by ranges can be opened so."""
    places = sorted(places, key=lambda place: natural_key(place.key))
    if not places:
        raise FormatError("no object matches", where=path, fix="check the pattern")
    for format in formats:
        mine = [place for place in places if place.name.endswith(format.suffixes)] if format.suffixes else []
        if len(mine) == len(places) and format.inspect_remote is not None:
            return open_bare(path, format, [format.inspect_remote(place) for place in mine])
        if mine and format.inspect_remote is not None:
            others = [place for place in places if place not in mine]
            raise FormatError(
                f"{len(others):,} of {len(places):,} objects are not {format.name}, such as {others[0]}",
                where=path,
                fix="write a pattern that matches objects of one format",
            )
    readable = ", ".join(format.name for format in formats if format.inspect_remote is not None)
    raise FormatError(
        f"objects without a manifest open in object storage as {readable} only, found {places[0].name}",
        where=path,
        fix="copy them to a folder and convert them there",
    )


def _glob(store: ObjectStore, pattern: ObjectPath) -> list[ObjectPath]:
    """Objects whose keys match, part by part: `*` does not match across a slash."""
    parts = pattern.key.split("/")
    plain = next(number for number, part in enumerate(parts) if glob.has_magic(part))
    root = replace(pattern, key="/".join(parts[:plain]))
    wanted = parts[plain:]
    found = []
    for one in store.list(root):
        names = one.name.split("/")
        if len(names) == len(wanted) and all(map(fnmatch.fnmatchcase, names, wanted)):
            found.append(root / one.name)
    return found
