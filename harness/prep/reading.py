"""Reads chat files in a stream, whole or a shard of them at a time."""

from __future__ import annotations

import io
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, BinaryIO

import pyarrow as pa
import pyarrow.parquet as pq

from harness.errors import PrepError
from harness.prep.chat import BadRecord, Conversation, parse_line, parse_record
from harness.prep.sources import ARROW_SUFFIXES, COMPRESSED, PARQUET_SUFFIXES

LINE, ROW = "line", "row"
_CHUNK_BYTES = 1 << 18
_CHUNK_ROWS = 1024
_SCAN_BYTES = 8 << 20


@dataclass(frozen=True, slots=True)
class Chunk:
    """Consecutive records of one file, not yet parsed.

    Attributes:
        path: the file.
        unit: `line` (counted from 1) or `row` (counted from 0).
        first: number of the first record.
        records: lines as bytes, or decoded rows.
        num_bytes: size in the file, for progress; rows share their file's size evenly.
    """

    path: str
    unit: str
    first: int
    records: list[Any]
    num_bytes: int

    def parse(self) -> Iterator[Conversation | BadRecord]:
        """Every record in order; blank lines are no records."""
        for number, record in enumerate(self.records, start=self.first):
            where = f"{self.path}, {self.unit} {number}"
            if self.unit == ROW:
                yield parse_record(record, where)
            elif record.strip():
                yield parse_line(record, where)


@dataclass(frozen=True, slots=True)
class Shard:
    """Consecutive records of one file, which are prepared in one go.

    Attributes:
        path: the file.
        first: number of the first record, as in `Chunk`.
        start, end: bytes of the file that hold the records.
        row_groups: of a Parquet file, first and one behind the last; None for other files.
        limit: at most so many records, blank lines not counted; None for all.
    """

    path: str
    first: int
    start: int
    end: int
    row_groups: tuple[int, int] | None = None
    limit: int | None = None

    @property
    def num_bytes(self) -> int:
        return self.end - self.start


def cut_shards(files: Iterable[Path], *, shard_bytes: int, limit: int = 0) -> list[Shard]:
    """Divide files into shards of about `shard_bytes`, in order; compressed and Arrow files are one each.

    Lines of a larger JSONL file are counted on the way, so that each shard knows the number of its first.

    Args:
        limit: of all shards together, in records; 0 for all.

    Raises:
        PrepError: a file cannot be read.
    """
    shards = [shard for file in files for shard in _cut(file, shard_bytes)]
    if not limit:
        return shards
    kept, left = [], limit
    for shard in shards:
        count = sum(not _is_blank(record) for chunk in read_shard(shard) for record in chunk.records)
        kept.append(shard if count <= left else replace(shard, limit=left))
        left -= count
        if left <= 0:
            break
    return kept


def read_shard(shard: Shard) -> Iterator[Chunk]:
    """Read the records of a shard, about 256 KiB or 1,024 rows at a time.

    Raises:
        PrepError: the file cannot be read, or has no usable `messages` column.
    """
    return _limited(_read(Path(shard.path), shard), shard.limit)


def read_chunks(files: Iterable[Path], *, limit: int = 0) -> Iterator[Chunk]:
    """Read whole files in order, as `read_shard` does.

    Args:
        files: as from `list_files`.
        limit: stop after so many records; 0 reads all. Blank lines are no records.
    """
    return _limited((chunk for file in files for chunk in _read(file, None)), limit or None)


def _limited(chunks: Iterator[Chunk], left: int | None) -> Iterator[Chunk]:
    if left is None:
        yield from chunks
        return
    for chunk in chunks:
        places = [place for place, record in enumerate(chunk.records) if not _is_blank(record)]
        if len(places) >= left:
            end = places[left - 1] + 1
            yield replace(chunk, records=chunk.records[:end], num_bytes=chunk.num_bytes * end // len(chunk.records))
            return
        left -= len(places)
        yield chunk


def _is_blank(record: object) -> bool:
    return isinstance(record, bytes) and not record.strip()


def _kind(file: Path) -> str:
    return file.suffix.lower()


def _cut(file: Path, shard_bytes: int) -> Iterator[Shard]:
    try:
        size = file.stat().st_size
        if _kind(file) in PARQUET_SUFFIXES:
            yield from _cut_parquet(file, shard_bytes)
        elif _kind(file) in (*COMPRESSED, *ARROW_SUFFIXES) or size <= shard_bytes:
            yield Shard(str(file), 0 if _kind(file) in ARROW_SUFFIXES else 1, 0, size)
        else:
            yield from _cut_lines(file, size, shard_bytes)
    except (OSError, pa.ArrowException) as error:
        raise PrepError(f"the file cannot be read: {error}", where=str(file)) from error


def _cut_lines(file: Path, size: int, shard_bytes: int) -> Iterator[Shard]:
    start, first = 0, 1
    with file.open("rb") as source:
        while start < size:
            source.seek(start)
            left, lines = shard_bytes, 0
            while left and (block := source.read(min(left, _SCAN_BYTES))):
                lines += block.count(b"\n")
                left -= len(block)
            rest = source.readline()
            end = source.tell()
            yield Shard(str(file), first, start, end)
            start, first = end, first + lines + bool(rest)


def _cut_parquet(file: Path, shard_bytes: int) -> Iterator[Shard]:
    metadata = pq.read_metadata(file)
    group, first, row, start = 0, 0, 0, 0
    for number in range(metadata.num_row_groups):
        row += metadata.row_group(number).num_rows
        is_last = number + 1 == metadata.num_row_groups
        end = file.stat().st_size if is_last else _begin_of(metadata.row_group(number + 1))
        if is_last or end - start >= shard_bytes:
            yield Shard(str(file), first, start, end, (group, number + 1))
            group, first, start = number + 1, row, end


def _begin_of(row_group: Any) -> int:
    columns = [row_group.column(number) for number in range(row_group.num_columns)]
    return int(min(min(one.data_page_offset, one.dictionary_page_offset or one.data_page_offset) for one in columns))


def _read(file: Path, shard: Shard | None) -> Iterator[Chunk]:
    """The records of a shard of the file, or all of them."""
    kind = _kind(file)
    try:
        if kind in PARQUET_SUFFIXES:
            yield from _read_parquet(file, shard)
        elif kind in ARROW_SUFFIXES:
            yield from _read_arrow(file)
        elif kind in COMPRESSED:
            yield from _read_compressed(file, COMPRESSED[kind])
        else:
            with file.open("rb") as lines:
                if shard is None:
                    yield from _read_lines(file, lines, 1)
                    return
                lines.seek(shard.start)
                yield from _read_lines(file, io.BytesIO(lines.read(shard.num_bytes)), shard.first)
    except (OSError, pa.ArrowException) as error:
        raise PrepError(
            f"the file cannot be read: {error}", where=str(file), fix="it is damaged or was cut off: write it again"
        ) from error


def _read_lines(file: Path, lines: BinaryIO, first: int) -> Iterator[Chunk]:
    while records := lines.readlines(_CHUNK_BYTES):
        yield Chunk(str(file), LINE, first, records, sum(map(len, records)))
        first += len(records)


def _read_compressed(file: Path, codec: str) -> Iterator[Chunk]:
    first, before = 1, 0
    with pa.OSFile(str(file)) as source, pa.CompressedInputStream(source, codec) as stream:
        lines = io.BufferedReader(stream, _CHUNK_BYTES)
        while records := lines.readlines(_CHUNK_BYTES):
            at = source.tell()
            yield Chunk(str(file), LINE, first, records, at - before)
            first, before = first + len(records), at


def _read_parquet(file: Path, shard: Shard | None) -> Iterator[Chunk]:
    with pq.ParquetFile(file, page_checksum_verification=True) as parquet:
        check_messages_column(parquet.schema_arrow, file)
        row_bytes = file.stat().st_size / max(parquet.metadata.num_rows, 1)
        first = 0 if shard is None else shard.first
        groups = range(*(shard.row_groups if shard is not None and shard.row_groups else (0, parquet.num_row_groups)))
        for batch in parquet.iter_batches(batch_size=_CHUNK_ROWS, row_groups=list(groups), columns=["messages"]):
            records = batch.to_pylist()
            yield Chunk(str(file), ROW, first, records, int(row_bytes * len(records)))
            first += len(records)


def _read_arrow(file: Path) -> Iterator[Chunk]:
    size = file.stat().st_size
    with pa.memory_map(str(file)) as source:
        try:
            batches: Any = pa.ipc.open_stream(source)
        except pa.ArrowInvalid:
            opened = pa.ipc.open_file(source)
            batches = (opened.get_batch(number) for number in range(opened.num_record_batches))
            schema = opened.schema
        else:
            schema = batches.schema
        check_messages_column(schema, file)
        first, before = 0, 0
        for batch in batches:
            for start in range(0, batch.num_rows, _CHUNK_ROWS):
                records = batch.select(["messages"]).slice(start, _CHUNK_ROWS).to_pylist()
                at = min(size, source.tell())
                yield Chunk(str(file), ROW, first, records, at - before)
                first, before = first + len(records), at


def check_messages_column(schema: Any, file: Path) -> None:
    expected = "`messages` must be a list of structs with the strings `role` and `content`"
    if "messages" not in schema.names:
        raise PrepError(
            f"there is no `messages` column among: {', '.join(schema.names)}", where=str(file), fix=expected
        )
    kind = schema.field("messages").type
    is_list = pa.types.is_list(kind) or pa.types.is_large_list(kind)
    turn = kind.value_type if is_list else None
    if turn is None or not pa.types.is_struct(turn) or not {"role", "content"} <= {field.name for field in turn}:
        raise PrepError(f"`messages` is of type {kind}", where=str(file), fix=expected)
