"""Writes Megatron's indexed datasets in a stream: memory does not grow with the data, and a pair appears whole."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from types import TracebackType
from typing import Any, BinaryIO, Self, cast

import numpy as np
import numpy.typing as npt

from harness.errors import ConfigError, FormatError
from harness.indexed.index import BIN, IDX, INT32, UINT16, IndexHeader, largest_token, with_suffix
from harness.storage import AtomicFile, Marker, sync_folder

# Entries of a ledger, or tokens, that are in memory at a time.
_BLOCK = 1 << 20


class IndexedWriter:
    """Writes X.bin and X.idx; a context manager.

    Ledgers go to unnamed files until the end, so that memory is bounded at any number of sequences and a process that
    is killed leaves none behind. Leaving the block gives the files their names, the index last; leaving it with an
    exception leaves nothing.

    Args:
        prefix: X.
        dtype: of the stored tokens. Where None it is uint16 until a token needs more; what is written by then is
            written again as int32.
        overwrite: replace a pair that is there, at the end.

    Attributes:
        dtype: as it stands.
        header: of the index, once the block is left.
        num_sequences, num_documents, num_tokens: so far.
    """

    def __init__(self, prefix: Path, *, dtype: np.dtype[Any] | None = None, overwrite: bool = False) -> None:
        self.prefix = prefix
        self.dtype = UINT16 if dtype is None else dtype
        self.header: IndexHeader | None = None
        self.num_sequences = self.num_documents = self.num_tokens = 0
        self._can_widen = dtype is None
        self._overwrite = overwrite
        self._marker = Marker(prefix.with_name(f".{prefix.name}_writing"))

    def __enter__(self) -> Self:
        found = [path for path in (with_suffix(self.prefix, BIN), with_suffix(self.prefix, IDX)) if path.exists()]
        if found and not self._overwrite:
            raise FormatError(
                f"{found[0].name} is there already",
                where=str(self.prefix),
                fix="name another, or replace it (--overwrite, overwrite=True)",
            )
        folder = self.prefix.parent
        with self._explained():
            folder.mkdir(parents=True, exist_ok=True)
            self._marker.acquire()
            try:
                self._lengths = cast(BinaryIO, tempfile.TemporaryFile(dir=folder))
                self._bounds = cast(BinaryIO, tempfile.TemporaryFile(dir=folder))
                self._bin = AtomicFile(with_suffix(self.prefix, BIN))
            except OSError:
                self._marker.release(remove=True)
                raise
        return self

    def append(
        self, tokens: npt.NDArray[Any], lengths: npt.NDArray[Any], documents: npt.NDArray[Any] | None = None
    ) -> None:
        """Add whole documents.

        Args:
            tokens: integers [n] from 0 to 2**31 - 1, end to end.
            lengths: integers [sequences], which add up to n.
            documents: integers [documents], sequences of each, which add up to all; None makes each a document.

        Raises:
            FormatError: a token is negative or does not fit, or the disk refuses.
        """
        self.append_tokens(tokens)
        self.append_ledgers(lengths, np.arange(1, len(lengths) + 1) if documents is None else np.cumsum(documents))

    def append_tokens(self, tokens: npt.NDArray[Any]) -> None:
        """Add tokens alone: integers [n]; raises as `append`."""
        largest = largest_token(tokens)
        if largest > np.iinfo(self.dtype).max:
            if not self._can_widen or largest > np.iinfo(INT32).max:
                what = f"a token is negative or above {min(np.iinfo(self.dtype).max, np.iinfo(INT32).max):,}"
                raise FormatError(what, where=str(self.prefix), fix="mend the tokens, or name a wider dtype")
            self.widen()
        with self._explained():
            self._bin.write(np.ascontiguousarray(tokens, self.dtype).data)
        self.num_tokens += len(tokens)

    def append_ledgers(self, lengths: npt.NDArray[Any], document_ends: npt.NDArray[Any]) -> None:
        """Add sequences and documents alone.

        Args:
            lengths: integers [sequences].
            document_ends: integers [documents], where each ends among these sequences.
        """
        with self._explained():
            for start in range(0, len(lengths), _BLOCK):
                self._lengths.write(np.ascontiguousarray(lengths[start : start + _BLOCK], "<i4").data)
            for start in range(0, len(document_ends), _BLOCK):
                ends = document_ends[start : start + _BLOCK] + self.num_sequences
                self._bounds.write(np.ascontiguousarray(ends, "<i8").data)
        self.num_sequences += len(lengths)
        self.num_documents += len(document_ends)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        try:
            if kind is None:
                with self._explained():
                    self._finish()
        finally:
            self._bin.abort()
            for spool in (self._lengths, self._bounds):
                with suppress(OSError):
                    spool.close()
            self._marker.release(remove=True)

    def widen(self) -> None:
        """Write the tokens again as int32, and go on so."""
        with self._explained():
            self._widen()

    def _widen(self) -> None:
        self._bin.flush()
        with self._bin.temporary_path.open("rb") as narrow:
            # The open file keeps the bytes of the name that is dropped.
            self._bin.abort()
            self._bin = AtomicFile(with_suffix(self.prefix, BIN))
            while block := narrow.read(self.dtype.itemsize * _BLOCK):
                self._bin.write(np.frombuffer(block, self.dtype).astype(INT32).data)
        self.dtype = INT32

    def _finish(self) -> None:
        if self.num_sequences == 0:
            raise FormatError("no document was written", where=str(self.prefix), fix="give it at least one")
        header = IndexHeader(self.dtype, self.num_sequences, self.num_documents + 1)
        index = AtomicFile(with_suffix(self.prefix, IDX))
        try:
            index.write(header.to_bytes())
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
            if last != self.num_tokens:
                raise ConfigError(f"lengths add up to {last:,} of {self.num_tokens:,} tokens", where=str(self.prefix))
            # An index beside other tokens than its own would be read as if it were theirs.
            index.path.unlink(missing_ok=True)
            self._bin.finish()
            index.finish()
        finally:
            index.abort()
        sync_folder(self.prefix.parent)
        self.header = header

    def _read_lengths(self) -> Iterator[npt.NDArray[np.int32]]:
        self._lengths.seek(0)
        while block := self._lengths.read(4 * _BLOCK):
            yield np.frombuffer(block, "<i4")

    @contextmanager
    def _explained(self) -> Iterator[None]:
        """Turn errors of the system, such as a full disk, into errors that say where."""
        try:
            yield
        except OSError as error:
            raise FormatError(
                f"writing failed: {error.strerror or error}",
                where=str(self.prefix),
                fix="mend the cause (space, permissions, quota) and run the same command again",
            ) from error
