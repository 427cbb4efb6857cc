"""Rotary position embedding of a whole packed row at once.

Without Transformer Engine's fused kernel, Megatron rotates the sequences of a row one by one, twice in every layer.
Here the angles of a row are gathered by position once per microbatch, and the number of kernels with which each layer
rotates queries and keys does not depend on the number of sequences.
"""

from __future__ import annotations

from typing import Any

import torch
from megatron.core.models.common.embeddings.yarn_rotary_pos_embedding import _yarn_get_concentration_factor_from_config
from megatron.core.tensor_parallel import ColumnParallelLinear, gather_from_sequence_parallel_region
from megatron.core.transformer.attention import SelfAttention
from megatron.core.transformer.identity_op import IdentityOp
from megatron.core.transformer.multi_latent_attention import MLASelfAttention

from harness.megatron.compat import PackedRow, WholeLinear


class RowSelfAttention(SelfAttention):  # type: ignore[misc]
    """Megatron's self-attention, with the rotary embedding of a packed row applied to the row as a whole."""

    _rotary: tuple[PackedRow, torch.Tensor] | None = None

    def __init__(self, config: Any, submodules: Any, *arguments: Any, **options: Any) -> None:
        # Megatron-Core 0.19 builds the norms of a specification only with this setting, which also makes it sum their
        # gradients over tensor-parallel ranks: wrong for norms that are divided over these ranks.
        setting = config.qk_layernorm
        config.qk_layernorm = setting or submodules.q_layernorm not in (None, IdentityOp)
        try:
            super().__init__(config, submodules, *arguments, **options)
        finally:
            config.qk_layernorm = setting
        axes = torch.tensor(config.rope_axes) if getattr(config, "rope_axes", ()) else None
        self.register_buffer("rope_axes", axes, persistent=False)

    def forward(self, *args: Any, rotary_pos_emb: Any = None, packed_seq_params: Any = None, **kw: Any) -> Any:
        """Attend as Megatron does; Megatron rotates if the row is not a `PackedRow`, or with its fused kernel.

        Angles are [max_seqlen, 1, 1, d], or an equal pair for queries and keys.
        """
        by_row = isinstance(packed_seq_params, PackedRow) and _turns_itself(self.config, packed_seq_params)
        if by_row and rotary_pos_emb is not None:
            freqs = rotary_pos_emb[0] if isinstance(rotary_pos_emb, tuple) else rotary_pos_emb
            self._rotary, rotary_pos_emb = (packed_seq_params, freqs), None
        try:
            return super().forward(*args, rotary_pos_emb=rotary_pos_emb, packed_seq_params=packed_seq_params, **kw)
        finally:
            self._rotary = None

    def get_query_key_value_tensors(self, *args: Any, **kw: Any) -> Any:
        """Return Megatron's query, key, value (and gate), with query and key rotated."""
        made = super().get_query_key_value_tensors(*args, **kw)
        if self._rotary is None:
            return made
        row, freqs = self._rotary
        query, key, *rest = made
        mscale = _yarn_get_concentration_factor_from_config(self.config)
        cos, sin = row.angles(freqs, query.dtype, mscale=mscale, axes=self.rope_axes)
        return (rotate(query, cos, sin), rotate(key, cos, sin), *rest)


class RowLatentAttention(MLASelfAttention):  # type: ignore[misc]
    """Megatron's multi-latent attention, with the rotary embedding of a packed row applied to the row as a whole.

    Its down-projections are replicated on every tensor-parallel rank, as with Transformer Engine. Megatron's local ones
    are divided; the part of the keys that all heads share would then get only the gradient from one rank's heads.
    """

    def __init__(self, config: Any, *arguments: Any, **options: Any) -> None:
        super().__init__(config, *arguments, **options)
        for name in ("linear_q_down_proj", "linear_kv_down_proj"):
            projection = getattr(self, name, None)
            if isinstance(projection, ColumnParallelLinear):
                setattr(self, name, WholeLinear(projection.input_size, projection.output_size, config=config))

    def _resolve_qk_norm_config(self, submodules: Any) -> dict[str, Any]:
        """Return the parts of the specification unchanged; Megatron-Core 0.19 allows fewer combinations."""
        names = ("linear_q_proj", "linear_q_up_proj", "linear_kv_up_proj", "q_layernorm", "kv_layernorm")
        return {name: getattr(submodules, name) for name in names}

    def get_query_key_value_tensors(
        self, hidden_states: torch.Tensor, *args: Any, packed_seq_params: Any = None, **kw: Any
    ) -> Any:
        """Return queries and keys [T / cp, heads, head_dim], values [T / cp, heads, value_dim], and both latents."""
        row = args[2] if len(args) > 2 else packed_seq_params
        if not isinstance(row, PackedRow) or not _turns_itself(self.config, row):
            return super().get_query_key_value_tensors(hidden_states, *args, packed_seq_params=packed_seq_params, **kw)
        config, heads = self.config, self.num_attention_heads_per_partition
        plain, turned = config.qk_head_dim, config.qk_pos_emb_head_dim
        queries_of = hidden_states
        if config.q_lora_rank is None:
            query, _ = self.linear_q_proj(hidden_states)
        else:
            queries_of = self.q_layernorm(self.linear_q_down_proj(hidden_states)[0])
            query, _ = self.linear_q_up_proj(queries_of)
        latent, shared = self.linear_kv_down_proj(hidden_states)[0].split((config.kv_lora_rank, turned), dim=-1)
        if config.sequence_parallel:
            shared = gather_from_sequence_parallel_region(shared, group=self.tp_group)
        latent = self.kv_layernorm(latent)
        both, _ = self.linear_kv_up_proj(latent)

        made = self.rotary_pos_emb(row.max_seqlen_q, packed_seq=True)
        freqs, mscale = made if isinstance(made, tuple) else (made, 1.0)
        cos, sin = row.angles(freqs, query.dtype, mscale=mscale)
        query, query_turned = query.view(*query.shape[:2], heads, plain + turned).split((plain, turned), dim=-1)
        key, value = both.view(*both.shape[:2], heads, plain + config.v_head_dim).split(
            (plain, config.v_head_dim), dim=-1
        )
        shared = rotate(_pairs_apart(shared.unsqueeze(2)), cos, sin)
        query = torch.cat((query, rotate(_pairs_apart(query_turned), cos, sin)), dim=-1)
        key = torch.cat((key, shared.expand(-1, -1, heads, -1)), dim=-1)
        return query.squeeze(1), key.squeeze(1), value.squeeze(1), queries_of, latent


def _turns_itself(config: Any, row: PackedRow) -> bool:
    """Return True if the row must be rotated here, not by the fused kernel.

    Both versions pass the kernel `pg_collection.cp`, the layout's group. It counts positions itself, in one dimension.
    """
    return not config.apply_rope_fusion or row.cp_group is not None or row.grid is not None


def _pairs_apart(heads: torch.Tensor) -> torch.Tensor:
    """Move elements at even positions before those at odd positions: these models rotate neighboring elements."""
    return torch.cat((heads[..., 0::2], heads[..., 1::2]), dim=-1)


def rotate(heads: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Rotate the first d features of [T, 1, heads, head_dim] by the angles [T, 1, 1, d] of their positions."""
    num_rotated = cos.shape[-1]
    if num_rotated == heads.shape[-1]:
        return _Rotation.apply(heads, cos, sin)  # type: ignore[no-untyped-call,no-any-return]
    rotated = _Rotation.apply(heads[..., :num_rotated], cos, sin)  # type: ignore[no-untyped-call]
    return torch.cat((rotated, heads[..., num_rotated:]), dim=-1)


class _Rotation(torch.autograd.Function):
    """Rotation of pairs (i, i + d / 2); the backward pass rotates gradients back, so no activation is saved."""

    @staticmethod
    def forward(ctx: Any, heads: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(cos, sin)
        return _turn(heads, cos, sin)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        cos, sin = ctx.saved_tensors
        return _turn(gradients[0], cos, -sin), None, None


def _turn(heads: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    first, second = heads.chunk(2, dim=-1)
    return heads * cos + torch.cat((-second, first), dim=-1) * sin
