"""Writing a dataset into object storage: shards are streamed as they come, the manifest is the last object.

There are no locks and no renames there. An upload is not visible before it is complete; what an interrupted write
left is removed by the next one, which begins anew. Uploads of a process that was killed stay invisible, and are billed
until a lifecycle rule of the bucket ends them.
"""

from __future__ import annotations

import contextlib
import tempfile
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import xxhash

from harness.errors import ConfigError, FormatError
from harness.formats.base import Format, ShardWriter
from harness.formats.digest import dataset_fingerprint
from harness.formats.folders import MARKER_NAME
from harness.formats.index import INDEX_FOLDER, INDEX_NAMES, IndexPart, write_index
from harness.formats.manifest import MANIFEST_NAME, MAX_MANIFEST_BYTES, Manifest, Provenance, Shard, parse_manifest
from harness.formats.parts import PART_SUFFIX, FinishedShard, load_part, pack_index_bytes, save_part, stored_files
from harness.formats.writer import OURS, PackWriter, already_there
from harness.storage import REQUEST_BYTES, ObjectPath, ObjectStore, StoredFile


class RemoteFile:
    """An object that is there only after `finish`; what pyarrow expects of a writable file."""

    def __init__(self, store: ObjectStore, place: ObjectPath) -> None:
        self.path = Path(place.name)
        self.num_bytes = 0
        self._digest = xxhash.xxh3_64()
        self._store = store
        self._place = place
        self._buffer = bytearray()
        self._done = False
        self._stream: Any = store.open_upload(place)

    @property
    def closed(self) -> bool:
        return self._done

    @property
    def xxh3(self) -> str:
        return str(self._digest.hexdigest())

    def write(self, data: bytes | memoryview) -> int:
        view = memoryview(data).cast("B")
        if self._done:
            # A library's writer that is dropped after `abort` writes its footer; there is no file for it any more.
            return len(view)
        self._digest.update(view)
        self.num_bytes += len(view)
        self._buffer += view
        if len(self._buffer) >= REQUEST_BYTES:
            self._send()
        return len(view)

    def tell(self) -> int:
        return self.num_bytes

    def writable(self) -> bool:
        return True

    def readable(self) -> bool:
        return False

    def seekable(self) -> bool:
        return False

    def flush(self) -> None:
        """Sent in parts of a size that the store takes."""

    def close(self) -> None:
        """Writers handed this file call it when they are done; the upload is completed by `finish`."""

    def finish(self) -> None:
        """Complete the upload."""
        if not self._done:
            self._send()
            self._store.upload(self._place, self._stream.close)
            self._done = True

    def abort(self) -> None:
        """Leave no object."""
        if self._done:
            return
        self._done = True
        self._buffer.clear()
        # PyArrow completes an upload whose stream is dropped: completed here and deleted, no half object stays.
        try:
            self._store.upload(self._place, self._stream.close)
        finally:
            self._store.delete(self._place)

    def _send(self) -> None:
        data, self._buffer = bytes(self._buffer), bytearray()
        if data:
            self._store.upload(self._place, lambda: self._stream.write(data))


class RemotePackWriter(PackWriter):
    """Streams shards; index entries wait in a temporary folder of this machine, a few bytes a pack."""

    def __init__(
        self,
        place: ObjectPath,
        *,
        format: Format,
        pack_size: int,
        provenance: Provenance,
        packs_per_shard: int,
        rows_per_group: int,
        overwrite: bool,
    ) -> None:
        super().__init__(
            str(place),
            format=format,
            pack_size=pack_size,
            provenance=provenance,
            packs_per_shard=packs_per_shard,
            rows_per_group=rows_per_group,
        )
        if format.write_remote is None:
            raise ConfigError(
                f"{format.name} cannot be written to object storage",
                where=str(place),
                fix="write parquet there, or write to a folder and copy it",
            )
        self._place = place
        self._overwrite = overwrite
        self._store = ObjectStore(place)
        self._write_remote = format.write_remote
        self._file: RemoteFile | None = None
        self._staging = tempfile.TemporaryDirectory(prefix="harness-index-")
        self._claimed = False

    def _prepare(self) -> None:
        if self._single:
            if not self._overwrite and self._store.find_size(self._place) is not None:
                raise already_there(self.where)
            return
        names = [one.name for one in self._store.list(self._place)]
        if MANIFEST_NAME in names and self._is_dataset():
            if not self._overwrite:
                raise already_there(self.where)
            self._store.delete(self._place / MANIFEST_NAME)
            names.remove(MANIFEST_NAME)
        elif names and MARKER_NAME not in names:
            raise FormatError(
                f"the destination holds {len(names):,} objects of something else, such as {min(names)}",
                where=self.where,
                fix="name a place without objects",
            )
        self._put(MARKER_NAME, b"")
        self._claimed = True
        self._delete_ours(names)

    def _is_dataset(self) -> bool:
        place = self._place / MANIFEST_NAME
        return parse_manifest(self._store.read_whole(place, MAX_MANIFEST_BYTES), where=str(place)) is not None

    def _start_shard(self) -> ShardWriter:
        place = self._place if self._single else self._place / self._format.shard_name(len(self._finished))
        self._file = RemoteFile(self._store, place)
        return self._write_remote(self._file, self._options)

    def _finish_shard(self, shard: ShardWriter) -> FinishedShard:
        assert self._file is not None
        shard.finish({})
        name = self._format.shard_name(len(self._finished))
        files = (StoredFile(name, self._file.num_bytes, self._file.xxh3),)
        finished = FinishedShard(Shard(name, len(self._builder), files), self._builder.totals())
        self._index.mkdir(exist_ok=True)
        save_part(self._part_path(len(self._finished)), finished, self._builder.build())
        return finished

    def _finish(self) -> Manifest:
        staging = Path(self._staging.name)
        fingerprint = write_index(
            staging, self._load_parts, num_packs=self.num_packs, num_sequences=self.totals.num_sequences
        )
        files = stored_files(staging, [self._index / name for name in INDEX_NAMES])
        for name in INDEX_NAMES:
            self._copy(self._index / name, self._place / INDEX_FOLDER / name)
        manifest = self._build_manifest(fingerprint)
        manifest = replace(manifest, shards=tuple(one.shard for one in self._finished), index=files)
        self._put(MANIFEST_NAME, manifest.to_json().encode())
        return manifest

    def _finish_file(self, shard: ShardWriter) -> Manifest:
        part = self._builder.build()
        manifest = self._build_manifest(dataset_fingerprint([part.checksums]))
        shard.finish({"manifest": manifest.to_json().encode(), "index": pack_index_bytes(part)})
        return manifest

    def _abort(self) -> None:
        # The error that led here is what the user must see, not one of the cleaning.
        with contextlib.suppress(OSError, FormatError):
            if self._shard is not None:
                self._shard.abort()
        with contextlib.suppress(OSError, FormatError):
            if self._claimed:
                self._delete_ours([one.name for one in self._store.list(self._place)])
        self._release()

    def _release(self) -> None:
        with contextlib.suppress(OSError, FormatError):
            if self._claimed:
                self._store.delete(self._place / MARKER_NAME)
        self._staging.cleanup()

    def _delete_ours(self, names: list[str]) -> None:
        for name in names:
            if OURS.fullmatch(name.partition("/")[0]):
                self._store.delete(self._place / name)

    def _put(self, name: str, data: bytes) -> None:
        file = RemoteFile(self._store, self._place / name)
        file.write(data)
        file.finish()

    def _copy(self, path: Path, place: ObjectPath) -> None:
        upload = RemoteFile(self._store, place)
        with path.open("rb") as file:
            while block := file.read(REQUEST_BYTES):
                upload.write(block)
        upload.finish()

    @property
    def _index(self) -> Path:
        return Path(self._staging.name) / INDEX_FOLDER

    def _part_path(self, number: int) -> Path:
        return self._index / f"{number:06d}{PART_SUFFIX}"

    def _load_parts(self) -> Iterator[IndexPart]:
        for number in range(len(self._finished)):
            loaded = load_part(self._part_path(number))
            if loaded is None:
                raise FormatError("a file of the write in progress is damaged", where=str(self._part_path(number)))
            yield loaded[1]
