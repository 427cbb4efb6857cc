"""Reads the packs of each step, on each rank, in worker processes that never change a batch.

Which packs make up a global batch is a pure function of seed and epoch (`order`, and `blend` for several datasets). How
their sequences become rows is planned from lengths alone, the same on every rank (`plan`); a rank reads only its own
sequences, in `workers`. The whole state is a few integers and a fingerprint (`state`). `live` reads data that is still
being written. Read `order` first, then `plan` and `loader`.

Importing this package imports no PyTorch; opening a `Loader` does.
"""

from __future__ import annotations

from harness.loader.blend import Blend, BlendOrder
from harness.loader.config import LoaderConfig, RankLayout
from harness.loader.corpus import SPLITS, CorpusConfig, CorpusSource, SplitSources, corpus_paths
from harness.loader.datasets import (
    BlendSource,
    DataConfig,
    JoinedReader,
    LiveConfig,
    LiveData,
    LiveSource,
    RunData,
    Sources,
    open_datasets,
    open_live,
    open_train,
)
from harness.loader.inspect_blend import BLEND_SUFFIXES, render_blend, summarize_blend
from harness.loader.loader import Loader
from harness.loader.order import BatchRange, EpochOrder, shuffle_in_windows, steps_from, steps_per_epoch
from harness.loader.plan import BatchReader, PackSource, RankBatch, RawBatch, build_batch
from harness.loader.state import LoaderState
from harness.loader.workers import BatchStream

__all__ = [
    "BLEND_SUFFIXES",
    "SPLITS",
    "BatchRange",
    "BatchReader",
    "BatchStream",
    "Blend",
    "BlendOrder",
    "BlendSource",
    "CorpusConfig",
    "CorpusSource",
    "DataConfig",
    "EpochOrder",
    "JoinedReader",
    "LiveConfig",
    "LiveData",
    "LiveSource",
    "Loader",
    "LoaderConfig",
    "LoaderState",
    "PackSource",
    "RankBatch",
    "RankLayout",
    "RawBatch",
    "RunData",
    "Sources",
    "SplitSources",
    "build_batch",
    "corpus_paths",
    "open_datasets",
    "open_live",
    "open_train",
    "render_blend",
    "shuffle_in_windows",
    "steps_from",
    "steps_per_epoch",
    "summarize_blend",
]
