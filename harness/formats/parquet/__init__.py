"""Parquet shards: `ParquetWriter` and `ParquetShard`."""

from __future__ import annotations

from harness.formats.parquet.reader import ParquetShard
from harness.formats.parquet.writer import ParquetWriter

__all__ = [
    "ParquetShard",
    "ParquetWriter",
]
