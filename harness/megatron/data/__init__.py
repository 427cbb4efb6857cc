"""Data of a Megatron job: batches for every rank, a pretraining corpus through Megatron's datasets, and streams.

`feed` gives each rank the batches of a loader, and turns an error of one rank into an error of all; `live_feed` does
the same for live chunks. `corpus` checks the sources and builds Megatron's datasets; `samples` reads them.
Read `feed` first.
"""

from __future__ import annotations

from harness.megatron.data.corpus import build_corpus, find_packs, open_corpus
from harness.megatron.data.feed import Feed, readable, together
from harness.megatron.data.live_feed import LiveFeed
from harness.megatron.data.samples import SampleLoader, SampleReader

__all__ = [
    "Feed",
    "LiveFeed",
    "SampleLoader",
    "SampleReader",
    "build_corpus",
    "find_packs",
    "open_corpus",
    "readable",
    "together",
]
