"""Training on data that is still being written: a producer adds chunks to a folder while ranks read them.

`folder` has the names and records of a folder and opens chunks; `producer` writes them, and `produce` feeds it from
files or a pipe. A rank reads its own chunks (`rank`); ranks exchange what they have and train, wait or stop together
(`consumer`), from a position that holds for any number of ranks (`position`). With a schedule that balances, tokens go
from the rank that reads them to the one that trains them (`balance`). Read `folder` first.
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
