"""`torchrun -m tests.distributed.expert_ranks RUNS.json`: runs of `recipes.sft` in the same processes, some faulty.

RUNS.json is a list of [port, fault, overrides, folder, start]; the folder is first copied from `start`.
"""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any
from unittest import mock

import torch

from harness.config import compose_config
from harness.megatron import prepare_process
from harness.plan import SftConfig
from harness.thd import ThdBatch, TokensAhead
from recipes import sft

from .forked import jobs_of


@contextmanager
def planted(fault: str | None) -> Iterator[None]:
    """Make a mistake of other programs inside the block."""
    from megatron.core.transformer.moe.moe_layer import MoELayer

    from harness.megatron import batch
    from harness.megatron.model.router import Router

    count: Callable[..., None] = Router._count
    of_chunk = batch.padding_argument

    def count_all(self: Any, logits: torch.Tensor, chosen: torch.Tensor, padding: torch.Tensor) -> None:
        count(self, logits, chosen, padding)
        self.local_tokens_per_expert += (chosen & padding.unsqueeze(1)).sum(dim=0)

    ahead = batch.tokens_ahead

    def ahead_at_real_bounds(row: ThdBatch, distance: int) -> TokensAhead:
        bounds = row.cu_seqlens.copy()
        bounds[-1] = len(row)
        return ahead(replace(row, cu_seqlens=bounds, cu_seqlens_padded=bounds), distance)

    faults: dict[str | None, Any] = {
        None: [],
        "padding in the router": [
            mock.patch.object(batch, "padding_argument", lambda chunk, mask: of_chunk(chunk, torch.zeros_like(mask)))
        ],
        "MTP rolled at unpadded bounds": [mock.patch.object(batch, "tokens_ahead", ahead_at_real_bounds)],
        "expert bias sees padding": [mock.patch.object(Router, "_count", count_all)],
        "shared expert skipped on one rank": [mock.patch.object(MoELayer, "shared_experts_compute", return_value=None)]
        * int(os.environ.get("RANK", "0") == "1"),
    }
    for patch in faults[fault]:
        patch.start()
    try:
        yield
    finally:
        mock.patch.stopall()


if __name__ == "__main__":
    prepare_process()
    for fault, overrides, folder, start in jobs_of(sys.argv[1]):
        if os.environ["RANK"] == "0":  # the others wait for it to join
            shutil.copytree(start, folder)
        with planted(fault):
            assert sft.main(compose_config("sft", SftConfig, [*overrides, f"run_dir={folder}"])) == 0
