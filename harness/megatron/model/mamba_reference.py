"""CPU reference of Mamba-2 layers: the functions of `mamba_ssm` that a mixer trains with.

Plain PyTorch for machines without the CUDA packages. The recurrence is equation (2) of Dao and Gu, "Transformers are
SSMs" (2024), computed by chunks as in their section 6: a masked matrix product inside each chunk, and a recurrence of
states from chunk to chunk. It runs in float32, or in float64 for inputs of that type, and returns the input's type.

A row contains several documents (runs of equal `seq_idx`), and nothing passes from one to another, not even a NaN that
a mask would multiply by zero: every document starts a chunk of its own, so no matrix product reads two documents. The
outputs of a document, and the gradients of its inputs, are the same bits whatever the other documents contain.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch.nn import functional

# The most slots of a chunk; callers may ask for fewer. It changes results by rounding only. Of 16 to 128, 32 trained
# fastest (4,096 tokens in 8 heads of 16: 84 ms of one core, for 168 ms with 128).
MOST_SLOTS = 32
NO_LIMITS = (0.0, float("inf"))


@dataclass(frozen=True)
class ChunkedRow:
    """The slots of a row's tokens in chunks that start with each document.

    Chunks are ordered by waves: the first chunk of every document, the longest document first, then all second chunks,
    and so on. The documents of a wave are the first ones of the wave before, so one batched step per wave carries the
    states of all documents.
    """

    slots: torch.Tensor  # int64 [tokens]: the slot of each token among all chunks * size
    size: int
    waves: list[int]  # chunks of each wave, never increasing

    @classmethod
    def of(cls, lengths: torch.Tensor, most_slots: int) -> ChunkedRow:
        """Return the layout of documents of `lengths` (int64 [documents]), end to end in the row; some may be empty."""
        size = min(most_slots, MOST_SLOTS, int(lengths.max()))
        counts = (lengths + size - 1) // size
        ranks = counts.argsort(descending=True, stable=True).argsort()
        waves = len(counts) - counts.bincount().cumsum(0)[:-1]
        first_chunks = waves.cumsum(0) - waves
        positions = positions_of(lengths)
        chunks = first_chunks[positions // size] + ranks.repeat_interleave(lengths)
        return cls(chunks * size + positions % size, size, waves.tolist())

    def split(self, tokens: torch.Tensor) -> torch.Tensor:
        """Return values by token [tokens, ...] as [chunks, size, ...], zero in slots without a token."""
        chunks = sum(self.waves)
        empty = tokens.new_zeros(chunks * self.size, *tokens.shape[1:])
        return empty.index_copy(0, self.slots, tokens).view(chunks, self.size, *tokens.shape[1:])

    def merge(self, chunks: torch.Tensor) -> torch.Tensor:
        """Return values by slot [chunks, size, ...] as [tokens, ...]."""
        return chunks.flatten(0, 1).index_select(0, self.slots)


def document_lengths(shape: torch.Size, seq_idx: torch.Tensor | None) -> torch.Tensor:
    """Return int64 lengths of all documents of rows [batch, length], a new one wherever `seq_idx` changes."""
    starts = torch.ones(shape[:2], dtype=torch.bool, device=None if seq_idx is None else seq_idx.device)
    starts[:, 1:] = False if seq_idx is None else seq_idx[:, 1:] != seq_idx[:, :-1]
    bounds = starts.flatten().nonzero().flatten()
    return torch.diff(bounds, append=bounds.new_tensor([starts.numel()]))


def positions_of(lengths: torch.Tensor) -> torch.Tensor:
    """Return the position of each token in its document, int64 [tokens]."""
    starts = lengths.cumsum(0) - lengths
    return torch.arange(int(lengths.sum()), device=lengths.device) - starts.repeat_interleave(lengths)


def refuse(function: str, unsupported: dict[str, object]) -> None:
    """Raise NotImplementedError for arguments in use that Megatron-Core does not pass when it trains."""
    if used := [name for name, value in unsupported.items() if value is not None and value is not False]:
        raise NotImplementedError(f"{function}: the CPU reference has no {', '.join(used)}; install its CUDA package")


def working_type(x: torch.Tensor) -> torch.dtype:
    """Return the type to compute in: float32, or float64 for inputs of that type."""
    return torch.promote_types(x.dtype, torch.float32)


def convolve(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, activation: str | None, lengths: torch.Tensor
) -> torch.Tensor:
    """Return the causal depthwise convolution of `x` [batch, length, channels], each document of `lengths` alone."""
    if activation not in (None, "silu", "swish"):
        raise NotImplementedError(f"activation {activation!r}: the CPU reference of the convolution has silu only")
    inner = working_type(x)
    values, taps = x.to(inner), weight.to(inner)
    positions = positions_of(lengths).view(*x.shape[:2], 1)
    mixed = values * taps[:, -1] if bias is None else values * taps[:, -1] + bias.to(inner)
    for distance in range(1, taps.shape[1]):
        # Selected before it is multiplied, so that neither values nor gradients of another document take part.
        earlier = torch.where(positions >= distance, values.roll(distance, dims=1), 0.0)
        mixed = mixed + earlier * taps[:, -1 - distance]
    return (functional.silu(mixed) if activation else mixed).to(x.dtype)


def segment_decays(log_decays: torch.Tensor) -> torch.Tensor:
    """Return the decay after slot j through slot i as entry (i, j) of [..., size, size]: exp of a segment's sum.

    Each sum adds only what the segment contains: a difference of prefix sums would lose the digits that a long chunk
    cancels. Entries with j > i are zero, masked before the exponential.

    Args:
        log_decays: [..., size], the logarithm of the decay of each slot.
    """
    size = log_decays.shape[-1]
    causal = torch.ones(size, size, dtype=torch.bool, device=log_decays.device).tril()
    summed = torch.where(causal.tril(-1), log_decays[..., None], 0.0).cumsum(-2)
    return torch.where(causal, summed, float("-inf")).exp()


def mamba_chunk_scan_combined(
    x: torch.Tensor,
    dt: torch.Tensor,
    A: torch.Tensor,  # noqa: N803
    B: torch.Tensor,  # noqa: N803
    C: torch.Tensor,  # noqa: N803
    chunk_size: int,
    *,
    D: torch.Tensor | None = None,  # noqa: N803
    z: torch.Tensor | None = None,
    dt_bias: torch.Tensor | None = None,
    seq_idx: torch.Tensor | None = None,
    dt_softplus: bool = False,
    dt_limit: tuple[float, float] = NO_LIMITS,
    **unsupported: object,
) -> torch.Tensor:
    """Return the scan of every document, [batch, length, heads, head_dim], gated by silu(z) where `z` is given.

    Args:
        x: [batch, length, heads, head_dim]; `z` alike.
        dt: [batch, length, heads]; steps before bias, softplus and limits.
        A: [heads], negative.
        B: [batch, length, groups, state]; `C` alike. A group serves heads / groups consecutive heads.
        D: [heads] or [heads, head_dim]; weight of the input that skips the scan.
        seq_idx: int32 [batch, length]; states restart wherever it changes.
    """
    refuse("mamba_chunk_scan_combined", unsupported)
    inner = working_type(x)
    steps = dt.to(inner) if dt_bias is None else dt.to(inner) + dt_bias.to(inner)
    steps = (functional.softplus(steps) if dt_softplus else steps).clamp(*dt_limit)
    values, keys, queries = x.to(inner), B.to(inner), C.to(inner)
    row = ChunkedRow.of(document_lengths(x.shape, seq_idx), chunk_size)
    inputs = (values * steps[..., None], keys, queries, steps * A.to(inner))
    scanned = row.merge(_scan(row, *(row.split(each.flatten(0, 1)) for each in inputs))).view_as(values)
    if D is not None:
        scanned = scanned + values * (D.to(inner) if D.dim() == 2 else D.to(inner)[:, None])
    return (scanned if z is None else scanned * functional.silu(z.to(inner))).to(x.dtype)


def _scan(
    row: ChunkedRow, values: torch.Tensor, keys: torch.Tensor, queries: torch.Tensor, log_decays: torch.Tensor
) -> torch.Tensor:
    """Return query_t h_t, where h_t = exp(log_decay_t) h_(t-1) + key_t value_t: [chunks, size, heads, head_dim].

    Args:
        values: [chunks, size, heads, head_dim].
        keys: [chunks, size, groups, state]; `queries` alike.
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
    initial_states: torch.Tensor | None = None,
    seq_idx: torch.Tensor | None = None,
    dt_limit: tuple[float, float] = NO_LIMITS,
    return_final_states: bool = False,
    activation: str = "silu",
    rmsnorm_weight: torch.Tensor | None = None,
    rmsnorm_eps: float = 1e-6,
    outproj_weight: torch.Tensor | None = None,
    outproj_bias: torch.Tensor | None = None,
    headdim: int | None = None,
    ngroups: int = 1,
    norm_before_gate: bool = True,
) -> torch.Tensor:
    """Return a Mamba-2 mixer's output after its input projection, [batch, length, heads * head_dim or outputs].

    Args:
        zxbcdt: [batch, length, 2 * heads * head_dim + 2 * groups * state + heads]: gate, x, B, C and dt.
        conv1d_weight: [channels of x, B and C, width].
        seq_idx: int32 [batch, length]; states and windows restart wherever it changes.
        rmsnorm_weight: [heads * head_dim]; without it the output is gated but not normalized.
        outproj_weight: [outputs, heads * head_dim]; omit to leave the projection to the caller.
    """
    refuse("mamba_split_conv1d_scan_combined", {"initial_states": initial_states})
    refuse("mamba_split_conv1d_scan_combined", {"return_final_states": return_final_states})
    heads, inner = len(A), working_type(zxbcdt)
    channels = D.numel() if headdim is None else heads * headdim
    states = (len(conv1d_weight) - channels) // 2
    z, mixed, dt = torch.split(zxbcdt.to(inner), [channels, len(conv1d_weight), heads], dim=-1)
    mixed = convolve(mixed, conv1d_weight, conv1d_bias, activation, document_lengths(zxbcdt.shape, seq_idx))
    x, B, C = torch.split(mixed, [channels, states, states], dim=-1)  # noqa: N806
    z, x = (each.reshape(*dt.shape, -1) for each in (z, x))
    B, C = (each.reshape(*dt.shape[:2], ngroups, -1) for each in (B, C))  # noqa: N806
    gate = z if rmsnorm_weight is None else None
    scan = partial(mamba_chunk_scan_combined, dt_bias=dt_bias, dt_softplus=True, dt_limit=dt_limit, seq_idx=seq_idx)
    mixed = scan(x, dt, A, B, C, chunk_size, D=D, z=gate).flatten(2)
    if rmsnorm_weight is not None:
        group = channels // ngroups
        mixed = gated_rms_norm(mixed, rmsnorm_weight, z.flatten(2), rmsnorm_eps, group, norm_before_gate)
    if outproj_weight is not None:
        bias = None if outproj_bias is None else outproj_bias.to(inner)
        mixed = functional.linear(mixed, outproj_weight.to(inner), bias)
    return mixed.to(zxbcdt.dtype)


def gated_rms_norm(
    x: torch.Tensor, weight: torch.Tensor, z: torch.Tensor | None, eps: float, group_size: int, norm_before_gate: bool
) -> torch.Tensor:
    """Return `x` [..., channels] normalized by groups of channels and gated by silu(z), before or after the norm."""
    inner = working_type(x)
    gate = None if z is None else functional.silu(z.to(inner))
    values = x.to(inner) if gate is None or norm_before_gate else x.to(inner) * gate
    grouped = values.reshape(*x.shape[:-1], -1, group_size)
    normed = (grouped * torch.rsqrt(grouped.square().mean(-1, keepdim=True) + eps)).view_as(x) * weight.to(inner)
    return (normed * gate if gate is not None and norm_before_gate else normed).to(x.dtype)


class GatedRMSNorm(torch.nn.Module):
    """Normalization by groups of channels with an optional gate, as `RMSNorm` of `mamba_ssm` next to the scan."""

    def __init__(
        self, hidden_size: int, eps: float = 1e-5, *, group_size: int, norm_before_gate: bool, **kw: Any
    ) -> None:
        """Make the weight; `kw` are its device and dtype."""
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(hidden_size, **kw))
        self.register_parameter("bias", None)
        self.eps, self.group_size, self.norm_before_gate = eps, group_size, norm_before_gate

    def forward(self, x: torch.Tensor, z: torch.Tensor | None = None) -> torch.Tensor:
        """Return `x` [..., hidden_size] normalized, and gated where `z` of the same shape is given."""
        return gated_rms_norm(x, self.weight, z, self.eps, self.group_size, self.norm_before_gate)
