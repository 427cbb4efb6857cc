"""CPU reference of the gated delta rule: the functions of `fla` that a layer trains with.

Plain PyTorch for machines without the CUDA package. The recurrence is equation (10) of Yang, Kautz and Hatamizadeh,
"Gated Delta Networks" (2024), computed by chunks as in their section 3.3: what the tokens of a chunk add to the state
solves a triangular system, and a recurrence carries states from chunk to chunk. Chunks start with each document
(`mamba_reference.ChunkedRow`), so nothing passes from one to another. It runs in float32, or in float64 for inputs of
that type, and returns the input's type.
"""

from __future__ import annotations

import torch
from torch.nn import functional

from harness.megatron.model.mamba_reference import MOST_SLOTS, ChunkedRow, convolve, segment_decays, working_type


def causal_conv1d(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, *, activation: str, cu_seqlens: torch.Tensor
) -> tuple[torch.Tensor, None]:
    """Return the causal depthwise convolution of `x` [1, T, channels], each document alone, and no state."""
    return convolve(x, weight, bias, activation, cu_seqlens.diff()), None


def chunk_gated_delta_rule(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor,
    *,
    use_qk_l2norm_in_kernel: bool,
    cu_seqlens: torch.Tensor,
) -> tuple[torch.Tensor, None]:
    """Return S_t q_t / sqrt(key_dim), where S_t = exp(g_t) S_(t-1) (I - beta_t k_t k_t') + beta_t v_t k_t'.

    Args:
        q, k: [1, T, heads, key_dim].
        v: [1, T, heads, value_dim].
        g, beta: [1, T, heads], the logarithm of the decay, and the rate at which a value replaces that of its key.
        cu_seqlens: int64 [documents + 1], bounds of the documents.

    Returns:
        [1, T, heads, value_dim], in the type of `q`; and no state.
    """
    inner = working_type(q)
    row = ChunkedRow.of(cu_seqlens.diff(), MOST_SLOTS)
    # [chunks, heads, slots, ...]
    queries, keys, values = (row.split(each[0].to(inner)).transpose(1, 2) for each in (q, k, v))
    log_decays, rates = (row.split(each[0].to(inner)).transpose(1, 2) for each in (g, beta))
    if use_qk_l2norm_in_kernel:
        queries, keys = (each * (each.square().sum(-1, keepdim=True) + 1e-6).rsqrt() for each in (queries, keys))
    queries = queries * q.shape[-1] ** -0.5
    # A slot without a token has zeros, and changes nothing.
    between, since_start = segment_decays(log_decays), log_decays.cumsum(-1).exp()[..., None]
    # What a token adds to the state is corrected by what those before it in the chunk, and the state, give for its key.
    system = (rates[..., None] * between * (keys @ keys.mT)).tril(-1)
    sides = torch.cat((values, keys * since_start), dim=-1) * rates[..., None]
    solved = torch.linalg.solve_triangular(
        system + torch.eye(row.size, dtype=system.dtype, device=system.device), sides, upper=False, unitriangular=True
    )
    added, seen = solved.split((values.shape[-1], keys.shape[-1]), dim=-1)
    at_end = keys.mT * between[..., -1, None, :]
    whole = since_start[..., -1:, :]
    scores = queries @ keys.mT * between
    state, outputs = values.new_zeros(1, 1, keys.shape[-1], values.shape[-1]), []
    by_wave = (torch.split(each, row.waves) for each in (added, seen, at_end, whole, scores, queries * since_start))
    for own, of_state, ends, decay, inside, asked in zip(*by_wave, strict=True):
        state = state[: len(own)]
        corrected = own - of_state @ state
        outputs.append(inside @ corrected + asked @ state)
        state = state * decay + ends @ corrected
    return row.merge(torch.cat(outputs).transpose(1, 2)).unsqueeze(0).to(q.dtype), None


def gate(x: torch.Tensor, by: torch.Tensor) -> torch.Tensor:
    """Return `x` times silu of `by`, computed in float32 or better, in the type of `x`."""
    return (x * functional.silu(by.to(working_type(by)))).to(x.dtype)
