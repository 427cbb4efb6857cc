"""Layers of hybrid models: Megatron-Core's Mamba-2 and gated delta rule, whose states restart at every sequence.

The scan is the kernel of mamba-ssm or flash-linear-attention on a GPU where it is installed, and otherwise PyTorch code
in `scan_reference`. Here a layer with a scan is a layer of GPTModel with the mixer in place of attention. Megatron's
own hybrid models look up the sequence of each token on the device in every layer (0.16), need Transformer Engine for
rows that context-parallel ranks share, and do not support interleaved pipelines; its layer of the gated delta rule
does not support packed rows (0.16).
"""

from __future__ import annotations

import inspect
import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, cast

import torch
from megatron.core.tensor_parallel import all_to_all, copy_to_tensor_model_parallel_region, get_cuda_rng_tracker
from megatron.core.transformer.identity_op import IdentityFuncOp, IdentityOp
from megatron.core.transformer.spec_utils import ModuleSpec
from torch.nn import functional

from harness.errors import ConfigError
from harness.megatron import compat
from harness.megatron.compat import PackedRow
from harness.megatron.model import scan_reference
from harness.plan.families.base import SCANS
from harness.plan.model_checks import check_scan_offsets

Mixed = tuple[torch.Tensor, torch.Tensor | None]
_mamba, _delta = compat.import_scans(scan_reference)


class RowMamba(_mamba.MambaMixer):  # type: ignore[misc, name-defined]
    """Megatron's Mamba-2 mixer on a packed row."""

    def __init__(self, config: Any, submodules: Any, layer_number: int, pg_collection: Any, **unused: Any) -> None:
        with _quiet_generator():
            super().__init__(
                config, submodules, config.hidden_size, layer_number=layer_number, pg_collection=pg_collection
            )
        self._divided = {self.cp.cp_size: self.cp}
        features = 2 * self.cp.d_inner_local_tpcp + 2 * self.cp.ngroups_local_tpcp * self.cp.d_state
        device = torch.device("cuda", 0) if self.D.is_cuda else torch.device("cpu")
        self._scan = choose_scan(device, features + self.cp.nheads_local_tpcp)

    def forward(
        self, hidden_states: torch.Tensor, attention_mask: Any = None, *, packed_seq_params: PackedRow, **unused: Any
    ) -> Mixed:
        """Mix tokens; input and output are [T / cp, 1, hidden_size]; T / cp / tp tokens with sequence parallelism."""
        cp = self._division(packed_seq_params.cp_group)
        _, owners, order = packed_seq_params.scan_order(cp.cp_size)
        mixed, _ = self.in_proj(hidden_states)
        if order is not None:
            states = cp.ngroups_local_tp * cp.d_state
            sizes = [cp.d_inner_local_tp, cp.d_inner_local_tp, states, states, cp.nheads_local_tp]
            gate, values, *of_groups, steps = torch.split(mixed, sizes, dim=-1)
            copied = (_copy_groups(piece, cp.ngroups_local_tp, cp.cp_size) for piece in of_groups)
            mixed = _gather_tokens([gate, values, *copied, steps], cp.cp_group, order)
        if self._scan is not scan_reference.mamba_split_conv1d_scan_combined:
            check_scan_offsets(len(mixed), mixed.shape[-1])
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
        scanned = _gather_heads(scanned.transpose(0, 1).contiguous(), cp.cp_group, order)
        return cast(Mixed, self.out_proj(self.norm(scanned)))

    def _division(self, group: Any) -> Any:
        """Return Megatron's division of heads and parameters over the ranks of `group`; None for the layout's group."""
        size = self.cp.cp_size if group is None else group.size()
        if size not in self._divided:
            kind = type(self.cp)
            values = {name: getattr(self.cp, name) for name in inspect.signature(kind).parameters}
            self._divided[size] = kind(**values | {"cp_group": group})
        return self._divided[size]

    def use_plain_scan(self) -> None:
        """Use the scan in PyTorch, even if kernels are installed."""
        self._scan = scan_reference.mamba_split_conv1d_scan_combined


class RowDelta(_delta.GatedDeltaNet):  # type: ignore[misc, name-defined]
    """Megatron's layer of the gated delta rule on a packed row."""

    def __init__(self, config: Any, submodules: Any, layer_number: int, pg_collection: Any, **unused: Any) -> None:
        with _quiet_generator():
            super().__init__(config, submodules, layer_number=layer_number, pg_collection=pg_collection)
            # Megatron initializes the same filters on all tensor-parallel ranks.
            with get_cuda_rng_tracker().fork():
                self.conv1d.reset_parameters()
        tp = self.pg_collection.tp.size()
        self._groups = self.num_key_heads // tp
        # Sizes of queries, keys, values, gate, rates and decays for this rank's heads.
        heads = self.num_value_heads // tp
        self._sizes = [self.qk_dim // tp, self.qk_dim // tp, self.v_dim // tp, self.v_dim // tp, heads, heads]
        self._scan, self._convolve = choose_delta_rule(self.A_log.device)

    def forward(
        self, hidden_states: torch.Tensor, attention_mask: Any = None, *, packed_seq_params: PackedRow, **unused: Any
    ) -> Mixed:
        """Mix tokens; input and output are [T / cp, 1, hidden_size]; T / cp / tp tokens with sequence parallelism."""
        group = packed_seq_params.cp_group or self.pg_collection.cp
        bounds, _, order = packed_seq_params.scan_order(group.size())
        mixed, _ = self.in_proj(hidden_states)
        filters, decay, bias = self.conv1d.weight.squeeze(1), self.A_log, self.dt_bias
        if order is not None:
            mixed = _gather_tokens(self._by_rank(mixed, -1, group.size()), group, order)
            pieces = self._by_rank(filters, 0, group.size())
            filters = torch.cat([piece.chunk(group.size())[group.rank()] for piece in pieces])
            decay, bias = (each.chunk(group.size())[group.rank()] for each in (decay, bias))
        heads, keys = len(decay), filters.shape[0] - len(decay) * self.value_head_dim
        sizes = [filters.shape[0], heads * self.value_head_dim, heads, heads]
        inputs, gate, rates, steps = torch.split(mixed.transpose(0, 1), sizes, dim=-1)
        inputs, _ = self._convolve(
            x=inputs.contiguous(), weight=filters, bias=None, activation="silu", cu_seqlens=bounds
        )
        query, key, value = torch.split(inputs, [keys // 2, keys // 2, sizes[1]], dim=-1)
        groups = keys // 2 // self.key_head_dim
        by_group = (torch.unflatten(part, -1, (groups, -1)) for part in (query, key))
        query, key = (part.repeat_interleave(heads // groups, dim=2) for part in by_group)
        scanned, _ = self._scan(
            q=query,
            k=key,
            v=torch.unflatten(value, -1, (heads, -1)).contiguous(),
            g=-decay.float().exp() * functional.softplus(steps.float() + bias.float()),
            beta=rates.sigmoid(),
            use_qk_l2norm_in_kernel=True,
            cu_seqlens=bounds,
        )
        scanned = scan_reference.gate(self.out_norm(scanned), torch.unflatten(gate, -1, (heads, -1))).flatten(2)
        scanned = _gather_heads(scanned.transpose(0, 1).contiguous(), group, order)
        return cast(Mixed, self.out_proj(scanned))

    def use_plain_scan(self) -> None:
        """Use the scan in PyTorch, even if kernels are installed."""
        self._scan, self._convolve = scan_reference.chunk_gated_delta_rule, scan_reference.causal_conv1d

    def _by_rank(self, whole: torch.Tensor, dim: int, cp: int) -> list[torch.Tensor]:
        """Split the channels in `dim` into pieces, each of which context-parallel ranks divide."""
        count = 6 if dim else 3  # the convolution has only queries, keys and values
        query, key, *others = torch.split(whole, self._sizes[:count], dim=dim)
        return [_copy_groups(query, self._groups, cp, dim), _copy_groups(key, self._groups, cp, dim), *others]


class HeadNorm(torch.nn.Module):
    """Norm of each head's output. All heads share its weight, so each tensor-parallel rank has a partial gradient."""

    def __init__(self, config: Any, hidden_size: int, eps: float) -> None:
        super().__init__()
        self.weight, self.eps = torch.nn.Parameter(torch.ones(hidden_size, dtype=config.params_dtype)), eps

    def forward(self, heads: torch.Tensor) -> torch.Tensor:
        """Normalize [..., hidden_size] in float32; shape and dtype do not change."""
        weight = copy_to_tensor_model_parallel_region(self.weight).float()
        return functional.rms_norm(heads.float(), weight.shape, weight, self.eps).type_as(heads)


@contextmanager
def _quiet_generator() -> Iterator[None]:
    """Hide Megatron's warning about values from the generator of the CPU, which is correct for training on a CPU."""
    log = logging.getLogger("megatron.core.tensor_parallel.random")
    level = log.level
    log.setLevel(logging.ERROR)
    try:
        yield
    finally:
        log.setLevel(level)


def _uses_kernels(device: torch.device, *, delta_rule: bool) -> bool:
    has_them = device.type == "cuda" and compat.missing_kernels(delta_rule=delta_rule) is None
    if not has_them or torch.are_deterministic_algorithms_enabled():
        return False
    if (reason := compat.why_no_packed_scan(delta_rule=delta_rule)) is not None:
        what = f"the installed kernels ignore where sequences begin, or compute wrong gradients: {reason}"
        where = "package flash-linear-attention" if delta_rule else "packages mamba-ssm, causal-conv1d"
        fix = f"install {reason.partition(' is required')[0]}, or remove the kernels"
        raise ConfigError(what, where=where, fix=fix)
    return True


def choose_scan(device: torch.device, features: int) -> Callable[..., torch.Tensor]:
    """Return the scan of mamba-ssm on a GPU if installed; without it, or in deterministic mode, the PyTorch scan."""
    if not _uses_kernels(device, delta_rule=False):
        return scan_reference.mamba_split_conv1d_scan_combined
    if features % 8:
        what = f"a rank would scan {features} numbers per token, but causal-conv1d requires a multiple of 8"
        where = "model.scan_num_heads, parallel.tensor_parallel_size, parallel.context_parallel_size"
        raise ConfigError(what, where=where, fix="fewer tensor- or context-parallel ranks")
    from mamba_ssm.ops.triton.ssd_combined import mamba_split_conv1d_scan_combined

    return mamba_split_conv1d_scan_combined  # type: ignore[no-any-return]


def choose_delta_rule(device: torch.device) -> tuple[Callable[..., Any], Callable[..., Any]]:
    """Return the gated delta rule and its convolution, from fla or PyTorch, chosen as in `choose_scan`."""
    if not _uses_kernels(device, delta_rule=True):
        return scan_reference.chunk_gated_delta_rule, scan_reference.causal_conv1d
    from fla.modules.convolution import causal_conv1d
    from fla.ops.gated_delta_rule import chunk_gated_delta_rule

    return chunk_gated_delta_rule, causal_conv1d


def _copy_groups(piece: torch.Tensor, groups: int, cp_size: int, dim: int = -1) -> torch.Tensor:
    """Repeat each group whose heads are on several context-parallel ranks, once for each of them."""
    dim %= piece.dim()
    copies = torch.unflatten(piece, dim, (groups, -1)).repeat_interleave(max(1, cp_size // groups), dim=dim)
    return copies.flatten(dim, dim + 1)


def _gather_tokens(pieces: list[torch.Tensor], group: Any, order: torch.Tensor) -> torch.Tensor:
    """Exchange this rank's tokens, [T / cp, 1, F], for all tokens of this rank's heads, [T, 1, F / cp], in order."""
    of_ranks = [torch.unflatten(piece, -1, (group.size(), -1)) for piece in pieces]
    return _exchange(torch.cat(of_ranks, dim=-1).movedim(-2, 0), group).flatten(0, 1)[order]


def _gather_heads(scanned: torch.Tensor, group: Any, order: torch.Tensor | None) -> torch.Tensor:
    """Exchange all tokens of this rank's heads, [T, 1, F / cp], for its tokens with all heads, [T / cp, 1, F]."""
    if order is None:
        return scanned
    by_rank = torch.empty_like(scanned).index_copy(0, order, scanned).reshape(group.size(), -1, *scanned.shape[1:])
    return _exchange(by_rank, group).movedim(0, -2).flatten(-2)


def _exchange(of_ranks: torch.Tensor, group: Any) -> torch.Tensor:
    """Send part r of [cp, ...] to context-parallel rank r; return the received parts by rank."""
    return cast(torch.Tensor, all_to_all(group, of_ranks.contiguous().flatten(0, 1))).view(of_ranks.shape)


def only(part: str, layer: ModuleSpec, *, is_whole: bool) -> ModuleSpec:
    """Return a layer with the part that a letter of `model.layer_pattern` names; keep its MLP unless `is_whole`."""
    parts = layer.submodules
    if part in "-E":
        absent = {"input_layernorm": IdentityOp, "self_attention": IdentityOp, "self_attn_bda": IdentityFuncOp}
        return replace(layer, submodules=replace(parts, **absent))
    attention = parts.self_attention
    # Tensor-parallel ranks divide both layers; with Transformer Engine, the first includes the norm.
    linear = attention.submodules
    if part == "M":
        mixer = _mamba.MambaMixerSubmodules(in_proj=linear.linear_qkv, out_proj=linear.linear_proj)
        attention = ModuleSpec(module=RowMamba, submodules=mixer)
    elif part == "D":
        mixer = _delta.GatedDeltaNetSubmodules(
            in_proj=linear.linear_qkv, out_norm=HeadNorm, out_proj=linear.linear_proj
        )
        attention = ModuleSpec(module=RowDelta, submodules=mixer)
    changed: dict[str, Any] = {"self_attention": attention}
    if part in SCANS:
        # Map the norm in Transformer Engine's first matrix to the name of PyTorch's layers in checkpoints.
        names = {
            name: stored.replace("linear_qkv", "in_proj") for name, stored in parts.sharded_state_dict_keys_map.items()
        }
        changed["sharded_state_dict_keys_map"] = names
    if is_whole:
        changed |= {"pre_mlp_layernorm": IdentityOp, "mlp": IdentityOp, "mlp_bda": IdentityFuncOp}
    return replace(layer, submodules=replace(parts, **changed))
