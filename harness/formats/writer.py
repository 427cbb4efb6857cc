"""Writing a dataset: what every destination has in common. Shards first, then the index, and the manifest last."""

from __future__ import annotations

import contextlib
import re
from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import asdict
from types import TracebackType
from typing import Self

from harness.errors import ConfigError, FormatError
from harness.formats.base import Format, ShardOptions, ShardWriter
from harness.formats.index import INDEX_FOLDER
from harness.formats.manifest import Manifest, Provenance
from harness.formats.parts import FinishedShard, PartBuilder, Totals
from harness.records import Pack
from harness.storage import redact

# What a write that was interrupted can have left in a folder.
OURS = re.compile(r"(shard|chunk)_\d+\b.*|" + INDEX_FOLDER)


class PackWriter(ABC):
    """Streams packs into a dataset; a context manager.

    Leaving the `with` block writes the index and then the manifest; leaving it with an exception leaves no dataset.
    Memory holds one shard's lengths and what the format buffers, never the dataset.

    Attributes:
        where: the destination, for people.
        pack_size: tokens that no pack may exceed.
        provenance: stored in the manifest; may be replaced until the block is left.
        manifest: what was written, once the block is left.
    """

    def __init__(
        self,
        where: str,
        *,
        format: Format,
        pack_size: int,
        provenance: Provenance,
        packs_per_shard: int,
        rows_per_group: int,
    ) -> None:
        settings = {"pack_size": pack_size, "packs_per_shard": packs_per_shard, "rows_per_group": rows_per_group}
        for name, value in settings.items():
            if value < 1:
                raise ConfigError(f"{name} is {value}, expected at least 1")
        self.where = where
        self.pack_size = pack_size
        self.provenance = provenance
        self.manifest: Manifest | None = None
        self._format = format
        self._single = bool(format.single_file_suffix) and where.endswith(format.single_file_suffix)
        self._packs_per_shard = packs_per_shard
        self._options = ShardOptions(pack_size=pack_size, rows_per_group=rows_per_group)
        self._finished: list[FinishedShard] = []
        self._finished_totals = Totals()
        self._shard: ShardWriter | None = None
        self._builder = PartBuilder()
        self._open = False

    @property
    def num_packs(self) -> int:
        """Packs so far, those that a resumed write found included."""
        return self._finished_totals.num_packs + len(self._builder)

    @property
    def totals(self) -> Totals:
        """Packs, sequences, tokens and trained tokens so far."""
        return self._finished_totals + self._builder.totals()

    def __enter__(self) -> Self:
        with self._explained():
            self._prepare()
        self._open = True
        return self

    def append(self, pack: Pack) -> None:
        """Add a pack.

        Raises:
            FormatError: the pack breaks an invariant (the error has its number), or the disk refuses.
        """
        if not self._open:
            raise ConfigError("the writer is not open", where=self.where, fix="use `with open_writer(...) as writer`")
        problem = pack.problem(self.pack_size)
        if problem is not None:
            raise FormatError(f"pack {self.num_packs:,} {problem}", where=self.where, fix="mend what makes the packs")
        with self._explained():
            if self._shard is None:
                self._shard = self._start_shard()
            try:
                self._shard.append(pack)
            except FormatError as error:
                raise FormatError(f"pack {self.num_packs:,} {error.what}", where=self.where, fix=error.fix) from None
            self._builder.append(pack)
            if len(self._builder) == self._packs_per_shard and not self._single:
                self._end_shard()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if not self._open:
            return
        self._open = False
        try:
            if kind is None:
                with self._explained():
                    self._end()
        finally:
            if self.manifest is None:
                self._abort()
            else:
                self._release()

    @abstractmethod
    def _prepare(self) -> None:
        """Claim the destination, and keep of an interrupted write what can be gone on with."""

    @abstractmethod
    def _start_shard(self) -> ShardWriter:
        """Start the next shard, or the only file."""

    @abstractmethod
    def _finish_shard(self, shard: ShardWriter) -> FinishedShard:
        """Give the files of a full shard their names, and store its index entries."""

    @abstractmethod
    def _finish(self) -> Manifest:
        """Write the index and then the manifest, after the last shard."""

    @abstractmethod
    def _finish_file(self, shard: ShardWriter) -> Manifest:
        """Finish the only file."""

    @abstractmethod
    def _abort(self) -> None:
        """Leave no dataset, after an error that must not be hidden by another."""

    @abstractmethod
    def _release(self) -> None:
        """Let go of the destination, whose dataset is whole."""

    def _end_shard(self) -> None:
        assert self._shard is not None
        finished = self._finish_shard(self._shard)
        self._shard = None
        self._finished.append(finished)
        self._finished_totals = self._finished_totals + finished.totals
        self._builder = PartBuilder()

    def _end(self) -> None:
        if self.num_packs == 0:
            raise FormatError("no packs were written", where=self.where, fix="a dataset holds at least one pack")
        if self._single:
            assert self._shard is not None
            manifest = self._finish_file(self._shard)
            self._shard = None
        else:
            if len(self._builder):
                self._end_shard()
            manifest = self._finish()
        self.manifest = manifest

    def _build_manifest(self, fingerprint: str) -> Manifest:
        return Manifest(
            format=self._format.name,
            pack_size=self.pack_size,
            fingerprint=fingerprint,
            shards=(),
            index=(),
            provenance=self.provenance,
            **asdict(self.totals),
        )

    @contextlib.contextmanager
    def _explained(self) -> Iterator[None]:
        """Turn errors of the system, such as a full disk, into errors that say where."""
        try:
            yield
        except OSError as error:
            raise FormatError(
                f"writing failed: {error.strerror or error}",
                where=redact(str(error.filename or self.where)),
                fix="mend the cause (space, permissions, quota) and run the same command again",
            ) from error


def already_there(where: str) -> FormatError:
    """The error for a destination that is not to be overwritten."""
    return FormatError(
        "the destination already holds a dataset",
        where=where,
        fix="name another, or replace it (--overwrite, overwrite=True)",
    )
