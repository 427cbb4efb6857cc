"""Build Megatron-Core's own GPTModel, wrapped in its DistributedDataParallel, from a `ModelConfig`."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import replace
from importlib.util import find_spec
from typing import Any

import torch
from megatron.core import parallel_state, tensor_parallel
from megatron.core.activations import squared_relu
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads
from megatron.core.fusions.fused_bias_geglu import quick_gelu
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec, get_gpt_decoder_layer_specs
from megatron.core.transformer.enums import AttnBackend
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_config import MLATransformerConfig, TransformerConfig
from megatron.core.transformer.transformer_layer import get_transformer_layer_offset
from torch.nn import functional

from harness.errors import ConfigError
from harness.megatron import compat
from harness.megatron.model.attention import JointKeyNorm, JointQueryNorm, LatentNorm, RMSNorm, VarlenAttention
from harness.megatron.model.fusions import choose_fusions
from harness.megatron.model.lora import add_adapters
from harness.megatron.model.media import add_encoder
from harness.megatron.model.mtp import PredictingModel, decoder_layers, predicting_layers
from harness.megatron.model.rotary import RowLatentAttention, RowSelfAttention
from harness.megatron.model.router import Router, finalize_with_experts, prepare_experts, routers
from harness.megatron.weights import TensorShard
from harness.plan import ModelConfig, ParallelConfig
from harness.plan.layout import padded_vocab_size

# Transformer Engine chooses among the backends that support a model, unless one is named.
_BACKENDS = {"flash": AttnBackend.flash, "fused": AttnBackend.fused, "unfused": AttnBackend.unfused}
# Megatron-Core sets these to select the backend, in the order of `_BACKENDS`.
_BACKEND_VARIABLES = ("NVTE_FLASH_ATTN", "NVTE_FUSED_ATTN", "NVTE_UNFUSED_ATTN")


def use_transformer_engine(choice: str, device: torch.device) -> bool:
    """Return True if layers use Transformer Engine; raise ConfigError if it is requested and missing."""
    if choice == "torch" or (choice == "auto" and device.type != "cuda"):
        return False
    try:
        import transformer_engine.pytorch  # noqa: F401
    except (ImportError, OSError) as error:
        if choice == "auto":
            return False
        what = f"model.attention is {choice}, but Transformer Engine cannot be imported: {error}"
        fix = "install the `gpu` extra, use a container with it, or set model.attention=torch"
        raise ConfigError(what, where="model.attention", fix=fix) from error
    return True


def engine_layers(model: ModelConfig, parallel: ParallelConfig, device: torch.device) -> bool:
    """Return True if this model's layers use Transformer Engine; raise ConfigError as `use_transformer_engine` does.

    It has no float32 attention for rows with padding: `auto` then selects PyTorch, and explicit settings are refused.
    """
    if model.attention == "auto" and model.on(device.type).dtype == "float32" and parallel.padding_setting is not None:
        return False
    return use_transformer_engine(model.attention, device)


def _require_engine(
    model: ModelConfig, parallel: ParallelConfig, device: torch.device, setting: str, without: str
) -> None:
    """Raise ConfigError if layers use PyTorch; `without` is the value of `setting` that works with PyTorch."""
    name, _, value = setting.partition("=")
    if not engine_layers(model, parallel, device):
        what = f"{name} is {value}, but layers use PyTorch: Transformer Engine is not installed or not on this device"
        fix = f"install the `gpu` extra, use a container with it, or set {name}={without}"
        raise ConfigError(what, where=name, fix=fix)


def _check_backend_variables(model: ModelConfig) -> None:
    """Raise ConfigError for an environment variable that Megatron-Core would set to another value."""
    chosen = _BACKENDS.get(model.attention)
    for name, backend in zip(_BACKEND_VARIABLES, _BACKENDS.values(), strict=True):
        wanted, now = "1" if chosen in (None, backend) else "0", os.environ.get(name)
        if now not in (None, wanted):
            what = f"{name} is {now}, but model.attention is {model.attention}, which sets it to {wanted}"
            fix = f"unset it; model.attention={', '.join(_BACKENDS)} each select a backend"
            raise ConfigError(what, where=f"environment, {name}", fix=fix)


def transformer_config(model: ModelConfig, parallel: ParallelConfig, device: torch.device) -> TransformerConfig:
    """Return Megatron's config for this model on this layout."""
    model = model.on(device.type)
    kind = MLATransformerConfig if model.kv_lora_rank else TransformerConfig
    config = kind(
        **_layer_settings(model),
        **_kernel_settings(model, parallel, device),
        **_division(model, parallel, device),
        **_experts(model, parallel, device),
        **_fp8(model, parallel, device),
        mtp_num_layers=model.mtp_layers or None,
        mtp_loss_scaling_factor=model.mtp_loss,
        calculate_per_token_loss=True,
        recompute_granularity=None if model.recompute == "none" else model.recompute,
        recompute_modules=model.recompute_modules,
        # "uniform" recomputes units of one layer each, "block" the first layers of a chunk.
        recompute_method=None if model.recompute != "full" else "block" if model.recompute_layers else "uniform",
        recompute_num_layers=(model.recompute_layers or 1) if model.recompute == "full" else None,
    )
    config.rope_axes = model.rope_axes
    # Not above: Megatron refuses float32, which its schedule trains as well, and which a CPU has.
    config.overlap_moe_expert_parallel_comm = parallel.overlap_experts
    config.delay_wgrad_compute = parallel.delay_weight_gradients
    if model.rope_scaling == "yarn" and not model.kv_lora_rank:
        # Megatron reads these from its config, which has no fields for them.
        config.yarn_rotary_scaling_factor = model.rope_scaling_factor
        config.yarn_original_max_position_embeddings = model.rope_original_positions
        config.yarn_beta_fast, config.yarn_beta_slow = 32.0, 1.0
        config.yarn_mscale, config.yarn_mscale_all_dim = model.rope_mscale, model.rope_mscale_all_dim
        config.yarn_correction_range_round_to_int = model.traits.yarn_truncates
    return config


# Settings with the same name in Megatron's config, and names there of settings with another: for all models, for latent
# attention, and for layers with Mamba-2 or the gated delta rule.
_SIZES = ("num_layers", "hidden_size", "ffn_hidden_size", "num_attention_heads", "num_query_groups")
_LATENTS = {
    **{name: name for name in ("q_lora_rank", "kv_lora_rank", "v_head_dim", "rotary_base")},
    "qk_head_dim": "qk_nope_head_dim",
    "qk_pos_emb_head_dim": "qk_rope_head_dim",
    "original_max_position_embeddings": "rope_original_positions",
    "mscale": "rope_mscale",
    "mscale_all_dim": "rope_mscale_all_dim",
}
_SCANS = ("scan_num_heads", "scan_head_dim", "scan_state_dim", "scan_num_groups")
_MAMBA = ("mamba_num_heads", "mamba_head_dim", "mamba_state_dim", "mamba_num_groups")
_DELTA = ("linear_num_value_heads", "linear_value_head_dim", "linear_key_head_dim", "linear_num_key_heads")


def _layer_settings(model: ModelConfig) -> dict[str, Any]:
    dtype: torch.dtype = getattr(torch, model.dtype)
    names = {name: name for name in _SIZES} | (_LATENTS if model.kv_lora_rank else {})
    if model.layer_pattern:
        names |= zip(_DELTA if model.has_delta_rule else _MAMBA, _SCANS, strict=True)
    made: dict[str, Any] = {name: getattr(model, own) for name, own in names.items()}
    if model.kv_lora_rank:
        scaled = model.rope_scaling == "yarn"
        made |= {"multi_latent_attention": True, "rope_type": "yarn" if scaled else "rope"}
        made["rotary_scaling_factor"] = model.rope_scaling_factor if scaled else 1.0
    if model.num_experts or model.layer_pattern:
        # With a list, even one without MoE layers, Megatron's checkpoints allow layers to differ.
        made["moe_layer_freq"] = [int("E" in parts) for parts in model.all_parts[: model.num_layers]]
    return made | {
        "kv_channels": model.head_size,
        "add_qkv_bias": model.traits.has_qkv_bias,
        # Megatron sums the gradients of these norms over tensor-parallel ranks, which divide norms that span all heads.
        "qk_layernorm": model.has_head_norms and not model.traits.norms_span_heads,
        "layernorm_epsilon": model.norm_epsilon,
        "init_method_std": model.init_std,
        "normalization": "RMSNorm",
        "layernorm_zero_centered_gamma": model.traits.norms_add_one,
        "attention_output_gate": model.traits.has_output_gate,
        "gated_linear_unit": model.halves == 2,
        "add_bias_linear": model.traits.has_biases,
        "softmax_type": "learnable" if model.traits.has_sinks else "vanilla",
        # Megatron counts only the preceding tokens, not the token itself.
        "window_size": None if model.sliding_window is None else (model.sliding_window - 1, 0),
        "window_attn_skip_freq": None if model.sliding_window is None else 2,
        "hidden_dropout": 0.0,
        "attention_dropout": 0.0,
        "params_dtype": dtype,
        "pipeline_dtype": dtype,
        "bf16": dtype == torch.bfloat16,
    }


def _kernel_settings(model: ModelConfig, parallel: ParallelConfig, device: torch.device) -> dict[str, Any]:
    fusions = choose_fusions(model, device)
    gate = quick_gelu if fusions["bias_activation_fusion"] else _clamped_gate
    activation = gate if model.traits.swiglu_limit else functional.silu
    return {
        **fusions,
        "activation_func": activation if model.halves == 2 else squared_relu,
        "activation_func_clamp_value": model.traits.swiglu_limit or None,
        "glu_linear_offset": 1.0 if model.traits.swiglu_limit else 0.0,
        "cross_entropy_fusion_impl": "native",
        "deterministic_mode": torch.are_deterministic_algorithms_enabled(),
        "masked_softmax_fusion": False,
        # A replayed graph treats every row as Transformer Engine treated the captured one: it would overwrite the
        # gradients of earlier rows of the step, or reuse stale FP8 weights.
        "disable_parameter_transpose_cache": parallel.cuda_graphs,
        "attention_backend": _BACKENDS.get(model.attention, AttnBackend.auto),
        # On a CPU the whole matrix is initialized and then sliced, so that every layout starts from the same weights;
        # on GPUs each shard is initialized in place, which large models need.
        "use_cpu_initialization": device.type == "cpu",
    }


def _division(model: ModelConfig, parallel: ParallelConfig, device: torch.device) -> dict[str, Any]:
    dispatcher = parallel.expert_dispatcher if model.num_experts else "alltoall"
    if dispatcher == "flex" and (device.type != "cuda" or find_spec("deep_ep") is None):
        what = "DeepEP's kernels require GPUs and the package deep_ep"
        raise ConfigError(what, where="parallel.expert_dispatcher=flex", fix="parallel.expert_dispatcher=alltoall")
    pipelined = parallel.pipeline_parallel_size > 1
    interleaved = parallel.virtual_pipeline_parallel_size is not None
    return {
        "tensor_model_parallel_size": parallel.tensor_parallel_size,
        "pipeline_model_parallel_size": parallel.pipeline_parallel_size,
        "virtual_pipeline_model_parallel_size": parallel.virtual_pipeline_parallel_size,
        "pipeline_model_parallel_layout": parallel.pipeline_layout or None,
        "context_parallel_size": parallel.context_parallel_size,
        "sequence_parallel": parallel.sequence_parallel,
        "tp_comm_overlap": parallel.overlap_tensor_parallel,
        "expert_model_parallel_size": parallel.expert_parallel_size,
        "expert_tensor_parallel_size": parallel.expert_tensor_parallel_size,
        # Packed rows differ in length. Megatron ties this switch to a setting of its MoE code, even for dense models.
        "variable_seq_lengths": pipelined and not parallel.static_rows,
        "moe_token_dispatcher_type": dispatcher,
        # In an interleaved pipeline of two stages, a rank sends to the same peer in both directions. Individual sends
        # stay in order; batched ones are matched by order alone, and a gradient could be received as an activation.
        "overlap_p2p_comm": interleaved,
        "batch_p2p_comm": not interleaved,
        # On a CPU, gloo may still be reading a tensor that is being sent.
        "deallocate_pipeline_outputs": pipelined and device.type == "cuda",
    }


def _clamped_gate(gate: torch.Tensor) -> torch.Tensor:
    """Compute the same as Megatron's `quick_gelu`, without compiling it on the first call."""
    return gate * torch.sigmoid(1.702 * gate)


# Lowest compute capability that supports each recipe. GPUs of 10.0 and later emulate `blockwise` with another recipe.
_FP8_SINCE = {"tensorwise": (8, 9), "blockwise": (9, 0), "mxfp8": (10, 0)}


def _fp8(model: ModelConfig, parallel: ParallelConfig, device: torch.device) -> dict[str, Any]:
    """Return the settings of FP8 matrix products; empty if they are off."""
    if model.fp8 == "off":
        return {}
    _require_engine(model, parallel, device, f"model.fp8={model.fp8}", "off")
    there = torch.cuda.get_device_capability(device) if device.type == "cuda" else None
    if there is not None and there < _FP8_SINCE[model.fp8]:
        needed, given = ("compute capability " + ".".join(map(str, one)) for one in (_FP8_SINCE[model.fp8], there))
        what, where = f"model.fp8 is {model.fp8}, which requires {needed}", torch.cuda.get_device_name(device)
        raise ConfigError(what, where=f"{where}, {given}", fix="model.fp8=tensorwise on Ada and Hopper, or off")
    return {
        # Gradients need the larger range of e5m2 only if a whole tensor shares one scale.
        "fp8": "hybrid" if model.fp8 == "tensorwise" else "e4m3",
        "fp8_recipe": model.fp8,
        "moe_router_padding_for_quantization": bool(model.num_experts),
    }


def _experts(model: ModelConfig, parallel: ParallelConfig, device: torch.device) -> dict[str, Any]:
    if not model.num_experts:
        return {}
    if model.grouped_gemm == "on":
        _require_engine(model, parallel, device, "model.grouped_gemm=on", "auto")
    can_group = model.grouped_gemm != "off" and model.why_not_grouped is None
    return {
        "num_moe_experts": model.num_experts,
        "moe_router_topk": model.experts_per_token,
        "moe_ffn_hidden_size": model.expert_size,
        "moe_latent_size": model.expert_latent_size or None,
        "moe_shared_expert_intermediate_size": model.shared_ffn_hidden_size or None,
        "moe_shared_expert_gate": model.gates_shared_experts,
        "moe_router_load_balancing_type": "aux_loss" if model.aux_loss else "none",
        "moe_aux_loss_coeff": model.aux_loss,
        "moe_z_loss_coeff": model.z_loss or None,
        "moe_router_score_function": model.router_score,
        "moe_router_pre_softmax": not model.router_normalize,
        "moe_router_num_groups": model.router_groups,
        "moe_router_group_topk": model.router_top_groups,
        "moe_router_topk_scaling_factor": model.router_scale if model.router_scale != 1 else None,
        "moe_router_enable_expert_bias": model.expert_bias,
        # Adapter training does not change the expert biases of the base model.
        "moe_router_bias_update_rate": 0.0 if model.lora_rank else model.expert_bias_rate,
        "moe_router_dtype": "fp32",
        "moe_grouped_gemm": can_group and engine_layers(model, parallel, device),
        "moe_shared_expert_overlap": parallel.overlap_shared_experts,
    }


def _layers(model: ModelConfig, config: TransformerConfig, *, transformer_engine: bool, vp_stage: int | None) -> Any:
    block = get_gpt_decoder_block_spec(
        config, use_transformer_engine=transformer_engine, normalization="RMSNorm", vp_stage=vp_stage
    )
    layers = [_with_own_parts(layer, model, transformer_engine=transformer_engine) for layer in block.layer_specs]
    if model.layer_pattern is not None:
        from harness.megatron.model.scan import only

        first = get_transformer_layer_offset(config, vp_stage=vp_stage)
        is_whole = "-" in model.traits.pattern_letters
        letters = model.layer_pattern[first : first + len(layers)]
        layers = [only(*pair, is_whole=is_whole) for pair in zip(letters, layers, strict=True)]
    return replace(block, layer_specs=layers, layer_norm=block.layer_norm if transformer_engine else RMSNorm)


# Renamed norms, keyed by whether attention is latent, whose layers Megatron names differently.
_NORM_NAMES = {
    False: {
        "input_layernorm.": "self_attention.linear_qkv.layer_norm_",
        "pre_mlp_layernorm.": "mlp.linear_fc1.layer_norm_",
    },
    True: {"mlp.linear_fc1.layer_norm_": "pre_mlp_layernorm."},
}


def _with_own_parts(layer: ModuleSpec, model: ModelConfig, *, transformer_engine: bool) -> ModuleSpec:
    """Return a layer with our rotary embedding and router; without Transformer Engine, also our kernel and norms."""
    layer = compat.with_router(layer, Router)
    # Few versions of Transformer Engine support sinks in packed rows, and none with a ring of context-parallel ranks.
    with_kernel = transformer_engine and not model.traits.has_sinks
    parts: dict[str, Any] = {} if with_kernel else {"core_attention": VarlenAttention}
    if model.traits.norms_span_heads:
        parts |= {"q_layernorm": JointQueryNorm, "k_layernorm": JointKeyNorm}
    elif model.has_head_norms and not transformer_engine:
        parts |= {"q_layernorm": RMSNorm, "k_layernorm": RMSNorm}
    if model.kv_lora_rank:
        parts |= {"q_layernorm": LatentNorm, "kv_layernorm": LatentNorm}
    attention = layer.submodules.self_attention
    module = RowLatentAttention if model.kv_lora_rank else RowSelfAttention
    attention = replace(attention, module=module, submodules=replace(attention.submodules, **parts))
    norms: dict[str, Any] = {"input_layernorm": RMSNorm, "pre_mlp_layernorm": RMSNorm}
    if transformer_engine and model.num_experts:
        # Checkpoints use the same names as PyTorch's layers.
        norms = {"sharded_state_dict_keys_map": _NORM_NAMES[bool(model.kv_lora_rank)]}
    elif transformer_engine:
        norms = {}
    return replace(layer, submodules=replace(layer.submodules, self_attention=attention, **norms))


def build_chunks(
    model: ModelConfig, parallel: ParallelConfig, *, vocab_size: int, device: torch.device
) -> list[GPTModel]:
    """Build this rank's chunks of the model: one, or one per virtual pipeline stage."""
    config = transformer_config(model, parallel, device)
    _check_backend_variables(model)
    for name in ("overlap_tensor_parallel", "delay_weight_gradients"):
        if getattr(parallel, name):
            _require_engine(model, parallel, device, f"parallel.{name}=true", "false")
    if parallel.cuda_graphs:
        _check_graphs(model, parallel, device)
    # A graph cannot set the state of a generator, but it can switch between generators.
    by_generators = parallel.cuda_graphs and device.type == "cuda"
    tensor_parallel.model_parallel_cuda_manual_seed(
        model.seed, use_cudagraphable_rng=by_generators, force_reset_rng=by_generators
    )
    torch.manual_seed(model.seed)
    number, size = parallel.virtual_pipeline_parallel_size or 1, padded_vocab_size(vocab_size)
    stages, with_engine = range(number) if number > 1 else [None], engine_layers(model, parallel, device)
    chunks = [
        _build_chunk(model, config, vp_stage=stage, vocab_size=size, with_engine=with_engine).to(device)
        for stage in stages
    ]
    shard = TensorShard(parallel_state.get_tensor_model_parallel_rank(), parallel.tensor_parallel_size)
    for chunk in chunks:
        if model.encoder is not None and chunk.pre_process:
            add_encoder(chunk, model)
            chunk.encoder.to(device)
        if model.num_experts:
            prepare_experts(chunk, model, device)
        if model.kv_lora_rank:  # share one rotary embedding, so that angles are gathered once per microbatch
            attentions = [layer.self_attention for _, layer in decoder_layers(chunk)]
            for attention in attentions:
                attention.rotary_pos_emb = attentions[0].rotary_pos_emb
        if model.init_from is not None:
            _hide_padding(chunk, vocab_size)
        if model.lora_rank:
            add_adapters(chunk, model, shard, device)
    if not config.bf16:
        return chunks
    chunks = [chunk.bfloat16() for chunk in chunks]
    for router in routers(chunks):
        if router.expert_bias is not None:  # bfloat16 would lose its small updates
            router.expert_bias.data = router.expert_bias.data.float()
    return chunks


def _build_chunk(
    model: ModelConfig, config: TransformerConfig, *, vp_stage: int | None, vocab_size: int, with_engine: bool
) -> GPTModel:
    layers = _layers(model, config, transformer_engine=with_engine, vp_stage=vp_stage)
    further = None
    if model.mtp_layers:
        block = layers
        if not block.layer_specs:  # MTP layers copy the spec of the last layer, which is in another chunk
            last = get_gpt_decoder_layer_specs(config, with_engine, normalization="RMSNorm")[-1:]
            own = [_with_own_parts(layer, model, transformer_engine=with_engine) for layer in last]
            block = replace(block, layer_specs=own)
        further = predicting_layers(config, block, transformer_engine=with_engine, vp_stage=vp_stage)
    scaled = "yarn" if hasattr(config, "yarn_mscale") else "rope"
    return (PredictingModel if model.mtp_layers else GPTModel)(
        config=config,
        transformer_layer_spec=layers,
        mtp_block_spec=further,
        vocab_size=vocab_size,
        max_sequence_length=model.max_sequence_length,
        pre_process=parallel_state.is_pipeline_first_stage(ignore_virtual=False, vp_stage=vp_stage),
        post_process=parallel_state.is_pipeline_last_stage(ignore_virtual=False, vp_stage=vp_stage),
        # Media features replace placeholder embeddings before the tokens are scattered over ranks.
        scatter_embedding_sequence_parallel=model.encoder is None,
        share_embeddings_and_output_weights=model.tie_embeddings,
        position_embedding_type=scaled if model.rotated_size else "none",
        rotary_percent=model.traits.rotated_part,
        rotary_base=model.rotary_base,
        rope_scaling=model.rope_scaling == "llama3",
        rope_scaling_factor=model.rope_scaling_factor,
        seq_len_interpolation_factor=model.rope_scaling_factor if model.rope_scaling == "linear" else None,
        vp_stage=vp_stage,
    )


def _hide_padding(chunk: GPTModel, vocab_size: int) -> None:
    """Exclude vocabulary padding from the softmax: pretrained weights have no padding rows."""
    if not chunk.post_process:
        return
    rows = padded_vocab_size(vocab_size) // chunk.config.tensor_model_parallel_size
    first = max(0, vocab_size - parallel_state.get_tensor_model_parallel_rank() * rows)

    def hide(module: torch.nn.Module, inputs: Any, output: Any) -> None:
        if first < rows:
            output[0][..., first:] = torch.finfo(output[0].dtype).min

    chunk.output_layer.register_forward_hook(hide)


def _check_graphs(model: ModelConfig, parallel: ParallelConfig, device: torch.device) -> None:
    """Raise ConfigError if the pass of a row cannot be captured. NCCL reads the variables when it connects."""
    if not compat.has_streams(device):
        what = f"parallel.cuda_graphs is true, but the device is {device.type}"
        raise ConfigError(what, where="parallel.cuda_graphs", fix="parallel.cuda_graphs=false")
    if engine_layers(model, parallel, device) and compat.engine_compares_bounds():
        what = f"parallel.cuda_graphs is true, but megatron-core {compat.MEGATRON_VERSION} cannot inform this version "
        what += "of Transformer Engine that rows are padded, so it checks on the host"
        fix = "megatron-core 0.19, Transformer Engine 2.19, or parallel.cuda_graphs=false"
        raise ConfigError(what, where="parallel.cuda_graphs", fix=fix)
    names = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")
    grows = next((name for name in names if "expandable_segments:True" in os.environ.get(name, "")), None)
    if grows is not None and (registers := os.environ.get("NCCL_GRAPH_REGISTER", "1")) != "0":
        what = f"{grows} has expandable_segments:True, and NCCL_GRAPH_REGISTER is {registers}: replayed collectives "
        what += "would use memory that was moved"
        raise ConfigError(what, where="environment, NCCL_GRAPH_REGISTER", fix="NCCL_GRAPH_REGISTER=0")


def build_model(
    model: ModelConfig,
    parallel: ParallelConfig,
    *,
    vocab_size: int,
    device: torch.device,
    fill: Callable[[list[GPTModel]], None] | None = None,
) -> list[DistributedDataParallel]:
    """Build this rank's chunks of the model, ready to train; `fill` loads weights into them before they are wrapped."""
    chunks = build_chunks(model, parallel, vocab_size=vocab_size, device=device)
    if fill is not None:
        fill(chunks)
    config = chunks[0].config
    # A replayed graph does not run the hooks that start communication.
    overlaps = compat.has_streams(device) and parallel.overlap_gradients and not parallel.cuda_graphs
    # If no row of a step has media, the encoder gets no gradient, and an overlapped reduction would wait for it.
    overlaps = overlaps and not model.train_encoder
    ddp = DistributedDataParallelConfig(
        grad_reduce_in_fp32=parallel.gradient_dtype == "float32",
        use_distributed_optimizer=parallel.distributed_optimizer,
        overlap_grad_reduce=overlaps,
        # Megatron gathers a weight when the module that owns it is called; some adapter weights have no such module.
        overlap_param_gather=overlaps
        and parallel.overlap_weights
        and parallel.distributed_optimizer
        and not model.lora_rank,
        average_in_collective=False,
        delay_wgrad_compute=parallel.delay_weight_gradients,
    )
    # Gradient accumulation runs on the stream that it was created on, which has to be the stream of the capture.
    stream = torch.cuda.Stream() if parallel.cuda_graphs else None  # type: ignore[no-untyped-call]
    if stream is not None:
        stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):  # None changes nothing
        wrapped = [
            # Buckets follow the order of gradients in the backward pass; only the first chunk has several.
            DistributedDataParallel(config, ddp, chunk, disable_bucketing=index > 0)
            for index, chunk in enumerate(chunks)
        ]
    if stream is not None:
        torch.cuda.current_stream().wait_stream(stream)
        wrapped[0].capture_stream = stream
    config.finalize_model_grads_func = finalize_with_experts if model.num_experts else finalize_model_grads
    if ddp.overlap_grad_reduce:
        syncs = [chunk.no_sync for chunk in wrapped]
        config.no_sync_func = syncs if len(syncs) > 1 else syncs[0]
    for chunk in wrapped:
        chunk.broadcast_params()
    return wrapped
