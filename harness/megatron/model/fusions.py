"""Choose fused kernels, and warn about settings and packages that make a run on a GPU slower than necessary."""

from __future__ import annotations

import importlib.util
import os

import torch
from megatron.core.transformer.moe import moe_utils

from harness.errors import ConfigError
from harness.megatron.compat import missing_kernels
from harness.plan import ModelConfig, ParallelConfig

# Megatron-Core's linear layers call this extension of Apex to add a weight's gradient within the matrix product.
_ADDING_KERNEL, _ENGINE = "fused_weight_gradient_mlp_cuda", "transformer_engine"
_PACKAGES = {"fuse_weight_gradient": _ADDING_KERNEL, "fuse_permutation": _ENGINE, "fuse_router": _ENGINE}
# Router kernels, at least up to Transformer Engine 2.14, keep 52 bytes per expert in 48 KiB of shared memory.
_MOST_ROUTED = 48 * 1024 // 52


def choose_fusions(model: ModelConfig, device: torch.device) -> dict[str, bool]:
    """Return Megatron's fusion settings for a model: those that are `on`, and on a GPU `auto` ones if available."""
    model, is_gpu = model.on(device.type), device.type == "cuda"

    def uses(name: str) -> bool:
        choice, missing = getattr(model, name), _why_not(name, model, device)
        if choice == "on" and missing:
            raise ConfigError(f"model.{name} is on, but {missing}", where=f"model.{name}", fix="set it to auto")
        return not missing and (choice == "on" or (choice == "auto" and is_gpu))

    deterministic = torch.are_deterministic_algorithms_enabled()
    odd = "trainer.deterministic is true" * deterministic or "model.dtype is float32" * (model.dtype != "bfloat16")
    if model.fuse_cross_entropy == "on" and odd:
        what = f"model.fuse_cross_entropy is on, but {odd}: the fused loss is not deterministic, and rounds gradients "
        fix = "model.fuse_cross_entropy=auto, or trainer.deterministic=false and model.dtype=bfloat16"
        raise ConfigError(f"{what}to bfloat16", where=f"model.fuse_cross_entropy, {odd.split()[0]}", fix=fix)
    # Megatron's fused loss saves a second copy of the logits in float32, and rounds their gradients to bfloat16.
    return {
        "bias_activation_fusion": uses("fuse_swiglu") and model.halves == 2,
        "cross_entropy_loss_fusion": uses("fuse_cross_entropy") and not odd,
        "gradient_accumulation_fusion": uses("fuse_weight_gradient"),
        # Without it, the host waits in every layer for the number of tokens per expert.
        "moe_permute_fusion": uses("fuse_permutation") and bool(model.num_experts),
        "moe_router_fusion": uses("fuse_router") and bool(model.num_experts),
    }


def slow_parts(
    model: ModelConfig, parallel: ParallelConfig, device: torch.device, *, has_engine: bool, shares_rows: bool = False
) -> list[str]:
    """Return a sentence for each setting or missing package that makes a run on a GPU slower than necessary."""
    if device.type != "cuda":
        return []
    model, found = model.on(device.type), []
    costs = "launches kernels for every sequence of a row, and gathers keys and values with context parallelism"
    if model.attention == "auto" and not has_engine:
        why = "Transformer Engine cannot be imported"
        if model.dtype == "float32" and parallel.padding_setting is not None:
            why = f"Transformer Engine has no float32 attention with {parallel.padding_setting}"
        found.append(f"model.attention is auto, but {why}: PyTorch's attention {costs}")
    if model.traits.has_sinks:
        sinks = f"models of the family {model.family} have attention sinks, which require PyTorch's attention"
        found.append(f"{sinks}: it {costs}")
    reason = model.why_not_grouped or (None if has_engine else "the layers do not use Transformer Engine")
    if model.num_experts and model.grouped_gemm == "auto" and reason:
        found.append(f"model.grouped_gemm is auto, but {reason}: experts are computed one after another")
    if model.layer_pattern is not None and (package := missing_kernels(delta_rule=model.has_delta_rule)):
        found.append(f"{package} is not installed: the scans of layers run in PyTorch, which is much slower")
    elif model.layer_pattern is not None and torch.are_deterministic_algorithms_enabled():
        found.append("trainer.deterministic is true: the scans of layers run in PyTorch, which is much slower")
    if parallel.cuda_graphs and parallel.overlap_gradients:
        found.append("parallel.cuda_graphs is true: gradients are reduced after the last row, without overlap")
    if parallel.cuda_graphs and not has_engine:
        found.append("parallel.cuda_graphs is true: PyTorch's attention computes the scores of all pairs in a row")
    found += _wrong_connections(parallel, device, shares_rows)
    if model.dtype == "float32":
        found.append("model.dtype is float32: bfloat16 takes half the memory and is many times faster on a GPU")
    for name, result in {
        **({"fuse_permutation": "every layer with experts waits for the host"} if model.num_experts else {}),
        **({"fuse_router": "each router launches many small kernels"} if model.num_experts else {}),
        "fuse_weight_gradient": "each weight gradient needs an extra kernel",
    }.items():
        if getattr(model, name) == "auto" and (missing := _why_not(name, model, device)):
            found.append(f"model.{name} is auto, but {missing}: {result}")
    if has_engine and not model.traits.has_sinks and torch.are_deterministic_algorithms_enabled():
        heads = model.num_attention_heads // parallel.tensor_parallel_size
        padded = parallel.padding_setting
        found.append(
            "trainer.deterministic is true: since 2.19, Transformer Engine has no deterministic fused attention on "
            f"Hopper for a row in which sequences x {heads} heads x the square of the longest reaches 2^30; "
            + (f"with {padded} such a row ends the run" if padded else "all scores of such a row are stored")
            + "; model.attention=torch supports it"
        )
    is_fused = model.fuse_cross_entropy == "auto" and model.dtype == "bfloat16"
    if is_fused and torch.are_deterministic_algorithms_enabled():
        found.append("trainer.deterministic is true: the loss is not fused and stores the logits twice in float32")
    return found


def _wrong_connections(parallel: ParallelConfig, device: torch.device, shares_rows: bool) -> list[str]:
    value, best = os.environ.get("CUDA_DEVICE_MAX_CONNECTIONS"), parallel.device_connections(shares_rows)
    if torch.cuda.is_available() and torch.cuda.get_device_capability(device) >= (10, 0):
        best = 32
    if value is not None and (value == "1") == (best == 1):
        return []
    given = "not set" if value is None else value
    why = "delays communication until the overlapped GEMM ends" if best == 1 else "queues communication after kernels"
    return [f"CUDA_DEVICE_MAX_CONNECTIONS is {given}, which {why}: set it to {best} before the job starts"]


def _why_not(fusion: str, model: ModelConfig, device: torch.device) -> str | None:
    """Return why a fusion is not available, or None if it is; fusions that need no package always are."""
    package = _PACKAGES.get(fusion)
    if package is None:
        return None
    if device.type != "cuda":
        return "there is no GPU"
    if importlib.util.find_spec(package) is None:
        name = f"Apex's extension {package}" if package == _ADDING_KERNEL else "Transformer Engine"
        return f"{name} is not installed"
    if fusion == "fuse_router" and getattr(moe_utils, "fused_topk_with_score_function", None) is None:
        return "this Transformer Engine has no kernels for routers, which 2.7 and later have"
    if fusion == "fuse_router" and model.num_experts > _MOST_ROUTED:
        return f"the kernels have room for {_MOST_ROUTED} experts, and the model has {model.num_experts}"
    return None
