"""Verify a pair X.bin, X.idx: the structure of the index, the sizes, and every token read back."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from harness.errors import FormatError, Problem
from harness.indexed.index import BIN, IDX, INT32, MappedIndex, prefix_of, with_suffix
from harness.records import Int32Array

# Ledger entries, or tokens, checked at a time.
_LARGE = 1 << 30
_BLOCK = 1 << 20


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
    problem = None
    if index.header.dtype != INT32 or index.has_modes:
        modes = " with modes" if index.has_modes else ""
        problem = f"holds {index.header.dtype.name} tokens{modes}, expected int32"
    elif index.header.num_sequences:
        problem = next(_ledger_problems(index), None)
    if problem is not None:
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
