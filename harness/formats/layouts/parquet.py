"""`parquet`: lists of tokens, masks and starts, zstd, page checksums. A file on its own holds its manifest and index.

`parquet_packs` writes files and reads single packs of them. Files of other tools and earlier versions are read by row
groups: one is decoded at once and a few are kept, because the loader's order stays within few groups at a time.

`parquet_pages` refuses files that claim more memory than they can hold data for.
"""

from __future__ import annotations

import base64
import contextlib
import itertools
import zlib
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.parquet as pq

from harness.errors import FormatError
from harness.formats.base import FIELDS, Format, PackPart, ShardReader, find_files
from harness.formats.index import IndexPart, dataset_fingerprint, lengths_from_starts
from harness.formats.layouts.parquet_packs import METADATA_PREFIX, ParquetWriter, find_table, read_packs
from harness.formats.layouts.parquet_pages import check_totals, fetch_columns, read_footer, read_row_groups
from harness.formats.manifest import Manifest
from harness.records import Pack
from harness.storage import Place
from harness.storage.inputs import open_source

SCHEMA = pa.schema(
    [
        pa.field(name, pa.list_(pa.field("element", kind, nullable=False)), nullable=False)
        for name, kind in zip(FIELDS, (pa.int32(), pa.uint8(), pa.int32()), strict=True)
    ]
)
CACHE_BYTES = 64 << 20

# Limits on a footer, because thrift allocates what the footer claims.
_MAX_FOOTER_STRING = 1 << 30
_MAX_FOOTER_LIST = 1 << 20
_COLUMNS = "a packed dataset requires the list columns input_ids, loss_mask and seq_start_id"
_MAX_COLUMNS = 64
_UNREADABLE = (FormatError, OSError, pa.ArrowException, ValueError, MemoryError)
# The end of a remote file that is read at once: most footers fit.
_TAIL_BYTES = 1 << 16


class _Column(NamedTuple):
    """A list column of one row group: its values, and where each row begins."""

    values: npt.NDArray[Any]
    offsets: npt.NDArray[Any]


class ParquetShard(ShardReader):
    """One open file and its last few decoded row groups; `pack_size` bounds the memory that it can claim."""

    def __init__(self, place: Place, pack_size: int | None = None) -> None:
        self._place = place
        self._pack_size = pack_size
        self._cache: OrderedDict[int, list[_Column]] = OrderedDict()
        self._file: Any = None
        with self._explained("the footer"):
            self._source = open_source(place)
            self._table = find_table(self._source)
        if self._table is None:
            self._open_footer()
        else:  # which is all that reading packs takes
            self.num_packs = self._table.num_packs

    def _open_footer(self) -> None:
        if self._file is not None:
            return
        source = self._source
        with self._explained("the footer"):
            source.fetch(max(0, source.num_bytes - _TAIL_BYTES), source.num_bytes)
            self._groups = read_row_groups(source)
            self._file = pq.ParquetFile(
                source.for_arrow(),
                page_checksum_verification=True,
                pre_buffer=False,
                thrift_string_size_limit=_MAX_FOOTER_STRING,
                thrift_container_size_limit=_MAX_FOOTER_LIST,
            )
            # As every shard of ours has them.
            self._has_own_types = self._check_schema()
            if len(self._groups) != self._file.metadata.num_row_groups:
                raise FormatError("the footer is damaged: its row groups cannot be counted")
            source.release()
            counts = np.array([group.num_rows for group in self._groups], np.int64)
            self._starts = np.concatenate([np.zeros(1, np.int64), np.cumsum(counts)])
            self.num_packs = int(self._starts[-1])
            if self._table is not None and self._table.num_packs != self.num_packs:
                raise FormatError(f"the footer is damaged: its table of pages lists {self._table.num_packs:,} packs")

    def read(self, rows: Sequence[int], parts: Sequence[PackPart] = ()) -> list[tuple[Pack, int | None]]:
        if self._table is None:
            return [(pack, None) for pack in self._read_groups(rows)]
        packs: list[tuple[Pack, int | None]] = []
        try:
            for pack in read_packs(self._source, self._table, rows, self._pack_size, parts):
                packs.append(pack)
        except _UNREADABLE as error:
            # Of the first row if pages cannot be read, because they are read together.
            raise self._explain(error, self.where(rows[len(packs)])) from None
        return packs

    def _read_groups(self, rows: Sequence[int]) -> list[Pack]:
        groups = (np.searchsorted(self._starts, np.asarray(rows, np.int64), side="right") - 1).tolist()
        # Copies: a view would keep the whole row group in memory for as long as the pack lives.
        packs: list[Pack | None] = [None] * len(rows)
        # Group by group, so that no more than one need be in memory for any order of rows.
        for group, positions in itertools.groupby(sorted(range(len(rows)), key=groups.__getitem__), groups.__getitem__):
            columns = self._group(group)
            (ids, tokens), (mask, bits), (starts, sequences) = ((values, offsets.data) for values, offsets in columns)
            first = int(self._starts[group])
            for position in positions:
                row = rows[position] - first
                packs[position] = Pack(
                    ids[tokens[row] : tokens[row + 1]].copy(),
                    mask[bits[row] : bits[row + 1]].copy(),
                    starts[sequences[row] : sequences[row + 1]].copy(),
                )
        return [pack for pack in packs if pack is not None]

    def read_row(self, row: int) -> Pack:
        return self.read((row,))[0][0]

    def contents(self) -> IndexPart:
        self._open_footer()
        with self._explained("the footer"):
            check_totals(self._groups, self._source.num_bytes)
        stored = self._file.metadata.metadata or {}
        own = {name: value for name, value in stored.items() if name.startswith(METADATA_PREFIX.encode())}
        # A footer has no checksum: where its metadata is not found, their names are still in its bytes.
        if own or METADATA_PREFIX.encode() in read_footer(self._source):
            manifest, index = (own.pop(f"{METADATA_PREFIX}{name}".encode(), None) for name in ("manifest", "index"))
            if manifest is None or index is None or own:
                what = "the dataset metadata of this file is damaged: the manifest or the index is missing"
                raise FormatError(what, where=str(self._place), fix="copy the file again")
            return self._own_contents(manifest, index)
        counts, lengths = [np.zeros(0, np.int64)], [np.zeros(0, np.int32)]
        for group in range(len(self._groups)):
            # Without input_ids: masks have the same lengths.
            mask, starts = self._columns(group, ("loss_mask", "seq_start_id"))
            counts.append(np.diff(starts.offsets).astype(np.int64))
            num_tokens, first = np.diff(mask.offsets).astype(np.int64), int(self._starts[group])
            lengths.append(
                lengths_from_starts(num_tokens, starts.values, starts.offsets, where=str(self._place), first_row=first)
            )
        return IndexPart(np.concatenate(counts), np.concatenate(lengths))

    def _own_contents(self, text: bytes, index: bytes) -> IndexPart:
        manifest = Manifest.from_json(text.decode("utf-8", "replace"), where=f"{self._place}, metadata")
        num_packs, num_sequences = manifest.num_packs, manifest.num_sequences
        # Counts beyond those of the footer, which were checked, could expand the index to any size.
        most = sum(group.chunks["seq_start_id"].num_values for group in self._groups if "seq_start_id" in group.chunks)
        if num_packs != self.num_packs or num_sequences > most:
            what = f"contains {self.num_packs:,} packs (manifest: {num_packs:,}), or other numbers of sequences"
            raise FormatError(what, where=str(self._place), fix="copy the file again")
        size = 16 + 12 * num_packs + 4 * num_sequences
        try:
            data = zlib.decompressobj().decompress(base64.b64decode(index, validate=True), size + 1)
            # Both counts come first.
            part = IndexPart.from_bytes(data[16:], num_packs, num_sequences)
            counts, lengths = part.sequence_counts, part.sequence_lengths
            if min(counts.min(), lengths.min()) < 1 or counts.sum(dtype=np.int64) != num_sequences:
                raise ValueError("its counts and lengths do not match")
            if dataset_fingerprint([part.checksums]) != manifest.fingerprint:
                raise ValueError("its checksums do not match the fingerprint in the manifest")
        except (ValueError, zlib.error) as error:
            raise FormatError(f"the index in the metadata is damaged: {error}", where=str(self._place)) from None
        return replace(part, pack_size=manifest.pack_size, manifest=manifest)

    def where(self, row: int) -> str:
        if self._table is not None:
            group, inside = divmod(row, self._table.rows_per_group)
        else:
            group = int(np.searchsorted(self._starts, row, side="right")) - 1
            inside = row - int(self._starts[group])
        return f"{self._place}, row group {group:,}, row {inside:,}"

    def close(self) -> None:
        self._cache.clear()
        if self._file is not None:
            self._file.close()
        self._source.close()

    def _group(self, group: int) -> list[_Column]:
        if group not in self._cache:
            self._cache[group] = self._columns(group, FIELDS)
            sizes = [sum(array.nbytes for column in columns for array in column) for columns in self._cache.values()]
            while len(sizes) > 1 and sum(sizes) > CACHE_BYTES:
                self._cache.popitem(last=False)
                del sizes[0]
        self._cache.move_to_end(group)
        return self._cache[group]

    def _columns(self, group: int, names: Sequence[str]) -> list[_Column]:
        rows = self._groups[group].num_rows
        with self._explained(f"row group {group:,}"):
            chunks = self._groups[group].chunks
            if not set(FIELDS) <= chunks.keys():
                raise FormatError("the footer is damaged: a column has no data")
            ids_bytes = chunks["input_ids"].num_bytes
            fetch_columns(self._source, [chunks[name] for name in names], rows, ids_bytes, self._pack_size)
            table = self._file.read_row_group(group, columns=list(names), use_threads=False)
            if table.num_rows != rows:
                raise FormatError(f"row group {group:,} contains {table.num_rows:,} rows, its footer lists {rows:,}")
            columns = [_column_of(table.column(name), name) for name in names]
            self._source.release()
            return columns

    def _check_schema(self) -> bool:
        """Raise FormatError unless our columns are lists of integers; returns whether they have our own types."""
        if (num_columns := self._file.metadata.num_columns) > _MAX_COLUMNS:
            raise FormatError(f"has {num_columns:,} columns, expected {len(FIELDS)}", fix=_COLUMNS)
        schema = self._file.schema_arrow
        for name in FIELDS:
            if schema.get_field_index(name) < 0:
                raise FormatError(f"has no column {name}, only {', '.join(schema.names[:8])}", fix=_COLUMNS)
            kind = schema.field(name).type
            if not (pa.types.is_list(kind) or pa.types.is_large_list(kind)) or not pa.types.is_integer(kind.value_type):
                raise FormatError(f"has the column {name} of type {kind}, expected a list of integers", fix=_COLUMNS)
        return all(schema.field(name).equals(SCHEMA.field(name)) for name in FIELDS)

    @contextlib.contextmanager
    def _explained(self, part: str) -> Iterator[None]:
        try:
            yield
        except _UNREADABLE as error:
            raise self._explain(error, f"{self._place}, {part}") from None

    def _explain(self, error: Exception, where: str) -> Exception:
        """Return the error of reading a part of the file as FormatError, unless it is one of the system."""
        if isinstance(error, FormatError):
            return FormatError(error.what, where=error.where or where, fix=error.fix)
        # Arrow raises OSError without a number for what it cannot decode; the system gives one.
        if isinstance(error, OSError) and error.errno is not None:
            return error
        first = str(error).splitlines()[0][:200] if str(error) else "no reason given"
        return FormatError(f"damaged or not a Parquet file: {first}", where=where)


def is_own(place: Place) -> bool:
    """Return whether a file is a shard of a dataset folder: of our types, and without any metadata of its own."""
    with contextlib.closing(ParquetShard(place)) as shard:
        shard._open_footer()
        return shard._has_own_types and not shard._file.metadata.metadata


def _column_of(column: Any, name: str) -> _Column:
    """Return numpy views of an Arrow list column's buffers."""
    # Combining copies even a single chunk.
    array = column.chunk(0) if column.num_chunks == 1 else column.combine_chunks()
    if array.null_count or array.values.null_count:
        raise FormatError(f"has missing values in {name}")
    return _Column(array.values.to_numpy(zero_copy_only=True), array.offsets.to_numpy())


SUFFIX = ".parquet"
SUFFIXES = (SUFFIX, ".pq")


FORMAT = Format(
    name="parquet",
    shard_template=f"shard_{{:06d}}{SUFFIX}",
    suffixes=SUFFIXES,
    files_per_shard=2,
    write_shard=ParquetWriter,
    open_shard=ParquetShard,
    find_bare=partial(find_files, suffixes=SUFFIXES),
    is_own=is_own,
    has_checksums=True,
    single_file_suffix=SUFFIX,
    in_buckets=True,
)
