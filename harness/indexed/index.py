"""Megatron's indexed datasets: the index X.idx beside the tokens in X.bin, what can be wrong with a pair, its writer.

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
import shutil
import struct
import tempfile
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, Self, cast

import numpy as np
import numpy.typing as npt

from harness.errors import ConfigError, FormatError, Problem, os_errors_as
from harness.records import Int32Array, Int64Array
from harness.storage import Marker, make_folder, sync_path
from harness.storage.files import AtomicFile, PlacingClaim, explain_os_errors

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
# Ledger entries, or tokens, in memory at a time; bytes of an index from which one problem is enough.
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
                what = f"sequence {sequence:,} has the token {int(tokens[at]):,} at position {position:,}"
                return [Problem(f"{what}, expected 0 to {limit:,}", str(bin_path))]
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
        what = f"has {num_bytes:,} bytes, expected {expected:,} from the lengths in the index"
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
            what = f"the pointer of sequence {first + at:,} is {int(pointers[at]):,}"
            yield f"{what}, expected {int(begins[at]):,} from the lengths before it"
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


# ---- writing


@dataclass(frozen=True)
class IndexedReport:
    """A written pair: its prefix, the name of its dtype, and its counts."""

    prefix: str
    dtype: str
    num_documents: int
    num_sequences: int
    num_tokens: int
    empty_documents: int = 0


class IndexedWriter:
    """Context manager that writes X.bin and X.idx.

    Lengths and document bounds go to unnamed temporary files until the end: memory stays bounded for any number of
    sequences, and a killed process leaves no such files. Leaving the block renames the pair into place, the index last;
    leaving it with an exception leaves nothing. After a kill the same call writes the pair again.

    Args:
        dtype: of the stored tokens. None starts with uint16 and rewrites the file as int32 once a token needs it.
        overwrite: replace an existing pair, at the end.
    """

    def __init__(self, prefix: Path, *, dtype: np.dtype[Any] | None = None, overwrite: bool = False) -> None:
        self.prefix = prefix
        self.dtype = UINT16 if dtype is None else dtype
        self._is_whole = False
        self.num_sequences = self.num_documents = self.num_tokens = 0
        self._paths = (with_suffix(prefix, BIN), with_suffix(prefix, IDX))
        self._can_widen = dtype is None
        self._overwrite = overwrite
        self._claim = PlacingClaim(Marker(prefix.with_name(f".{prefix.name}_writing")), self._refuse_existing)

    def __enter__(self) -> Self:
        folder = self.prefix.parent
        with explain_os_errors(self.prefix):
            make_folder(folder)
            self._claim.enter()
            try:
                spools = [tempfile.TemporaryFile(dir=folder) for _ in range(3)]  # noqa: SIM115 - closed at the end
                self._lengths, self._bounds, self._modes = cast(list[BinaryIO], spools)
                self._bin = AtomicFile(with_suffix(self.prefix, BIN))
            except OSError:
                self._claim.release()
                raise
        return self

    def _refuse_existing(self) -> None:
        if (existing := [path for path in self._paths if path.exists()]) and not self._overwrite:
            fix = "choose another name, or replace it (--overwrite, overwrite=True)"
            raise FormatError(f"{existing[0].name} already exists", where=str(self.prefix), fix=fix)

    def append(
        self, tokens: npt.NDArray[Any], lengths: npt.NDArray[Any], documents: npt.NDArray[Any] | None = None
    ) -> None:
        """Add whole documents; FormatError if a token is negative or does not fit, or the disk refuses.

        Tokens are integers [n] from 0 to 2**31 - 1, end to end; lengths, integers [sequences], add up to n; documents,
        integers [documents], are the sequences in each, and None makes every sequence a document.
        """
        self.append_tokens(tokens)
        self.append_ledgers(lengths, np.arange(1, len(lengths) + 1) if documents is None else np.cumsum(documents))

    def append_tokens(self, tokens: npt.NDArray[Any]) -> None:
        """Add tokens alone: integers [n]; raises like `append`."""
        if (largest := largest_token(tokens)) > np.iinfo(self.dtype).max:
            if not self._can_widen or largest > np.iinfo(INT32).max:
                what = f"a token is negative or above {min(np.iinfo(self.dtype).max, np.iinfo(INT32).max):,}"
                raise FormatError(what, where=str(self.prefix), fix="fix the tokens, or choose a larger dtype")
            self.widen()
        with explain_os_errors(self.prefix):
            self._bin.write(np.ascontiguousarray(tokens, self.dtype).data)
        self.num_tokens += len(tokens)

    def append_ledgers(
        self, lengths: npt.NDArray[Any], document_ends: npt.NDArray[Any], modes: npt.NDArray[np.int8] | None = None
    ) -> None:
        """Add sequences and documents alone: lengths are integers [sequences].

        `document_ends`, integers [documents], are the past-the-end sequence of each, counted within these sequences;
        `modes`, int8 [sequences], those of a multimodal dataset, whose every call gives them.
        """
        with explain_os_errors(self.prefix):
            for start in range(0, len(lengths), _BLOCK):
                self._lengths.write(np.ascontiguousarray(lengths[start : start + _BLOCK], "<i4").data)
            for start in range(0, len(document_ends), _BLOCK):
                ends = document_ends[start : start + _BLOCK] + self.num_sequences
                self._bounds.write(np.ascontiguousarray(ends, "<i8").data)
            if modes is not None:
                self._modes.write(np.ascontiguousarray(modes, "i1").data)
        self.num_sequences += len(lengths)
        self.num_documents += len(document_ends)

    def widen(self) -> None:
        """Rewrite the tokens as int32, and store int32 from here on."""
        with explain_os_errors(self.prefix):
            self._bin.flush()
            with self._bin.temporary_path.open("rb") as narrow:
                # The open file keeps its bytes after the name is removed.
                self._bin.abort()
                self._bin = AtomicFile(with_suffix(self.prefix, BIN))
                while block := narrow.read(self.dtype.itemsize * _BLOCK):
                    self._bin.write(np.frombuffer(block, self.dtype).astype(INT32).data)
        self.dtype = INT32

    def report(self, *, empty_documents: int = 0) -> IndexedReport:
        counts = (self.num_documents, self.num_sequences, self.num_tokens)
        return IndexedReport(str(self.prefix), self.dtype.name, *counts, empty_documents)

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        try:
            if kind is None:
                with explain_os_errors(self.prefix):
                    self._finish()
        finally:
            self._bin.abort()
            if self._claim.is_placing and not self._is_whole:
                with suppress(OSError):
                    for path in self._paths:
                        path.unlink(missing_ok=True)
            for spool in (self._lengths, self._bounds, self._modes):
                with suppress(OSError):
                    spool.close()
            self._claim.release()

    def _finish(self) -> None:
        if self.num_sequences == 0:
            raise FormatError("no document was written", where=str(self.prefix), fix="write at least one document")
        index = AtomicFile(with_suffix(self.prefix, IDX))
        try:
            index.write(IndexHeader(self.dtype, self.num_sequences, self.num_documents + 1).to_bytes())
            for lengths in self._read_lengths():
                index.write(lengths.data)
            last = 0
            for lengths in self._read_lengths():
                ends = last + np.cumsum(lengths, dtype="<i8")
                index.write(((ends - lengths) * self.dtype.itemsize).astype("<i8", copy=False).data)
                last = int(ends[-1])
            index.write(np.zeros(1, "<i8").data)
            self._bounds.seek(0)
            shutil.copyfileobj(self._bounds, cast(BinaryIO, index), 8 * _BLOCK)
            if self._modes.tell() not in (0, self.num_sequences):
                what = f"{self._modes.tell():,} of {self.num_sequences:,} sequences have a mode"
                raise ConfigError(what, where=str(self.prefix), fix="provide modes for all sequences or for none")
            self._modes.seek(0)
            shutil.copyfileobj(self._modes, cast(BinaryIO, index), 8 * _BLOCK)
            if last != self.num_tokens:
                what = f"the lengths sum to {last:,}, but {self.num_tokens:,} tokens were written"
                raise ConfigError(what, where=str(self.prefix), fix="provide the length of every written sequence")
            self._claim.place()
            # An old index next to new tokens would be read as theirs.
            index.path.unlink(missing_ok=True)
            self._bin.finish()
            index.finish()
        finally:
            index.abort()
        sync_path(self.prefix.parent)
        self._is_whole = True

    def _read_lengths(self) -> Iterator[npt.NDArray[np.int32]]:
        self._lengths.seek(0)
        while block := self._lengths.read(4 * _BLOCK):
            yield np.frombuffer(block, "<i4")
