"""Writing a dataset into a folder or a file on a disk; a folder's interrupted write can be gone on with."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import asdict, replace
from pathlib import Path

from harness.errors import FormatError
from harness.formats.base import Format, ShardWriter
from harness.formats.digest import dataset_fingerprint
from harness.formats.folders import MARKER_NAME
from harness.formats.index import INDEX_FOLDER, INDEX_NAMES, IndexPart, write_index
from harness.formats.manifest import MANIFEST_NAME, Manifest, Provenance, Shard, load_manifest
from harness.formats.parts import (
    PART_SUFFIX,
    FinishedShard,
    is_whole,
    load_part,
    pack_index_bytes,
    save_part,
    settings_of,
    stored_files,
)
from harness.formats.writer import OURS, PackWriter, already_there
from harness.storage import TEMPORARY_SUFFIX, Marker, sync_folder


class LocalPackWriter(PackWriter):
    """Writes under temporary names. A marker that is locked keeps other writers away.

    Attributes:
        path: the destination.
    """

    def __init__(
        self,
        path: Path,
        *,
        format: Format,
        pack_size: int,
        provenance: Provenance,
        packs_per_shard: int,
        rows_per_group: int,
        overwrite: bool,
        resume_key: str | None,
    ) -> None:
        super().__init__(
            str(path),
            format=format,
            pack_size=pack_size,
            provenance=provenance,
            packs_per_shard=packs_per_shard,
            rows_per_group=rows_per_group,
        )
        self.path = path
        self._overwrite = overwrite
        self._settings = None
        if resume_key is not None and not self._single:
            self._settings = settings_of(
                {
                    "pack_size": pack_size,
                    "packs_per_shard": packs_per_shard,
                    "rows_per_group": rows_per_group,
                    "format": format.name,
                    "provenance": asdict(provenance),
                    "key": resume_key,
                }
            )
        self._marker = Marker(path.with_name(f".{path.name}{MARKER_NAME}") if self._single else path / MARKER_NAME)
        self._created_folder = False

    def _prepare(self) -> None:
        if self._single:
            if self.path.exists() and not self._overwrite:
                raise already_there(self.where)
            self.path.parent.mkdir(parents=True, exist_ok=True)
            self._marker.acquire()
            return
        if self.path.exists() and not self.path.is_dir():
            raise FormatError("the destination is a file, expected a folder", where=str(self.path), fix="name another")
        self._created_folder = not self.path.exists()
        self.path.mkdir(parents=True, exist_ok=True)
        if not self._marker.path.exists() and load_manifest(self.path) is None:
            others = sorted(entry.name for entry in self.path.iterdir())
            if others:
                raise FormatError(
                    f"the destination holds {len(others):,} files of something else, such as {others[0]}",
                    where=str(self.path),
                    fix="name a new or empty folder",
                )
        previous = self._marker.acquire()
        try:
            if load_manifest(self.path) is not None:
                if not self._overwrite:
                    raise already_there(self.where)
                (self.path / MANIFEST_NAME).unlink()
                sync_folder(self.path)
                previous = b""
            if self._settings is not None and previous == self._settings:
                self._take_up()
            self._clean()
            self._marker.write(self._settings or b"")
        except BaseException:
            self._marker.release(remove=self._marker.was_created)
            raise

    def _take_up(self) -> None:
        """Keep the whole shards of an interrupted write, up to the first that is not whole."""
        while True:
            loaded = load_part(self._part_path(len(self._finished)))
            if loaded is None:
                return
            finished, _ = loaded
            if finished.shard.path != self._format.shard_name(len(self._finished)):
                return
            # A short shard is the last one of a write that was stopped in its final steps: it is written again.
            if finished.totals.num_packs != self._packs_per_shard or not is_whole(self.path, finished.shard):
                return
            self._finished.append(finished)
            self._finished_totals = self._finished_totals + finished.totals

    def _clean(self) -> None:
        """Remove what an interrupted write left, except the shards that were taken up."""
        kept = {(self.path / stored.path) for shard in self._finished for stored in shard.shard.files}
        kept |= {self._part_path(number) for number in range(len(self._finished))}
        kept |= {path.parent for path in kept}
        for entry in list(self.path.iterdir()):
            if entry.name.endswith(TEMPORARY_SUFFIX) or OURS.fullmatch(entry.name):
                _remove(entry, kept)

    def _part_path(self, number: int) -> Path:
        return self.path / INDEX_FOLDER / f"{number:06d}{PART_SUFFIX}"

    def _start_shard(self) -> ShardWriter:
        path = self.path if self._single else self.path / self._format.shard_name(len(self._finished))
        return self._format.write_shard(path, self._options)

    def _finish_shard(self, shard: ShardWriter) -> FinishedShard:
        paths = shard.finish({})
        for folder in {path.parent for path in paths} | {self.path}:
            sync_folder(folder)
        name = self._format.shard_name(len(self._finished))
        stored = Shard(name, len(self._builder), stored_files(self.path, paths))
        finished = FinishedShard(stored, self._builder.totals())
        (self.path / INDEX_FOLDER).mkdir(exist_ok=True)
        save_part(self._part_path(len(self._finished)), finished, self._builder.build())
        return finished

    def _finish(self) -> Manifest:
        fingerprint = write_index(
            self.path, self._load_parts, num_packs=self.num_packs, num_sequences=self.totals.num_sequences
        )
        index = self.path / INDEX_FOLDER
        for number in range(len(self._finished)):
            self._part_path(number).unlink()
        sync_folder(index)
        files = stored_files(self.path, [index / name for name in INDEX_NAMES])
        manifest = self._build_manifest(fingerprint)
        manifest = replace(manifest, shards=tuple(one.shard for one in self._finished), index=files)
        manifest.save(self.path)
        return manifest

    def _finish_file(self, shard: ShardWriter) -> Manifest:
        part = self._builder.build()
        manifest = self._build_manifest(dataset_fingerprint([part.checksums]))
        shard.finish({"manifest": manifest.to_json().encode(), "index": pack_index_bytes(part)})
        sync_folder(self.path.parent)
        return manifest

    def _release(self) -> None:
        # A marker that cannot be removed means nothing beside a manifest.
        with contextlib.suppress(OSError):
            self._marker.release(remove=True)

    def _load_parts(self) -> Iterator[IndexPart]:
        for number in range(len(self._finished)):
            loaded = load_part(self._part_path(number))
            if loaded is None:
                raise FormatError("a file of the write in progress is damaged", where=str(self._part_path(number)))
            yield loaded[1]

    def _abort(self) -> None:
        # The error that led here is what the user must see, not one of the cleaning.
        with contextlib.suppress(OSError):
            if self._shard is not None:
                self._shard.abort()
        with contextlib.suppress(OSError):
            # What the same command can take up stays; anything else would only puzzle the next reader.
            if self._settings is None and not self._single:
                self._finished.clear()
                self._clean()
        with contextlib.suppress(OSError):
            self._marker.release(remove=self._settings is None)
            if self._created_folder and self._settings is None:
                self.path.rmdir()


def _remove(entry: Path, kept: set[Path]) -> None:
    """Remove a file or folder with what is in it, except kept paths and what leads to them."""
    if entry in kept and not entry.is_dir():
        return
    if entry.is_symlink() or not entry.is_dir():
        entry.unlink()
        return
    for child in list(entry.iterdir()):
        _remove(child, kept)
    if entry not in kept:
        entry.rmdir()
