"""One microbatch row as tensors on the device, with the PackedSeqParams that attention and RoPE read."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from megatron.core import parallel_state
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.utils import get_attr_wrapped_model, get_model_config

from harness.megatron.compat import packed_seq_params
from harness.thd import ThdBatch, context_parallel_indices


@dataclass(frozen=True)
class RowTensors:
    """This rank's slice of one row of T padded tokens.

    Attributes:
        tokens, labels, position_ids: int64 [1, T / cp].
        loss_mask: float32 [1, T / cp].
        padding_mask: bool [1, T / cp], True at padding.
        packed_seq_params: boundaries of the whole row, the same on every rank of its context-parallel group.
    """

    tokens: torch.Tensor
    labels: torch.Tensor
    position_ids: torch.Tensor
    loss_mask: torch.Tensor
    padding_mask: torch.Tensor
    packed_seq_params: PackedSeqParams


def to_device(row: ThdBatch, device: torch.device, *, cp_size: int = 1, cp_rank: int = 0) -> RowTensors:
    """Copy this rank's context-parallel slice of a row to `device`."""
    # The bounds decide where a token is in its sequence, for attention and for the rotary embedding alike.
    positions = np.arange(len(row), dtype=np.int64) - np.repeat(
        row.cu_seqlens_padded[:-1], np.diff(row.cu_seqlens_padded)
    )
    fields: list[npt.NDArray[Any]] = [
        row.tokens,
        row.labels,
        row.position_ids,
        row.loss_mask,
        row.padding_mask,
        positions,
    ]
    if cp_size > 1:
        keep = context_parallel_indices(row.cu_seqlens_padded, cp_size=cp_size, cp_rank=cp_rank)
        fields = [field[keep] for field in fields]
    tokens, labels, position_ids, loss_mask, padding_mask, counted = (
        torch.from_numpy(np.ascontiguousarray(field)).unsqueeze(0).to(device, non_blocking=True) for field in fields
    )
    # Kernels take a slower path with padded bounds, so these are passed only if they differ.
    padded = None if np.array_equal(row.cu_seqlens, row.cu_seqlens_padded) else row.cu_seqlens_padded
    return RowTensors(
        tokens,
        labels,
        position_ids,
        loss_mask,
        padding_mask,
        packed_seq_params(
            cu_seqlens=torch.from_numpy(row.cu_seqlens).to(device, non_blocking=True),
            cu_seqlens_padded=None if padded is None else torch.from_numpy(padded).to(device, non_blocking=True),
            max_seqlen=row.max_seqlen,
            positions=counted[0],
        ),
    )


def run_row(chunk: Any, row: RowTensors, *, with_labels: bool = True) -> torch.Tensor:
    """Run a row through one chunk of the model; return its losses, or logits, or what the next stage gets.

    The routers of experts are told where padding is, on every stage.
    """
    output: torch.Tensor = chunk(
        input_ids=row.tokens,
        position_ids=row.position_ids,
        attention_mask=None,
        labels=row.labels if with_labels else None,
        packed_seq_params=row.packed_seq_params,
        **padding_argument(chunk, row.padding_mask),
    )
    return output


def padding_argument(chunk: Any, padding_mask: torch.Tensor) -> dict[str, torch.Tensor]:
    """Return the argument that names padding to a chunk's routers of experts; none for a chunk without experts.

    Megatron cuts the mask for sequence parallelism on the first stage alone.

    Args:
        padding_mask: bool [1, T / cp], True at padding.
    """
    config = get_model_config(chunk)
    if config.num_moe_experts is None:
        return {}
    if config.sequence_parallel and not get_attr_wrapped_model(chunk, "pre_process"):
        rank = parallel_state.get_tensor_model_parallel_rank()
        padding_mask = padding_mask.chunk(config.tensor_model_parallel_size, dim=1)[rank]
    return {"padding_mask": padding_mask}
