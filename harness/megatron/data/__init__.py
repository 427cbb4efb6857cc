"""TODO."""

from __future__ import annotations

from harness.megatron.data.corpus import build_corpus, open_corpus
from harness.megatron.data.feed import Feed, readable, together
from harness.megatron.data.live_feed import LiveFeed
from harness.megatron.data.samples import SampleLoader, SampleReader
from harness.megatron.data.sources import find_packs

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
