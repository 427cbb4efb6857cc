"""Settings of a loader, and the place of its rank in the parallel layout."""

from __future__ import annotations

import os
import sys
from dataclasses import dataclass

from harness.checks import LONGEST_S, CheckedSettings, bounded, one_of
from harness.errors import ConfigError, LoaderError


@dataclass
class LoaderConfig(CheckedSettings, section="loader"):
    """Settings of how packs are read.

    Attributes:
        global_batch_size: number of packs in a global batch, over all ranks.
        seed: seed of the shuffle.
        num_workers: number of worker processes per rank; 0 reads in the training process. Batches do not depend on it.
        persistent_workers: keep workers across epochs, so that they prefetch the next one.
        prefetch_factor: number of batches that each worker reads ahead.
        start_method: start method of the workers: fork, spawn or forkserver; null uses the default of the platform.
        block_packs: number of packs in a block of the shuffle (`harness.loader.EpochOrder`). A value of 1 with a window
            as large as the dataset is a full shuffle.
        window_blocks: number of blocks over which packs are shuffled.
        drop_last: drop the packs at the end of an epoch that do not fill a global batch.
        shuffle: shuffle the packs; false reads them in stored order.
        timeout_s: maximum time in seconds to wait for the data of one step.
        allow_other_data: resume even if the dataset, seed, order or tokenizer differs from that of the checkpoint.
    """

    global_batch_size: int = bounded(8, lowest=1)
    seed: int = bounded(0, lowest=-(2**63), highest=2**64 - 1)
    num_workers: int = bounded(2, lowest=0, highest=1024)
    persistent_workers: bool = True
    prefetch_factor: int = bounded(2, lowest=1, highest=1024)
    start_method: str | None = one_of(None, ("fork", "spawn", "forkserver"))
    block_packs: int = bounded(64, lowest=1)
    window_blocks: int = bounded(16, lowest=1)
    drop_last: bool = False
    shuffle: bool = True
    timeout_s: float = bounded(300.0, above=0, highest=LONGEST_S)
    allow_other_data: bool = False

    @property
    def order_signature(self) -> str:
        """Text that, with seed and data, determines the order of an epoch; the global batch size does not affect it."""
        return f"block_packs={self.block_packs} window_blocks={self.window_blocks}" if self.shuffle else "stored"


@dataclass(frozen=True, slots=True)
class RankLayout:
    """The place of one rank in the parallel layout. The default is a single rank that holds the whole model.

    Attributes:
        dp_rank, dp_size: data parallelism, which selects the rows of a global batch that this rank trains.
        cp_rank, cp_size: context parallelism, whose ranks share a row.
        pp_rank: stage of the pipeline.
        pad_to_multiple: every sequence is padded to a multiple of this (`harness.thd.padding_multiple`).
        group_size: the number of microbatches of a step is a multiple of this.
        shares_rows: True if the trainer supports rows that several data-parallel ranks share (`ThdBatch.shared_by`), as
            produced by the `dynamic_context` schedule.
        reads_ahead: read only this rank's tokens of a shared row, and this many after each chunk for labels; others may
            be -1. None reads rows whole.
    """

    dp_rank: int = 0
    dp_size: int = 1
    cp_rank: int = 0
    cp_size: int = 1
    tp_rank: int = 0
    tp_size: int = 1
    pp_rank: int = 0
    is_first_stage: bool = True
    is_last_stage: bool = True
    pad_to_multiple: int = 1
    group_size: int = 1
    shares_rows: bool = False
    reads_ahead: int | None = None

    def __post_init__(self) -> None:
        for name in ("dp_size", "cp_size", "tp_size", "pad_to_multiple", "group_size"):
            if getattr(self, name) < 1:
                raise LoaderError(f"{name} is {getattr(self, name)}", where="RankLayout", fix="set it to 1 or more")
        for kind, name in (("data", "dp"), ("context", "cp"), ("tensor", "tp")):
            rank, size = getattr(self, f"{name}_rank"), getattr(self, f"{name}_size")
            if not 0 <= rank < size:
                what = f"{kind}-parallel rank {rank} is out of range for size {size}"
                raise LoaderError(what, where="RankLayout", fix=f"use a {name}_rank from 0 to {size - 1}")

    @property
    def needs_tokens(self) -> bool:
        """True for the first and last pipeline stage; stages in between need only the bounds of sequences."""
        return self.is_first_stage or self.is_last_stage


def rank_layout(layout: RankLayout | None, dp_rank: int | None, dp_size: int | None) -> RankLayout:
    """Return the layout of this rank, or one of only data parallelism; by default that of a single rank.

    Raise ConfigError if both are given, or if neither is given in a job of several ranks.
    """
    if layout is not None:
        if (dp_rank, dp_size) == (None, None):
            return layout
        what = f"dp_rank={dp_rank} and dp_size={dp_size} were passed together with a layout, which contains both"
        raise ConfigError(what, where="Loader", fix="set them in the layout, or pass no layout")
    # The process group or, before it exists, the launcher knows the number of ranks. Do not import PyTorch here.
    distributed, launched = sys.modules.get("torch.distributed"), os.environ.get("WORLD_SIZE", "")
    num_ranks = int(launched) if launched.isdecimal() else 1
    if distributed is not None and distributed.is_available() and distributed.is_initialized():
        num_ranks = max(num_ranks, distributed.get_world_size())
    if num_ranks > 1 and (dp_rank is None or dp_size is None):
        raise ConfigError(
            f"the job has {num_ranks} ranks, but dp_rank or dp_size is not set: every rank would train the same packs",
            where="torch.distributed, or WORLD_SIZE in the environment",
            fix="pass dp_rank and dp_size, or a layout; dp_rank=0, dp_size=1 gives every rank all packs",
        )
    return RankLayout(dp_rank=dp_rank or 0, dp_size=1 if dp_size is None else dp_size)
