"""The dataset, the schedule and the exact resume in other training loops.

`RankStream` yields this rank's batch of every step and keeps the position after it; every adapter is made of it.
`FixedRows` yields its rows one by one, for trainers that fix the number of microbatches. `MegatronRow` and
`HuggingFaceRow` are one row in the two dialects of training code. Each trainer has a module of its own, which is a door
too: `torch` (plain loops, torchdata, Lightning, accelerate), `huggingface`, `megatron_lm`, `megatron_bridge` and
`torchtitan`. `INTEGRATIONS` lists them with the packages that each needs. `packed_sft` has the names of the RFC for
packed SFT data, which are here too.

Importing this package imports no training framework.
"""

from __future__ import annotations

from harness.integrations.dialects import DIALECTS, DialectError, HuggingFaceRow, MegatronRow, Row, require_dialect
from harness.integrations.packed_sft import (
    GPTSFTPackedDataset,
    GPTSFTPackedMemmapDataset,
    GPTSFTPackedParquetDataset,
    create_sft_dataset,
    open_packed_writer,
)
from harness.integrations.registry import INTEGRATIONS, Integration, missing_packages, require
from harness.integrations.stream import FixedRows, RankStream, as_packed_rows, require_as_packed

__all__ = [
    "DIALECTS",
    "INTEGRATIONS",
    "DialectError",
    "FixedRows",
    "GPTSFTPackedDataset",
    "GPTSFTPackedMemmapDataset",
    "GPTSFTPackedParquetDataset",
    "HuggingFaceRow",
    "Integration",
    "MegatronRow",
    "RankStream",
    "Row",
    "as_packed_rows",
    "create_sft_dataset",
    "missing_packages",
    "open_packed_writer",
    "require",
    "require_as_packed",
    "require_dialect",
]
