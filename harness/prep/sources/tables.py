"""Read the columns of Parquet and Arrow files, and stream their rows as plain values in bounded memory."""

from __future__ import annotations

import contextlib
import inspect
import struct
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from harness.errors import FormatError, PrepError
from harness.formats.layouts.parquet_pages import Chunk, read_pages
from harness.prep.chat import MEDIA_FIELDS, BadReason, BadRecord, RecordReader, is_media_column
from harness.prep.chat.values import json_or
from harness.prep.sources.text import MAX_RECORD_BYTES
from harness.storage import Place
from harness.storage.inputs import open_source, open_stream

ROW = "row"
_CHUNK_ROWS = 1024
# Bytes decoded at once; rows with long texts are read in smaller batches.
_CHUNK_BYTES = 32 << 20
# Bytes of a column read at once; otherwise the whole column of a row group is.
_BUFFER_BYTES = 4 << 20
# Maximum values of a column in one row group: always accepted, and accepted per compressed byte of the group.
_FREE_VALUES, _VALUES_PER_BYTE = 1 << 22, 16
# Maximum bytes of one decompressed page. Writers keep dictionaries below 1 or 2 MB.
_MAX_PAGE_BYTES, _MAX_DICTIONARY_BYTES = 256 << 20, 32 << 20
# Maximum bytes of one Arrow batch with the dictionaries before it. Writers put 64k rows or more into a batch.
_MAX_BATCH_BYTES = 1 << 30
# Rows read at once as a dictionary, which Arrow copies for each batch.
_MEASURED_ROWS = 1 << 14
# Maximum bytes of a fixed-length value, such as a UUID: no option reads such columns as dictionaries.
_MAX_FIXED_BYTES = 64
# With its JSON extension type, Arrow would not read such a column as a dictionary.
_OPTIONS = dict.fromkeys({"arrow_extensions_enabled"} & set(inspect.signature(pq.ParquetFile).parameters), False)


@contextlib.contextmanager
def open_parquet(place: Place, *, as_dictionaries: Sequence[str] = ()) -> Iterator[Any]:
    """Open a Parquet file; raise OSError, FormatError or pyarrow.ArrowException.

    Read the leaf columns `as_dictionaries` one row group at a time: Arrow cannot join dictionaries inside lists.
    """
    with (
        contextlib.closing(open_source(place)) as source,
        pq.ParquetFile(
            source.for_arrow(),
            read_dictionary=as_dictionaries,
            page_checksum_verification=True,
            buffer_size=_BUFFER_BYTES,
            pre_buffer=False,
            **_OPTIONS,
        ) as parquet,
    ):
        yield parquet


@contextlib.contextmanager
def open_arrow(place: Place) -> Iterator[tuple[Any, Iterator[Any], Any]]:
    """Open an Arrow stream or file; yield its schema, its batches, and the stream whose position measures progress."""
    mapped = pa.memory_map(str(place)) if isinstance(place, Path) else pa.PythonFile(open_stream(place), "r")
    with mapped as source:
        # A file is a stream between two magic strings.
        count = pa.ipc.open_file(source).num_record_batches if source.read(6) == b"ARROW1" else None
        source.seek(0 if count is None else 8)
        stream = pa.ipc.open_stream(source)
        yield stream.schema, _batches(stream, source, str(place), count), source


def _batches(stream: Any, source: Any, where: str, count: int | None) -> Iterator[Any]:
    """Yield the batches of a stream, `count` of them in a file; raise PrepError before a batch takes gigabytes."""
    dictionaries = number = 0

    def refuse_large(num_bytes: int) -> None:
        if num_bytes > _MAX_BATCH_BYTES:
            what = f"the batch decompresses to {num_bytes:,} bytes, more than {_MAX_BATCH_BYTES:,}"
            raise PrepError(what, where=f"{where}, batch {number}", fix="write the file again in smaller batches")

    while True:
        at, last = source.tell(), 0
        with contextlib.suppress(EOFError):
            while (message := pa.ipc.read_message(source)).type == "dictionary":
                dictionaries += _decompressed_bytes(message)
            last = _decompressed_bytes(message)
        refuse_large(dictionaries + last)
        source.seek(at)
        if (batch := next(stream, None)) is None:
            break
        if batch.num_rows > max(_FREE_VALUES, _VALUES_PER_BYTE * (source.tell() - at)):
            raise pa.ArrowInvalid(f"batch {number} declares {batch.num_rows:,} rows in {source.tell() - at:,} bytes")
        batch.validate()
        refuse_large(sum(map(_view_bytes, batch.columns)))
        batch.validate(full=True)  # offsets in a damaged file can point outside its memory
        yield batch
        number += 1
    if count not in (None, number):
        raise pa.ArrowInvalid(f"it has {number:,} batches, and its footer lists {count:,}")


def _decompressed_bytes(message: Any) -> int:
    """Return the decompressed bytes that an Arrow message declares for its buffers; its metadata is a flatbuffer."""
    data, body = memoryview(message.metadata), memoryview(message.body)

    def number(at: int, size: int = 4, of: memoryview = data) -> int:
        return int.from_bytes(of[at : at + size], "little", signed=True)

    def field(table: int, place: int) -> int:
        bounds = table - number(table)
        offset = number(bounds + 4 + 2 * place, 2) if 4 + 2 * place < number(bounds, 2) else 0
        return table + offset if offset else 0

    def target(at: int) -> int:
        return at + number(at)

    root = target(0)
    batch = target(field(root, 2))
    if message.type == "dictionary":
        batch = target(field(batch, 1))
    # Version 4 of the metadata names the compression in custom fields of the message.
    if not field(batch, 3) and not (field(root, 4) and data[field(root, 0)] == 3):
        return 0
    start = target(field(batch, 2)) + 4
    places = struct.iter_unpack("<qq", data[start : start + 16 * number(start - 4)])
    return sum(max(0, number(at, 8, body)) for at, size in places if size >= 8)


def cut_parquet(place: Place, size: int, shard_bytes: int) -> Iterator[tuple[int, int, int, tuple[int, int]]]:
    """Yield the first row, byte range and range of row groups of each shard of about `shard_bytes`."""
    with open_parquet(place) as parquet:
        metadata = parquet.metadata
        group, first, row, start = 0, 0, 0, 0
        for number in range(metadata.num_row_groups):
            row += metadata.row_group(number).num_rows
            is_last = number + 1 == metadata.num_row_groups
            end = size if is_last else min(map(_start_of, _columns_of(metadata.row_group(number + 1))))
            if is_last or end - start >= shard_bytes:
                yield first, start, end, (group, number + 1)
                group, first, start = number + 1, row, end


def _columns_of(row_group: Any) -> list[Any]:
    return [row_group.column(number) for number in range(row_group.num_columns)]


def _start_of(column: Any) -> int:
    return int(min(column.data_page_offset, column.dictionary_page_offset or column.data_page_offset))


def read_parquet(
    place: Place, size: int, reader: RecordReader, groups: tuple[int, int] | None, first: int
) -> Iterator[tuple[int, list[Any], int]]:
    """Yield the number of the first row, the rows, and their even share of the file's bytes.

    `groups` are the first and past-the-end row groups, or None for all; `first` is the number of their first row.
    """
    with open_parquet(place) as parquet:
        schema, metadata = parquet.schema_arrow, parquet.metadata
        values, presence = _present(schema.names, reader)
        row_bytes = size / max(metadata.num_rows, 1)
        numbers = list(range(*(groups or (0, parquet.num_row_groups))))
        costs = Counter[str]()
        for column in (column for number in numbers for column in _columns_of(metadata.row_group(number))):
            costs[column.path_in_schema] += column.total_uncompressed_size
        # The cheapest leaf: for images, that is their path, which is null if there is no image.
        leaves = [
            min((one for one in costs if _is_in(one, name)), key=costs.__getitem__, default=name) for name in presence
        ]
        columns = [*values, *leaves]
        check_expansion(parquet, size, numbers, values, str(place))
        num_rows = sum(metadata.row_group(number).num_rows for number in numbers)
        cost = sum(num for path, num in costs.items() if any(_is_in(path, name) for name in columns))
        rows = max(1, min(_CHUNK_ROWS, int(_CHUNK_BYTES / max(cost / max(num_rows, 1), 1))))
        failed: Exception | None = None
        for at, number in enumerate(numbers):
            try:
                if isinstance(place, Path):  # in object storage each header would be a request
                    rows = check_pages(place, metadata, number, columns, rows)
            except (OSError, pa.ArrowException, UnicodeDecodeError) as error:
                # Raised after the groups before it are read.
                numbers, failed = numbers[:at], error
                break
        for batch in parquet.iter_batches(batch_size=rows, row_groups=numbers, columns=columns):
            for piece in _pieces(batch, values, str(place), first):
                records = _rows(piece, values, presence)
                yield first, records, int(row_bytes * len(records))
                first += len(records)
        if failed is not None:
            raise failed


def read_arrow(place: Place, size: int, reader: RecordReader) -> Iterator[tuple[int, list[Any], int]]:
    """Yield the number of the first row, the rows, and the bytes of the file that they took."""
    with open_arrow(place) as (schema, batches, source):
        values, presence = _present(schema.names, reader)
        first, before = 0, 0
        for batch in batches:
            for start in range(0, batch.num_rows, _CHUNK_ROWS):
                for piece in _pieces(batch.slice(start, _CHUNK_ROWS), values, str(place), first):
                    records = _rows(piece, values, presence)
                    at = min(size, source.tell())
                    yield first, records, at - before
                    first, before = first + len(records), at


def check_pages(place: Path, metadata: Any, number: int, columns: Sequence[str], rows: int) -> int:
    """Refuse a row group that expands to gigabytes; return the number of rows, at most `rows`, to decode at once.

    A few bytes can refer to a text in their column's dictionary a million times. Such columns are first read as
    dictionaries, up to the last page that refers to one. Raises PrepError if a page or a row of texts exceeds its
    limit, or if pages have more values than the footer declares.
    """
    group, where = metadata.row_group(number), f"{place}, row group {number}"
    with contextlib.closing(open_source(place)) as source:
        for column in _columns_of(group):
            path = column.path_in_schema
            if not any(_is_in(path, name) for name in columns):
                continue
            if not group.num_rows:  # then it has no pages
                if column.num_values:
                    what = f"the column {path} has {column.num_values:,} values in a row group without rows"
                    raise PrepError(what, where=where, fix="write the file again")
                continue
            chunk = Chunk(path, column.num_values, _start_of(column), column.total_compressed_size)
            largest = values = coded = 0
            try:
                for page in read_pages(source, chunk):
                    if page.num_bytes > (_MAX_DICTIONARY_BYTES if page.is_dictionary else _MAX_PAGE_BYTES):
                        what = f"the column {path} declares a page of {page.num_bytes:,} bytes"
                        raise FormatError(what, fix="write the file again with smaller pages")
                    largest = max(largest, page.num_bytes if page.is_dictionary else 0)
                    values += page.num_values
                    coded = values if page.is_coded else coded
            except FormatError as error:
                raise PrepError(error.what, where=where, fix=error.fix) from None
            if largest * coded > MAX_RECORD_BYTES:
                rows = min(rows, _rows_at_once(place, number, path, coded, rows))
    return rows


def _rows_at_once(place: Path, group: int, path: str, coded: int, rows: int) -> int:
    """Return the number of rows of a text column that can be decoded at once, from its first `coded` values."""
    largest = seen = 0
    with open_parquet(place, as_dictionaries=[path]) as parquet:
        for batch in parquet.iter_batches(batch_size=_MEASURED_ROWS, row_groups=[group], columns=[path]):
            for start in range(0, batch.num_rows, rows):
                part = batch.slice(start, rows)
                if decoded_bytes(part) > MAX_RECORD_BYTES:
                    largest = max(largest, *(decoded_bytes(part.slice(row, 1)) for row in range(part.num_rows)))
            if largest > MAX_RECORD_BYTES:
                what = f"a row decodes to {largest:,} bytes of {path}, more than {MAX_RECORD_BYTES:,}"
                raise PrepError(what, where=f"{place}, row group {group}", fix="shorten the conversation")
            leaf = batch.column(0)
            while children := _children(leaf):
                leaf = children[0]
            seen += len(leaf)
            if seen >= coded:
                break
    return max(1, min(rows, MAX_RECORD_BYTES // largest)) if largest else rows


def _pieces(batch: Any, values: Sequence[str], where: str, first: int) -> Iterator[Any]:
    """Yield a batch, starting at row number `first`, in pieces of bounded size; raise PrepError for a larger row."""
    num_bytes = decoded_bytes(batch.select(list(values)))
    if batch.num_rows > 1 and num_bytes > _CHUNK_BYTES:
        half = batch.num_rows // 2
        yield from _pieces(batch.slice(0, half), values, where, first)
        yield from _pieces(batch.slice(half), values, where, first + half)
    elif num_bytes > MAX_RECORD_BYTES:
        what = f"the row decodes to {num_bytes:,} bytes, more than {MAX_RECORD_BYTES:,}"
        raise PrepError(what, where=f"{where}, row {first}", fix="shorten the conversation")
    else:
        yield batch


def decoded_bytes(column: Any) -> int:
    """Return the bytes of a batch or column, counting a text of a dictionary each time it is used."""
    if isinstance(column, pa.RecordBatch):
        return sum(map(decoded_bytes, column.columns))
    kind = column.type
    if pa.types.is_dictionary(kind):
        try:
            lengths = pc.binary_length(column.dictionary)
        except pa.ArrowNotImplementedError:  # numbers
            return int(len(column) * 8)
        return int(pc.sum(lengths.take(column.indices)).as_py() or 0)
    if pa.types.is_list_view(kind) or pa.types.is_large_list_view(kind):
        # Lists may overlap: the bytes of their values count for each list.
        places = zip(column.offsets.to_pylist(), column.sizes.to_pylist(), strict=True)
        return sum(decoded_bytes(column.values.slice(*place)) for place in places)
    if children := _children(column):
        return sum(map(decoded_bytes, children))
    if pa.types.is_run_end_encoded(kind):
        return len(column) * decoded_bytes(column.values)
    return _view_bytes(column) or max(int(column.nbytes), 8 * len(column))  # nulls take no bytes


def _view_bytes(column: Any) -> int:
    """Return the bytes of text views, which may overlap, in a column whose offsets may be invalid."""
    kind = column.type
    if pa.types.is_string_view(kind) or pa.types.is_binary_view(kind):
        lengths = np.frombuffer(column.buffers()[1], np.int32)[::4][column.offset :][: len(column)]
        return int(np.maximum(lengths, 0).sum(dtype=np.int64))
    if pa.types.is_struct(kind):
        return sum(_view_bytes(column.field(number)) for number in range(kind.num_fields))
    is_map, is_dictionary = pa.types.is_map(kind), pa.types.is_dictionary(kind)
    names = ("keys", "items") if is_map else ("dictionary",) if is_dictionary else ("values",)
    return sum(_view_bytes(getattr(column, name)) for name in names if hasattr(column, name))


def _children(column: Any) -> list[Any]:
    kind = column.type
    if pa.types.is_struct(kind):
        return list(column.flatten())
    if pa.types.is_map(kind):
        first, end = (column.offsets[place].as_py() for place in (0, -1))
        return [part.slice(first, end - first) for part in (column.keys, column.items)]
    return [column.flatten()] if _is_list(kind) else []


def _present(names: Sequence[str], reader: RecordReader) -> tuple[list[str], list[str]]:
    """Return the columns to decode, and the columns, such as images, that are only checked for values."""
    needed = reader.columns_to_read(dict.fromkeys(names))
    # Read in order to refuse rows with values: a table's schema lists a column even if no row has a value.
    refused = [name for name in dict.fromkeys(names) if is_media_column(name) and name not in reader.ignore_fields]
    needed += [name for name in refused if name not in needed]
    if repeated := [name for name in needed if list(names).count(name) > 1]:
        raise pa.ArrowInvalid(f"several columns have the name {repeated[0]!r}")
    presence = [name for name in needed if name in MEDIA_FIELDS and (reader.media is None or "video" in name)]
    return [name for name in needed if name not in presence], presence


def _is_in(path: str, name: str) -> bool:
    return path == name or path.startswith(f"{name}.")


def check_expansion(parquet: Any, size: int, groups: Sequence[int], columns: Sequence[str], where: str) -> None:
    """Refuse lists that a few bytes of run lengths expand to gigabytes, and long values that cannot be text.

    Raises PrepError if one of the top-level `columns` has more values in one of `groups` than the bytes of that row
    group justify, or contains long binary numbers. `size` is the size of the file; its footer can declare more.
    """
    schema = parquet.schema
    for leaf in map(schema.column, range(len(schema))):
        is_number = leaf.logical_type.type == "DECIMAL" and leaf.physical_type == "BYTE_ARRAY"
        if (is_number or leaf.length > _MAX_FIXED_BYTES) and any(_is_in(leaf.path, one) for one in columns):
            what = f"the column {leaf.path} has values of type {leaf.physical_type} ({leaf.length:,} bytes)"
            raise PrepError(what, where=where, fix="write text, or ignore the column with source.ignore_fields")
    for number in groups:
        group = _columns_of(parquet.metadata.row_group(number))
        # Bytes of all columns: the roles of regular conversations, and fields that are always null, take almost none.
        num_bytes = min(size, sum(column.total_compressed_size for column in group))
        most = max(_FREE_VALUES, _VALUES_PER_BYTE * num_bytes)
        for column in group:
            name = column.path_in_schema
            if column.num_values > most and any(_is_in(name, one) for one in columns):
                what = f"the column {name} declares {column.num_values:,} values; at most {most:,} are plausible"
                fix = "write the file again"
                raise PrepError(f"{what} in {num_bytes:,} bytes", where=f"{where}, row group {number}", fix=fix)


def _rows(batch: Any, values: Sequence[str], presence: Sequence[str]) -> list[Any]:
    """Return the rows of a batch as dicts; a column in `presence` is True if the row has a value there."""
    chosen = batch.select(list(values))
    try:
        rows: list[Any] = chosen.to_pylist() if values else [{} for _ in range(batch.num_rows)]
    except (ValueError, OverflowError, LookupError) as error:
        if isinstance(error, pa.ArrowException):
            raise
        rows = [_row(chosen.slice(number, 1)) for number in range(chosen.num_rows)]
    coded = [field for field in chosen.schema if _is_coded(field.type)]
    for row in rows if coded else ():
        if isinstance(row, dict):
            row.update({field.name: _plain(row[field.name], field.type) for field in coded})
    for name, column in ((name, batch.column(name)) for name in presence):
        # The value is valid and, if a list, has items.
        found = pc.list_value_length(column) if _is_list(column.type) else column.is_valid()
        for row, has_any in zip(rows, found.to_pylist(), strict=True):
            if has_any and isinstance(row, dict):
                row[name] = True
    return rows


def _row(row: Any) -> Any:
    try:
        return row.to_pylist()[0]
    except UnicodeDecodeError as error:
        return BadRecord("", BadReason.NOT_UTF8, f"byte {error.start} of a text is not UTF-8")
    except (ValueError, OverflowError, LookupError) as error:  # such as times that Python does not support
        return BadRecord("", BadReason.BAD_ROW, f"a value cannot be read: {error}")


def _is_list(kind: Any) -> bool:
    names = ("list", "large_list", "fixed_size_list", "list_view", "large_list_view")
    return any(getattr(pa.types, f"is_{name}")(kind) for name in names)


def _is_coded(kind: Any) -> bool:
    """Return True if values contain maps or JSON, which pyarrow returns as lists of pairs and as text."""
    if pa.types.is_map(kind) or _is_json(kind):
        return True
    if pa.types.is_struct(kind):
        return any(_is_coded(field.type) for field in kind)
    return _is_list(kind) and _is_coded(kind.value_type)


def _is_json(kind: Any) -> bool:
    # This is how Hugging Face's datasets store values whose fields differ from row to row.
    return isinstance(kind, pa.BaseExtensionType) and kind.extension_name == "arrow.json"


def _plain(value: Any, kind: Any) -> Any:
    """Return a value with its maps as dicts, and with its JSON parsed; text that is not JSON is kept."""
    if value is None or not _is_coded(kind):
        return value
    if _is_json(kind):
        return json_or(value, value)
    if pa.types.is_map(kind):
        return {key: _plain(item, kind.item_type) for key, item in value}
    if pa.types.is_struct(kind):
        return {**value, **{field.name: _plain(value[field.name], field.type) for field in kind}}
    return [_plain(item, kind.value_type) for item in value]
