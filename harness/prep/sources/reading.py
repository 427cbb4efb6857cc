"""Cut chat files into shards, and read their records in a stream."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from functools import lru_cache, partial
from pathlib import PurePosixPath
from typing import Any, TypeVar

import pyarrow as pa

from harness.errors import PrepError
from harness.prep.chat import BadRecord, Conversation, RecordReader, record_of_row
from harness.prep.sources import text
from harness.prep.sources.tables import ROW, cut_parquet, open_arrow, open_parquet, read_arrow, read_parquet
from harness.prep.sources.text import COMPRESSED, ITEM, LINE, SEPARATORS
from harness.storage import ObjectPath, Place, parse_place, stamp_of
from harness.storage.files import Stamp
from harness.storage.inputs import open_stream

# JSON: one record per line, or one list of records. Arrow: as `save_to_disk` of Hugging Face's datasets writes it.
JSON, PARQUET, ARROW = ".json", ".parquet", ".arrow"
TEXT_SUFFIXES = (".jsonl", ".ndjson", JSON, *SEPARATORS)
SUFFIXES = (*TEXT_SUFFIXES, PARQUET, ARROW)
# Bytes of lines to scan at once, and maximum bytes of one line, more than any line that is read.
_SCAN_BYTES, _LINE_BYTES = 8 << 20, 33 << 20
_THREADS = 16
T = TypeVar("T")


def for_each_file(work: Callable[[Place], T], files: Iterable[Place]) -> Iterator[T]:
    """Yield the results of `work` on files in order, with several threads for objects, whose requests take time."""
    files = list(files)
    if not any(isinstance(file, ObjectPath) for file in files):
        yield from map(work, files)
        return
    with ThreadPoolExecutor(_THREADS) as pool:
        yield from pool.map(work, files)


def suffix_of(file: Place) -> str:
    """Return a file's suffix in lower case, ignoring the suffix of its compression."""
    path = PurePosixPath(str(file))
    suffix = path.suffix.lower()
    return PurePosixPath(path.stem).suffix.lower() if suffix in COMPRESSED else suffix


def columns_of(file: Place) -> list[str]:
    """Return the column names of a table; empty for any other file."""
    if suffix_of(file) == PARQUET:
        with open_parquet(file) as parquet:
            return list(parquet.schema_arrow.names)
    if suffix_of(file) == ARROW:
        with open_arrow(file) as (schema, _, _):
            return list(schema.names)
    return []


def is_compressed(file: Place) -> bool:
    """Return True if a file's name indicates that it is compressed."""
    return PurePosixPath(str(file)).suffix.lower() in COMPRESSED


@dataclass(frozen=True)
class SourceFiles:
    """Files of a source; `skipped` are the files next to them that are not read.

    `facts` describe the origin if the path does not show it: dataset, revision and split. `names` identify the source
    on every machine; if empty, the places of the files do.
    """

    files: tuple[Place, ...]
    stamps: tuple[Stamp, ...]
    skipped: tuple[str, ...] = ()
    facts: Mapping[str, str] = field(default_factory=dict)
    names: tuple[str, ...] = ()

    @property
    def num_bytes(self) -> int:
        return sum(stamp.num_bytes for stamp in self.stamps)

    @property
    def digest(self) -> str:
        """Hash that changes with a file's name, size or version; for the hub, with the revision and the names."""
        values: list[Any] = [dict(self.facts)]
        if self.names:
            values += self.names
        else:
            pairs = zip(self.files, self.stamps, strict=True)
            values += [[str(file), stamp.num_bytes, stamp.version] for file, stamp in pairs]
        return hashlib.sha256(json.dumps(values).encode()).hexdigest()[:16]


@dataclass(frozen=True, slots=True)
class SourceChunk:
    """Consecutive records of one file, not yet parsed.

    `unit` is `line` (from 1), `row` of a table or `item` of a list (from 0). Lines and items are bytes, and rows are
    decoded; a line of a CSV file on which no row starts is blank. `num_bytes` is the size in the file, for progress;
    rows share the size of their file evenly.
    """

    path: str
    unit: str
    first: int
    records: list[Any]
    num_bytes: int
    reader: RecordReader = field(default_factory=RecordReader)

    def parse(self, *, is_whole: bool = False) -> Iterator[Conversation | BadRecord]:
        """Yield every record in order, without blank lines. If `is_whole`, records must contain their media."""
        folder = None if is_whole else self.path[: self.path.rfind("/") + 1] or "."
        for number, record in enumerate(self.records, start=self.first):
            where = f"{self.path}, {self.unit} {number}"
            if is_blank(record):
                continue
            if isinstance(record, bytes):
                yield self.reader.parse_line(record, where, folder)
            elif isinstance(record, BadRecord):
                yield BadRecord(where, record.reason, record.detail)
            else:
                yield self.reader.parse(record_of_row(record), where, folder)


@dataclass(frozen=True, slots=True)
class SourceShard:
    """Consecutive records of one file that are prepared as one unit.

    Attributes:
        first: number of the first record, as in `SourceChunk`.
        start, end: byte range of the file that contains the records; for a piece of a compressed file, the positions
            reached when reading its start and its end, for progress.
        row_groups: first and past-the-end row group of a Parquet file; None for other files.
        limit: maximum number of records, not counting blank lines; None for all.
        records: number of records in a piece of a compressed file, including blank ones; None for all that follow.
        reader: parser of the records, which also selects the columns to read from a table.
    """

    path: str
    first: int
    start: int
    end: int
    unit: str = LINE
    row_groups: tuple[int, int] | None = None
    limit: int | None = None
    records: int | None = None
    reader: RecordReader = field(default_factory=RecordReader)

    @property
    def num_bytes(self) -> int:
        return self.end - self.start

    @property
    def is_piece(self) -> bool:
        """True if the shard is a part of a compressed file."""
        return self.records is not None or (self.start > 0 and is_compressed(parse_place(self.path)))


def cut_shards(
    files: Iterable[Place], *, shard_bytes: int, limit: int = 0, reader: RecordReader | None = None
) -> Iterator[SourceShard]:
    """Divide files lazily into shards of about `shard_bytes`, in order; each Arrow file is one shard.

    Scans large JSONL files for line ends and JSON lists for items, so that each shard knows the number of its first
    record. Compressed files are divided by the bytes of their text. `limit` is for the records of all shards.
    """
    reader = reader or RecordReader()
    cut = for_each_file(lambda file: list(_cut(file, shard_bytes)), files)
    left = limit
    for whole in (replace(shard, reader=reader) for shards in cut for shard in shards):
        is_packed = whole.unit != ROW and is_compressed(parse_place(whole.path))
        for shard, counted in _pieces(whole, shard_bytes) if is_packed else [(whole, None)]:
            count = counted or 0
            if limit and counted is None:
                count = sum(not is_blank(record) for chunk in read_shard(shard) for record in chunk.records)
            yield shard if not limit or count <= left else replace(shard, limit=left)
            left -= count
            if limit and left <= 0:
                return


def _pieces(whole: SourceShard, shard_bytes: int) -> Iterator[tuple[SourceShard, int | None]]:
    """Divide a compressed file into pieces, each with its number of nonblank records if known.

    If the file cannot be read to its end, reading its last piece raises the error, with the right place.
    """
    piece, size, counted = whole, 0, 0
    try:
        for first, records, position in _read_text(parse_place(whole.path), whole.unit):
            if size >= shard_bytes:
                yield replace(piece, end=position, records=first - piece.first), counted
                piece, size, counted = replace(whole, first=first, start=position), 0, 0
            for record in records:
                parts = record.values() if isinstance(record, dict) else [record] if isinstance(record, bytes) else []
                size += sum(map(len, parts)) + isinstance(record, bytes)
                counted += not is_blank(record)
    except (OSError, EOFError, PrepError):
        yield piece, None
    else:
        yield piece, counted


def _cut(file: Place, shard_bytes: int) -> Iterator[SourceShard]:
    try:
        size = stamp_of(file).num_bytes
        suffix = suffix_of(file)
        if suffix == PARQUET:
            for first, start, end, groups in cut_parquet(file, size, shard_bytes):
                yield SourceShard(str(file), first, start, end, ROW, groups)
            return
        if suffix == ARROW:
            yield SourceShard(str(file), 0, 0, size, ROW)
            return
        unit = text.find_unit(file, is_json=suffix == JSON)
        if is_compressed(file) or size <= shard_bytes:
            yield SourceShard(str(file), 0 if unit == ITEM else 1, 0, size, unit)
        elif suffix in SEPARATORS or unit == ITEM:
            yield from _cut_records(file, size, shard_bytes, unit)
        else:
            yield from _cut_lines(file, size, shard_bytes)
    except (OSError, pa.ArrowException, UnicodeDecodeError) as error:  # also for column names
        raise _unreadable(str(file), error) from error


def _cut_lines(file: Place, size: int, shard_bytes: int) -> Iterator[SourceShard]:
    start, first = 0, 1
    with open_stream(file) as source:
        while start < size:
            source.seek(start)
            left, lines = shard_bytes, 0
            while left and (block := source.read(min(left, _SCAN_BYTES))):
                lines += block.count(b"\n")
                left -= len(block)
            rest = source.readline(_LINE_BYTES)
            # Reading a shard with a longer line raises an error.
            end = source.tell() if len(rest) < _LINE_BYTES else size
            yield SourceShard(str(file), first, start, end)
            start, first = end, first + lines + bool(rest)


def _cut_records(file: Place, size: int, shard_bytes: int, unit: str) -> Iterator[SourceShard]:
    start, first = 0, 0 if unit == ITEM else 1
    with open_stream(file) as source:
        if unit == ITEM:
            groups = text.read_items(file, source, 0)
            places = ((number + at, offset) for number, items in groups for at, (offset, _) in enumerate(items))
        else:
            reader = text.DelimitedReader(file, source, SEPARATORS[suffix_of(file)])
            places = ((line, offset) for line, offset, _ in reader.rows(reader.header()))
        for number, offset in places:
            if number > first and offset - start >= shard_bytes:
                yield SourceShard(str(file), first, start, offset, unit)
                start, first = offset, number
    yield SourceShard(str(file), first, start, size, unit)


def read_shard(shard: SourceShard) -> Iterator[SourceChunk]:
    """Yield the records of a shard, about 256 KiB or 1,024 rows at a time; raise PrepError if it cannot be read."""
    return _limited(_read(shard), shard.limit)


def read_chunks(files: Iterable[Place], *, limit: int = 0, reader: RecordReader | None = None) -> Iterator[SourceChunk]:
    """Yield the records of whole files in order, like `read_shard`; at most `limit` nonblank records, 0 for all."""
    reader = reader or RecordReader()
    shards = (shard for file in files for shard in _cut(file, 1 << 62))
    return _limited((chunk for shard in shards for chunk in _read(replace(shard, reader=reader))), limit or None)


def _limited(chunks: Iterator[SourceChunk], left: int | None) -> Iterator[SourceChunk]:
    if left is None:
        yield from chunks
        return
    for chunk in chunks:
        places = [place for place, record in enumerate(chunk.records) if not is_blank(record)]
        if len(places) >= left:
            end = places[left - 1] + 1
            yield replace(chunk, records=chunk.records[:end], num_bytes=chunk.num_bytes * end // len(chunk.records))
            return
        left -= len(places)
        yield chunk


def is_blank(record: object) -> bool:
    """Return True if a record is a line of white space, which does not count as a record."""
    return isinstance(record, bytes) and not record.strip()


def _read(shard: SourceShard) -> Iterator[SourceChunk]:
    """Yield the records of a shard; an error names the last record before it."""
    last: SourceChunk | None = None
    try:
        for chunk in _open(shard):
            yield replace(chunk, reader=shard.reader)
            last = chunk
    except (OSError, EOFError, pa.ArrowException, UnicodeDecodeError) as error:
        number = shard.first - 1 if last is None else last.first + len(last.records) - 1
        where = shard.path if last is None and not shard.is_piece else f"{shard.path}, after {shard.unit} {number}"
        raise _unreadable(where, error) from error


def _unreadable(where: str, error: Exception) -> PrepError:
    fix = "check its permissions; a damaged or truncated file must be written again"
    return PrepError(f"the file cannot be read: {error}", where=where, fix=fix)


def _open(shard: SourceShard) -> Iterator[SourceChunk]:
    file, path = parse_place(shard.path), shard.path
    suffix = suffix_of(file)
    if suffix in (PARQUET, ARROW):
        tables = (
            read_arrow(file, shard.end, shard.reader)
            if suffix == ARROW
            else read_parquet(file, stamp_of(file).num_bytes, shard.reader, shard.row_groups, shard.first)
        )
        yield from (SourceChunk(path, ROW, first, rows, num_bytes) for first, rows, num_bytes in tables)
        return
    before = shard.start
    if shard.is_piece:
        read = _packed_file(path, stamp_of(file), shard.unit).read(shard.first, shard.records)
    elif is_compressed(file):
        read = _read_text(file, shard.unit)
    else:
        read = _read_text(file, shard.unit, shard.first, shard.start, shard.end)
    for first, lines, position in read:
        # A JSON list is read ahead, beyond the end of the shard.
        at = max(before, min(position, shard.end))
        yield SourceChunk(path, shard.unit, first, lines, at - before)
        before = at


def _read_text(
    file: Place, unit: str, first: int | None = None, start: int = 0, end: int | None = None
) -> Iterator[tuple[int, list[Any], int]]:
    """Yield first number, records and position in the file for groups of records in a file or its bytes `start:end`."""
    first = (0 if unit == ITEM else 1) if first is None else first
    with text.open_text(file) as (stream, source):
        if start:
            stream.seek(start)
        if separator := SEPARATORS.get(suffix_of(file)):
            reader = text.DelimitedReader(file, stream, separator, first, end)
            if first == 1:
                names = reader.header()
            else:
                with text.open_text(file) as (beginning, _):
                    names = text.DelimitedReader(file, beginning, separator).header()
            groups: Iterator[tuple[int, list[Any]]] = ((line, rows) for line, _, rows in reader.rows(names))
        elif unit == ITEM:
            items = text.read_items(file, stream, first, None if end == stamp_of(file).num_bytes else end)
            groups = ((number, [item for _, item in group]) for number, group in items)
        else:
            groups = text.read_lines(file, stream, first, end)
        for number, records in groups:
            yield number, records, source.tell()


class _PackedFile:
    """A compressed file whose pieces are read one after another: its stream cannot be read from the middle."""

    def __init__(self, path: str, stamp: Stamp, unit: str) -> None:
        self._begin = partial(_read_text, parse_place(path), unit)
        self._groups: Iterator[tuple[int, list[Any], int]] = iter(())
        self._at: float = math.inf

    def read(self, first: int, count: int | None) -> Iterator[tuple[int, list[Any], int]]:
        """Yield `count` records from number `first`; start over if it comes before the current position."""
        if first < self._at:
            self._groups, self._at = self._begin(), 0
        end = None if count is None else first + count
        while end is None or self._at < end:
            self._at = math.inf  # after an error or the end, the next read starts over
            if (group := next(self._groups, None)) is None:
                return
            number, records, position = group
            self._at = number + len(records)
            kept = records[max(0, first - number) : None if end is None else end - number]
            if kept:
                yield max(first, number), kept, position


# The file that this process is reading piece by piece; a new stamp reopens a file that was rewritten.
_packed_file = lru_cache(maxsize=1)(_PackedFile)
