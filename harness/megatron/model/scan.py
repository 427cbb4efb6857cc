"""Layers of hybrid models: Megatron-Core's Mamba-2 mixer, whose state restarts at every sequence of a packed row.

The scan is the kernel of mamba-ssm on a GPU that has it, and PyTorch's in `mamba_reference` elsewhere. Here a layer
with a scan is a layer of GPTModel, with the mixer in the place of attention. Megatron's own hybrid models ask the
device for the sequence of each token in every layer (0.16), need Transformer Engine for rows that context-parallel
ranks share, and have no interleaved pipeline.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from megatron.core.tensor_parallel import all_to_all
from megatron.core.transformer.identity_op import IdentityFuncOp, IdentityOp
from megatron.core.transformer.spec_utils import ModuleSpec

from harness.errors import ConfigError
from harness.megatron import compat
from harness.megatron.compat import PackedRow
from harness.megatron.model import mamba_reference

if TYPE_CHECKING:
    from megatron.core.ssm.mamba_context_parallel import MambaContextParallel

MambaMixer, MambaMixerSubmodules = compat.import_mixer(mamba_reference)


class RowMamba(MambaMixer):  # type: ignore[misc, valid-type]
    """Megatron's Mamba-2 mixer on a packed row."""

    def __init__(self, config: Any, submodules: Any, layer_number: int, pg_collection: Any, **unused: Any) -> None:
        with _quiet_generator():
            super().__init__(
                config, submodules, config.hidden_size, layer_number=layer_number, pg_collection=pg_collection
            )
        self._scan = choose_scan(torch.device("cuda", 0) if self.D.is_cuda else torch.device("cpu"))

    def forward(
        self, hidden_states: torch.Tensor, attention_mask: Any = None, *, packed_seq_params: PackedRow, **unused: Any
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Return [T / cp, 1, hidden_size] for the same, as attention does; with sequence parallelism, T / cp / tp."""
        cp = self.cp
        owners, order = packed_seq_params.scan_order(cp.cp_size)
        mixed, _ = self.in_proj(hidden_states)
        mixed = _gather_tokens(mixed, cp, order)
        scanned = self._scan(
            mixed.transpose(0, 1).contiguous(),
            cp.get_conv1d_weight().squeeze(1),
            cp.get_conv1d_bias(),
            cp.get_dt_bias().float(),
            -torch.exp(cp.get_A_log().float()),
            D=cp.get_D(),
            chunk_size=self.chunk_size,
            activation=self.activation,
            headdim=self.headdim,
            ngroups=cp.ngroups_local_tpcp,
            seq_idx=owners,
        )
        scanned = _gather_heads(scanned.transpose(0, 1).contiguous(), cp, order)
        output: tuple[torch.Tensor, torch.Tensor | None] = self.out_proj(self.norm(scanned))
        return output


@contextmanager
def _quiet_generator() -> Iterator[None]:
    """Hide Megatron's warning that values are drawn from the generator of a CPU, which is right where a CPU trains."""
    log = logging.getLogger("megatron.core.tensor_parallel.random")
    level = log.level
    log.setLevel(logging.ERROR)
    try:
        yield
    finally:
        log.setLevel(level)


def choose_scan(device: torch.device) -> Callable[..., torch.Tensor]:
    """Return the function that scans: mamba-ssm's on a GPU that has it, PyTorch's elsewhere.

    Raises:
        ConfigError: installed versions would ignore where sequences begin.
    """
    if device.type != "cuda" or not compat.has_scan_kernels():
        return mamba_reference.mamba_split_conv1d_scan_combined
    if (reason := compat.why_no_packed_scan()) is not None:
        raise ConfigError(
            f"the installed kernels would carry the state of a sequence over to the next: {reason}",
            where="packages mamba-ssm, causal-conv1d",
            fix=f"install {reason.partition(' is required')[0]}, or remove both packages",
        )
    from mamba_ssm.ops.triton.ssd_combined import mamba_split_conv1d_scan_combined

    return mamba_split_conv1d_scan_combined  # type: ignore[no-any-return]


def _gather_tokens(mixed: torch.Tensor, cp: MambaContextParallel, order: torch.Tensor | None) -> torch.Tensor:
    """Exchange [T / cp, 1, F], this rank's tokens, for [T, 1, F / cp]: all tokens of this rank's heads, in order."""
    if order is None:
        return mixed
    states = cp.ngroups_local_tp * cp.d_state
    sizes = [cp.d_inner_local_tp, cp.d_inner_local_tp, states, states, cp.nheads_local_tp]
    gate, values, keys, queries, steps = torch.split(mixed, sizes, dim=-1)
    # A group whose heads are on several ranks is sent to each of them.
    copies = cp.group_repeat_count
    tokens = mixed.shape[:2]
    keys, queries = (
        part.reshape(*tokens, cp.ngroups_local_tp, cp.d_state).repeat_interleave(copies, dim=2).flatten(2)
        for part in (keys, queries)
    )
    of_ranks = [part.reshape(*tokens, cp.cp_size, -1) for part in (gate, values, keys, queries, steps)]
    return _exchange(torch.cat(of_ranks, dim=-1).movedim(-2, 0), cp).flatten(0, 1)[order]


def _gather_heads(scanned: torch.Tensor, cp: MambaContextParallel, order: torch.Tensor | None) -> torch.Tensor:
    """Exchange [T, 1, F / cp] back for this rank's tokens with all heads, [T / cp, 1, F]."""
    if order is None:
        return scanned
    by_rank = torch.empty_like(scanned).index_copy(0, order, scanned)
    by_rank = by_rank.reshape(cp.cp_size, -1, *scanned.shape[1:])
    return _exchange(by_rank, cp).movedim(0, -2).flatten(-2)


def _exchange(of_ranks: torch.Tensor, cp: MambaContextParallel) -> torch.Tensor:
    """Send part r of [cp, ...] to context-parallel rank r; return what they sent, by rank."""
    sent: torch.Tensor = all_to_all(cp.cp_group, of_ranks.contiguous().flatten(0, 1))
    return sent.view(of_ranks.shape)


def only(part: str, layer: ModuleSpec) -> ModuleSpec:
    """Return a layer of attention and an MLP or experts with one part alone, a letter of `model.layer_pattern`."""
    parts = layer.submodules
    if part in "-E":
        return replace(
            layer,
            submodules=replace(
                parts, input_layernorm=IdentityOp, self_attention=IdentityOp, self_attn_bda=IdentityFuncOp
            ),
        )
    attention = parts.self_attention
    if part == "M":
        # Tensor-parallel ranks divide both; in Transformer Engine's, the first includes the norm.
        linear = attention.submodules
        mixer = MambaMixerSubmodules(in_proj=linear.linear_qkv, out_proj=linear.linear_proj)
        attention = ModuleSpec(module=RowMamba, submodules=mixer)
    return replace(
        layer,
        submodules=replace(
            parts, self_attention=attention, pre_mlp_layernorm=IdentityOp, mlp=IdentityOp, mlp_bda=IdentityFuncOp
        ),
    )
