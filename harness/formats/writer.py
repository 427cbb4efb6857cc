"""Writing a dataset: shards first, then the index, and the manifest last."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator
from dataclasses import asdict, replace
from pathlib import Path
from types import TracebackType
from typing import Self

from harness.errors import ConfigError, FormatError
from harness.formats.base import Format, ShardOptions, ShardWriter
from harness.formats.digest import dataset_fingerprint
from harness.formats.files import TEMPORARY_SUFFIX, Marker, sync_folder
from harness.formats.index import INDEX_FOLDER, INDEX_NAMES, IndexPart, write_index
from harness.formats.manifest import MANIFEST_NAME, Manifest, Provenance, Shard, load_manifest
from harness.formats.parts import (
    PART_SUFFIX,
    FinishedShard,
    PartBuilder,
    Totals,
    is_whole,
    load_part,
    pack_index_bytes,
    save_part,
    settings_of,
    stored_files,
)
from harness.records import Pack

# Present while a writer is at work: tells an interrupted write from a folder of another tool.
MARKER_NAME = "_writing"
_OURS = re.compile(r"(shard|chunk)_\d+\b.*|" + INDEX_FOLDER)


class PackWriter:
    """Streams packs into a dataset; a context manager.

    Leaving the `with` block writes the index and then the manifest; leaving it with an exception leaves no dataset.
    Memory holds one shard's lengths and what the format buffers, never the dataset.

    Attributes:
        path: the destination.
        pack_size: tokens that no pack may exceed.
        provenance: stored in the manifest; may be replaced until the block is left.
        manifest: what was written, once the block is left.
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
        settings = {"pack_size": pack_size, "packs_per_shard": packs_per_shard, "rows_per_group": rows_per_group}
        for name, value in settings.items():
            if value < 1:
                raise ConfigError(f"{name} is {value}, expected at least 1")
        self.path = path
        self.pack_size = pack_size
        self.manifest: Manifest | None = None
        self._format = format
        self.provenance = provenance
        self._single = bool(format.single_file_suffix) and path.name.endswith(format.single_file_suffix)
        self._packs_per_shard = packs_per_shard
        self._options = ShardOptions(pack_size=pack_size, rows_per_group=rows_per_group)
        self._overwrite = overwrite
        self._settings = None
        if resume_key is not None and not self._single:
            shared = {**settings, "format": format.name, "provenance": asdict(provenance), "key": resume_key}
            self._settings = settings_of(shared)
        self._marker = Marker(path.with_name(f".{path.name}{MARKER_NAME}") if self._single else path / MARKER_NAME)
        self._created_folder = False
        self._finished: list[FinishedShard] = []
        self._finished_totals = Totals()
        self._shard: ShardWriter | None = None
        self._builder = PartBuilder()
        self._open = False

    @property
    def num_packs(self) -> int:
        """Packs so far, those that a resumed write found included."""
        return self._finished_totals.num_packs + len(self._builder)

    @property
    def totals(self) -> Totals:
        """Packs, sequences, tokens and trained tokens so far."""
        return self._finished_totals + self._builder.totals()

    def __enter__(self) -> Self:
        with self._explained():
            self._prepare()
        self._open = True
        return self

    def append(self, pack: Pack) -> None:
        """Add a pack.

        Raises:
            FormatError: the pack breaks an invariant (the error has its number), or the disk refuses.
        """
        if not self._open:
            raise ConfigError(
                "the writer is not open", where=str(self.path), fix="use `with open_writer(...) as writer`"
            )
        problem = pack.problem(self.pack_size)
        if problem is not None:
            raise FormatError(
                f"pack {self.num_packs:,} {problem}", where=str(self.path), fix="mend what makes the packs"
            )
        with self._explained():
            if self._shard is None:
                self._shard = self._format.write_shard(self._shard_path(), self._options)
            try:
                self._shard.append(pack)
            except FormatError as error:
                raise FormatError(
                    f"pack {self.num_packs:,} {error.what}", where=str(self.path), fix=error.fix
                ) from None
            self._builder.append(pack)
            if len(self._builder) == self._packs_per_shard and not self._single:
                self._finish_shard()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if not self._open:
            return
        self._open = False
        try:
            if kind is None:
                with self._explained():
                    self._finish()
        finally:
            if self.manifest is None:
                self._abort()
            else:
                # The dataset is whole; a marker that cannot be removed means nothing beside a manifest.
                with contextlib.suppress(OSError):
                    self._marker.release(remove=True)

    def _prepare(self) -> None:
        if self._single:
            if self.path.exists() and not self._overwrite:
                raise _exists(self.path)
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
                    raise _exists(self.path)
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
            if entry.name.endswith(TEMPORARY_SUFFIX) or _OURS.fullmatch(entry.name):
                _remove(entry, kept)

    def _shard_path(self) -> Path:
        return self.path if self._single else self.path / self._format.shard_name(len(self._finished))

    def _part_path(self, number: int) -> Path:
        return self.path / INDEX_FOLDER / f"{number:06d}{PART_SUFFIX}"

    def _finish_shard(self) -> None:
        assert self._shard is not None
        paths = self._shard.finish({})
        self._shard = None
        for folder in {path.parent for path in paths} | {self.path}:
            sync_folder(folder)
        name = self._format.shard_name(len(self._finished))
        shard = Shard(name, len(self._builder), stored_files(self.path, paths))
        finished = FinishedShard(shard, self._builder.totals())
        (self.path / INDEX_FOLDER).mkdir(exist_ok=True)
        save_part(self._part_path(len(self._finished)), finished, self._builder.build())
        self._finished.append(finished)
        self._finished_totals = self._finished_totals + finished.totals
        self._builder = PartBuilder()

    def _finish(self) -> None:
        if self.num_packs == 0:
            raise FormatError("no packs were written", where=str(self.path), fix="a dataset holds at least one pack")
        if self._single:
            self._finish_file()
            return
        if len(self._builder):
            self._finish_shard()
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
        self.manifest = manifest

    def _finish_file(self) -> None:
        assert self._shard is not None
        part = self._builder.build()
        manifest = self._build_manifest(dataset_fingerprint([part.checksums]))
        self._shard.finish({"manifest": manifest.to_json().encode(), "index": pack_index_bytes(part)})
        self._shard = None
        sync_folder(self.path.parent)
        self.manifest = manifest

    def _build_manifest(self, fingerprint: str) -> Manifest:
        return Manifest(
            format=self._format.name,
            pack_size=self.pack_size,
            fingerprint=fingerprint,
            shards=(),
            index=(),
            provenance=self.provenance,
            **asdict(self.totals),
        )

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

    @contextlib.contextmanager
    def _explained(self) -> Iterator[None]:
        """Turn errors of the system, such as a full disk, into errors that say where."""
        try:
            yield
        except OSError as error:
            raise FormatError(
                f"writing failed: {error.strerror or error}",
                where=str(error.filename or self.path),
                fix="mend the cause (space, permissions, quota) and run the same command again",
            ) from error


def _exists(path: Path) -> FormatError:
    return FormatError(
        "the destination already holds a dataset", where=str(path), fix="name another, or ask for it to be overwritten"
    )


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
