"""CPU reference for layers with a scan: the functions of `mamba_ssm` and `fla` that train these layers.

Plain PyTorch for machines without the CUDA packages, computed in chunks: matrix products inside each chunk, and a
recurrence of states from chunk to chunk. Computes in float32, or float64 for float64 inputs; returns the input's dtype.

- Mamba-2: the recurrence is equation (2) of Dao and Gu, "Transformers are SSMs" (2024), computed as in their section 6.
- The gated delta rule: equation (10) of Yang, Kautz and Hatamizadeh, "Gated Delta Networks" (2024), as in their section
  3.3: a triangular system gives the updates that the tokens of a chunk add to the state.

A row contains several documents (runs of equal `seq_idx`), and nothing passes from one to another, not even a NaN that
a mask would multiply by zero: every document starts a new chunk, so no matrix product reads two documents. The
outputs of a document, and the gradients of its inputs, are bitwise the same whatever the other documents contain.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch.nn import functional

# Largest number of slots in a chunk; callers may use fewer. It changes only rounding. Among 16 to 128, 32 trained
# fastest (4,096 tokens in 8 heads of 16: 84 ms on one core, compared with 168 ms for 128).
MOST_SLOTS = 32


@dataclass(frozen=True)
class ChunkedRow:
    """Assignment of a row's tokens to slots in chunks; every document starts a new chunk.

    Chunks are ordered in waves: the first chunk of every document, longest document first, then all second chunks, and
    so on. The documents of a wave are the leading ones of the previous wave, so one batched step per wave carries the
    states of all documents.
    """

    slots: torch.Tensor  # int64 [tokens]: the slot of each token among all chunks * size
    size: int
    waves: list[int]  # number of chunks in each wave, never increasing

    @classmethod
    def of(cls, lengths: torch.Tensor, most_slots: int) -> ChunkedRow:
        """Return the layout of consecutive documents of `lengths`, int64 [documents]; some may be empty."""
        size = min(most_slots, MOST_SLOTS, int(lengths.max()))
        counts = (lengths + size - 1) // size
        ranks = counts.argsort(descending=True, stable=True).argsort()
        waves = len(counts) - counts.bincount().cumsum(0)[:-1]
        first_chunks = waves.cumsum(0) - waves
        positions = positions_of(lengths)
        chunks = first_chunks[positions // size] + ranks.repeat_interleave(lengths)
        return cls(chunks * size + positions % size, size, waves.tolist())

    def split(self, tokens: torch.Tensor) -> torch.Tensor:
        """Return per-token values [tokens, ...] as [chunks, size, ...], zero in slots without a token."""
        chunks = sum(self.waves)
        empty = tokens.new_zeros(chunks * self.size, *tokens.shape[1:])
        return empty.index_copy(0, self.slots, tokens).view(chunks, self.size, *tokens.shape[1:])

    def merge(self, chunks: torch.Tensor) -> torch.Tensor:
        """Return per-slot values [chunks, size, ...] as [tokens, ...]."""
        return chunks.flatten(0, 1).index_select(0, self.slots)


def document_lengths(shape: torch.Size, seq_idx: torch.Tensor | None) -> torch.Tensor:
    """Return the lengths, int64, of all documents in rows [batch, length]; one starts wherever `seq_idx` changes."""
    starts = torch.ones(shape[:2], dtype=torch.bool, device=None if seq_idx is None else seq_idx.device)
    starts[:, 1:] = False if seq_idx is None else seq_idx[:, 1:] != seq_idx[:, :-1]
    bounds = starts.flatten().nonzero().flatten()
    return torch.diff(bounds, append=bounds.new_tensor([starts.numel()]))


def positions_of(lengths: torch.Tensor) -> torch.Tensor:
    """Return the position of each token in its document, int64 [tokens]."""
    starts = lengths.cumsum(0) - lengths
    return torch.arange(int(lengths.sum()), device=lengths.device) - starts.repeat_interleave(lengths)


def working_type(x: torch.Tensor) -> torch.dtype:
    """Return the dtype to compute in: float32, or float64 for float64 inputs."""
    return torch.promote_types(x.dtype, torch.float32)


def convolve(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, activation: str | None, lengths: torch.Tensor
) -> torch.Tensor:
    """Return the causal depthwise convolution of `x` [batch, length, channels], separately for each document."""
    if activation not in (None, "silu", "swish"):
        raise NotImplementedError(f"activation {activation!r}: the CPU reference of the convolution supports only silu")
    inner = working_type(x)
    values, taps = x.to(inner), weight.to(inner)
    positions = positions_of(lengths).view(*x.shape[:2], 1)
    mixed = values * taps[:, -1] if bias is None else values * taps[:, -1] + bias.to(inner)
    for distance in range(1, taps.shape[1]):
        # Select before multiplying, so that neither values nor gradients of another document take part.
        earlier = torch.where(positions >= distance, values.roll(distance, dims=1), 0.0)
        mixed = mixed + earlier * taps[:, -1 - distance]
    return (functional.silu(mixed) if activation else mixed).to(x.dtype)


def segment_decays(log_decays: torch.Tensor) -> torch.Tensor:
    """Return the decay from after slot j through slot i, exp of a segment's sum, as entry (i, j) of [..., size, size].

    Each sum adds only the segment's values: a difference of prefix sums would lose digits to cancellation in a long
    chunk. Entries with j > i are zero, masked before the exponential. `log_decays` is [..., size].
    """
    size = log_decays.shape[-1]
    causal = torch.ones(size, size, dtype=torch.bool, device=log_decays.device).tril()
    summed = torch.where(causal.tril(-1), log_decays[..., None], 0.0).cumsum(-2)
    return torch.where(causal, summed, float("-inf")).exp()


def _scan(
    row: ChunkedRow, values: torch.Tensor, keys: torch.Tensor, queries: torch.Tensor, log_decays: torch.Tensor
) -> torch.Tensor:
    """Return query_t h_t, where h_t = exp(log_decay_t) h_(t-1) + key_t value_t: [chunks, size, heads, head_dim].

    Args:
        values: [chunks, size, heads, head_dim].
        keys, queries: [chunks, size, groups, state].
        log_decays: [chunks, size, heads].
    """
    chunks, size, groups, _ = keys.shape
    # [chunks, groups, heads of a group, size, ...]; keys and queries have one head per group.
    values = values.view(chunks, size, groups, -1, values.shape[-1]).permute(0, 2, 3, 1, 4)
    log_decays = log_decays.view(chunks, size, groups, -1).permute(0, 2, 3, 1)
    keys, queries = keys.transpose(1, 2)[:, :, None], queries.transpose(1, 2)[:, :, None]
    between = segment_decays(log_decays)
    since_start = log_decays.cumsum(-1).exp()
    own = torch.split(keys.mT @ (values * between[..., -1, :, None]), row.waves)
    whole = torch.split(since_start[..., -1, None, None], row.waves)
    entering = [torch.zeros_like(own[0])]
    for wave, num_following in enumerate(row.waves[1:]):
        entering.append((entering[-1] * whole[wave] + own[wave])[:num_following])
    scanned = (queries @ keys.mT * between) @ values
    scanned = scanned + (queries @ torch.cat(entering)) * since_start[..., None]
    return scanned.flatten(1, 2).transpose(1, 2)


def mamba_split_conv1d_scan_combined(
    zxbcdt: torch.Tensor,
    conv1d_weight: torch.Tensor,
    conv1d_bias: torch.Tensor | None,
    dt_bias: torch.Tensor,
    A: torch.Tensor,  # noqa: N803
    D: torch.Tensor,  # noqa: N803
    chunk_size: int,
    seq_idx: torch.Tensor | None = None,
    activation: str = "silu",
    *,
    headdim: int,
    ngroups: int = 1,
) -> torch.Tensor:
    """Return a Mamba-2 mixer's gated output, before its norm and output projection, [batch, length, heads * head_dim].

    Args:
        zxbcdt: [batch, length, 2 * heads * head_dim + 2 * groups * state + heads]: gate, x, B, C and dt.
        conv1d_weight: [channels of x, B and C, width].
        dt_bias, A, D: [heads]; added to steps before softplus; negative decay rate; weight of the skip connection.
        seq_idx: int32 [batch, length]; states and windows restart wherever it changes.
        ngroups: groups of B and C; a group serves heads / groups consecutive heads.
    """
    heads, inner = len(A), working_type(zxbcdt)
    channels, lengths = heads * headdim, document_lengths(zxbcdt.shape, seq_idx)
    states = (len(conv1d_weight) - channels) // 2
    z, mixed, dt = torch.split(zxbcdt.to(inner), [channels, len(conv1d_weight), heads], dim=-1)
    mixed = convolve(mixed, conv1d_weight, conv1d_bias, activation, lengths)
    values, keys, queries = torch.split(mixed, [channels, states, states], dim=-1)
    values = values.reshape(*dt.shape, headdim)
    keys, queries = (each.reshape(*dt.shape[:2], ngroups, -1) for each in (keys, queries))
    steps = functional.softplus(dt + dt_bias.to(inner))
    row = ChunkedRow.of(lengths, chunk_size)
    inputs = (values * steps[..., None], keys, queries, steps * A.to(inner))
    scanned = row.merge(_scan(row, *(row.split(each.flatten(0, 1)) for each in inputs))).view_as(values)
    scanned = scanned + values * D.to(inner)[:, None]
    return (scanned.flatten(2) * functional.silu(z)).to(zxbcdt.dtype)


class GroupedRMSNorm(torch.nn.Module):
    """RMS norm over groups of channels, with the constructor of `RMSNorm` in `mamba_ssm`, without its gate."""

    def __init__(
        self, hidden_size: int, eps: float = 1e-5, *, group_size: int, norm_before_gate: bool = False, **kw: Any
    ) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(hidden_size, **kw))
        self.register_parameter("bias", None)
        self.eps, self.group_size = eps, group_size

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return `x` [..., hidden_size] normalized, computed in float32 or better."""
        values = x.to(working_type(x)).reshape(*x.shape[:-1], -1, self.group_size)
        normed = values * torch.rsqrt(values.square().mean(-1, keepdim=True) + self.eps)
        return (normed.view_as(x) * self.weight.to(normed.dtype)).to(x.dtype)


def causal_conv1d(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, *, activation: str, cu_seqlens: torch.Tensor
) -> tuple[torch.Tensor, None]:
    """Return the causal depthwise convolution of `x` [1, T, channels], separately for each document, and no state."""
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
        g, beta: [1, T, heads], logarithm of the decay, and rate at which a value replaces the one stored for its key.
        cu_seqlens: int64 [documents + 1], bounds of the documents.

    Returns:
        outputs, [1, T, heads, value_dim], in the dtype of `q`; and no state.
    """
    inner = working_type(q)
    row = ChunkedRow.of(cu_seqlens.diff(), MOST_SLOTS)
    # [chunks, heads, slots, ...]
    queries, keys, values = (row.split(each[0].to(inner)).transpose(1, 2) for each in (q, k, v))
    log_decays, rates = (row.split(each[0].to(inner)).transpose(1, 2) for each in (g, beta))
    if use_qk_l2norm_in_kernel:
        queries, keys = (each * (each.square().sum(-1, keepdim=True) + 1e-6).rsqrt() for each in (queries, keys))
    queries = queries * q.shape[-1] ** -0.5
    # A slot without a token contains zeros, and changes nothing.
    between, since_start = segment_decays(log_decays), log_decays.cumsum(-1).exp()[..., None]
    # Subtract from each token's update the values that earlier tokens of the chunk, and the state, give for its key.
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
    """Return `x * silu(by)`, computed in float32 or better, in the dtype of `x`."""
    return (x * functional.silu(by.to(working_type(by)))).to(x.dtype)
