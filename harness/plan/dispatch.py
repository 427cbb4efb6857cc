"""Temporary memory of a layer with experts: tokens on their way to the experts of other ranks and back.

Counted from Megatron-Core's dispatchers (`transformer/moe/token_dispatcher.py` of 0.16.1), whose steps keep the tokens
of the previous step until the layer ends; a test compares the count against PyTorch's allocations for `alltoall` and
`allgather`. One layer is computed at a time, so a rank needs this memory once. Tokens are an even share, or the share
of the busiest rank. Sizes of DeepEP's buffers (`csrc/config.hpp`) and of the workspace of grouped products (Transformer
Engine's `pytorch/module/base.py`) are only taken from these sources, because both require GPUs.
"""

from __future__ import annotations

import math

from harness.plan.layout import DEEPEP_RANKS, DTYPE_BYTES, ParallelConfig
from harness.plan.model import ModelConfig

# cuBLAS workspaces on GPUs of compute capability 9 or later, one for each of the streams that products alternate on.
GROUPED_GEMM_BYTES = 4 * (32 << 20)
# DeepEP uses 20 multiprocessors, as set by Megatron-Core, and two of them per channel.
_DEEPEP_CHANNELS = 20 // 2
_NVLINK_RANKS = 8
# Buffer per token in DeepEP: source (8 bytes), 128 expert ids (int64), 128 weights and 128 scales (float32).
_DEEPEP_TOKEN_BYTES = 8 + 128 * 8 + 128 * 4 + 128 * 4


def dispatch_bytes(model: ModelConfig, parallel: ParallelConfig, *, tokens: int, is_grouped: bool = False) -> int:
    """Return the peak bytes of a layer with experts, in addition to those that it keeps for the backward pass.

    `tokens` counts a microbatch on one rank (its slice, with context parallelism), scaled by the load of its experts.
    """
    if not model.num_experts:
        return 0
    count = {"alltoall": _alltoall, "allgather": _allgather, "flex": _flex}[parallel.expert_dispatcher]
    own = tokens / parallel.tensor_parallel_size
    # Without grouped products, each expert's output is a tensor, and all of them are concatenated.
    joins = not is_grouped and model.num_experts > parallel.expert_parallel_size
    return math.ceil(count(model, parallel, own, joins)) + (GROUPED_GEMM_BYTES if is_grouped else 0)


def _alltoall(model: ModelConfig, parallel: ParallelConfig, own: float, joins: bool) -> float:
    item, ep, etp = DTYPE_BYTES[model.number], parallel.expert_parallel_size, parallel.expert_tensor_parallel_size
    sorts = model.num_experts > ep
    sent = own * model.experts_per_token * model.hidden_size * item
    # Tokens in expert order, and received tokens; the input of the experts is kept, and not counted here.
    held = sent + (sent if ep > 1 and (sorts or etp > 1) else 0)
    given = etp * sent * (1 + sorts)  # outputs of experts, and the same in order of arrival
    # Their sum over the ranks that share an expert is in float32, like the router's scores.
    shared = ((etp * sent + sent) * 4 / item if item < 4 else sent) if etp > 1 else 0
    return held + max(given + shared, etp * sent * (1 + joins), sent * (1 + (ep > 1)))


def _allgather(model: ModelConfig, parallel: ParallelConfig, own: float, joins: bool) -> float:
    item, ep, etp = DTYPE_BYTES[model.number], parallel.expert_parallel_size, parallel.expert_tensor_parallel_size
    given = own * model.experts_per_token * etp * model.hidden_size * item
    everyone = own * ep * etp * model.hidden_size * item
    if ep * etp == 1:
        return given * (1 + joins)
    scores = 4 * own * ep * etp * model.num_experts
    summed = everyone * (1 + 4 / item * (item < 4)) + 4 * own * model.hidden_size
    # Megatron-Core never frees the buffer that tokens are gathered into.
    return everyone + scores + max(given * (1 + joins), given + everyone, summed)


def _flex(model: ModelConfig, parallel: ParallelConfig, own: float, joins: bool) -> float:
    item, ep, etp = DTYPE_BYTES[model.number], parallel.expert_parallel_size, parallel.expert_tensor_parallel_size
    experts, sent = model.num_experts, model.experts_per_token
    here = experts // ep
    # A rank receives a token once, however many of its experts the token is routed to.
    missed = math.comb(experts - here, sent) / math.comb(experts, sent)
    came = own * etp * ep * (1 - missed)
    given = own * etp * sent * model.hidden_size * item
    # Experts and scores of each token: over the whole model before it is sent, and over this rank's experts after.
    scores = 5 * etp * own * experts + came * (12 * sent + 5 * here)
    tokens = came * model.hidden_size * item
    return deepep_bytes(model, parallel) + scores + tokens + given + max(given * joins, tokens)


def deepep_bytes(model: ModelConfig, parallel: ParallelConfig) -> int:
    """Return the bytes of DeepEP's buffers: NVLink within a node, and RDMA between nodes."""
    ranks = parallel.expert_parallel_size * parallel.expert_tensor_parallel_size
    nvlink_tokens, rdma_tokens = DEEPEP_RANKS[ranks]
    nodes, peers = max(1, ranks // _NVLINK_RANKS), min(ranks, _NVLINK_RANKS)
    token = model.hidden_size * max(DTYPE_BYTES[model.number], 2) + _DEEPEP_TOKEN_BYTES
    nvlink = _DEEPEP_CHANNELS * peers * ((2 * nodes + 3) * 4 + nvlink_tokens * token)
    if ranks <= _NVLINK_RANKS:
        return _whole(nvlink)
    signals = (2 * _NVLINK_RANKS + 2) * 4
    rdma = _DEEPEP_CHANNELS * nodes * 2 * (signals + rdma_tokens * (token + 16)) + (1 << 20)
    return _whole(nvlink) + _whole(rdma)


def _whole(size: int) -> int:
    return -(-size // 128) * 128
