"""The functions of a Megatron-LM training script that read microbatches: `get_batch`, `forward_step`, the loss."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any, cast

import torch
from megatron.core.utils import get_attr_wrapped_model

from harness.integrations.megatron_lm.data_schedule import Microbatch, get_batch_on_this_rank_for_sequence_packing
from harness.megatron.batch import padding_argument, sum_loss


def get_batch(data_iterator: Iterator[Any] | None, vp_stage: int | None = None) -> Microbatch:
    """Return this rank's part of the next microbatch, as `get_batch_on_this_rank_for_sequence_packing` does.

    Args:
        data_iterator: that Megatron made of an `ExternalLoader`; None on tensor-parallel ranks other than the first.
        vp_stage: the virtual pipeline stage that asks; None without them.
    """
    return get_batch_on_this_rank_for_sequence_packing(data_iterator, vp_stage=vp_stage)


def forward_step(data_iterator: Iterator[Any] | None, model: Any) -> tuple[torch.Tensor, Any]:
    """Run one microbatch through one chunk of the model; return its output and the function of its loss.

    Routers of experts get the mask of padding, on every stage.
    """
    batch = get_batch(data_iterator, get_attr_wrapped_model(model, "vp_stage"))
    tokens, labels, loss_mask, attention_mask, position_ids, packed_seq_params, padding_mask = batch
    output = model(
        input_ids=tokens,
        position_ids=position_ids,
        attention_mask=attention_mask,
        labels=labels,
        packed_seq_params=packed_seq_params,
        **padding_argument(model, padding_mask),
    )
    # Called on the last stage alone, which has a mask.
    return output, partial(loss_function, cast(torch.Tensor, loss_mask))


def loss_function(
    loss_mask: torch.Tensor, losses: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, dict[str, torch.Tensor]]:
    """Return the summed loss of a microbatch, its trained tokens, and Megatron's report of both.

    With `--calculate-per-token-loss` Megatron divides by the tokens of the whole global batch, so the loss does not
    depend on the placement of sequences.
    """
    total, tokens, report = sum_loss(loss_mask, loss_mask.sum().to(torch.int), losses)
    return total, tokens, {"lm loss": report[:2]}
