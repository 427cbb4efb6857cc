"""A reader that believes what it reads, to measure what checking costs. Never train from it."""

from __future__ import annotations

from pathlib import Path

from harness.formats import PackReader, open_dataset
from harness.formats.base import ShardReader
from harness.formats.parquet import ParquetShard
from harness.records import Pack


class UncheckedReader(PackReader):
    """Compares no checksum, neither of packs nor of Parquet's pages."""

    def _check_pack(self, handle: ShardReader, row: int, pack: Pack, pack_id: int) -> None:
        return None

    def _open(self, shard: int) -> ShardReader:
        handle = super()._open(shard)
        if isinstance(handle, ParquetShard):
            handle.checks_pages = False
        return handle


def open_unchecked(path: Path) -> PackReader:
    """Open a dataset folder without checks on what is read; files are still looked at."""
    reader = open_dataset(path)
    reader.__class__ = UncheckedReader
    return reader
