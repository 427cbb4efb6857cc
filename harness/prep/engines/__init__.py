"""TODO."""

from __future__ import annotations

from harness.prep.engines.chunk import TokenizeJob
from harness.prep.engines.shard import BAD_RECORDS, Receipt, ShardJob, do_shard, refuse, shard_folder
from harness.prep.engines.spool import Split, Spool, divide
from harness.prep.engines.workers import count_workers, do_shards

__all__ = [
    "BAD_RECORDS",
    "Receipt",
    "ShardJob",
    "Split",
    "Spool",
    "TokenizeJob",
    "count_workers",
    "divide",
    "do_shard",
    "do_shards",
    "refuse",
    "shard_folder",
]
