"""Decoding the pages that `parquet_writer` writes, several times faster than a general reader.

A general reader decodes a repetition and a definition level for each value, and widens masks to four bytes. Here the
levels are read by runs (a pack is two of them), and byte planes are put together by whole arrays. Whatever is not
exactly as expected is left to pyarrow, which then reads it or says what is wrong.

Source of the layouts: `Encodings.md` and `parquet.thrift` of the Parquet format (data page version 1, RLE hybrid
levels of bit width 1, PLAIN and BYTE_STREAM_SPLIT values).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from harness.formats.parquet.pages import Chunk, Page

try:
    # Several times as fast as zlib's, which takes a tenth of what reading a pack in the loader's order does.
    from isal.isal_zlib import crc32
except ImportError:
    from zlib import crc32

ZSTD = 6
_DATA_PAGE = 0
_PLAIN, _RLE, _BYTE_STREAM_SPLIT = 0, 3, 9
# Planes are combined a piece at a time that stays in the processor's cache.
_PIECE = 1 << 16
_ZEROS = tuple(tuple(bit for bit in range(8) if not byte >> bit & 1) for byte in range(256))


def decode_pages(
    data: memoryview,
    chunk: Chunk,
    pages: Sequence[Page],
    codec: Any,
    dtype: npt.DTypeLike,
    known: dict[tuple[bytes, int], npt.NDArray[np.int64] | None],
    *,
    check: bool = True,
) -> tuple[npt.NDArray[Any], npt.NDArray[np.int64]] | None:
    """Values of a column chunk, and where its rows begin.

    Args:
        data: the chunk's bytes.
        chunk: a list column, where neither lists nor elements can be missing, of 32-bit integers in zstd.
        pages: its pages, found to be of honest sizes.
        codec: pyarrow's, for zstd.
        dtype: int32, or uint8 where each value is below 256.
        known: levels that were decoded before, with their number; tokens and masks have the same.
        check: compare each page's checksum.

    Returns:
        values [values] and int64 [rows + 1]; None where the pages are of another layout or damaged. Values have the
        narrowest type that holds the bytes of their pages: widening happens when a row is copied out, for nothing.
    """
    values: list[npt.NDArray[Any]] = []
    begins, done = [], 0
    for page in pages:
        body = data[page.start - chunk.start :][: page.num_bytes]
        head = page.fields.get(5)
        if page.fields.get(1) != _DATA_PAGE or not isinstance(head, dict) or len(body) != page.num_bytes:
            return None
        count, encoding = head.get(1), head.get(2)
        if not isinstance(count, int) or not 0 < count <= chunk.num_values - done:
            return None
        if head.get(3) != _RLE or head.get(4) != _RLE:
            return None
        if check and page.fields.get(4, 0) & 0xFFFFFFFF != crc32(body):
            return None
        try:
            # Arrow's buffers are of signed bytes.
            raw = memoryview(codec.decompress(body, page.num_unpacked_bytes)).cast("B")
        except (OSError, ValueError):
            return None
        rows, definitions, rest = _split(raw)
        if len(rest) != 4 * count or not _is_one_run(definitions, count):
            return None
        if (rows, count) not in known:
            known[rows, count] = row_begins(rows, count)
        found, decoded = known[rows, count], _values_of(rest, encoding)
        if found is None or decoded is None or not np.can_cast(decoded.dtype, dtype):
            return None
        values.append(decoded)
        begins.append(found + done)
        done += count
    if done != chunk.num_values or not begins or not begins[0].shape[0] or begins[0][0] != 0:
        return None
    return np.concatenate(values) if len(values) > 1 else values[0], np.concatenate([*begins, np.array([done])])


def _split(raw: memoryview) -> tuple[bytes, bytes, memoryview]:
    """Repetition levels, definition levels and values of a page, empty where they are cut short."""
    parts = []
    for _ in range(2):
        size = int.from_bytes(raw[:4], "little")
        parts.append(bytes(raw[4 : 4 + size]))
        raw = raw[4 + size :]
    return parts[0], parts[1], raw


def _is_one_run(levels: bytes, count: int) -> bool:
    """Whether levels are `count` ones and nothing else, so that no list is empty and no value is missing."""
    length, position = _varint(levels, 0)
    return length == count << 1 and levels[position:] == b"\x01"


def row_begins(levels: bytes, count: int) -> npt.NDArray[np.int64] | None:
    """int64 [rows that begin]: positions of zeros among `count` repetition levels; None where these are damaged."""
    found: list[int] = []
    position = done = 0
    while done < count and position < len(levels):
        # Most headers are of one byte or two, and a call takes as long as all else here.
        head = levels[position]
        position += 1
        if head > 127:
            head, position = _varint(levels, position - 1)
        length = head >> 1
        if length == 0 or position >= len(levels):
            return None
        if head & 1:
            # Most bytes have no zero: a row is as long as a pack, or as a conversation's part of one.
            for byte in levels[position : position + length]:
                if byte != 255:
                    found += [done + bit for bit in _ZEROS[byte]]
                done += 8
            position += length
        else:
            if levels[position] == 0:
                found += range(done, min(done + length, count))
            position += 1
            done += length
    # A run of packed bits may end up to seven positions after the last.
    if not count <= done < count + 8 or position != len(levels):
        return None
    begins = np.array(found, np.int64)
    return begins[: int(np.searchsorted(begins, count))]


def _varint(data: bytes, position: int) -> tuple[int, int]:
    """A number and the position after it; 0 where it is cut short or longer than any count."""
    value = shift = 0
    while position < len(data) and shift <= 35:
        byte = data[position]
        position += 1
        value |= (byte & 127) << shift
        if byte < 128:
            return value, position
        shift += 7
    return 0, position


def _values_of(data: memoryview, encoding: object) -> npt.NDArray[Any] | None:
    """32-bit integers as uint8, uint16 or int32, the narrowest where planes tell it; None in another encoding."""
    if encoding == _PLAIN:
        return np.frombuffer(data, "<i4")
    if encoding != _BYTE_STREAM_SPLIT:
        return None
    planes = np.frombuffer(data, np.uint8).reshape(4, -1)
    # `max` and not `any`, which is several times slower on bytes.
    used = [number for number in range(1, 4) if planes[number].max()]
    if not used:
        # A copy, because a view would keep the planes of zeros in memory.
        return np.array(planes[0])
    values: npt.NDArray[Any] = np.empty(planes.shape[1], np.uint16 if used == [1] else np.int32)
    shifted = np.empty(min(_PIECE, values.shape[0]), values.dtype)
    for start in range(0, values.shape[0], _PIECE):
        piece = values[start : start + _PIECE]
        piece[:] = planes[0, start : start + _PIECE]
        for number in used:
            high = shifted[: piece.shape[0]]
            high[:] = planes[number, start : start + _PIECE]
            high <<= 8 * number
            piece |= high
    return values
