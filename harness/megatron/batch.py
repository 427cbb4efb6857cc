"""One microbatch row as tensors on the device, with the PackedSeqParams that attention and RoPE read."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from megatron.core.packed_seq_params import PackedSeqParams

from harness.megatron.compat import packed_seq_params
from harness.thd import ThdBatch, context_parallel_indices


@dataclass(frozen=True)
class RowTensors:
    """This rank's slice of one row of T padded tokens.

    Attributes:
        tokens, labels, position_ids: int64 [1, T / cp].
        loss_mask: float32 [1, T / cp].
        packed_seq_params: boundaries of the whole row, the same on every rank of its context-parallel group.
    """

    tokens: torch.Tensor
    labels: torch.Tensor
    position_ids: torch.Tensor
    loss_mask: torch.Tensor
    packed_seq_params: PackedSeqParams


def to_device(row: ThdBatch, device: torch.device, *, cp_size: int = 1, cp_rank: int = 0) -> RowTensors:
    """Copy this rank's context-parallel slice of a row to `device`."""
    fields: list[npt.NDArray[Any]] = [row.tokens, row.labels, row.position_ids, row.loss_mask]
    if cp_size > 1:
        keep = context_parallel_indices(row.cu_seqlens_padded, cp_size=cp_size, cp_rank=cp_rank)
        fields = [field[keep] for field in fields]
    tokens, labels, position_ids, loss_mask = (
        torch.from_numpy(np.ascontiguousarray(field)).unsqueeze(0).to(device, non_blocking=True) for field in fields
    )
    # Kernels take a slower path with padded bounds, so these are passed only if they differ.
    padded = None if np.array_equal(row.cu_seqlens, row.cu_seqlens_padded) else row.cu_seqlens_padded
    return RowTensors(
        tokens,
        labels,
        position_ids,
        loss_mask,
        packed_seq_params(
            cu_seqlens=torch.from_numpy(row.cu_seqlens).to(device, non_blocking=True),
            cu_seqlens_padded=None if padded is None else torch.from_numpy(padded).to(device, non_blocking=True),
            max_seqlen=row.max_seqlen,
            total_tokens=int(row.cu_seqlens_padded[-1]),
        ),
    )
