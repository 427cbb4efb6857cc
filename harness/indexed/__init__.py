"""TODO."""

from __future__ import annotations

from harness.indexed.convert import IndexedReport, TokenSource, convert_tokens, report_of
from harness.indexed.family import TokenFamily, is_family, verify_family, write_family
from harness.indexed.index import (
    BIN,
    CODES,
    HEADER,
    IDX,
    INT32,
    MAGIC,
    UINT16,
    VERSION,
    IndexHeader,
    MappedIndex,
    prefix_of,
    with_suffix,
)
from harness.indexed.merge import count_sequences, merge_indexed, save_counts
from harness.indexed.verify import verify_indexed
from harness.indexed.writer import IndexedWriter

__all__ = [
    "BIN",
    "CODES",
    "HEADER",
    "IDX",
    "INT32",
    "MAGIC",
    "UINT16",
    "VERSION",
    "IndexHeader",
    "IndexedReport",
    "IndexedWriter",
    "MappedIndex",
    "TokenFamily",
    "TokenSource",
    "convert_tokens",
    "count_sequences",
    "is_family",
    "merge_indexed",
    "prefix_of",
    "report_of",
    "save_counts",
    "verify_family",
    "verify_indexed",
    "with_suffix",
    "write_family",
]
