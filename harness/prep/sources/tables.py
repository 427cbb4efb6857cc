"""Parquet and Arrow files: their columns, and their rows as plain values in a stream of bounded memory."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from harness.errors import PrepError
from harness.prep.chat import MEDIA_FIELDS, RecordReader, is_media_column
from harness.storage import Place, open_source, open_stream

ROW = "row"
_CHUNK_ROWS = 1024
# Decoded at once; rows with long texts come in smaller batches.
_CHUNK_BYTES = 32 << 20
# Read at once of a column; otherwise that is all of it in a row group.
_BUFFER_BYTES = 4 << 20
# Values of a column of lists in one row group: always accepted, and for each compressed byte of the group.
_FREE_VALUES, _VALUES_PER_BYTE = 1 << 22, 16


@dataclass(frozen=True, slots=True)
class Undecodable:
    """A row whose text is not UTF-8.

    Attributes:
        why: the problem in words.
    """

    why: str


@contextlib.contextmanager
def open_parquet(place: Place) -> Iterator[Any]:
    """Open a Parquet file; raises OSError, FormatError or pyarrow.ArrowException."""
    source = open_source(place)
    try:
        with pq.ParquetFile(
            source.for_arrow(), page_checksum_verification=True, buffer_size=_BUFFER_BYTES, pre_buffer=False
        ) as parquet:
            yield parquet
    finally:
        source.close()


@contextlib.contextmanager
def open_arrow(place: Place) -> Iterator[tuple[Any, Iterator[Any], Any]]:
    """Open an Arrow stream or file: its schema, its batches, and the stream whose position counts as progress."""
    mapped = pa.memory_map(str(place)) if isinstance(place, Path) else pa.PythonFile(open_stream(place), "r")
    with mapped as source:
        try:
            stream = pa.ipc.open_stream(source)
            yield stream.schema, iter(stream), source
            return
        except pa.ArrowInvalid:
            source.seek(0)
            opened = pa.ipc.open_file(source)
        yield opened.schema, (opened.get_batch(number) for number in range(opened.num_record_batches)), source


def read_columns(place: Place, *, is_parquet: bool) -> list[str]:
    """Return the names of a table's columns."""
    if is_parquet:
        with open_parquet(place) as parquet:
            return list(parquet.schema_arrow.names)
    with open_arrow(place) as (schema, _, _):
        return list(schema.names)


def cut_parquet(place: Place, size: int, shard_bytes: int) -> Iterator[tuple[int, int, int, tuple[int, int]]]:
    """Yield first row, byte range and range of row groups of shards of about `shard_bytes`."""
    with open_parquet(place) as parquet:
        metadata = parquet.metadata
        group, first, row, start = 0, 0, 0, 0
        for number in range(metadata.num_row_groups):
            row += metadata.row_group(number).num_rows
            is_last = number + 1 == metadata.num_row_groups
            end = size if is_last else _offset_of(metadata.row_group(number + 1))
            if is_last or end - start >= shard_bytes:
                yield first, start, end, (group, number + 1)
                group, first, start = number + 1, row, end


def _offset_of(row_group: Any) -> int:
    columns = [row_group.column(number) for number in range(row_group.num_columns)]
    offsets = [(column.data_page_offset, column.dictionary_page_offset) for column in columns]
    return min(int(min(data, dictionary or data)) for data, dictionary in offsets)


def read_parquet(
    place: Place, size: int, reader: RecordReader, groups: tuple[int, int] | None, first: int
) -> Iterator[tuple[int, list[Any], int]]:
    """Yield number of the first row, rows, and their even share of the file's bytes.

    Args:
        reader: says what columns are read.
        groups: first and past-the-end row group; None reads all.
        first: number of the first row of the first group.
    """
    with open_parquet(place) as parquet:
        schema, metadata = parquet.schema_arrow, parquet.metadata
        values, presence = _present(schema.names, reader)
        row_bytes = size / max(metadata.num_rows, 1)
        numbers = list(range(*(groups or (0, parquet.num_row_groups))))
        leaves = [_smallest_leaf(metadata, numbers, name) for name in presence]
        costs = _leaf_bytes(metadata, numbers)
        check_expansion(parquet, size, numbers, values, str(place))
        num_rows = sum(metadata.row_group(number).num_rows for number in numbers)
        cost = sum(
            num for path, num in costs.items() if path in leaves or any(_is_in(path, name) for name in values)
        ) / max(num_rows, 1)
        rows = _num_rows(cost)
        columns = [*values, *leaves]
        for batch in parquet.iter_batches(batch_size=rows, row_groups=numbers, columns=columns):
            records = _rows(batch, values, presence)
            yield first, records, int(row_bytes * len(records))
            first += len(records)


def read_arrow(place: Place, size: int, reader: RecordReader) -> Iterator[tuple[int, list[Any], int]]:
    """Yield number of the first row, rows, and the bytes of the file that they took."""
    with open_arrow(place) as (schema, batches, source):
        values, presence = _present(schema.names, reader)
        first, before = 0, 0
        for batch in batches:
            cost = batch.select(values).nbytes / max(batch.num_rows, 1)
            num_rows = _num_rows(cost)
            for start in range(0, batch.num_rows, num_rows):
                records = _rows(batch.slice(start, num_rows), values, presence)
                at = min(size, source.tell())
                yield first, records, at - before
                first, before = first + len(records), at


def _num_rows(row_bytes: float) -> int:
    """Return how many rows of a size to decode at once."""
    return max(1, min(_CHUNK_ROWS, int(_CHUNK_BYTES / max(row_bytes, 1))))


def _present(names: Sequence[str], reader: RecordReader) -> tuple[list[str], list[str]]:
    """Return the columns to decode, and those, such as images, of which only whether a row has any is read."""
    needed = reader.columns_to_read(dict.fromkeys(names))
    # Read to be refused: a schema of tables lists a column even where no row has a value.
    refused = [name for name in dict.fromkeys(names) if is_media_column(name) and name not in reader.ignore_fields]
    needed += [name for name in refused if name not in needed]
    if repeated := [name for name in needed if list(names).count(name) > 1]:
        raise pa.ArrowInvalid(f"several columns have the name {repeated[0]!r}")
    presence = [name for name in needed if name in MEDIA_FIELDS]
    return [name for name in needed if name not in presence], presence


def _is_in(path: str, name: str) -> bool:
    return path == name or path.startswith(f"{name}.")


def _leaf_bytes(metadata: Any, groups: Sequence[int]) -> dict[str, int]:
    """Return the uncompressed bytes of each leaf column in these row groups."""
    total: dict[str, int] = {}
    for number in groups:
        group = metadata.row_group(number)
        for place in range(group.num_columns):
            column = group.column(place)
            total[column.path_in_schema] = total.get(column.path_in_schema, 0) + column.total_uncompressed_size
    return total


def check_expansion(parquet: Any, size: int, groups: Sequence[int], columns: Sequence[str], where: str) -> None:
    """Refuse lists that a few bytes of run lengths expand to gigabytes.

    Args:
        parquet: an open `ParquetFile`.
        size: bytes of the file, of which its footer can claim more.
        groups, columns: row groups and top-level columns that are read.

    Raises:
        PrepError: a column has more values than the bytes of its row group justify.
    """
    schema = parquet.schema
    nested = [number for number in range(len(schema)) if schema.column(number).max_repetition_level]
    for number in groups:
        group = parquet.metadata.row_group(number)
        # Of all columns: the roles of regular conversations, and fields that are null in all, take next to nothing.
        num_bytes = min(size, sum(group.column(place).total_compressed_size for place in range(group.num_columns)))
        most = max(_FREE_VALUES, _VALUES_PER_BYTE * num_bytes)
        for column in map(group.column, nested):
            name = column.path_in_schema
            if column.num_values > most and any(_is_in(name, one) for one in columns):
                what = f"the column {name} claims {column.num_values:,} values, at most {most:,} can be honest"
                fix = "write the file again"
                raise PrepError(f"{what} in {num_bytes:,} bytes", where=f"{where}, row group {number}", fix=fix)


def _smallest_leaf(metadata: Any, groups: Sequence[int], name: str) -> str:
    """Return the cheapest leaf of a column: of images that is their path, which is null where there is no image."""
    leaves = {path: num for path, num in _leaf_bytes(metadata, groups).items() if _is_in(path, name)}
    return min(leaves, key=lambda path: leaves[path], default=name)


def _rows(batch: Any, values: Sequence[str], presence: Sequence[str]) -> list[Any]:
    """Return the rows of a batch as dicts; a column of `presence` holds True where the row has something there."""
    marks = {name: _has_any(batch.column(name)) for name in presence}
    chosen = batch.select(list(values))
    try:
        rows: list[Any] = chosen.to_pylist() if values else [{} for _ in range(batch.num_rows)]
    except UnicodeDecodeError:
        rows = [_row(chosen.slice(number, 1)) for number in range(chosen.num_rows)]
    maps = [field for field in chosen.schema if _has_map(field.type)]
    for row in rows if maps else ():
        if isinstance(row, dict):
            row.update({field.name: _plain(row[field.name], field.type) for field in maps})
    for name, column in marks.items():
        for row, has_any in zip(rows, column, strict=True):
            if has_any and isinstance(row, dict):
                row[name] = True
    return rows


def _row(row: Any) -> Any:
    try:
        return row.to_pylist()[0]
    except UnicodeDecodeError as error:
        return Undecodable(f"byte {error.start} of a text is not UTF-8")


def _has_any(column: Any) -> list[bool]:
    """Return for each value whether it is there and, if a list, whether it has items."""
    kind = column.type
    if _is_list(kind):
        return [bool(length) for length in pc.list_value_length(column).to_pylist()]
    return [bool(valid) for valid in column.is_valid().to_pylist()]


def _is_list(kind: Any) -> bool:
    types = pa.types
    views = [getattr(types, name) for name in ("is_list_view", "is_large_list_view") if hasattr(types, name)]
    return any(check(kind) for check in (types.is_list, types.is_large_list, types.is_fixed_size_list, *views))


def _has_map(kind: Any) -> bool:
    if pa.types.is_map(kind):
        return True
    if pa.types.is_struct(kind):
        return any(_has_map(field.type) for field in kind)
    return _is_list(kind) and _has_map(kind.value_type)


def _plain(value: Any, kind: Any) -> Any:
    """Return a value with its maps, which pyarrow gives as lists of pairs, as dicts."""
    if value is None or not _has_map(kind):
        return value
    if pa.types.is_map(kind):
        return {key: _plain(item, kind.item_type) for key, item in value}
    if pa.types.is_struct(kind):
        return {**value, **{field.name: _plain(value[field.name], field.type) for field in kind}}
    return [_plain(item, kind.value_type) for item in value]
