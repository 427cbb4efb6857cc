"""Training on data that is still being written: a producer adds chunks to a folder while ranks read them.

`folder` has the names and records of a folder and opens chunks; `producer` writes them, and `produce` feeds it from
files or a pipe. A rank reads its own chunks (`rank`); ranks exchange what they have and train, wait or stop together
(`consumer`), from a position that holds for any number of ranks (`position`). Read `folder` first.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from harness.loader.live.config import LiveConfig
from harness.loader.live.position import LivePosition

if TYPE_CHECKING:
    from harness.loader.live.consumer import ORDER, LiveLoader
    from harness.loader.live.folder import CONSUMER_FILE, LiveFolder, chunk_name
    from harness.loader.live.produce import STDIN, Packing, produce_chunks, read_conversations, read_packs
    from harness.loader.live.producer import LiveProducer
    from harness.loader.live.rank import BatchPlan, LivePack, Offer, RankStream
    from harness.loader.live.status import live_status, now, render_status

# Imported when first used: settings need neither pyarrow nor rich.
_LAZY = {
    "CONSUMER_FILE": "folder",
    "ORDER": "consumer",
    "STDIN": "produce",
    "BatchPlan": "rank",
    "LiveFolder": "folder",
    "LiveLoader": "consumer",
    "LivePack": "rank",
    "LiveProducer": "producer",
    "Offer": "rank",
    "Packing": "produce",
    "RankStream": "rank",
    "chunk_name": "folder",
    "live_status": "status",
    "now": "status",
    "produce_chunks": "produce",
    "read_conversations": "produce",
    "read_packs": "produce",
    "render_status": "status",
}

__all__ = [
    "CONSUMER_FILE",
    "ORDER",
    "STDIN",
    "BatchPlan",
    "LiveConfig",
    "LiveFolder",
    "LiveLoader",
    "LivePack",
    "LivePosition",
    "LiveProducer",
    "Offer",
    "Packing",
    "RankStream",
    "chunk_name",
    "live_status",
    "now",
    "produce_chunks",
    "read_conversations",
    "read_packs",
    "render_status",
]


def __getattr__(name: str) -> Any:
    if name not in _LAZY:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_LAZY[name]}"), name)
