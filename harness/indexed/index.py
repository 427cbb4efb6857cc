"""The index of Megatron's indexed datasets, X.idx beside the tokens in X.bin, and what can be wrong with a pair.

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
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from harness.errors import ConfigError, FormatError, Problem, os_errors_as
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
# Ledger entries, or tokens, checked at a time; bytes of an index from which one problem is enough.
_BLOCK, _LARGE = 1 << 20, 1 << 30


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


def verify_indexed(
    path: str | os.PathLike[str], *, vocab_size: int | None = None, progress: Callable[[int, int], None] | None = None
) -> list[Problem]:
    """Return every detectable problem of a pair; an empty list if there is none.

    Checks that both files exist, the header, the file sizes against its counts, that lengths are positive, that
    pointers start at 0 and each follows from the lengths before it, that they cover the `.bin` to its last byte, that
    document bounds rise from 0 to the number of sequences, and that all tokens are 0 or more and inside the vocabulary.
    A token that changed to another legal one goes unnoticed: the pair has no checksums.

    Args:
        path: X, X.bin or X.idx.
        vocab_size: exclusive upper bound of tokens; None knows no bound.
        progress: called with tokens read and tokens in total.
    """
    prefix = prefix_of(path)
    index, problems = _check_structure(prefix)
    if index is None or problems:
        return problems
    bin_path, dtype, done = with_suffix(prefix, BIN), index.header.dtype, 0
    total = bin_path.stat().st_size // dtype.itemsize
    limit = np.iinfo(np.int32).max if vocab_size is None else vocab_size - 1
    with bin_path.open("rb", buffering=0) as file:
        while block := file.read(dtype.itemsize * _BLOCK):
            tokens = np.frombuffer(block, dtype)
            bad = (tokens < 0) | (tokens > limit)
            if bad.any():
                at = int(np.argmax(bad))
                sequence = int(np.searchsorted(index.pointers, (done + at) * dtype.itemsize, "right")) - 1
                position = done + at - int(index.pointers[sequence]) // dtype.itemsize
                kind, bound = ("the negative token", "") if tokens[at] < 0 else ("the token", f", above {limit:,}")
                what = f"sequence {sequence:,} has {kind} {int(tokens[at]):,} at position {position:,}{bound}"
                return [Problem(what, str(bin_path))]
            done += len(tokens)
            if progress is not None:
                progress(done, total)
    return [] if done == total else [Problem(f"only {done:,} of {total:,} tokens could be read", str(bin_path))]


def check_indexed(prefix: Path) -> MappedIndex:
    """Return the index of a pair whose structure is intact (tokens are not read); FormatError otherwise."""
    index, problems = _check_structure(prefix)
    if index is None or problems:
        raise FormatError(problems[0].what, where=problems[0].where)
    return index


def read_lengths(path: Path) -> Int32Array:
    """Read the lengths, int32 [S], of a pair of int32 tokens; FormatError if damaged or of another dtype."""
    index = MappedIndex(path)
    if index.header.dtype != INT32 or index.has_modes:
        modes = " with modes" if index.has_modes else ""
        raise FormatError(f"holds {index.header.dtype.name} tokens{modes}, expected int32", where=str(path))
    if index.header.num_sequences and (problem := next(_ledger_problems(index), None)) is not None:
        raise FormatError(problem, where=str(path))
    return index.lengths.copy()


def _check_structure(prefix: Path) -> tuple[MappedIndex | None, list[Problem]]:
    bin_path, idx_path = with_suffix(prefix, BIN), with_suffix(prefix, IDX)
    if missing := [path for path in (bin_path, idx_path) if not path.is_file()]:
        return None, [Problem(f"{path.name} is missing", str(path)) for path in missing]
    try:
        index = MappedIndex(idx_path)
    except FormatError as error:
        return None, [Problem(error.what, error.where)]
    problems = [Problem(what, str(idx_path)) for what in _ledger_problems(index)]
    # A sparse file of terabytes fails in its first block, and reading its other zeros would take hours.
    if problems and index.header.num_bytes > _LARGE:
        return index, problems
    problems += [Problem(what, str(idx_path)) for what in _document_problems(index)]
    expected = index.header.dtype.itemsize * sum(int(block.sum(dtype=np.int64)) for block in _blocks(index.lengths))
    if (num_bytes := bin_path.stat().st_size) != expected:
        kind = "short" if num_bytes < expected else "long"
        what = f"is too {kind}: {num_bytes:,} bytes, expected {expected:,} from the lengths in the index"
        problems.append(Problem(what, str(bin_path)))
    return index, problems


def _blocks(ledger: npt.NDArray[Any]) -> Iterator[npt.NDArray[Any]]:
    for start in range(0, ledger.shape[0], _BLOCK):
        yield ledger[start : start + _BLOCK]


def _ledger_problems(index: MappedIndex) -> Iterator[str]:
    """Yield the first problem of the lengths and pointers."""
    if index.header.num_sequences == 0:
        yield "contains no sequences"
        return
    if not np.issubdtype(index.header.dtype, np.integer):
        yield f"declares tokens as {index.header.dtype.name}, which cannot hold token ids"
    first = last = 0
    for lengths, pointers in zip(_blocks(index.lengths), _blocks(index.pointers), strict=True):
        bad = lengths <= 0
        if bad.any():
            at = int(np.argmax(bad))
            yield f"sequence {first + at:,} has the length {int(lengths[at]):,}"
            return
        ends = last + np.cumsum(lengths, dtype=np.int64) * index.header.dtype.itemsize
        begins = np.concatenate([[last], ends[:-1]])
        wrong = pointers != begins
        if wrong.any():
            at = int(np.argmax(wrong))
            falls = " and falls" if at and pointers[at] < pointers[at - 1] else ""
            yield (
                f"the pointer of sequence {first + at:,} is {int(pointers[at]):,}{falls}, "
                f"expected {int(begins[at]):,} from the lengths before it"
            )
            return
        first, last = first + len(lengths), int(ends[-1])


def _document_problems(index: MappedIndex) -> Iterator[str]:
    documents, count = index.documents, index.header.num_sequences
    if documents.shape[0] < 2:
        yield f"has {documents.shape[0]} document bounds, expected at least 2"
        return
    if documents[0] != 0:
        yield f"the first document begins at sequence {int(documents[0]):,}, expected 0"
    first, previous = 0, int(documents[0])
    for block in _blocks(documents):
        falls = np.diff(block, prepend=previous) < 0
        if falls.any():
            at = int(np.argmax(falls))
            yield f"document bound {first + at:,} is {int(block[at]):,}, below the one before it"
            return
        first, previous = first + len(block), int(block[-1])
    if previous != count:
        yield f"the last document ends at sequence {previous:,} of {count:,}"
