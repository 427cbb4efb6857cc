"""Training on data that is still being written: a producer adds chunks to a folder while ranks read them.

`folder` has the names and records of a folder and opens chunks; `producer` writes them, and `produce` feeds it from
files or a pipe. A rank reads its own chunks (`rank`); ranks exchange what they have and train, wait or stop together
(`consumer`), from a position that holds for any number of ranks (`position`). What each rank reads of each folder for
a step is in `shares`. With a schedule that balances, tokens go from the rank that reads them to the one that trains
them (`balance`). Read `folder` first.
"""

from __future__ import annotations

from harness.loader.live.consumer import ORDER, LiveLoader, join_streams, split_streams
from harness.loader.live.folder import CONSUMER_FILE, LiveFolder, chunk_name
from harness.loader.live.position import LivePosition, positions_from_json, positions_to_json
from harness.loader.live.produce import (
    STDIN,
    Packing,
    log_unused_fields,
    produce_chunks,
    read_conversations,
    read_packs,
)
from harness.loader.live.producer import LiveProducer
from harness.loader.live.rank import BatchPlan, FolderReader, LivePack, Offer
from harness.loader.live.status import live_status, render_status

__all__ = [
    "CONSUMER_FILE",
    "ORDER",
    "STDIN",
    "BatchPlan",
    "FolderReader",
    "LiveFolder",
    "LiveLoader",
    "LivePack",
    "LivePosition",
    "LiveProducer",
    "Offer",
    "Packing",
    "chunk_name",
    "join_streams",
    "live_status",
    "log_unused_fields",
    "positions_from_json",
    "positions_to_json",
    "produce_chunks",
    "read_conversations",
    "read_packs",
    "render_status",
    "split_streams",
]
