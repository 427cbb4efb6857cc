"""TODO."""

from __future__ import annotations

from harness.megatron.data.corpus import build_corpus, open_corpus
from harness.megatron.data.feed import Feed, layout_of, readable, together
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
    "layout_of",
    "open_corpus",
    "readable",
    "together",
]
