"""Training on data that is still being written: a producer adds chunks to a folder while ranks read them.

Read `folder` first, then `producer`, and `rank` before `consumer`.
"""

from harness.loader.live.produce import (
    STDIN,
    Packing,
    log_unused_fields,
    produce_chunks,
    read_conversations,
    read_packs,
)
from harness.loader.live.producer import LiveProducer

__all__ = [
    "STDIN",
    "LiveProducer",
    "Packing",
    "log_unused_fields",
    "produce_chunks",
    "read_conversations",
    "read_packs",
]
