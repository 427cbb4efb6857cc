"""Reading one Parquet file: a row group at a time, checked before memory is spent on it."""

from __future__ import annotations

import contextlib
import itertools
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.parquet as pq

from harness.errors import FormatError
from harness.formats.base import make_pack
from harness.formats.parquet.decode import ZSTD, decode_pages
from harness.formats.parquet.pages import Page, check_extent, count_limit, read_pages, read_row_groups
from harness.formats.parquet.writer import FIELDS, METADATA_PREFIX, SCHEMA
from harness.records import Int64Array, Pack
from harness.storage import ByteSource, ObjectPath, open_source

CACHE_BYTES = 64 << 20

# What a footer may claim: thrift allocates what it reads there.
_MAX_FOOTER_STRING = 1 << 30
_MAX_FOOTER_LIST = 1 << 20
_MAX_COLUMNS = 64
_COPY_AGAIN = "copy the file again, or write the dataset again"
_Levels = dict[tuple[bytes, int], npt.NDArray[np.int64] | None]
_INT32, _UINT8 = np.dtype(np.int32), np.dtype(np.uint8)


@dataclass(frozen=True, eq=False)
class _Column:
    """A list column of one row group: its values, of its type or a narrower one, and where each row's begin."""

    values: npt.NDArray[Any]
    offsets: npt.NDArray[Any]


class ParquetShard:
    """One open file and its last few decoded row groups.

    Attributes:
        checks_pages: whether the checksums of pages are compared; only a bench has a reason to leave that out.
    """

    checks_pages = True

    def __init__(self, path: Path | ObjectPath, *, pack_size: int | None = None) -> None:
        self._path = path
        self._pack_size = pack_size
        self._source: ByteSource | None = None
        self._cache: OrderedDict[int, tuple[_Column, _Column, _Column]] = OrderedDict()
        self._cached_bytes = 0
        self._file: Any = None
        # Columns of just the types that we write, and their dtypes.
        self._own_columns: dict[str, npt.DTypeLike] = {}
        self._codec = pa.Codec("zstd")
        with self._explained("the footer"):
            source = self._source = open_source(path)
            self._groups = read_row_groups(source)
            self._file = pq.ParquetFile(
                source.for_arrow(),
                page_checksum_verification=True,
                pre_buffer=False,
                thrift_string_size_limit=_MAX_FOOTER_STRING,
                thrift_container_size_limit=_MAX_FOOTER_LIST,
            )
            self._check_schema()
            if len(self._groups) != self._file.metadata.num_row_groups:
                raise FormatError("the footer is damaged: its row groups cannot be counted")
            source.release()
        counts = np.array([group.num_rows for group in self._groups], np.int64)
        self._starts = np.concatenate([np.zeros(1, np.int64), np.cumsum(counts)])

    @property
    def num_rows(self) -> int:
        return int(self._starts[-1])

    @property
    def metadata(self) -> dict[str, bytes]:
        """Our own entries of the file's key-value metadata."""
        stored = self._file.metadata.metadata or {}
        prefix = METADATA_PREFIX.encode()
        return {
            key.removeprefix(prefix).decode("latin1"): value for key, value in stored.items() if key.startswith(prefix)
        }

    def read(self, rows: Sequence[int]) -> list[Pack]:
        groups = (np.searchsorted(self._starts, np.asarray(rows, np.int64), side="right") - 1).tolist()
        packs: list[Pack | None] = [None] * len(rows)
        # Group by group, so that no more than one need be in memory for any order of rows.
        for group, positions in itertools.groupby(sorted(range(len(rows)), key=groups.__getitem__), groups.__getitem__):
            columns = self._group(group)
            (ids, tokens), (mask, bits), (starts, sequences) = ((one.values, one.offsets.data) for one in columns)
            first = int(self._starts[group])
            if len(self._own_columns) < len(FIELDS):
                for position in positions:
                    row = rows[position] - first
                    packs[position] = Pack(
                        ids[tokens[row] : tokens[row + 1]].copy(),
                        mask[bits[row] : bits[row + 1]].copy(),
                        starts[sequences[row] : sequences[row + 1]].copy(),
                    )
                continue
            for position in positions:
                row = rows[position] - first
                # Copies: a view would keep the whole row group in memory for as long as the pack lives.
                packs[position] = make_pack(
                    ids[tokens[row] : tokens[row + 1]].astype(_INT32),
                    mask[bits[row] : bits[row + 1]].astype(_UINT8),
                    starts[sequences[row] : sequences[row + 1]].astype(_INT32),
                )
        return [pack for pack in packs if pack is not None]

    def lengths(self) -> Iterator[tuple[Int64Array, npt.NDArray[Any], npt.NDArray[Any]]]:
        """For each row group: tokens of each row, and values and offsets of seq_start_id; reads no token."""
        for group in range(len(self._starts) - 1):
            mask, starts = self._columns(group, ("loss_mask", "seq_start_id"))
            yield np.diff(mask.offsets).astype(np.int64), starts.values, starts.offsets

    def read_row(self, row: int) -> Pack:
        return self.read((row,))[0]

    def where(self, row: int) -> str:
        group = int(np.searchsorted(self._starts, row, side="right")) - 1
        return f"{self._path}, row group {group:,}, row {row - int(self._starts[group]):,}"

    def close(self) -> None:
        self._cache.clear()
        if self._file is not None:
            self._file.close()
        if self._source is not None:
            self._source.close()

    def _group(self, group: int) -> tuple[_Column, _Column, _Column]:
        cached = self._cache.get(group)
        if cached is not None:
            self._cache.move_to_end(group)
            return cached
        ids, mask, starts = self._columns(group, FIELDS)
        columns = (ids, mask, starts)
        self._cache[group] = columns
        self._cached_bytes += _num_bytes(columns)
        while self._cached_bytes > CACHE_BYTES and len(self._cache) > 1:
            self._cached_bytes -= _num_bytes(self._cache.popitem(last=False)[1])
        return columns

    def _columns(self, group: int, names: Sequence[str]) -> list[_Column]:
        rows = int(self._starts[group + 1] - self._starts[group])
        assert self._source is not None
        with self._explained(f"row group {group:,}"):
            pages = self._read_pages(group, rows, names)
            known: _Levels = {}
            columns = {name: self._decode(group, rows, name, pages[name], known) for name in names}
            others = [name for name, column in columns.items() if column is None]
            if others:
                table = self._file.read_row_group(group, columns=others, use_threads=False)
                if table.num_rows != rows:
                    raise FormatError(f"row group {group:,} holds {table.num_rows:,} rows, its footer says {rows:,}")
                columns |= {name: _column_of(table.column(name), name) for name in others}
            self._source.release()
            return [column for column in columns.values() if column is not None]

    def _read_pages(self, group: int, rows: int, names: Sequence[str]) -> dict[str, list[Page]]:
        """Pages of the columns, or an error where they would take more memory than their rows can honestly need."""
        chunks = self._groups[group].chunks
        if not set(FIELDS) <= chunks.keys():
            raise FormatError("the footer is damaged: a column has no data")
        limit = count_limit(rows, chunks["input_ids"], self._pack_size)
        wanted = [chunks[name] for name in names]
        source = self._source
        assert source is not None
        for chunk in wanted:
            check_extent(source, chunk, limit)
        source.fetch(min(one.start for one in wanted), max(one.start + one.num_bytes for one in wanted))
        return {chunk.column: read_pages(source, chunk, limit) for chunk in wanted}

    def _decode(self, group: int, rows: int, name: str, pages: Sequence[Page], known: _Levels) -> _Column | None:
        """A column in the layout that we write, None for another."""
        chunk = self._groups[group].chunks[name]
        if name not in self._own_columns or chunk.codec != ZSTD:
            return None
        assert self._source is not None
        data = memoryview(self._source.read_at(chunk.start, chunk.num_bytes))
        found = decode_pages(data, chunk, pages, self._codec, self._own_columns[name], known, check=self.checks_pages)
        return None if found is None or found[1].shape[0] != rows + 1 else _Column(*found)

    def _check_schema(self) -> None:
        num_columns = self._file.metadata.num_columns
        if num_columns > _MAX_COLUMNS:
            raise FormatError(f"has {num_columns:,} columns, expected {len(FIELDS)}", where=str(self._path))
        schema = self._file.schema_arrow
        for name in FIELDS:
            if schema.get_field_index(name) < 0:
                raise FormatError(
                    f"lacks the column {name}; it has {', '.join(schema.names[:8])}",
                    where=str(self._path),
                    fix="a packed dataset has the list columns input_ids, loss_mask and seq_start_id",
                )
            field = schema.field(name)
            kind = field.type
            if not (pa.types.is_list(kind) or pa.types.is_large_list(kind)) or not pa.types.is_integer(kind.value_type):
                raise FormatError(
                    f"has the column {name} of type {kind}, expected a list of integers", where=str(self._path)
                )
            if field.equals(SCHEMA.field(name)):
                self._own_columns[name] = kind.value_type.to_pandas_dtype()

    @contextlib.contextmanager
    def _explained(self, part: str) -> Iterator[None]:
        try:
            yield
        except FormatError as error:
            raise FormatError(
                error.what, where=error.where or f"{self._path}, {part}", fix=error.fix or _COPY_AGAIN
            ) from None
        except OSError as error:
            # Arrow raises it without a number for what it cannot decode; the system gives one.
            if error.errno is not None:
                raise
            raise self._damaged(str(error), part) from None
        except (pa.ArrowException, ValueError, MemoryError) as error:
            raise self._damaged(str(error), part) from None

    def _damaged(self, message: str, part: str) -> FormatError:
        first = message.splitlines()[0][:200] if message else "no reason given"
        return FormatError(
            f"damaged or not a Parquet file: {first}",
            where=f"{self._path}, {part}",
            fix=_COPY_AGAIN,
        )


def _num_bytes(columns: tuple[_Column, ...]) -> int:
    return sum(column.values.nbytes + column.offsets.nbytes for column in columns)


def _column_of(column: Any, name: str) -> _Column:
    """Numpy views of an Arrow list column's buffers."""
    chunks = [chunk for chunk in column.chunks if len(chunk)]
    if len(chunks) != 1:
        chunks = [pa.concat_arrays(chunks)] if chunks else [pa.array([], column.type)]
    array = chunks[0]
    if array.null_count or array.values.null_count:
        raise FormatError(f"has missing values in {name}")
    offsets = array.offsets.to_numpy()
    values = array.values.to_numpy(zero_copy_only=True)
    return _Column(values, offsets)
