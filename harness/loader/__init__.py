"""Reads the packs of each step, on each rank, in worker processes that never change a batch.

Which packs make up a global batch is a pure function of seed and epoch (`order`, and `blend` for several datasets). How
their sequences become rows is planned from lengths alone, the same on every rank (`plan`); a rank reads only its own
sequences, in `workers`. The whole state is a few integers and a fingerprint (`state`). `live` reads data that is still
being written. Read `order` first, then `plan` and `loader`. No part of it needs PyTorch.
"""

from typing import TYPE_CHECKING

from harness.doors import names_on_first_use

if TYPE_CHECKING:
    from harness.loader.blend import Blend
    from harness.loader.config import LoaderConfig, RankLayout
    from harness.loader.corpus import CorpusConfig, corpus_paths
    from harness.loader.datasets import DataConfig, JoinedReader, LiveConfig, RunData, open_datasets
    from harness.loader.loader import Loader
    from harness.loader.order import BatchRange, EpochOrder
    from harness.loader.plan import RankBatch, build_batch
    from harness.loader.state import LoaderState

__all__ = [
    "BatchRange",
    "Blend",
    "CorpusConfig",
    "DataConfig",
    "EpochOrder",
    "JoinedReader",
    "LiveConfig",
    "Loader",
    "LoaderConfig",
    "LoaderState",
    "RankBatch",
    "RankLayout",
    "RunData",
    "build_batch",
    "corpus_paths",
    "open_datasets",
]

# `order` and `state` alone need numpy and no more.
__getattr__ = names_on_first_use(
    __name__,
    blend="Blend",
    config="LoaderConfig RankLayout",
    corpus="CorpusConfig corpus_paths",
    datasets="DataConfig JoinedReader LiveConfig RunData open_datasets",
    loader="Loader",
    order="BatchRange EpochOrder",
    plan="RankBatch build_batch",
    state="LoaderState",
)
