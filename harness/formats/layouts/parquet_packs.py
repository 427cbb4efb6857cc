"""Parquet files with one page per pack and column, and a table of where these pages are.

A rank trains single packs that are spread over the row groups of a file. It reads their pages alone, through the table
of pages between the last row group and the footer: int64 [packs + row groups, 3], the first byte of each page, and
after each row group the ends of its columns. The footer names the table in the field that Parquet reserves for
extensions; other tools skip both.

The bytes of ids and masks are split (BYTE_STREAM_SPLIT), and pages compressed with zstd. The first bytes of ids have a
zstd frame of their own: measured on text, this saves 4% of a page that holds one pack.

The ids of a long pack are compressed in segments, so that a rank reads those of its sequences, or of its chunks of
them, alone. A frame that zstd skips ends the page: the size of each frame, the digest of each segment, and that of all
ids, which the pack's checksum covers. A page that was rewritten with other segments shows only where it is read whole.
"""

from __future__ import annotations

import base64
import itertools
import re
import struct
import zlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import xxhash

from harness.errors import FormatError
from harness.formats.base import FIELDS, PackPart, ShardWriter, make_pack
from harness.formats.layouts.parquet_pages import Long, byte_limit, count_limit, encode_number, encode_struct
from harness.records import Int32Array, Int64Array, Pack, UInt64Array
from harness.storage import Folder
from harness.storage.files import OutputFile
from harness.storage.inputs import ByteSource, read_ranges

METADATA_PREFIX = "harness."
_MAGIC = b"PAR1"
# Each level takes a tenth more time than the one before and saves half a percent.
_CODEC = pa.Codec("zstd", compression_level=3)
_PLANES = 4  # bytes of an INT32, which Parquet stores small integers as
_MAX_TOKENS = 1 << 28  # the size of a page is an int32
# Tokens of a segment, and the planes that it has: the fourth is zero, or the page has no segments. Measured on text,
# segments of 4,096 take 4% more bytes than none, those of 2,048 8%.
SEGMENT_TOKENS, _SEGMENT_PLANES = 4096, 3
# Packs up to this size have none, because they are read whole.
_WHOLE_TOKENS = 8192
_SKIPPED = struct.Struct("<2I")  # the mark of a frame that zstd skips, and its size
_SKIP_MARK = 0x184D2A50
_ENTRY = struct.Struct("<3q")
# The extension of the footer: a mark, the numbers of a PageTable, and their hash.
_EXTENSION, _EXTENSION_FIELD, _MARK = struct.Struct("<8s24sQ"), 32767, b"harnpage"
_TAIL_BYTES = _EXTENSION.size + 9
# Numbers of the format's enumerations.
_INT32, _UINT8, _LIST, _ZSTD, _REPEATED, _PLAIN, _RLE, _BYTE_STREAM_SPLIT = 1, 11, 3, 6, 2, 0, 3, 9
_ENCODINGS = dict(zip(FIELDS, (_BYTE_STREAM_SPLIT, _BYTE_STREAM_SPLIT, _PLAIN), strict=True))
# The header of a page of one row in Thrift's compact protocol. Its numbers: size without compression, size, checksum;
# values, encoding, and sizes of the levels of definition and repetition.
_HEADER = b"\x15\x06\x15%b\x15%b\x15%b\x4c\x15%b\x15\x00\x15\x02\x15%b\x15%b\x15%b\x11\x00\x00"
_VARINT = rb"[\x80-\xff]{0,4}[\x00-\x7f]"
_PARSER = re.compile(_HEADER % (_VARINT, _VARINT, *[b"(%b)" % _VARINT] * 2, _VARINT, b"(.)", b"(.)"), re.DOTALL)


class ParquetWriter(ShardWriter[OutputFile]):
    """Compresses pages of packs, and writes them one row group at a time."""

    def __init__(self, folder: Folder, name: str, _pack_size: int, rows_per_group: int) -> None:
        super().__init__([name], [folder.create_file(name)])
        self._rows_per_group = rows_per_group
        self._columns: list[list[tuple[bytes, int, int]]] = [[] for _ in FIELDS]
        self._groups: list[dict[int, Any]] = []
        self._entries: list[bytes] = []
        self._num_packs = self._position = 0
        self._write(_MAGIC)

    def append(self, pack: Pack) -> None:
        if len(pack) > _MAX_TOKENS:
            what = f"has {len(pack):,} tokens, but a page of Parquet contains at most {_MAX_TOKENS:,}"
            raise FormatError(what, fix="prepare smaller packs, or write memmap")
        for column, name in zip(self._columns, FIELDS, strict=True):
            column.append(_encode_page(name, getattr(pack, name)))
        self._num_packs += 1
        if len(self._columns[0]) == self._rows_per_group:
            self._flush()

    def finish(self, metadata: Mapping[str, bytes], /) -> list[str]:
        self._flush()
        numbers = _ENTRY.pack(self._position, self._num_packs, self._rows_per_group)
        self._write(b"".join(self._entries))
        # Metadata is text to other tools; the manifest is text already.
        texts = {
            key: value if key == "manifest" else base64.b64encode(zlib.compress(value, 1))
            for key, value in metadata.items()
        }
        pairs = [{1: (METADATA_PREFIX + key).encode(), 2: text} for key, text in texts.items()]
        footer = {1: 2, 2: _schema(), 3: Long(self._num_packs), 4: self._groups} | ({5: pairs} if pairs else {})
        extension = _EXTENSION.pack(_MARK, numbers, xxhash.xxh3_64_intdigest(numbers))
        encoded = encode_struct({**footer, 6: b"harness version 1", _EXTENSION_FIELD: extension})
        self._write(encoded + len(encoded).to_bytes(4, "little") + _MAGIC)
        return super().finish(metadata)

    def _write(self, data: bytes) -> None:
        self._files[0].write(data)
        self._position += len(data)

    def _flush(self) -> None:
        rows = len(self._columns[0])
        if not rows:
            return
        entries, chunks, raw_bytes = np.zeros((rows + 1, len(FIELDS)), "<i8"), [], 0
        for number, (name, pages) in enumerate(zip(FIELDS, self._columns, strict=True)):
            start, (data, sizes, counts) = self._position, zip(*pages, strict=True)
            entries[:, number] = start + np.cumsum([0, *map(len, data)])
            self._write(b"".join(data))
            column = {1: _INT32, 2: [_RLE, _ENCODINGS[name]], 3: [name.encode(), b"list", b"element"], 4: _ZSTD}
            column |= {5: Long(sum(counts)), 6: Long(sum(sizes)), 7: Long(self._position - start), 9: Long(start)}
            chunks.append({2: Long(0), 3: column})
            raw_bytes += sum(sizes)
            pages.clear()
        self._groups.append({1: chunks, 2: Long(raw_bytes), 3: Long(rows)})
        self._entries.append(entries.tobytes())


def _encode_page(name: str, values: npt.NDArray[Any]) -> tuple[bytes, int, int]:
    """Return the page of one row of a column, its size without compression, and the number of its values."""
    count = values.shape[0]
    data = np.ascontiguousarray(values).view(np.uint8).reshape(count, -1)
    if _ENCODINGS[name] == _BYTE_STREAM_SPLIT:
        planes, data = data.T, np.zeros((_PLANES, count), np.uint8)
        # Measured: a seventh of the time of copying the transposed array at once.
        for number, plane in enumerate(planes):
            data[number] = plane
    # Levels of a list: its first value begins a row, the others continue it, and all of them exist.
    # A run begins with its length, doubled as `encode_number` doubles what is not negative.
    repetition = b"\2\0" + (encode_number(count - 1) + b"\1" if count > 1 else b"")
    definition = encode_number(count) + b"\1"
    parts = (data[:1], data[1:]) if name == "input_ids" else (data,)
    is_long = name == "input_ids" and count > _WHOLE_TOKENS and not data[_SEGMENT_PLANES:].any()
    frames = _encode_segments(values, data) if is_long else [_CODEC.compress(part, asbytes=True) for part in parts]
    body = b"".join([repetition, definition, *frames])
    raw_bytes, checksum = len(repetition + definition) + data.nbytes, zlib.crc32(body)
    signed = checksum - (checksum >> 31 << 32)
    numbers = (raw_bytes, len(body), signed, count, _ENCODINGS[name], len(definition), len(repetition))
    header = _HEADER % tuple(map(encode_number, numbers))
    return header + body, len(header) + raw_bytes, count


def _encode_segments(values: npt.NDArray[Any], data: npt.NDArray[np.uint8]) -> list[bytes]:
    """Return the frames of the planes of ids, each segment by segment, and the one that lists them."""
    ids, starts = np.ascontiguousarray(values, "<i4"), range(0, len(values), SEGMENT_TOKENS)
    parts = [plane[start : start + SEGMENT_TOKENS] for plane in data[:_SEGMENT_PLANES] for start in starts]
    frames = [_CODEC.compress(part, asbytes=True) for part in [*parts, data[_SEGMENT_PLANES:]]]
    digests = [xxhash.xxh3_64_intdigest(ids[start : start + SEGMENT_TOKENS].data) for start in starts]
    numbers = np.array([xxhash.xxh3_64_intdigest(ids.data), *digests], "<u8").tobytes()
    numbers += np.array([*map(len, frames)], "<u4").tobytes()
    numbers += xxhash.xxh3_64_digest(numbers)
    return [*frames, _SKIPPED.pack(_SKIP_MARK, len(numbers)) + numbers]


def _schema() -> list[dict[int, Any]]:
    elements: list[dict[int, Any]] = [{4: b"schema", 5: len(FIELDS)}]
    for name in FIELDS:
        elements.append({3: 0, 4: name.encode(), 5: 1, 6: _LIST})
        elements.append({3: _REPEATED, 4: b"list", 5: 1})
        elements.append({1: _INT32, 3: 0, 4: b"element"} | ({6: _UINT8} if name == "loss_mask" else {}))
    return elements


class PageTable(NamedTuple):
    """The table of pages of a file: its first byte, the packs of the file, and the packs of a row group."""

    start: int
    num_packs: int
    rows_per_group: int

    def locate(self, row: int) -> tuple[int, int]:
        """Return the range of bytes of a row's entry and of the next one, which has the ends of its pages."""
        start = self.start + _ENTRY.size * (row + row // self.rows_per_group)
        return start, start + 2 * _ENTRY.size


def find_table(source: ByteSource) -> PageTable | None:
    """Return the table of pages of a file; None for files without one, as other tools write them."""
    tail = source.read_at(max(0, source.num_bytes - _TAIL_BYTES), _TAIL_BYTES)
    if not tail.startswith(_MARK) or not tail.endswith(_MAGIC) or len(tail) < _TAIL_BYTES:
        return None
    _, numbers, digest = _EXTENSION.unpack_from(tail)
    table = PageTable(*_ENTRY.unpack(numbers))
    num_entries = table.num_packs - (-table.num_packs // max(1, table.rows_per_group))
    footer_start = source.num_bytes - 8 - int.from_bytes(tail[-8:-4], "little")
    is_whole = digest == xxhash.xxh3_64_intdigest(numbers) and table.num_packs >= 0 and table.rows_per_group > 0
    if not is_whole or table.start + _ENTRY.size * num_entries != footer_start:
        raise FormatError("the footer is damaged: the table of pages is not where it says", fix="copy the file again")
    return table


def read_packs(
    source: ByteSource, table: PageTable, rows: Sequence[int], pack_size: int | None, parts: Sequence[PackPart] = ()
) -> Iterator[tuple[Pack, int | None]]:
    """Read the pages of packs together, and yield the packs in the order of `rows`, as `ShardReader.read` does.

    FormatError if a page is damaged, lies outside the file, or is larger than packs of `pack_size` tokens can have, and
    OSError, as of Arrow, for values that cannot be decompressed.
    """
    most = byte_limit(count_limit(1, table.start, pack_size))
    pages: list[list[tuple[int, int]]] = []
    for entries in read_ranges(source, [table.locate(row) for row in rows]):
        ends = _ENTRY.unpack_from(entries, _ENTRY.size)
        pages.append([*zip(_ENTRY.unpack_from(entries), ends, strict=True)])
        for start, end in pages[-1]:
            if not 0 <= start < end <= min(table.start, start + most):
                raise FormatError(f"a page is listed at bytes {start:,} to {end:,}", fix="copy the file again")
    segments = _find_segments(source, [ids for ids, _, _ in pages], parts)
    for number, found in segments.items():
        pages[number][:1] = found.frames
    blocks = iter(read_ranges(source, [one for ranges in pages for one in ranges]))
    for number, ranges in enumerate(pages):
        yield _decode_pack([*itertools.islice(blocks, len(ranges))], pack_size, segments.get(number))


class _Segments(NamedTuple):
    """The segments of a page that are read: their numbers, digests of their ids, and places in the file, by planes.

    `digest` is that of all ids of the pack, and `page_bytes` the size of the page.
    """

    part: PackPart
    numbers: Int64Array
    digests: UInt64Array
    digest: int
    page_bytes: int
    frames: list[tuple[int, int]]


def _find_segments(
    source: ByteSource, pages: Sequence[tuple[int, int]], parts: Sequence[PackPart]
) -> dict[int, _Segments]:
    """Return the segments to read, by the number of the page of ids; the others are read whole."""
    lists: dict[int, tuple[int, int]] = {}
    for number, part in enumerate(parts):
        (start, end), count = pages[number], -(-part.num_tokens // SEGMENT_TOKENS)
        size = _SKIPPED.size + 8 * (count + 2) + 4 * (count * _SEGMENT_PLANES + 1)
        unread = 1 - part.segments(SEGMENT_TOKENS).shape[0] / count
        if end - start > size and unread * (end - start) > max(size, source.least_skipped_bytes):
            lists[number] = end - size, end
    found = {}
    for (number, (start, _)), data in zip(lists.items(), read_ranges(source, [*lists.values()]), strict=True):
        if _SKIPPED.unpack_from(data) != (_SKIP_MARK, len(data) - _SKIPPED.size):
            continue  # of a file without segments or with longer ones, or of ids that have no such zeros
        if xxhash.xxh3_64_digest(data[_SKIPPED.size : -8]) != data[-8:]:
            raise FormatError("the list of the segments of a page does not match its checksum")
        chosen, count = parts[number].segments(SEGMENT_TOKENS), -(-parts[number].num_tokens // SEGMENT_TOKENS)
        digests = np.frombuffer(data, "<u8", count + 1, _SKIPPED.size)
        sizes = np.frombuffer(data[_SKIPPED.size + digests.nbytes : -8], "<u4").astype(np.int64)
        ends = start - np.cumsum(sizes[::-1])[::-1] + sizes
        places = (np.arange(_SEGMENT_PLANES)[:, None] * count + chosen).ravel()
        frames = [*zip((ends - sizes)[places].tolist(), ends[places].tolist(), strict=True)]
        if ends[0] - sizes[0] < pages[number][0]:
            raise FormatError("the list of the segments of a page lists more than the page", fix="copy the file again")
        size = pages[number][1] - pages[number][0]
        found[number] = _Segments(parts[number], chosen, digests[1:][chosen], int(digests[0]), size, frames)
    return found


def _decode_pack(
    pages: Sequence[memoryview], pack_size: int | None, segments: _Segments | None
) -> tuple[Pack, int | None]:
    """Return the pack of its pages: those of ids, or the frames of some segments, mask and starts."""
    frames, counts = [], []
    for page in pages if segments is None else pages[-2:]:
        header = _PARSER.match(page)
        if header is None:
            raise FormatError("a page header is damaged")
        checksum, count, definition, repetition = header.groups()
        body = page[header.end() :]
        if zlib.crc32(body) != _parse_zigzag(checksum) & 0xFFFFFFFF:
            raise FormatError("a page does not match its checksum")
        frames.append(body[(definition[0] + repetition[0]) >> 1 :])
        counts.append(_parse_zigzag(count))
    num_flags, num_starts = counts[-2:]
    num_tokens = counts[0] if segments is None else segments.part.num_tokens
    page_bytes = len(pages[0]) if segments is None else segments.page_bytes
    if not 0 < num_starts <= num_tokens == num_flags <= count_limit(1, page_bytes, pack_size):
        raise FormatError(f"pages claim {num_tokens:,} ids, {num_flags:,} mask entries and {num_starts:,} starts")
    # One call for all pages, because each sets up a decoder.
    raw = np.frombuffer(_CODEC.decompress(b"".join(frames), _PLANES * sum(counts)), np.uint8)
    starts = _PLANES * (sum(counts) - num_starts)
    mask = starts - _PLANES * num_tokens
    flags = raw[mask : mask + num_tokens].copy()
    if segments is None:
        ids, digest = np.empty((num_tokens, _PLANES), np.uint8), None
        for number, plane in enumerate(raw[:mask].reshape(_PLANES, -1)):  # first the lowest byte of every value
            ids[:, number] = plane
        values = ids.view("<i4").reshape(-1)
    else:
        values, digest = _decode_segments(pages[:-2], segments), segments.digest
    return make_pack(values, flags, raw[starts:].copy().view("<i4")), digest


def _decode_segments(frames: Sequence[memoryview], segments: _Segments) -> Int32Array:
    """Return the ids of a pack, int32 [tokens], with -1 in the segments that are not read."""
    num_tokens = segments.part.num_tokens
    starts, values = segments.numbers * SEGMENT_TOKENS, np.full(num_tokens, -1, "<i4")
    if not len(starts):
        return values
    places = np.concatenate([np.arange(start, min(start + SEGMENT_TOKENS, num_tokens)) for start in starts.tolist()])
    raw = np.frombuffer(_CODEC.decompress(b"".join(frames), _SEGMENT_PLANES * len(places)), np.uint8)
    ids = np.zeros((len(places), _PLANES), np.uint8)
    for number, plane in enumerate(raw.reshape(_SEGMENT_PLANES, -1)):
        ids[:, number] = plane
    values[places] = ids.view("<i4").reshape(-1)
    for start, digest in zip(starts.tolist(), segments.digests.tolist(), strict=True):
        if xxhash.xxh3_64_intdigest(values[start : start + SEGMENT_TOKENS].data) != digest:
            raise FormatError("a segment of a page does not match its checksum")
    return values


def _parse_zigzag(data: bytes) -> int:
    value = 0
    for byte in reversed(data):
        value = value << 7 | byte & 127
    return (value >> 1) ^ -(value & 1)
