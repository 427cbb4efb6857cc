"""Packed attention and RMSNorm for machines without Transformer Engine.

Megatron's local core attention refuses the `thd` format, and its local norm refuses sequence parallelism.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.tensor_parallel import mappings, set_tensor_model_parallel_attributes
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.utils import is_layer_window_attention, make_sharded_tensors_for_checkpoint
from torch.nn import functional


class _Divided(torch.nn.Module):
    """A module whose parameters are all divided by tensor-parallel ranks."""

    def sharded_state_dict(
        self, prefix: str = "", sharded_offsets: tuple[Any, ...] = (), metadata: dict[str, Any] | None = None
    ) -> dict[str, Any]:
        """Return the tensors of the module for `dist_checkpointing`, which any layout can load."""
        own = self.state_dict(prefix="", keep_vars=True)
        return dict(make_sharded_tensors_for_checkpoint(own, prefix, dict.fromkeys(own, 0), sharded_offsets))


class VarlenAttention(_Divided):
    """Causal attention within each sequence of a packed row, with PyTorch's `scaled_dot_product_attention`.

    Replaces Megatron's `core_attention`. The row is split at `cu_seqlens_q_padded` (at `cu_seqlens_q` if nothing is
    padded), so that no token attends to another sequence. Padding is at the end of its sequence, where causality hides
    it from real tokens. With context parallelism, keys and values are gathered over the CP group of the row, or of the
    layout if the row has none, and each rank computes its two chunks of every sequence.

    Attributes:
        window: number of tokens, including itself, that a token attends to; None for itself and all before it.
        softmax_offset: [heads of this rank], score of an extra key without a value (a sink); None for no such key.
    """

    def __init__(
        self,
        config: TransformerConfig,
        layer_number: int,
        *,
        softmax_scale: float | None = None,
        pg_collection: Any = None,
        **_unused: Any,  # arguments for features that are off here, such as dropout
    ) -> None:
        super().__init__()
        self.scale = softmax_scale if softmax_scale is not None else 1.0 / math.sqrt(config.kv_channels)
        has_window = is_layer_window_attention(config.window_size, config.window_attn_skip_freq, layer_number)
        self.window = config.window_size[0] + 1 if has_window else None
        self.softmax_offset = None
        if config.softmax_type == "learnable":
            own = config.num_attention_heads // config.tensor_model_parallel_size
            self.softmax_offset = torch.nn.Parameter(torch.zeros(own, dtype=config.params_dtype))
            set_tensor_model_parallel_attributes(self.softmax_offset, is_parallel=True, dim=0, stride=1)
        self.cp_group = pg_collection.cp if config.context_parallel_size > 1 else None

    def forward(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        *_: Any,
        packed_seq_params: PackedSeqParams | None = None,
        **_unused: Any,
    ) -> torch.Tensor:
        """Attend within each sequence.

        Args:
            query: [T / cp, heads, head_dim], or [s, b, heads, head_dim] without `packed_seq_params`.
            key, value: the same with key-value heads; the size of a head may be different for values.

        Returns:
            [T / cp, heads * value_dim], or [s, b, heads * value_dim].
        """
        if packed_seq_params is None:
            out = self._attend(*(t.permute(1, 2, 0, 3) for t in (query, key, value)))
            return out.permute(2, 0, 1, 3).flatten(2)
        bounds = packed_seq_params.cu_seqlens_q_padded
        if bounds is None:
            bounds = packed_seq_params.cu_seqlens_q
        if getattr(packed_seq_params, "is_static", False):
            return self._forward_as_one(query, key, value, bounds)
        lengths = list(getattr(packed_seq_params, "lengths", ()) or filter(None, torch.diff(bounds).tolist()))
        group = packed_seq_params.cp_group or self.cp_group
        if group is not None:
            return self._forward_on_slices(query, key, value, lengths, group)
        pieces = [
            self._attend(*(_heads_first(t) for t in qkv)).squeeze(0).transpose(0, 1)
            for qkv in zip(*(torch.split(t, lengths) for t in (query, key, value)), strict=True)
        ]
        return torch.cat(pieces).flatten(1)

    def _forward_as_one(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, bounds: torch.Tensor
    ) -> torch.Tensor:
        """Attend over the whole row with a mask [T, T], without reading any value on the host."""
        places = torch.arange(query.shape[0], device=query.device)
        sequence = torch.searchsorted(bounds, places, right=True)
        back = places.unsqueeze(1) - places
        allowed = (back >= 0) & (sequence.unsqueeze(1) == sequence)
        if self.window is not None:
            allowed &= back < self.window
        out = self._attend_block(_heads_first(query), _heads_first(key), _heads_first(value), allowed)
        return out.squeeze(0).transpose(0, 1).flatten(1)

    def _forward_on_slices(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, lengths: list[int], group: Any
    ) -> torch.Tensor:
        cp_rank, cp_size = group.rank(), group.size()
        # One collective for keys and values: [T, heads, key and value], ordered by rank; its backward sums over ranks.
        both = mappings.gather_from_sequence_parallel_region(torch.cat((key, value), dim=-1), group=group)
        local = [length // cp_size for length in lengths]
        by_rank = [torch.split(part, local) for part in both.chunk(cp_size)]
        pieces = []
        for index, sequence in enumerate(torch.split(query, local)):
            # Rank r holds chunks r and 2 * cp - 1 - r of a sequence; join the chunks in order.
            halves = [parts[index].chunk(2) for parts in by_rank]
            whole = torch.cat([half[0] for half in halves] + [half[1] for half in reversed(halves)])
            chunk = sequence.shape[0] // 2
            for part, number in zip(sequence.chunk(2), (cp_rank, 2 * cp_size - 1 - cp_rank), strict=True):
                keys, values = torch.split(whole[: (number + 1) * chunk], [key.shape[-1], value.shape[-1]], dim=-1)
                out = self._attend(_heads_first(part), _heads_first(keys), _heads_first(values))
                pieces.append(out.squeeze(0).transpose(0, 1))
        return torch.cat(pieces).flatten(1)

    def _attend(self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        """Return [b, heads, L, value_dim]; queries are for the last L tokens of the keys and values."""
        size, window = query.shape[-2], self.window
        if window is None or size <= window:
            return self._attend_block(query, key, value)
        # Each block of queries needs only its own keys and those of the preceding block.
        blocks, before = [], key.shape[-2] - size
        for start in range(0, size, window):
            stop = min(start + window, size)
            seen = slice(max(0, before + start - window + 1), before + stop)
            blocks.append(self._attend_block(query[..., start:stop, :], key[..., seen, :], value[..., seen, :]))
        return torch.cat(blocks, dim=-2)

    def _attend_block(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, allowed: torch.Tensor | None = None
    ) -> torch.Tensor:
        size, total = query.shape[-2], key.shape[-2]
        if allowed is None and (size < total or (self.window is not None and total > self.window)):
            places = torch.arange(total, device=query.device)
            back = places[total - size :].unsqueeze(1) - places
            allowed = back >= 0 if self.window is None else (back >= 0) & (back < self.window)
        shape = size, value.shape[-1]
        if self.softmax_offset is not None:
            query, key, value, allowed = self._with_sink(query, key, value, allowed)
        # PyTorch's fused kernels need equal sizes of queries and values; the others store all scores of a sequence.
        wanting = query.shape[-1] - value.shape[-1]
        out = functional.scaled_dot_product_attention(
            query,
            key,
            functional.pad(value, (0, wanting)) if wanting > 0 else value,
            attn_mask=allowed,
            is_causal=allowed is None,
            scale=self.scale,
            enable_gqa=key.shape[1] != query.shape[1],
        )
        return out[..., -shape[0] :, : shape[1]]

    def _with_sink(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, allowed: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor | None]:
        """Add a first key with a zero value, whose score for every query is the head's sink, using an extra dimension.

        Without a mask, a query is added in front too, so that under causality all others attend to that key.
        """
        assert self.softmax_offset is not None
        score = (self.softmax_offset.to(query.dtype) / self.scale).view(1, -1, 1, 1)
        query = torch.cat((query, score.expand(*query.shape[:-1], 1)), dim=-1)
        key = functional.pad(key, (0, 1, 1, 0))
        key = key + functional.pad(key.new_ones(1, 1), (key.shape[-1] - 1, 0, 0, key.shape[-2] - 1))
        value = functional.pad(value, (0, 0, 1, 0))
        if allowed is None:
            return functional.pad(query, (0, 0, 1, 0)), key, value, None
        return query, key, value, functional.pad(allowed, (1, 0), value=True)


def _heads_first(tokens: torch.Tensor) -> torch.Tensor:
    """Return [1, h, L, d] for [L, h, d]; with the batched layout, PyTorch can choose its fused kernel."""
    return tokens.transpose(0, 1).unsqueeze(0)


class RMSNorm(torch.nn.Module):
    """Root-mean-square norm; its weight is marked, because its gradient is partial under sequence parallelism.

    With `layernorm_zero_centered_gamma`, weights are relative to 1.

    Source: Zhang and Sennrich, "Root Mean Square Layer Normalization", 2019.
    """

    def __init__(self, config: TransformerConfig, hidden_size: int, eps: float = 1e-5, **_unused: Any) -> None:
        super().__init__()
        self.eps, self.origin = eps, float(config.layernorm_zero_centered_gamma)
        self.weight = torch.nn.Parameter(torch.full((hidden_size,), 1 - self.origin, dtype=config.params_dtype))
        # Read by finalize_model_grads, which sums the gradient over the TP group.
        self.weight.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """Normalize [..., hidden_size] in float32; shape and dtype do not change."""
        wide = hidden.float()
        weight = self.weight.float() + self.origin if self.origin else self.weight.float()
        return (functional.rms_norm(wide, (wide.shape[-1],), eps=self.eps) * weight).type_as(hidden)


class LatentNorm(RMSNorm):
    """Norm of a latent vector. Its epsilon is the same in all published models, independent of their other norms."""

    def __init__(self, config: TransformerConfig, hidden_size: int, eps: float = 1e-5, **_unused: Any) -> None:
        super().__init__(config, hidden_size, eps=1e-6)


class JointQueryNorm(_Divided):
    """Root-mean-square norm over the queries of all heads together, which tensor-parallel ranks divide."""

    heads = "num_attention_heads"

    def __init__(self, config: TransformerConfig, hidden_size: int, eps: float = 1e-5, **_unused: Any) -> None:
        super().__init__()
        self.eps, self.size = eps, getattr(config, self.heads) * hidden_size
        own = torch.ones(self.size // config.tensor_model_parallel_size, dtype=config.params_dtype)
        self.weight = torch.nn.Parameter(own)
        set_tensor_model_parallel_attributes(self.weight, is_parallel=True, dim=0, stride=1)

    def forward(self, heads: torch.Tensor) -> torch.Tensor:
        """Normalize [..., heads of this rank, head_dim] in float32; shape and dtype do not change."""
        wide = heads.float()
        own = wide.square().sum(dim=(-2, -1), keepdim=True)
        # Sum over all ranks in the forward pass, and sum the gradients of all ranks in the backward pass.
        whole = mappings.copy_to_tensor_model_parallel_region(mappings.reduce_from_tensor_model_parallel_region(own))
        weight = self.weight.float().view(wide.shape[-2:])
        return (wide * torch.rsqrt(whole / self.size + self.eps) * weight).type_as(heads)


class JointKeyNorm(JointQueryNorm):
    """The same norm over the keys of all groups."""

    heads = "num_query_groups"
