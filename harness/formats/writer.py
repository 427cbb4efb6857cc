"""Writing of datasets, to a disk or object storage: shards first, then the index, and the manifest last."""

from __future__ import annotations

import contextlib
import json
import operator
import re
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from os import PathLike
from pathlib import Path
from typing import Any, Self

import numpy as np
import xxhash

from harness.errors import ConfigError, FormatError
from harness.formats.base import FORMATS, Format, ShardWriter, load_format
from harness.formats.index import INDEX_FOLDER, IndexBuilder, IndexPart, dataset_fingerprint, index_names, write_index
from harness.formats.manifest import MANIFEST_NAME, Manifest, Provenance, Shard, Totals, file_problems, load_manifest
from harness.formats.media import MediaWriter
from harness.formats.opening import MARKER_NAME, find_traces
from harness.records import Pack
from harness.settings import from_plain
from harness.storage import BucketFolder, Folder, LocalFolder, make_folder, open_folder, sync_path, write_atomically
from harness.storage.files import TEMPORARY_SUFFIX, PlacingClaim, explain_os_errors

# Note in the marker of a write that cannot be resumed: files in the folder belong to it and are replaced.
_BEGUN = b"begun"
# Much larger than the index of any shard.
_MAX_PART_BYTES = 1 << 34
# Names of files that an interrupted write may leave in a folder.
_OURS = re.compile(r"(shard|chunk)_\d+\b.*|" + INDEX_FOLDER)


def open_writer(
    path: str | PathLike[str],
    *,
    format: str = "parquet",
    pack_size: int,
    provenance: Provenance | None = None,
    packs_per_shard: int | None = None,
    rows_per_group: int = 64,
    overwrite: bool = False,
    resume_key: str | None = None,
) -> PackWriter:
    """Return a writer for a new dataset, to be used in a `with` block.

    Args:
        path: a new or empty folder, or a file with the suffix of a format that supports single-file datasets (`.npy`,
            `.parquet`). Both may be in object storage; files only for Parquet.
        format: one of FORMATS.
        pack_size: maximum number of tokens in a pack.
        provenance: stored in the manifest.
        packs_per_shard: None for the format's default. A single file has no shards.
        rows_per_group: packs in a Parquet row group, which other tools decode at once; ignored by other formats.
        overwrite: replace an existing dataset, which is deleted when the block is entered.
        resume_key: identifies the content. An interrupted write with the same key and settings resumes after its last
            complete shard, from any machine if in object storage: append from pack `writer.num_packs` on. Not for
            single files.

    Raises:
        ConfigError: the format is unknown, a number is below 1, or the destination has another format's suffix.
        FormatError: on entering the block, if the destination is in use, not empty or cannot be written.
    """
    kind = load_format(format)
    for name in FORMATS:
        if name != kind.name and str(path).endswith(f".{name}"):
            what = f"the destination ends in .{name} but the format is {kind.name}"
            raise ConfigError(what, where=str(path), fix=f"use format {name!r}, or change the destination")
    # Convert numpy integers, which JSON does not support.
    sizes = {"pack_size": operator.index(pack_size), "rows_per_group": operator.index(rows_per_group)}
    sizes["packs_per_shard"] = kind.packs_per_shard if packs_per_shard is None else operator.index(packs_per_shard)
    return PackWriter(path, kind, sizes, provenance or Provenance(), overwrite, resume_key)


class PackWriter:
    """Streams packs into a dataset; a context manager.

    Leaving the `with` block writes the index and then the manifest; leaving it with an exception removes the dataset.
    Memory use is bounded by the lengths of one shard and the buffers of the format.

    Attributes:
        pack_size: maximum number of tokens in a pack.
        provenance: stored in the manifest; may be replaced until the block is left.
        manifest: manifest of the written dataset, after the block was left.
    """

    def __init__(
        self,
        path: str | PathLike[str],
        format: Format,
        sizes: Mapping[str, int],
        provenance: Provenance,
        overwrite: bool,
        resume_key: str | None,
    ) -> None:
        for name, value in sizes.items():
            if value < 1:
                raise ConfigError(f"{name} is {value}", where=f"data.{name}", fix="set it to 1 or more")
        destination = open_folder(path)
        self.where = destination.where()
        try:
            from_plain(Provenance, asdict(provenance))
        except ValueError as odd:
            fix = "use texts, and whole numbers of Python for counts and seed"
            raise ConfigError(f"the provenance cannot be stored: {odd}", where=self.where, fix=fix) from None
        is_file = bool(format.single_file_suffix) and self.where.endswith(format.single_file_suffix)
        unfit = {"jsonl": "the labels of jsonl cannot express"}
        unfit |= {"npy": "a single file of npy cannot record"} if is_file else {}
        if provenance.max_weight > 1 and format.name in unfit:
            what = f"the dataset has token weights, which {unfit[format.name]}"
            raise ConfigError(what, where=self.where, fix="write another format")
        self.pack_size = sizes["pack_size"]
        self.provenance = provenance
        self.manifest: Manifest | None = None
        self._format = format
        self._file = ""
        self._folder = destination
        self._sizes = sizes
        self._finished: list[Shard] = []
        self._finished_totals = Totals()
        self._shard: ShardWriter[Any] | None = None
        self._media: MediaWriter | None = None
        self._builder = IndexBuilder()
        self._open = False
        self._claim: FolderClaim | _FileClaim
        if is_file:
            if isinstance(destination, BucketFolder) and not format.in_buckets:
                what = f"a single file of {format.name} cannot be written to object storage"
                fix = f"omit the suffix {format.single_file_suffix} to write a folder, or write parquet"
                raise ConfigError(what, where=destination.where(), fix=fix)
            self._file = destination.place.name
            self._folder = open_folder(str(destination.place.parent))
            self._claim = _FileClaim(self._folder, self._file, overwrite=overwrite)
            return
        if isinstance(destination, BucketFolder):
            destination.is_staged = not format.in_buckets
        resume = None
        if resume_key is not None:
            # Everything that a resumed write must share with the interrupted one, as comparable bytes.
            identity = {"format": format.name, "provenance": asdict(provenance), "key": resume_key}
            resume = json.dumps({**sizes, **identity}, sort_keys=True).encode()
        self._resumes = resume is not None
        self._claim = FolderClaim(self._folder, overwrite=overwrite, resume=resume, keep=self._take_up)

    @property
    def num_packs(self) -> int:
        """Number of packs so far, including those of a resumed write."""
        return self._finished_totals.num_packs + len(self._builder)

    @property
    def totals(self) -> Totals:
        """Numbers of packs, sequences, tokens and trained tokens so far."""
        return self._finished_totals + self._builder.totals()

    def __enter__(self) -> Self:
        with explain_os_errors(self.where):
            if self._file:
                self._folder.make()
            self._claim.enter()
        self._open = True
        return self

    def append(self, pack: Pack) -> None:
        """Add a pack; raise FormatError with its number if it violates an invariant or if the disk fails."""
        if not self._open:
            raise ConfigError("the writer is not open", where=self.where, fix="use `with open_writer(...) as writer`")
        if problem := pack.problem(self.pack_size, max_weight=self.provenance.max_weight):
            raise FormatError(f"pack {self.num_packs:,} {problem}", where=self.where, fix="fix the producer of packs")
        with explain_os_errors(self.where):
            if pack.media and self._file:
                what = f"pack {self.num_packs:,} has media, which a single file cannot hold"
                raise FormatError(what, where=self.where, fix="write a folder: omit the suffix of the destination")
            if self._shard is None:
                name = self._file or self._format.shard_name(len(self._finished))
                self._shard = self._format.write_shard(
                    self._folder, name, self.pack_size, self._sizes["rows_per_group"]
                )
            try:
                self._shard.append(pack)
            except FormatError as error:
                raise FormatError(f"pack {self.num_packs:,} {error.what}", where=self.where, fix=error.fix) from None
            if pack.media and self._media is None:
                self._media = MediaWriter(self._folder, self._format.shard_name(len(self._finished)))
            self._builder.append(pack, self._media.append(pack) if pack.media and self._media is not None else None)
            if len(self._builder) == self._sizes["packs_per_shard"] and not self._file:
                self._finish_shard(self._shard)

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if not self._open:
            return
        self._open = False
        try:
            if kind is None:
                with explain_os_errors(self.where):
                    self._finish()
        finally:
            for unfinished in (self._shard, self._media):
                # Report the first error, not one of the cleanup.
                with contextlib.suppress(OSError, FormatError):
                    if self.manifest is None and unfinished is not None:
                        unfinished.abort()
            self._claim.finish(whole=self.manifest is not None)

    def _finish_shard(self, shard: ShardWriter[Any]) -> None:
        """Finish the files of a full shard, and store its manifest entry and index entries.

        This bounds memory and makes the write resumable.
        """
        names = shard.finish({}) + ([] if self._media is None else self._media.finish())
        self._folder.sync(names)
        number = len(self._finished)
        stored = Shard(self._format.shard_name(number), len(self._builder), self._folder.describe(names))
        totals = self._builder.totals()
        path, body = self._part_path(number), self._builder.build().to_bytes()
        make_folder(path.parent)
        head = {"shard": asdict(stored), "totals": asdict(totals), "body_xxh3": xxhash.xxh3_64_hexdigest(body)}
        write_atomically(path, json.dumps(head).encode() + b"\n" + body)
        if self._resumes and isinstance(self._folder, BucketFolder):
            self._folder.write(_part_name(number), [path.read_bytes()])
        self._shard = self._media = None
        self._finished.append(stored)
        self._finished_totals += totals
        self._builder = IndexBuilder()

    def _finish(self) -> None:
        if self.num_packs == 0:
            raise FormatError("no packs were written", where=self.where, fix="write at least one pack")
        manifest = Manifest(
            format=self._format.name,
            pack_size=self.pack_size,
            fingerprint="",
            shards=(),
            index=(),
            provenance=self.provenance,
            **asdict(self.totals),
        )
        if self._file:
            assert self._shard is not None
            part = self._builder.build()
            manifest = replace(manifest, fingerprint=dataset_fingerprint([part.checksums])).sealed()
            head = np.array([part.sequence_counts.shape[0], part.sequence_lengths.shape[0]], np.int64)
            metadata = {"manifest": manifest.to_json().encode(), "index": head.tobytes() + part.to_bytes()}
            assert isinstance(self._claim, _FileClaim)
            self._claim.place()
            self._folder.sync(self._shard.finish(metadata))
            self._shard = None
        else:
            if self._shard is not None:
                self._finish_shard(self._shard)
            fingerprint = write_index(self._folder, self._load_parts, self.totals)
            for number in range(len(self._finished)):
                self._part_path(number).unlink()
                if self._resumes and isinstance(self._folder, BucketFolder):
                    self._folder.remove(_part_name(number))
            sync_path(self._part_path(0).parent)
            manifest = replace(manifest, fingerprint=fingerprint, shards=tuple(self._finished))
            manifest = replace(manifest, index=self._folder.describe(index_names(manifest))).sealed()
            manifest.save(self._folder)
        self.manifest = manifest

    def _part_path(self, number: int) -> Path:
        return self._folder.scratch / _part_name(number)

    def _load_parts(self) -> Iterator[IndexPart]:
        for number in range(len(self._finished)):
            loaded = _load_part(self._part_path(number))
            if loaded is None:
                what = "a file of the write in progress is damaged"
                raise FormatError(what, where=str(self._part_path(number)), fix="write again with --overwrite")
            yield loaded[2]

    def _take_up(self) -> Collection[str]:
        """Keep the leading complete shards of an interrupted write; return the names of the files to keep."""
        names: list[str] = []
        while True:
            number = len(self._finished)
            if isinstance(self._folder, BucketFolder):
                data = self._folder.read(_part_name(number), _MAX_PART_BYTES)
                if data is None:
                    return names
                self._part_path(number).parent.mkdir(exist_ok=True)
                write_atomically(self._part_path(number), data)
            loaded = _load_part(self._part_path(number))
            if loaded is None or loaded[0].path != self._format.shard_name(number):
                return names
            shard, totals, _ = loaded
            # An upload is visible only when complete, so comparing its size is sufficient.
            hashes = isinstance(self._folder, LocalFolder)
            # A short shard was the last one of a write that stopped in its final steps; it is written again.
            is_short = totals.num_packs != self._sizes["packs_per_shard"]
            if is_short or any(file_problems(self._folder, shard.files, "file", hashes=hashes)):
                return names
            self._finished.append(shard)
            self._finished_totals += totals
            names += [*(stored.path for stored in shard.files), _part_name(number)]


class _FileClaim(PlacingClaim):
    """Exclusive use of a single-file dataset. In object storage nothing is locked."""

    def __init__(self, folder: Folder, name: str, *, overwrite: bool) -> None:
        self._folder, self._name, self._overwrite = folder, name, overwrite
        marker = folder.lock(f".{name}{MARKER_NAME}") if isinstance(folder, LocalFolder) else None
        super().__init__(marker, self._refuse)

    def _refuse(self) -> None:
        if not self._overwrite and self._folder.exists(self._name):
            raise _already_there(self._folder.where(self._name))

    def finish(self, *, whole: bool) -> None:
        """Unlock the file; remove it if it already has its name but the last step failed."""
        with contextlib.suppress(OSError):
            if not whole and not self._overwrite and isinstance(self._folder, LocalFolder):
                self._folder.remove(self._name)
        with contextlib.suppress(OSError):
            self.release()


@dataclass
class FolderClaim:
    """Exclusive use of a dataset folder for one write; a locked marker excludes other writers.

    Args:
        folder: a new or empty folder, an interrupted write, or with `overwrite` a dataset.
        overwrite: replace a dataset, which is deleted by `enter`.
        resume: settings that identify a resumable write.
        keep: called for an interrupted write with the same settings; returns the names of files to keep.
    """

    folder: Folder
    overwrite: bool
    resume: bytes | None = None
    keep: Callable[[], Collection[str]] = tuple

    def __post_init__(self) -> None:
        self._marker = self.folder.lock(MARKER_NAME)
        self._created = False

    def enter(self) -> None:
        """Lock the folder and clean up an interrupted write; FormatError if it is in use or contains other files."""
        folder = self.folder
        self._created = folder.make()
        names = folder.names()
        if MARKER_NAME not in names:
            if not self._holds_dataset():
                if names:
                    what = f"the destination contains other files, such as {min(names)}"
                    raise FormatError(what, where=folder.where(), fix="choose a new or empty folder")
            elif not self.overwrite:
                raise _already_there(folder.where())
        previous = self._marker.acquire()
        try:
            # Check again, because the previous owner of the lock may have finished in between.
            if self._holds_dataset():
                # A write that was killed between its last two steps leaves both a manifest and its marker.
                if not self.overwrite and not previous:
                    raise _already_there(folder.where())
                folder.remove(MANIFEST_NAME)
                folder.sync([])
                previous = b""
            self._clean(self.keep() if self.resume is not None and previous == self.resume else ())
            self._marker.write(self.resume or _BEGUN)
        except BaseException:
            self._marker.release(remove=self._marker.was_created)
            raise

    def finish(self, *, whole: bool) -> None:
        """Unlock the folder; remove all files unless the dataset is complete or the write is resumable."""
        keeps_files = self.resume is not None and not whole
        with contextlib.suppress(OSError, FormatError):
            if not whole and self.folder.exists(MANIFEST_NAME):
                # The last step failed: the manifest exists but may not survive a power failure.
                self.folder.remove(MANIFEST_NAME)
            if not whole and not keeps_files:
                self._clean(())
        # A marker that cannot be removed is ignored next to a manifest.
        with contextlib.suppress(OSError, FormatError):
            self._marker.release(remove=not keeps_files)
        self.folder.discard(empty=self._created and not whole and not keeps_files)

    def _holds_dataset(self) -> bool:
        try:
            return load_manifest(self.folder) is not None
        except FormatError:
            # A dataset to replace may be incomplete, but must have been written by this package.
            if self.overwrite and find_traces(self.folder):
                return True
            raise

    def _clean(self, keep: Collection[str]) -> None:
        for name in self.folder.names():
            if name.endswith(TEMPORARY_SUFFIX) or _OURS.fullmatch(name):
                self.folder.remove(name, keep)


def forget_interruption(path: str | PathLike[str]) -> None:
    """Remove the marker of a write that was killed after its dataset was complete, which the caller has checked."""
    folder = open_folder(path)
    if isinstance(folder, LocalFolder):
        of_file = LocalFolder(folder.place.parent).lock(f".{folder.place.name}{MARKER_NAME}")
        marker = of_file if folder.place.is_file() else folder.lock(MARKER_NAME)
        if marker.path.exists():
            with explain_os_errors(folder.where()):
                marker.acquire()
                marker.release(remove=True)


def _already_there(where: str) -> FormatError:
    fix = "choose another destination, or replace the dataset (--overwrite, overwrite=True)"
    return FormatError("the destination already contains a dataset", where=where, fix=fix)


def _part_name(number: int) -> str:
    return f"{INDEX_FOLDER}/{number:06d}.part"


def _load_part(path: Path) -> tuple[Shard, Totals, IndexPart] | None:
    """Read a file written by `_finish_shard`; return None if it is missing or damaged."""
    try:
        with path.open("rb") as file:
            head: dict[str, Any] = json.loads(file.readline())
            body = file.read()
        if xxhash.xxh3_64_hexdigest(body) != head["body_xxh3"]:
            return None
        totals, shard = from_plain(Totals, head["totals"]), from_plain(Shard, head["shard"])
        return shard, totals, IndexPart.from_bytes(body, totals.num_packs, totals.num_sequences, totals.num_media)
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return None
