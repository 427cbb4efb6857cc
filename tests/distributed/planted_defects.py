"""Defects that other trainers had, each as a change of a rank's batch: the isolation check has to find them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import torch

from harness.loader import RankLayout
from harness.megatron.batch import RowTensors, to_device
from harness.megatron.compat import packed_seq_params
from harness.parity.isolation import Prepare
from harness.plan import ParallelConfig
from harness.thd import ThdBatch


def planted_defects(layout: RankLayout, parallel: ParallelConfig, multiple: int) -> dict[str, Prepare]:
    """Return the defects that the layout can have.

    A check that finds none of them proves nothing.

    Args:
        multiple: each sequence of the row is padded to a multiple of this many tokens.
    """

    def on_row(change: Callable[[ThdBatch], ThdBatch]) -> Prepare:
        return lambda row, device, **slices: to_device(change(row), device, **slices)

    def bounds_dropped(row: ThdBatch, device: torch.device, **slices: Any) -> RowTensors:
        tensors = to_device(row, device, **slices)
        if layout.pp_rank != parallel.pipeline_parallel_size // 2:
            return tensors  # the bug was in stages in the middle
        whole = torch.tensor([0, len(row)], dtype=torch.int32, device=device)
        params = packed_seq_params(cu_seqlens=whole, cu_seqlens_padded=None, max_seqlen=len(row))
        return replace(tensors, packed_seq_params=params)

    def positions_continue(row: ThdBatch) -> ThdBatch:
        return replace(row, position_ids=np.arange(len(row), dtype=np.int64))

    def slice_off_by_one(row: ThdBatch, device: torch.device, *, cp_size: int, cp_rank: int) -> RowTensors:
        chunk = np.concatenate(
            [
                np.arange(start, stop).reshape(2 * cp_size, -1)[[cp_rank + 1, 2 * cp_size - 1 - cp_rank]].reshape(-1)
                for start, stop in zip(row.cu_seqlens_padded[:-1], row.cu_seqlens_padded[1:], strict=True)
            ]
        )
        right = to_device(row, device, cp_size=cp_size, cp_rank=cp_rank)
        return replace(right, tokens=torch.from_numpy(row.tokens[chunk]).unsqueeze(0).to(device))

    def padding_attended(row: ThdBatch) -> ThdBatch:
        # The padding at the end of a document counts as part of the next document, which attends to it.
        bounds = row.cu_seqlens_padded.copy()
        bounds[1:-1] -= multiple
        keep = np.append(True, np.diff(bounds) > 0)
        return replace(row, cu_seqlens_padded=bounds[keep], cu_seqlens=row.cu_seqlens[keep])

    def label_crosses(row: ThdBatch) -> ThdBatch:
        labels, mask = row.labels.copy(), row.loss_mask.copy()
        last = int(row.cu_seqlens[1]) - 1
        labels[last], mask[last] = row.tokens[int(row.cu_seqlens_padded[1])], 1.0
        return replace(row, labels=labels, loss_mask=mask)

    def mask_shifted(row: ThdBatch) -> ThdBatch:
        return replace(row, loss_mask=np.roll(row.loss_mask, 1))

    planted: dict[str, Prepare] = {
        "cu_seqlens dropped": bounds_dropped,
        "positions not restarted": on_row(positions_continue),
        "padding attended": on_row(padding_attended),
        "label crosses a boundary": on_row(label_crosses),
        "mask shifted by one": on_row(mask_shifted),
    }
    if parallel.context_parallel_size > 1:
        planted["slice off by one chunk"] = slice_off_by_one
    return planted
