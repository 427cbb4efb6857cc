"""Limits on the memory that a Parquet column chunk can claim, checked before it is decoded.

Arrow allocates what page headers claim, up to 2 GiB a page, and a few kilobytes of zstd can expand to that. The
headers are walked here (Thrift's compact protocol, as in `parquet.thrift` of the Parquet format) and compared with
what the column can honestly hold.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from harness.errors import FormatError
from harness.storage.inputs import ByteSource

# Values of a row group that are always decoded: 16 MiB of tokens, or 256 MiB where packs have a known size. The larger
# one is also what a file without a manifest may hold in total.
_FREE_VALUES = 1 << 22
_FREE_KNOWN_VALUES = 1 << 26
# A row group of 2,000 packs of 128 Ki tokens; more does not fit beside a model.
_MAX_VALUES = 1 << 28
# Token ids of real text take more than a byte each when compressed; more than this is made to fill the memory.
_VALUES_PER_BYTE = 16
# Eight bytes of value, and levels that can take up to two more.
_BYTES_PER_VALUE = 10
_SLACK_BYTES = 1 << 16
# Smallest and largest text of a page are in its header, of up to 4 KiB each.
_HEADER_BYTES = 1 << 14
_DICTIONARY_PAGE = 2
# Headers of data pages of version 1 and 2, and the field of each that has the encoding.
_DATA_HEADERS = {5: 2, 8: 4}
_DICTIONARY_ENCODINGS = (2, 8)


class Chunk(NamedTuple):
    """A column chunk as the footer describes it: its values, and where its pages are."""

    column: str
    num_values: int
    start: int
    num_bytes: int

    @property
    def end(self) -> int:
        return self.start + self.num_bytes


class Page(NamedTuple):
    """A page as its header describes it: `num_bytes` decompressed, `num_values` of a data page and 0 of a dictionary.

    With `is_coded` it refers to the dictionary, so that its values can be larger than it is.
    """

    num_bytes: int
    num_values: int
    is_dictionary: bool
    is_coded: bool


class RowGroup(NamedTuple):
    """A row group: its rows, and its column chunks by the name of their top-level column."""

    num_rows: int
    chunks: dict[str, Chunk]


def read_footer(source: ByteSource) -> bytes:
    """Return the bytes of the footer; raises FormatError if there is none."""
    num_bytes = source.num_bytes
    tail = source.read_at(max(0, num_bytes - 8), 8)
    length = int.from_bytes(tail[:4], "little")
    if tail[4:] != b"PAR1" or length > num_bytes - 12:
        raise FormatError("not a Parquet file, or truncated")
    return source.read_at(num_bytes - 8 - length, length)


def read_row_groups(source: ByteSource) -> list[RowGroup]:
    """Read the row groups from the footer without pyarrow, which crashes on some damage; raise FormatError for any."""
    groups = _Compact(read_footer(source)).struct(0).get(4, [])
    if not isinstance(groups, list):
        raise FormatError("the footer is damaged: it has no row groups")
    row_groups = []
    for group in groups:
        chunks = {}
        try:
            num_rows = int(group[3])
            for column in group[1]:
                metadata = column[3]
                starts = [metadata[field] for field in (9, 11) if field in metadata]
                name = metadata[3][0].decode("utf-8", "replace")
                chunks[name] = Chunk(name, int(metadata[5]), int(min(starts)), int(metadata[7]))
        except (KeyError, TypeError, ValueError, IndexError, AttributeError):
            raise FormatError("the footer is damaged: a column chunk lacks its numbers") from None
        # Each row has an entry in each column, even if its list is empty.
        if not 0 <= num_rows <= min((chunk.num_values for chunk in chunks.values()), default=0) < 1 << 48:
            raise FormatError(f"the footer is damaged: the columns of a row group do not have {num_rows:,} rows")
        row_groups.append(RowGroup(num_rows, chunks))
    return row_groups


def count_limit(rows: int, ids_bytes: int, pack_size: int | None) -> int:
    """Return the most values that a column of a row group may hold, given the compressed size of its ids.

    `pack_size`, tokens that no pack exceeds, allows more.
    """
    honest = _VALUES_PER_BYTE * ids_bytes
    if pack_size is not None:
        return min(rows * pack_size, max(_FREE_KNOWN_VALUES, honest))
    return min(_MAX_VALUES, max(_FREE_VALUES, honest))


def check_totals(row_groups: Sequence[RowGroup], num_bytes: int) -> None:
    """Raise FormatError for a file that claims more values in all its row groups than its size can honestly hold."""
    # Listing their lengths would take hours or fill the memory.
    most = max(_FREE_KNOWN_VALUES, _VALUES_PER_BYTE * num_bytes)
    totals: Counter[str] = Counter()
    for group in row_groups:
        for name, chunk in group.chunks.items():
            totals[name] += chunk.num_values
    name, total = max(totals.items(), key=lambda item: item[1], default=("", 0))
    if total > most:
        what = f"the column {name} claims {total:,} values in {num_bytes:,} bytes; at most {most:,} are plausible"
        raise FormatError(what)


def fetch_columns(
    source: ByteSource, chunks: Sequence[Chunk], rows: int, ids_bytes: int, pack_size: int | None
) -> None:
    """Fetch column chunks of a row group; FormatError for more memory than the rows of `count_limit` can need."""
    limit = count_limit(rows, ids_bytes, pack_size)
    most = byte_limit(limit)
    for chunk in chunks:
        column, start, end = f"the column {chunk.column}", chunk.start, chunk.end
        if not 0 <= chunk.num_values <= limit:
            raise FormatError(f"{column} claims {chunk.num_values:,} values, but at most {limit:,} fit")
        if start < 0 or end < start or end > source.num_bytes:
            raise FormatError(f"{column} is at bytes {start:,} to {end:,}, outside the file")
        if chunk.num_bytes > most:
            raise FormatError(f"{column} claims {chunk.num_bytes:,} bytes; at most {most:,} are plausible")
    source.fetch(min(chunk.start for chunk in chunks), max(chunk.end for chunk in chunks))
    for chunk in chunks:
        if (total := sum(page.num_bytes for page in read_pages(source, chunk))) > most:
            what = f"the column {chunk.column} claims pages of {total:,} bytes, but at most {most:,} are plausible"
            raise FormatError(what)


def read_pages(source: ByteSource, chunk: Chunk) -> Iterator[Page]:
    """Yield what the pages of a chunk claim; FormatError for a damaged header, or more values, which Arrow decodes."""
    position, total = chunk.start, 0
    while position < chunk.end:
        reader = _Compact(source.read_at(position, min(_HEADER_BYTES, chunk.end - position)))
        header = reader.struct(0)
        try:
            num_bytes, packed = int(header[2]), int(header[3])
            num_values, is_coded = 0, False
            for field, encoding in _DATA_HEADERS.items():
                num_values += int(header[field][1]) if field in header else 0
                is_coded |= field in header and header[field][encoding] in _DICTIONARY_ENCODINGS
            if min(num_bytes, packed, num_values) < 0:
                raise ValueError
        except (KeyError, TypeError, ValueError):
            raise FormatError("a page header is damaged: it has no sizes, or negative ones") from None
        total += num_values
        if total > chunk.num_values:
            what = f"pages of the column {chunk.column} contain {total:,} values, not {chunk.num_values:,}"
            raise FormatError(what, fix="copy the file again, or write it again")
        yield Page(num_bytes, num_values, header.get(1) == _DICTIONARY_PAGE, is_coded)
        position += reader.position + packed


def byte_limit(num_values: int) -> int:
    """Return the most bytes that a column of so many values may take."""
    return _BYTES_PER_VALUE * num_values + _SLACK_BYTES


_TRUE, _FALSE, _BYTE, _I16, _I32, _I64, _DOUBLE, _BINARY, _LIST, _SET, _MAP, _STRUCT = range(1, 13)
_MAX_DEPTH = 8


class Long(int):
    """A number of 64 bits; others have 32."""


_KINDS: dict[type, int] = {Long: _I64, int: _I32, bytes: _BINARY, list: _LIST, dict: _STRUCT}


def encode_struct(fields: Mapping[int, Any]) -> bytes:
    """Serialize values by field number, in rising order, in Thrift's compact protocol."""
    out, last = bytearray(), 0
    for number, value in fields.items():
        kind, delta = _KINDS[type(value)], number - last
        out += bytes([delta << 4 | kind]) if delta < 16 else bytes([kind]) + encode_varint(2 * number)
        out += _encode_value(value)
        last = number
    return bytes(out) + b"\0"


def _encode_value(value: Any) -> bytes:
    if isinstance(value, dict):
        return encode_struct(value)
    if isinstance(value, bytes):
        return encode_varint(len(value)) + value
    if isinstance(value, list):
        inner = _KINDS[type(value[0])]
        head = bytes([len(value) << 4 | inner]) if len(value) < 15 else bytes([0xF0 | inner])
        return head + b"".join([encode_varint(len(value)) * (len(value) > 14), *map(_encode_value, value)])
    return encode_number(value)


def encode_number(value: int) -> bytes:
    return encode_varint(2 * value if value >= 0 else -2 * value - 1)


def encode_varint(value: int) -> bytes:
    """Serialize a number from 0 on, seven bits a byte."""
    out = bytearray()
    while value > 127:
        out.append(value & 127 | 128)
        value >>= 7
    return bytes(out) + bytes([value])


class _Compact:
    """A parser of Thrift's compact protocol, as far as footers and page headers use it."""

    def __init__(self, data: bytes) -> None:
        self._data = data
        self.position = 0

    def struct(self, depth: int) -> dict[int, Any]:
        """Parse a struct to values by field number. Every value takes at least a byte of data, which bounds memory."""
        fields: dict[int, Any] = {}
        field = 0
        while byte := self._take(1)[0]:
            field, kind = field + (byte >> 4) if byte >> 4 else self._zigzag(), byte & 15
            fields[field] = kind == _TRUE if kind in (_TRUE, _FALSE) else self._value(kind, depth)
        return fields

    def _value(self, kind: int, depth: int) -> Any:
        if depth > _MAX_DEPTH:
            raise FormatError("Parquet metadata is damaged: structs are nested too deep")
        if kind in (_I16, _I32, _I64):
            return self._zigzag()
        if kind in (_BINARY, _DOUBLE):
            return self._take(8 if kind == _DOUBLE else self._varint())
        if kind in (_LIST, _SET):
            head = self._take(1)[0]
            count = self._varint() if head >> 4 == 15 else head >> 4
            if count > len(self._data) - self.position:
                raise FormatError(f"Parquet metadata is damaged: a list claims {count:,} entries")
            return [self._value(head & 15, depth + 1) for _ in range(count)]
        if kind == _STRUCT:
            return self.struct(depth + 1)
        if kind in (_TRUE, _FALSE, _BYTE):
            return self._take(1)[0]
        raise FormatError(f"Parquet metadata is damaged: unknown type {kind}")

    def _take(self, count: int) -> bytes:
        start, self.position = self.position, self.position + count
        if self.position > len(self._data):
            raise FormatError("Parquet metadata is damaged: it is truncated")
        return self._data[start : self.position]

    def _zigzag(self) -> int:
        value = self._varint()
        return (value >> 1) ^ -(value & 1)

    def _varint(self) -> int:
        value = 0
        for shift in range(0, 70, 7):
            byte = self._take(1)[0]
            value |= (byte & 127) << shift
            if byte < 128:
                return value
        raise FormatError("Parquet metadata is damaged: a number has no end")
