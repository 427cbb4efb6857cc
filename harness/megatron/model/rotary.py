"""Rotary position embedding of a whole packed row at once.

Megatron's own, without Transformer Engine's fused kernel, visits the sequences of a row one by one, in every layer and
twice. Here the angles of a row are gathered by position once a microbatch, and each layer rotates queries and keys with
a number of kernels that does not depend on the sequences.
"""

from __future__ import annotations

from typing import Any

import torch
from megatron.core.models.common.embeddings.yarn_rotary_pos_embedding import (
    _yarn_get_concentration_factor_from_config,
)
from megatron.core.transformer.attention import SelfAttention

from harness.megatron.compat import PackedRow


class RowSelfAttention(SelfAttention):  # type: ignore[misc]
    """Megatron's self-attention, with the rotary embedding of a packed row applied to the row as a whole."""

    _rotary: tuple[PackedRow, torch.Tensor] | None = None

    def forward(self, *args: Any, rotary_pos_emb: Any = None, packed_seq_params: Any = None, **kw: Any) -> Any:
        """Attend as Megatron does; it rotates itself where rows are no `PackedRow`, and where its fused kernel does.

        Args:
            rotary_pos_emb: angles [max_seqlen, 1, 1, d], or a pair of equal ones for queries and keys.
        """
        by_row = isinstance(packed_seq_params, PackedRow) and not self.config.apply_rope_fusion
        if by_row and rotary_pos_emb is not None:
            freqs = rotary_pos_emb[0] if isinstance(rotary_pos_emb, tuple) else rotary_pos_emb
            self._rotary, rotary_pos_emb = (packed_seq_params, freqs), None
        try:
            return super().forward(*args, rotary_pos_emb=rotary_pos_emb, packed_seq_params=packed_seq_params, **kw)
        finally:
            self._rotary = None

    def get_query_key_value_tensors(self, *args: Any, **kw: Any) -> Any:
        """Return Megatron's query, key, value (and gate), the first two rotated."""
        made = super().get_query_key_value_tensors(*args, **kw)
        if self._rotary is None:
            return made
        row, freqs = self._rotary
        query, key, *rest = made
        cos, sin = row.angles(freqs, query.dtype, mscale=_yarn_get_concentration_factor_from_config(self.config))
        return (rotate(query, cos, sin), rotate(key, cos, sin), *rest)


def rotate(heads: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Rotate the first d features of [T, 1, heads, head_dim] by the angles [T, 1, 1, d] of their positions."""
    num_rotated = cos.shape[-1]
    if num_rotated == heads.shape[-1]:
        return _Rotation.apply(heads, cos, sin)  # type: ignore[no-untyped-call,no-any-return]
    rotated = _Rotation.apply(heads[..., :num_rotated], cos, sin)  # type: ignore[no-untyped-call]
    return torch.cat((rotated, heads[..., num_rotated:]), dim=-1)


class _Rotation(torch.autograd.Function):
    """The rotation of pairs (i, i + d / 2); its gradient is the rotation back, so no activation is kept."""

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
