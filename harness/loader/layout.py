"""The place of one rank in the parallel layout: the record that loaders, live streams and Megatron's loop share."""

from __future__ import annotations

from dataclasses import dataclass

from harness.errors import LoaderError


@dataclass(frozen=True, slots=True)
class RankLayout:
    """The place of one rank in the parallel layout. The default is a single rank that holds the whole model.

    Attributes:
        dp_rank, dp_size: data parallelism: which rows of a global batch this rank trains.
        cp_rank, cp_size: context parallelism: ranks that share a row.
        tp_rank, tp_size: tensor parallelism.
        pp_rank: stage of the pipeline.
        is_first_stage, is_last_stage: of the pipeline.
        virtual_stages: model chunks of this rank in an interleaved pipeline; None without interleaving.
        pad_to_multiple: every sequence is padded to a multiple of this (`harness.thd.padding_multiple`).
        group_size: the number of microbatches of a step is a multiple of this.
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
    virtual_stages: int | None = None
    pad_to_multiple: int = 1
    group_size: int = 1

    def __post_init__(self) -> None:
        for name in ("dp_size", "cp_size", "tp_size", "pad_to_multiple", "group_size"):
            if getattr(self, name) < 1:
                raise LoaderError(f"{name} is {getattr(self, name)}, expected at least 1")
        if not 0 <= self.dp_rank < self.dp_size:
            raise LoaderError(f"data-parallel rank {self.dp_rank} does not exist among {self.dp_size}")

    @property
    def needs_tokens(self) -> bool:
        """True for the two ends of a pipeline; stages between need only the boundaries of sequences."""
        return self.is_first_stage or self.is_last_stage
