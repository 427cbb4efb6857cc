"""Transformer Engine's functions of a router as PyTorch's operations, by what its documentation and kernels say.

They compute in float32, whatever the dtype of the logits is. Unlike Megatron-Core's plain operations, they refuse what
the kernels do not have, take a bias off the sum of score and bias again, and divide the scores of the loss only where a
token has several experts.
"""

from __future__ import annotations

from typing import Any

import torch

CALLS = {"choose": 0, "score": 0}


def fused_topk_with_score_function(
    logits: torch.Tensor,
    topk: int,
    use_pre_softmax: bool,
    num_groups: int | None,
    group_topk: int | None,
    scaling_factor: float | None,
    score_function: str,
    expert_bias: torch.Tensor | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the weights [T, experts] of the experts of each token, in the dtype of the logits, and bool, which ones.

    Sigmoids are divided by their sum over a token's experts, if it has several; softmax is over all experts before they
    are chosen, or over those that are.
    """
    CALLS["choose"] += 1
    _check(logits, score_function)
    assert expert_bias is None or score_function == "sigmoid"
    assert use_pre_softmax or topk > 1 or score_function == "sigmoid"
    values = logits.float()
    if score_function == "sigmoid":
        values = values.sigmoid()
    elif use_pre_softmax:
        values = values.softmax(dim=1)
    ranked = values.detach() + (0 if expert_bias is None else expert_bias.detach().float())
    chosen = _best(ranked, topk) if not group_topk else _best_of_groups(ranked, topk, num_groups, group_topk)
    if score_function == "softmax" and not use_pre_softmax:
        weights = values.masked_fill(~chosen, -torch.inf).softmax(dim=1)
    else:
        if expert_bias is not None:  # rounded as the sum is; gradients are those of the score itself
            values = values + ((ranked - expert_bias.float()) - values.detach())
        weights = values * chosen
        if score_function == "sigmoid" and topk > 1:
            weights = weights / (weights.sum(dim=1, keepdim=True) + 1e-20)
    return (weights * (1.0 if scaling_factor is None else scaling_factor)).to(logits.dtype), chosen


def fused_compute_score_for_moe_aux_loss(
    logits: torch.Tensor, topk: int, score_function: str
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return bool [T, experts], the best experts of each token without biases and groups, and float32 scores of all."""
    CALLS["score"] += 1
    _check(logits, score_function)
    if score_function == "softmax":
        scores = logits.float().softmax(dim=1)
    else:
        scores = logits.float().sigmoid()
        if topk > 1:
            scores = scores / (scores.sum(dim=1, keepdim=True) + 1e-20)
    return _best(scores.detach(), topk), scores


def fused_moe_aux_loss(*arguments: Any, **options: Any) -> torch.Tensor:
    """Refuse: it needs the number of tokens on the host, and counts padding in it."""
    raise NotImplementedError("a loss over real tokens alone is not computed by this kernel")


def _check(logits: torch.Tensor, score_function: str) -> None:
    assert logits.dim() == 2
    assert logits.numel()
    assert logits.is_contiguous()
    assert logits.dtype in (torch.float32, torch.bfloat16, torch.float16)
    assert score_function in ("softmax", "sigmoid")


def _best(scores: torch.Tensor, number: int) -> torch.Tensor:
    """Return bool [T, experts]: again and again, the largest score that is left, the first of equal ones."""
    chosen = torch.zeros_like(scores, dtype=torch.bool)
    for _ in range(number):
        chosen.scatter_(1, scores.masked_fill(chosen, -torch.inf).argmax(dim=1, keepdim=True), True)
    return chosen


def _best_of_groups(scores: torch.Tensor, topk: int, num_groups: int | None, group_topk: int) -> torch.Tensor:
    """Return the best of the best groups, which are ranked by the sum of as many experts as each may give."""
    assert num_groups is not None
    grouped = scores.view(len(scores), num_groups, -1)
    best = _best(grouped.flatten(0, 1), topk // group_topk).view_as(grouped)
    groups = _best((grouped * best).sum(dim=2), group_topk)
    return _best(scores.masked_fill(~groups.repeat_interleave(grouped.shape[2], dim=1), -torch.inf), topk)
