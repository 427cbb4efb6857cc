"""Write Megatron's indexed datasets in a stream: memory does not grow with the data, and a pair appears whole."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, Self, cast

import numpy as np
import numpy.typing as npt

from harness.errors import ConfigError, FormatError
from harness.indexed.index import BIN, IDX, INT32, UINT16, IndexHeader, largest_token, with_suffix
from harness.storage import Marker, make_folder, sync_path
from harness.storage.files import AtomicFile, PlacingClaim, explain_os_errors

# Ledger entries, or tokens, in memory at a time.
_BLOCK = 1 << 20


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

        Args:
            tokens: integers [n] from 0 to 2**31 - 1, end to end.
            lengths: integers [sequences] that add up to n.
            documents: integers [documents], number of sequences in each; None makes every sequence a document.
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
        """Add sequences and documents alone.

        Args:
            lengths: integers [sequences].
            document_ends: integers [documents], past-the-end sequence of each, counted within these sequences.
            modes: int8 [sequences] of a multimodal dataset, whose every call gives them.
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
