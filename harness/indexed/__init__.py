"""Megatron's indexed datasets (X.bin and X.idx) from token shards: no torch, no Megatron.

    convert_tokens(["shards/"], "corpus")       token shards (Parquet) to one pair, as Megatron's own builder writes it
    write_family(["shards/"], OUT, family)      one pair per split, and the JSON files for Megatron's options
    merge_indexed(["a", "b"], "ab")             pairs joined end to end
    verify_indexed("ab")                        problems of a pair

Read `index` first: the layout of X.idx.
"""

from __future__ import annotations

from harness.indexed.convert import TokenSource, convert_tokens, count_sequences, merge_indexed, save_counts
from harness.indexed.family import TokenFamily, family_pairs, is_family, verify_family, write_family
from harness.indexed.index import (
    BIN,
    HEADER,
    IDX,
    INT32,
    LOSS_BIN,
    UINT16,
    IndexHeader,
    MappedIndex,
    prefix_of,
    with_suffix,
)
from harness.indexed.verify import read_lengths, verify_indexed
from harness.indexed.writer import IndexedReport, IndexedWriter

__all__ = [
    "BIN",
    "HEADER",
    "IDX",
    "INT32",
    "LOSS_BIN",
    "UINT16",
    "IndexHeader",
    "IndexedReport",
    "IndexedWriter",
    "MappedIndex",
    "TokenFamily",
    "TokenSource",
    "convert_tokens",
    "count_sequences",
    "family_pairs",
    "is_family",
    "merge_indexed",
    "prefix_of",
    "read_lengths",
    "save_counts",
    "verify_family",
    "verify_indexed",
    "with_suffix",
    "write_family",
]
