"""Chat files: find those that a source names, cut them into shards, and read their records in a stream.

Read `finding` first (files on a disk, in a bucket, of the hub), then `reading`; `text` and `tables` know the kinds of
files.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from harness.doors import names_on_first_use
from harness.prep.sources.config import SourceConfig

if TYPE_CHECKING:
    from harness.prep.sources.finding import SourceFiles, find_files, list_files
    from harness.prep.sources.reading import SourceChunk, SourceShard, cut_shards, read_chunks, read_shard
    from harness.prep.sources.schema import SourceSchema, find_schema, unread_columns
    from harness.prep.sources.tables import check_expansion, check_pages, open_parquet
    from harness.prep.sources.text import MAX_RECORD_BYTES

__all__ = [
    "MAX_RECORD_BYTES",
    "SourceChunk",
    "SourceConfig",
    "SourceFiles",
    "SourceSchema",
    "SourceShard",
    "check_expansion",
    "check_pages",
    "cut_shards",
    "find_files",
    "find_schema",
    "list_files",
    "open_parquet",
    "read_chunks",
    "read_shard",
    "unread_columns",
]

# The settings are part of every command line, which must not wait for pyarrow.
__getattr__ = names_on_first_use(
    __name__,
    {
        **dict.fromkeys(("SourceFiles", "find_files", "list_files"), "finding"),
        **dict.fromkeys(("SourceChunk", "SourceShard", "cut_shards", "read_chunks", "read_shard"), "reading"),
        **dict.fromkeys(("SourceSchema", "find_schema", "unread_columns"), "schema"),
        "MAX_RECORD_BYTES": "text",
        **dict.fromkeys(("check_expansion", "check_pages", "open_parquet"), "tables"),
    },
)
