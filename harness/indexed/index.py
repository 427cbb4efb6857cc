"""The index of Megatron's indexed datasets: X.idx beside the tokens in X.bin.

    magic of 9 bytes, version 1 (uint64), dtype code (uint8), number of sequences S and of document bounds D (uint64)
    lengths    int32 [S], tokens of each sequence
    pointers   int64 [S], byte offset of each sequence in X.bin
    documents  int64 [D], the first sequence of each document, and S at the end
    modes      int8 [S], in multimodal datasets only

Source: `megatron.core.datasets.indexed_dataset`.
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

from harness.errors import ConfigError, FormatError, os_errors_as
from harness.records import Int32Array, Int64Array

BIN, IDX = ".bin", ".idx"
# Beside a pair whose items are packs (`harness.formats`).
LOSS_BIN = ".loss.bin"
MAGIC = b"MMIDIDX\x00\x00"
HEADER = struct.Struct("<9sQBQQ")
VERSION = 1
# The dtype with code 1 comes first.
DTYPES: list[np.dtype[Any]] = [np.dtype(name) for name in ("u1", "i1", "<i2", "<i4", "<i8", "<f8", "<f4", "<u2")]
UINT16: np.dtype[Any] = np.dtype("<u2")
INT32: np.dtype[Any] = np.dtype("<i4")


@dataclass(frozen=True)
class IndexHeader:
    """The fixed-size start of an index; `num_sequences` is S, and `num_bounds` D, the number of documents plus one."""

    dtype: np.dtype[Any]
    num_sequences: int
    num_bounds: int

    @property
    def num_bytes(self) -> int:
        """Size of the whole index, without modes."""
        return HEADER.size + 12 * self.num_sequences + 8 * self.num_bounds

    def to_bytes(self) -> bytes:
        return HEADER.pack(MAGIC, VERSION, 1 + DTYPES.index(self.dtype), self.num_sequences, self.num_bounds)


def prefix_of(path: str | os.PathLike[str]) -> Path:
    """Return X, given X, X.bin or X.idx; raises ConfigError if that is a folder without a name."""
    text = str(path)
    prefix = Path(text.removesuffix(BIN) if text.endswith(BIN) else text.removesuffix(IDX))
    if prefix.name in ("", ".."):
        what = f"{text!r} is not what the names of two files begin with"
        raise ConfigError(what, where=text, fix="write FOLDER/NAME for FOLDER/NAME.bin and FOLDER/NAME.idx")
    return prefix


def with_suffix(prefix: Path, suffix: str) -> Path:
    """Return `prefix` + `suffix`; unlike `Path.with_suffix` it keeps dots in the prefix."""
    return Path(f"{prefix}{suffix}")


class MappedIndex:
    """A memory-mapped index: reading an entry touches its page only, and nothing is copied.

    Lengths, pointers and documents are as in the file; `modes` are int8 [S] of multimodal datasets, int8 [0] of others.
    Raises FormatError if the header is damaged, or the file size does not match its counts.
    """

    def __init__(self, path: Path) -> None:
        cannot_be_read = os_errors_as(FormatError, "the index cannot be read", where=path, fix="check the path")
        with cannot_be_read, path.open("rb") as file:
            num_bytes = os.fstat(file.fileno()).st_size
            head = file.read(HEADER.size)
            magic, version, code, *counts = HEADER.unpack(head) if len(head) == HEADER.size else (None, 0, 0)
            if (magic, version) != (MAGIC, VERSION) or not 1 <= code <= len(DTYPES):
                what = f"begins with {head[:18]!r}, not with the header of a Megatron index of version {VERSION}"
                raise FormatError(what, where=str(path))
            self.header = header = IndexHeader(DTYPES[code - 1], *counts)
            data = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        self.has_modes = header.num_sequences > 0 and num_bytes == header.num_bytes + header.num_sequences
        if num_bytes != header.num_bytes and not self.has_modes:
            shown = f"{header.num_sequences:,} sequences and {header.num_bounds:,} document bounds"
            what = f"has {num_bytes:,} bytes, but its counts of {shown} require {header.num_bytes:,}"
            raise FormatError(what, where=str(path))
        count, at = header.num_sequences, HEADER.size
        self.lengths: Int32Array = np.frombuffer(data, "<i4", count, at)
        self.pointers: Int64Array = np.frombuffer(data, "<i8", count, at + 4 * count)
        self.documents: Int64Array = np.frombuffer(data, "<i8", header.num_bounds, at + 12 * count)
        self.modes: npt.NDArray[np.int8] = np.frombuffer(data, "i1", count * self.has_modes, header.num_bytes)


def smallest_dtype(vocab_size: int) -> np.dtype[Any]:
    """Return the dtype that Megatron assumes for a vocabulary when it does not read the header.

    Megatron's own tools write int32 from 65,500 tokens on, so pairs that it then misreads for up to 65,536 tokens.
    """
    return UINT16 if vocab_size <= 1 << 16 else INT32


def largest_token(tokens: npt.NDArray[Any]) -> int:
    """Return the largest of some integers, or 2**64 if any is negative: one pass finds both kinds of bad token id."""
    if tokens.size == 0:
        return 0
    largest = int(tokens.view(tokens.dtype.str.replace("i", "u")).max())
    return 1 << 64 if tokens.dtype.kind == "i" and largest > np.iinfo(tokens.dtype).max else largest
