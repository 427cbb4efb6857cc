"""The index of Megatron's indexed datasets, X.idx beside the tokens in X.bin.

    magic of 9 bytes, version 1 (uint64), dtype code (uint8), number of sequences S and of document bounds D (uint64)
    lengths    int32 [S], tokens of each sequence
    pointers   int64 [S], where each begins in X.bin, in bytes
    documents  int64 [D], the first sequence of each document, and S at the end
    modes      int8 [S], in multimodal datasets only

As `megatron.core.datasets.indexed_dataset` reads and writes it.
"""

from __future__ import annotations

import mmap
import os
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from harness.errors import FormatError
from harness.records import Int32Array, Int64Array

BIN, IDX = ".bin", ".idx"
MAGIC = b"MMIDIDX\x00\x00"
HEADER = struct.Struct("<9sQBQQ")
VERSION = 1
DTYPES: dict[int, np.dtype[Any]] = {
    1: np.dtype("u1"),
    2: np.dtype("i1"),
    3: np.dtype("<i2"),
    4: np.dtype("<i4"),
    5: np.dtype("<i8"),
    6: np.dtype("<f8"),
    7: np.dtype("<f4"),
    8: np.dtype("<u2"),
}
UINT16, INT32 = DTYPES[8], DTYPES[4]
CODES = {dtype: code for code, dtype in DTYPES.items()}
COPY_AGAIN = "copy the pair again, or write it again from its tokens"


@dataclass(frozen=True)
class IndexHeader:
    """What an index begins with.

    Attributes:
        dtype: of the tokens in the `.bin`.
        num_sequences: S.
        num_bounds: D, one more than there are documents.
    """

    dtype: np.dtype[Any]
    num_sequences: int
    num_bounds: int

    @property
    def num_bytes(self) -> int:
        """Size of the whole index, without modes."""
        return HEADER.size + 12 * self.num_sequences + 8 * self.num_bounds

    def to_bytes(self) -> bytes:
        return HEADER.pack(MAGIC, VERSION, CODES[self.dtype], self.num_sequences, self.num_bounds)


def prefix_of(path: str | os.PathLike[str]) -> Path:
    """X of X, X.bin or X.idx."""
    text = str(path)
    for suffix in (BIN, IDX):
        if text.endswith(suffix):
            return Path(text.removesuffix(suffix))
    return Path(text)


def with_suffix(prefix: Path, suffix: str) -> Path:
    """`prefix` + `suffix`; prefixes may have dots of their own."""
    return prefix.with_name(prefix.name + suffix)


def parse_header(data: bytes, *, where: str) -> IndexHeader:
    """The header from an index's first bytes.

    Raises:
        FormatError: it is none, or of a version or dtype that Megatron does not know.
    """
    if len(data) < HEADER.size:
        what = f"has {len(data):,} bytes, an index begins with a header of {HEADER.size}"
        raise FormatError(what, where=where, fix=COPY_AGAIN)
    magic, version, code, num_sequences, num_bounds = HEADER.unpack_from(data)
    if magic != MAGIC:
        raise FormatError(f"begins with {magic!r}, not with {MAGIC!r} as a Megatron index does", where=where)
    if version != VERSION:
        raise FormatError(f"has version {version}, Megatron reads version {VERSION}", where=where, fix=COPY_AGAIN)
    if code not in DTYPES:
        what = f"has the dtype code {code}, known are {min(DTYPES)} to {max(DTYPES)}"
        raise FormatError(what, where=where, fix=COPY_AGAIN)
    return IndexHeader(DTYPES[code], num_sequences, num_bounds)


class MappedIndex:
    """An index whose ledgers are mapped: pages that are looked at, no copies.

    Attributes:
        header: of the index.
        lengths: int32 [S].
        pointers: int64 [S].
        documents: int64 [D].
        has_modes: whether modes follow, one a sequence.

    Raises:
        FormatError: the header is damaged, or the size is not the one that its counts make.
    """

    def __init__(self, path: Path) -> None:
        try:
            with path.open("rb") as file:
                num_bytes = os.fstat(file.fileno()).st_size
                self.header = header = parse_header(file.read(HEADER.size), where=str(path))
                data = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        except OSError as error:
            raise FormatError(
                f"the index cannot be read: {error.strerror}", where=str(path), fix="check the path"
            ) from None
        self.has_modes = header.num_sequences > 0 and num_bytes == header.num_bytes + header.num_sequences
        if num_bytes != header.num_bytes and not self.has_modes:
            raise FormatError(
                f"has {num_bytes:,} bytes, its counts of {header.num_sequences:,} sequences and {header.num_bounds:,} "
                f"document bounds need {header.num_bytes:,}",
                where=str(path),
                fix=COPY_AGAIN,
            )
        count, at = header.num_sequences, HEADER.size
        self.lengths: Int32Array = np.frombuffer(data, "<i4", count, at)
        self.pointers: Int64Array = np.frombuffer(data, "<i8", count, at + 4 * count)
        self.documents: Int64Array = np.frombuffer(data, "<i8", header.num_bounds, at + 12 * count)


def smallest_dtype(vocab_size: int) -> np.dtype[Any]:
    """The dtype that holds a vocabulary, which is the one that Megatron takes for it where it reads no header.

    Its tools write int32 from 65,500 tokens on, and so a pair that it then misreads up to 65,536.
    """
    return UINT16 if vocab_size <= 1 << 16 else INT32


def largest_token(tokens: npt.NDArray[Any]) -> int:
    """The largest of some integers; 2**64 where one is negative. One look finds both kinds that are no token ids."""
    if tokens.size == 0:
        return 0
    largest = int(tokens.view(tokens.dtype.str.replace("i", "u")).max())
    return 1 << 64 if tokens.dtype.kind == "i" and largest > np.iinfo(tokens.dtype).max else largest
