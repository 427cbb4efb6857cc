"""Memory of a layer of experts that is not kept: tokens on their way to the experts of other ranks and back.

Counted from Megatron-Core's dispatchers (`transformer/moe/token_dispatcher.py` of 0.16.1), whose steps hold on to the
tokens of the step before until the layer ends; a test compares it against what PyTorch allocates for `alltoall` and
`allgather`. One layer is computed at a time, so a rank needs it once. Tokens are those of an even share, or of
the busiest rank. Read in their sources alone, because they run on GPUs: DeepEP's buffers (`csrc/config.hpp`), and the
workspace of grouped products (`pytorch/module/base.py` of Transformer Engine).
"""

from __future__ import annotations

import math

from harness.plan.layout import DEEPEP_RANKS, DTYPE_BYTES, ParallelConfig
from harness.plan.model import ModelConfig

# cuBLAS's workspace on a GPU of compute capability 9 or later, one for each of the streams that products alternate on.
GROUPED_GEMM_BYTES = 4 * (32 << 20)
# Multiprocessors that DeepEP's kernels take, the setting of Megatron-Core; two make a channel.
_DEEPEP_CHANNELS = 20 // 2
_NVLINK_RANKS = 8
# Experts and scales of a token that DeepEP has room for (with its source, in 8 bytes), in int64 and float32.
_DEEPEP_TOKEN_BYTES = 8 + 128 * 8 + 128 * 4 + 128 * 4


def dispatch_bytes(model: ModelConfig, parallel: ParallelConfig, *, tokens: int, is_grouped: bool = False) -> int:
    """Return the most bytes that a layer of experts has beside those that it keeps for the backward pass.

    `tokens` are of a microbatch on one rank; with context parallelism, its slice; as many more as its experts get.
    """
    if not model.num_experts:
        return 0
    count = {"alltoall": _alltoall, "allgather": _allgather, "flex": _flex}[parallel.expert_dispatcher]
    own = tokens / parallel.tensor_parallel_size
    # Without grouped products each expert's output is a tensor, and all of them are joined.
    joins = not is_grouped and model.num_experts > parallel.expert_parallel_size
    return math.ceil(count(model, parallel, own, joins)) + (GROUPED_GEMM_BYTES if is_grouped else 0)


def _alltoall(model: ModelConfig, parallel: ParallelConfig, own: float, joins: bool) -> float:
    item, ep, etp = DTYPE_BYTES[model.number], parallel.expert_parallel_size, parallel.expert_tensor_parallel_size
    sorts = model.num_experts > ep
    sent = own * model.experts_per_token * model.hidden_size * item
    # Tokens in the order of experts, and those that came; the experts' own input is kept, and not counted here.
    held = sent + (sent if ep > 1 and (sorts or etp > 1) else 0)
    given = etp * sent * (1 + sorts)  # what experts give, and the same in the order in which it came
    # Their sum over the ranks of an expert is in float32, as the router's scores are.
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
    # Megatron never frees the buffer that tokens are gathered in.
    return everyone + scores + max(given * (1 + joins), given + everyone, summed)


def _flex(model: ModelConfig, parallel: ParallelConfig, own: float, joins: bool) -> float:
    item, ep, etp = DTYPE_BYTES[model.number], parallel.expert_parallel_size, parallel.expert_tensor_parallel_size
    experts, sent = model.num_experts, model.experts_per_token
    here = experts // ep
    # A rank gets a token once, however many of its experts are for it.
    missed = math.comb(experts - here, sent) / math.comb(experts, sent)
    came = own * etp * ep * (1 - missed)
    given = own * etp * sent * model.hidden_size * item
    # Which expert and what score each token has, of all experts here, and of the whole model before it is sent.
    scores = 5 * etp * own * experts + came * (12 * sent + 5 * here)
    tokens = came * model.hidden_size * item
    return deepep_bytes(model, parallel) + scores + tokens + given + max(given * joins, tokens)


def deepep_bytes(model: ModelConfig, parallel: ParallelConfig) -> int:
    """Return the bytes of DeepEP's buffers: for ranks of a node, and for nodes that RDMA connects."""
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
