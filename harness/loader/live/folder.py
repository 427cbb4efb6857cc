"""A folder of live chunks on a shared file system or in S3: files, their records, and open chunks.

chunk_00000.jsonl             rows: conversations or packs; Parquet chunks end in .parquet
chunk_00000.jsonl.ready       written after the chunk: counts and hash (`ReadyRecord`)
chunk_00000.jsonl.completed   rows were trained, or read (`data.live.completed`): the chunk may be deleted
END.json                      the stream is complete; totals of all chunks (`EndRecord`)
_producer, _consumer          locked by producer and training run, contain their status; touched every second
"""

from __future__ import annotations

import json
import os
import re
import tempfile
import time
from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from harness.errors import ConfigError, FormatError, os_errors_as
from harness.formats import load_format
from harness.formats.base import ShardReader
from harness.formats.index import INDEX_FOLDER
from harness.formats.layouts.jsonl import JsonlShard
from harness.formats.opening import find_traces
from harness.prep.chat import BadRecord, Conversation, RecordReader
from harness.prep.media import MediaLimits
from harness.prep.sources.reading import SourceChunk
from harness.prep.sources.tables import read_parquet
from harness.prep.sources.text import MAX_RECORD_BYTES
from harness.records import Pack
from harness.settings import load
from harness.storage import (
    LocalCache,
    Marker,
    ObjectPath,
    StoredFile,
    file_digest,
    is_uri,
    join_path,
    make_folder,
    open_folder,
    sync_path,
    write_atomically,
)
from harness.storage.bucket import list_below
from harness.storage.claims import ClaimStore, Lease, parse_lease
from harness.storage.files import TEMPORARY_SUFFIX, Stamp

CHAT, PACKS = "chat", "packs"
JSONL, PARQUET = ".jsonl", ".parquet"
SUFFIXES = (JSONL, PARQUET)
READY, COMPLETED = ".ready", ".completed"
END_FILE = "END.json"
PRODUCER_FILE, CONSUMER_FILE = "_producer", "_consumer"

_NAME = re.compile(r"chunk_(\d{5}|[1-9]\d{5,})(\.jsonl|\.parquet)(\.ready|\.completed)?", re.ASCII)
_CHECK = "check permissions and mounts"
_GRANT = "give the training ranks write access to this folder"
_WRITE_AGAIN = "write the chunk again under this name, with its own record; the run then continues with resume=true"
# A bucket listing is reused for this long, because polling ranks would otherwise send several requests per check.
_LISTING_S = 1.0
# Each row of a chunk may have a different schema.
_READER = RecordReader()
MEDIA_READER = RecordReader(media=MediaLimits())
T = TypeVar("T", bound="ReadyRecord | EndRecord")


@dataclass(frozen=True)
class ReadyRecord:
    """Record of a complete chunk; totals include all earlier chunks."""

    kind: str  # `chat` or `packs`
    rows: int  # conversations, or packs
    sequences: int  # conversations in the rows
    tokens: int | None  # stored tokens; None for chunks that are not tokenized
    num_bytes: int
    xxh3: str  # hash of the file
    chain: str  # digest of the hash and the previous chunk's chain; the last one covers the whole stream
    stream: str  # name of the stream; equal in every chunk of a folder
    total_rows: int
    total_sequences: int
    total_tokens: int | None
    position: Any  # position in the input after this chunk, from which a producer continues
    producer: str  # host and process id
    time: float  # seconds since 1970


# Stands for the record before the first chunk.
NO_RECORD = ReadyRecord("", 0, 0, 0, 0, "", "", "", 0, 0, 0, None, "", 0.0)


@dataclass(frozen=True)
class EndRecord:
    """Record of a complete stream: number of chunks, and totals of the last record, None without records."""

    chunks: int
    rows: int | None
    sequences: int | None
    tokens: int | None
    chain: str
    stream: str
    time: float


@dataclass
class Contents:
    """Names of the chunk files of a folder and of their `ready` and `completed` marks, by index."""

    chunks: dict[int, str] = field(default_factory=dict)
    ready: dict[int, str] = field(default_factory=dict)
    completed: dict[int, str] = field(default_factory=dict)

    @property
    def next_index(self) -> int:
        """Index after the last chunk with any file."""
        return 1 + max((*self.chunks, *self.ready, *self.completed), default=-1)

    def num_unread(self, chunks: Iterable[int], status: dict[str, Any]) -> int:
        """Count unread chunks, according to the status of the training run and their marks."""
        read = set(status.get("read") or ()) | set(self.completed)
        below = status.get("read_below") or 0
        return sum(index >= below and index not in read for index in chunks)


def chunk_name(index: int, suffix: str = JSONL) -> str:
    return f"chunk_{index:05d}{suffix}"


class LocalFiles:
    """Files of a local folder by name; `place` is the path or URI."""

    look_s = 0.2  # seconds between checks of a producer that waits for room

    def __init__(self, path: Path) -> None:
        self.path, self.place = path, str(path)

    def names(self) -> list[str]:
        """List the current names; empty if the folder does not exist. Raises OSError or FormatError."""
        try:
            return os.listdir(self.path)  # noqa: PTH208 - half the time of Path.iterdir, and called every second
        except FileNotFoundError:
            return []

    def exists(self) -> bool:
        return self.path.is_dir()

    def make(self) -> None:
        make_folder(self.path)

    def remove_temporary(self) -> None:
        """Remove incomplete files of a killed producer."""
        for name in self.path.glob(f"chunk_*{TEMPORARY_SUFFIX}"):
            name.unlink(missing_ok=True)

    def find(self, name: str) -> tuple[int, float] | None:
        """Return size and age in seconds of a file; None if it is missing."""
        try:
            found = (self.path / name).stat()
        except OSError:
            return None
        return found.st_size, max(0.0, time.time() - found.st_mtime)

    def read(self, name: str) -> bytes | None:
        """Return the contents of a small file; None if it is missing."""
        try:
            return (self.path / name).read_bytes()
        except FileNotFoundError:
            return None

    def read_mark(self, name: str) -> bytes:
        """Return the note of the last owner of a lock."""
        return Marker(self.path / name).read()

    def write(self, name: str, data: bytes) -> None:
        """Write a small file atomically."""
        write_atomically(self.path / name, data)

    def delete(self, name: str) -> None:
        """Delete a file if it exists."""
        (self.path / name).unlink(missing_ok=True)

    def lock(self, name: str) -> Marker:
        return Marker(self.path / name)

    def begin_chunk(self, name: str) -> Path:
        """Return the local path to write a chunk to."""
        return self.path / name

    def finish_chunk(self, name: str, path: Path) -> None:
        """Publish a chunk written to `path` durably; raise FormatError if another writer has published one."""
        sync_path(self.path)

    def drop_chunk(self, name: str, path: Path) -> None:
        """Remove a chunk without a record."""
        path.unlink(missing_ok=True)

    def open_chunk(self, name: str, stored: StoredFile | None) -> tuple[Path, object] | None:
        """Return a local path of a complete chunk, and an object that keeps it available; None if it is missing.

        `stored` contains the required size and hash, if known.
        """
        return self.path / name, None


class BucketFiles:
    """Objects below a prefix, with the methods of `LocalFiles`; chunks are read through the local cache."""

    look_s = _LISTING_S

    def __init__(self, place: ObjectPath) -> None:
        self.place = str(place)
        self._store = ClaimStore(place)
        self._listing: dict[str, tuple[Stamp, float]] = {}
        self._listed_at = -_LISTING_S
        self._chunks: tempfile.TemporaryDirectory[str] | None = None
        self._made = ""

    def names(self) -> list[str]:
        self._listing, self._listed_at = list_below(self._store.place), time.monotonic()
        return list(dict.fromkeys(name.partition("/")[0] for name in self._listing))

    def _listed(self, name: str) -> tuple[Stamp, float] | None:
        if time.monotonic() - self._listed_at >= _LISTING_S:
            self.names()
        return self._listing.get(name)

    def exists(self) -> bool:
        return bool(self.names())

    def make(self) -> None:
        """Do nothing: a bucket has no folders."""

    def remove_temporary(self) -> None:
        """Do nothing: uploads are atomic."""

    def find(self, name: str) -> tuple[int, float] | None:
        if (found := self._listed(name)) is None:
            return None
        return found[0].num_bytes, found[1] + time.monotonic() - self._listed_at

    def read(self, name: str) -> bytes | None:
        found = self._store.get(name) if self._listed(name) is not None else None
        return None if found is None else found[0]

    def read_mark(self, name: str) -> bytes:
        return parse_lease(self.read(name) or b"")[1]

    def write(self, name: str, data: bytes) -> None:
        self._listed_at = -_LISTING_S
        # A producer that lost its lease must not replace records of the next one.
        if self._store.put(name, data, only_if="") is None:
            raise conflict(name, self.place)

    def delete(self, name: str) -> None:
        self._listed_at = -_LISTING_S
        self._store.delete(name)

    def lock(self, name: str) -> Lease:
        return Lease(self._store, name)

    def begin_chunk(self, name: str) -> Path:
        if self._chunks is None:
            self._chunks = tempfile.TemporaryDirectory(prefix="harness-live-")
        return Path(self._chunks.name) / name

    def finish_chunk(self, name: str, path: Path) -> None:
        self._listed_at = -_LISTING_S
        if self._store.put(name, path, only_if="") is None:
            raise conflict(name, self.place)
        self._made = name
        path.unlink()

    def drop_chunk(self, name: str, path: Path) -> None:
        path.unlink(missing_ok=True)
        if self._made == name:  # otherwise it may belong to another producer
            self.delete(name)

    def open_chunk(self, name: str, stored: StoredFile | None) -> tuple[Path, object] | None:
        if self._listed(name) is None:
            return None
        if stored is None:
            kept = tempfile.TemporaryDirectory(prefix="harness-live-")
            path = Path(kept.name) / name
            return (path, kept) if self._store.download(name, path) else None
        entry = LocalCache().get([stored], self._download)
        return entry.folder / name, entry

    def _download(self, stored: StoredFile, path: Path) -> None:
        if not self._store.download(stored.path, path):
            where = join_path(self.place, stored.path)
            raise FormatError("the chunk was deleted", where=where, fix="see `harness live status`")


def conflict(name: str, place: str) -> FormatError:
    """Return the error for a file that another writer created in a folder."""
    fix = "another program writes to this folder; use a separate folder for each"
    return FormatError(f"{name} already exists", where=place, fix=fix)


def open_files(path: str | Path) -> LocalFiles | BucketFiles:
    """Return the files at a path or URI; raises ConfigError for msc://."""
    return BucketFiles(ObjectPath.parse(str(path))) if is_uri(str(path)) else LocalFiles(Path(path))


class LiveFolder:
    """A folder of live chunks, which may not exist yet; raises ConfigError for msc://."""

    def __init__(self, path: str | Path) -> None:
        self.files = open_files(path)
        self.where = self.files.place

    def look(self) -> Contents:
        """List chunk files and their marks; raise FormatError if the folder cannot be listed."""
        contents = Contents()
        with os_errors_as(FormatError, "the folder cannot be read", where=self.where, fix=_CHECK):
            names = self.files.names()
        if INDEX_FOLDER in names and find_traces(open_folder(self.where)).index:
            # Shards of a jsonl dataset have names of live chunks, and must not be marked and deleted.
            what = "the folder contains a stored dataset or a part of one, not live chunks"
            raise ConfigError(what, where=self.where, fix="specify a folder that `harness live produce` writes to")
        of = {None: contents.chunks, READY: contents.ready, COMPLETED: contents.completed}
        for name in names:
            if match := _NAME.fullmatch(name):
                of[match[3]][int(match[1])] = name
        return contents

    def find(self, index: int) -> str | None:
        """Return the file name of a chunk, complete or not."""
        return next((name for name in _names(index) if self.files.find(name) is not None), None)

    def record(self, index: int) -> ReadyRecord | None:
        """Return the ready record of a chunk, if it exists; raise FormatError if it is damaged."""
        records = (self._read(name + READY, ReadyRecord) for name in _names(index))
        return next((record for record in records if record is not None), None)

    def end(self) -> EndRecord | None:
        """Return the END record, or None while more chunks may follow; raise FormatError if it is damaged."""
        return self._read(END_FILE, EndRecord)

    def write_record(self, name: str, record: ReadyRecord | EndRecord) -> None:
        self.files.write(name, json.dumps(asdict(record)).encode() + b"\n")

    def complete(self, indices: Iterable[int]) -> None:
        """Mark existing chunks as completed, so that producers may delete them; raise FormatError on failure."""
        contents = self.look()
        with os_errors_as(FormatError, "trained chunks cannot be marked as completed", where=self.where, fix=_GRANT):
            for i in indices:
                if i in contents.chunks and i not in contents.completed:
                    self.files.write(contents.chunks[i] + COMPLETED, b"")

    def keep_again(self, indices: Iterable[int]) -> None:
        """Remove the marks of chunks that will be read again; raise FormatError on failure."""
        completed = self.look().completed
        with os_errors_as(FormatError, "chunks cannot be marked to be kept", where=self.where, fix=_GRANT):
            for index in completed.keys() & indices:
                self.files.delete(completed[index])

    def delete_completed(self, contents: Contents, *, keep: int, spare: int) -> None:
        """Delete completed chunks except the newest `keep` and index `spare`; failures are retried at the next call."""
        done = sorted(contents.completed)
        for index in done[: max(0, len(done) - keep)]:
            if index != spare:
                mark = contents.completed[index]
                name = mark.removesuffix(COMPLETED)
                with suppress(OSError, FormatError):
                    # Delete the mark last, so that the next attempt continues after a crash.
                    for file in (name, name + READY, mark):
                        self.files.delete(file)

    def seen_s(self, who: str = PRODUCER_FILE) -> float | None:
        """Return the seconds since the producer (or consumer) was last active; None if there was none."""
        found = self.files.find(who)
        return None if found is None else found[1]

    def status(self, who: str) -> dict[str, Any]:
        """Return the status written by the producer (or consumer); empty if there is none, or during a write."""
        try:
            values = json.loads(self.files.read_mark(who))
        except (OSError, ValueError, RecursionError):
            return {}
        return values if isinstance(values, dict) else {}

    def _read(self, name: str, kind: type[T]) -> T | None:
        where = join_path(self.where, name)
        with os_errors_as(FormatError, "the record cannot be read", where=where, fix=_CHECK):
            data = self.files.read(name)
        what, fix = "the file is not a record of this harness", "it was edited or damaged; write the chunk again"
        return None if data is None else load(kind, data, where=where, fix=fix, what=what)


def last_seen(seconds: float | None) -> str:
    """Format the time since the last activity."""
    if seconds is None:
        return "never seen"
    return f"last seen {seconds:.0f} s ago" if seconds < 120 else f"last seen {seconds / 60:.0f} min ago"


class _TableOfChats:
    """Rows of a Parquet file; the current group is kept in memory. Raises like `read_parquet`."""

    def __init__(self, path: Path, reader: RecordReader) -> None:
        self._path, self._reader = path, reader
        metadata = pq.read_metadata(path)
        self._group_ends = np.cumsum([metadata.row_group(i).num_rows for i in range(metadata.num_row_groups)] or [0])
        self.num_rows = int(self._group_ends[-1])
        self._pieces: Iterator[tuple[int, list[Any], int]] = iter(())
        self._rows: list[Any] = []
        self._first = self._next = -1

    def row(self, number: int) -> Any:
        """Return a row; in ascending order, each row is read once."""
        if not self._first <= number <= self._next:
            self.close()
            group = int(np.searchsorted(self._group_ends, number, side="right"))
            self._next = int(self._group_ends[group - 1]) if group else 0
            size, groups = self._path.stat().st_size, (group, self._group_ends.shape[0])
            self._pieces = read_parquet(self._path, size, self._reader, groups, self._next)
        while number >= self._next:
            self._rows = []  # release them before reading the next ones
            if (piece := next(self._pieces, None)) is None:
                raise pa.ArrowInvalid(f"it has {self._next:,} rows, and its footer counts {self.num_rows:,}")
            self._first, self._rows, _ = piece
            self._next = self._first + len(self._rows)
        return self._rows[number - self._first]

    def close(self) -> None:
        self._pieces, self._rows = iter(()), []
        self._first = self._next = -1


class LiveChunk:
    """An open chunk, checked against its record on opening and then read row by row.

    Without a record, any contents are accepted. `place` is its path or URI for messages, and `kept` keeps the file
    available until the chunk is closed. Raises FormatError if the file differs from its record or is not a chunk.
    """

    def __init__(
        self,
        path: Path,
        record: ReadyRecord | None,
        place: str = "",
        kept: object = None,
        reader: RecordReader = _READER,
    ) -> None:
        self.path, self.place, self._kept, self._reader = path, place or str(path), kept, reader
        self.stream = record.stream if record is not None else ""
        try:
            if record is not None:
                num_bytes, xxh3 = path.stat().st_size, file_digest(path)
                if (num_bytes, xxh3) != (record.num_bytes, record.xxh3):
                    raise FormatError(
                        f"the chunk is damaged: {num_bytes:,} bytes with hash {xxh3}, but {record.num_bytes:,} with "
                        f"{record.xxh3} in its ready record",
                        where=self.place,
                        fix=_WRITE_AGAIN,
                    )
            lines = JsonlShard(path) if path.suffix == JSONL else None
            self.kind = record.kind if record is not None else _guess_kind(path, lines)
            packs: ShardReader | None = lines
            if lines is None and self.kind == PACKS:
                packs = load_format("parquet").open_shard(path, None)
            self._rows = packs or _TableOfChats(path, reader)
        except (OSError, pa.ArrowException) as error:
            raise self._unreadable(error) from error
        self.num_rows = self._rows.num_packs if isinstance(self._rows, ShardReader) else self._rows.num_rows
        self._unit, self._first = ("row", 0) if lines is None else ("line", 1)

    def where(self, row: int) -> str:
        return f"{self.place}, {self._unit} {row + self._first:,}"

    def pack(self, row: int) -> Pack:
        """Return the pack of a row; raise FormatError if it breaks the invariants of packs."""
        assert isinstance(self._rows, ShardReader)
        pack = self._rows.read_row(row)
        if problem := pack.problem():
            raise FormatError(f"the pack {problem}", where=self.where(row), fix="write the complete chunk again")
        return pack

    def conversation(self, row: int) -> Conversation | BadRecord | None:
        """Return the conversation of a row, or the reason why it is invalid; None for a blank line."""
        assert isinstance(self._rows, JsonlShard | _TableOfChats)
        try:
            if isinstance(self._rows, JsonlShard):
                record = self._rows.line(row, MAX_RECORD_BYTES)
            else:
                record = self._rows.row(row)
        except FormatError as error:
            if error.where:
                raise
            what = f"the conversation {error.what}"
            raise FormatError(what, where=self.where(row), fix="shorten the conversation") from None
        except (OSError, pa.ArrowException) as error:
            raise self._unreadable(error) from error
        found = SourceChunk(self.place, self._unit, row + self._first, [record], 0, self._reader)
        return next(found.parse(is_whole=True), None)

    def close(self) -> None:
        self._rows.close()
        self._kept = None

    def _unreadable(self, error: Exception) -> FormatError:
        return FormatError(f"the chunk cannot be read: {error}", where=self.place, fix=_WRITE_AGAIN)


def _guess_kind(path: Path, lines: JsonlShard | None) -> str:
    columns: list[str] = []
    if lines is None:
        columns = pq.read_schema(path).names
    elif lines.num_packs == 0:
        return CHAT
    else:
        with suppress(ValueError, TypeError, RecursionError):
            line = lines.line(0)
            # Only packs may have lines longer than this.
            columns = ["input_ids"] if len(line) > MAX_RECORD_BYTES else list(json.loads(line))
    if "input_ids" in columns and "messages" not in columns:
        return PACKS
    if _READER.columns_to_read(columns):
        return CHAT
    what = "the file contains neither conversations of a known schema (such as `messages`) nor packs (`input_ids`)"
    raise FormatError(what, where=str(path), fix=_WRITE_AGAIN)


def open_chunk(
    folder: LiveFolder, index: int, *, require_ready: bool, settle_s: float, reader: RecordReader = _READER
) -> LiveChunk | None:
    """Open a chunk if it is complete, otherwise return None; raise FormatError if it or its record is damaged."""
    record = folder.record(index)
    if record is None and require_ready:
        return None
    name = folder.find(index)
    if name is None:
        return None
    if record is None and folder.end() is None and max(folder.look().chunks, default=index) <= index:
        age_s = folder.seen_s(name)
        if age_s is None or age_s <= settle_s:
            return None
    stored = StoredFile(name, record.num_bytes, record.xxh3) if record is not None else None
    found = folder.files.open_chunk(name, stored)
    return None if found is None else LiveChunk(found[0], record, join_path(folder.where, name), found[1], reader)


def _names(index: int) -> list[str]:
    return [chunk_name(index, suffix) for suffix in SUFFIXES]
