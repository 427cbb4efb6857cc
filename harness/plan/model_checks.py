"""Checks of a model's settings, and of a model on a layout, that need only numbers."""

from __future__ import annotations

from collections import Counter
from dataclasses import fields
from types import SimpleNamespace
from typing import TYPE_CHECKING

from harness.checks import SET, Rule, check_rules, includes, other_than, read_rules, show_value
from harness.errors import ConfigError
from harness.plan.encoders import MROPE, read_encoder
from harness.plan.layout import FP8_BLOCKS, LORA_TARGETS, ON_EVERY_RANK, VOCAB_MULTIPLE, ParallelConfig, sizes_on_rank
from harness.plan.stages import balance_stages, read_stages

if TYPE_CHECKING:
    from harness.plan.model import ModelConfig

_TP = "parallel.tensor_parallel_size"
# Name prefixes of settings that only models with experts use.
_OF_EXPERTS = ("expert", "shared_", "dense_layers", "router_", "aux_loss", "z_loss", "freeze_router", "grouped_gemm")
# All releases of mamba-ssm up to 2.3.2 compute the offset `chunk * chunk_size * stride_seqlen` in 32 bits; x, B, C and
# the time steps are views of the projection and have its full stride (state-spaces/mamba issue 1015).
_OFFSETS = 2**31
RULES = read_rules("""
    model.kv_lora_rank, model.rope_scaling!=none/yarn
      | Megatron-Core does not support this scaling with latent attention | model.rope_scaling=none or yarn
    model.num_experts, model.expert_bias=true, model.router_score!=sigmoid | Megatron-Core supports an expert bias only
      with a sigmoid router | model.router_score=sigmoid, or model.expert_bias=false
    model.num_experts, model.aux_loss_scope=sequence, model.aux_loss=0 | the load-balancing loss is disabled
      | model.aux_loss=0.001, or model.aux_loss_scope=row
    model.aux_loss_scope=sequence, model.recompute_modules~moe
      | recomputed routers do not know the sequences of their row | model.recompute=full, or model.aux_loss_scope=row
    model.num_experts, model.experts_per_token=1, model.router_score=softmax, model.router_normalize=true | the weight
      of a single expert would always be 1, so the router would not be trained | model.router_normalize=false
    model.encoder, model.mtp_layers | MTP layers do not read media | model.mtp_layers=0
    model.encoder, model.layer_pattern | hybrid models support only text | model.encoder=null
    model.encoder, model.fp8!=off | FP8 is not supported with an encoder | model.fp8=off
    !model.encoder, model.train_encoder=true | there is no encoder | model.train_encoder=false
    model.train_encoder=true, model.lora_rank | LoRA trains only adapters of the text model
      | model.train_encoder=false, or model.lora_rank=0
    model.mtp_layers, model.lora_rank | LoRA does not support MTP layers | model.mtp_layers=0
    model.mtp_layers, model.fp8!=off | FP8 is not supported with MTP layers | model.mtp_layers=0
    model.mtp_layers, model.recompute_layers | with MTP, all layers are recomputed | model.recompute_layers=null
    model.recompute_layers, model.recompute!=full | this number applies only if whole layers are recomputed
      | model.recompute=full, or model.recompute_layers=null
    model.mtp_layers, model.tie_embeddings=true | MTP layers do not support tied embeddings | model.mtp_layers=0
    model.layer_pattern, model.fp8!=off | FP8 is not supported with hybrid models | model.fp8=off
    model.layer_pattern, model.mtp_layers | hybrid models do not support MTP layers | model.mtp_layers=0
    model.layer_pattern, model.rope_scaling!=none | hybrid models cannot have it | model.rope_scaling=none
    model.layer_pattern, model.dense_layers | hybrid models cannot have it | model.dense_layers=0
""")
# Rules that involve both the model and its layout.
LAYOUT_RULES = tuple(
    Rule({f"parallel.{choice}": True, f"model.{name}": refused}, why, f"parallel.{choice}=false")
    for choice, others in {
        "cuda_graphs": (
            ("num_experts", SET, "CUDA graphs do not support experts, whose token counts are read on the host"),
            ("fp8", other_than("off"), "CUDA graphs do not support FP8"),
            ("recompute_modules", other_than(["core_attn"]), "CUDA graphs do not support it"),
            ("encoder", SET, "CUDA graphs do not support an encoder"),
            ("layer_pattern", SET, "CUDA graphs do not support hybrid models"),
        ),
        "overlap_weights_with_step": (
            ("lora_rank", SET, "weights of adapters are gathered at once"),
            ("train_encoder", True, "weights are gathered at once where an encoder is trained"),
            ("num_experts", SET, "Megatron-Core gathers experts before their own optimizer updates them"),
        ),
        "overlap_shared_experts": (
            ("recompute_modules", includes("moe", "shared_experts"), "overlapped shared experts cannot be recomputed"),
            ("shared_ffn_hidden_size", 0, "the model has no shared experts"),
            ("lora_rank", SET, "adapters of shared experts exchange tokens themselves"),
            ("expert_latent_size", SET, "Megatron-Core does not support it with experts of another size"),
        ),
        "overlap_experts": (
            ("num_experts", 0, "the model has no experts"),
            ("mtp_layers", SET, "Megatron-Core does not support MTP layers on packed rows with it"),
            ("layer_pattern", SET, "Megatron-Core does not support hybrid models with it"),
            ("encoder", SET, "it is not supported with an encoder"),
            ("recompute", "full", "Megatron-Core combines passes layer by layer and cannot compute whole layers again"),
            ("recompute_modules", includes("moe"), "experts that are computed in parts cannot be recomputed"),
        ),
        "delay_weight_gradients": (
            ("lora_rank", SET, "adapters are not Transformer Engine's layers"),
            ("recompute_modules", other_than(["core_attn"]), "it is not supported with parts that are computed again"),
            ("attention", "torch", "it requires Transformer Engine's layers"),
        ),
        "overlap_tensor_parallel": (
            ("encoder", SET, "it is not supported with an encoder"),
            ("lora_rank", SET, "LoRA adapters would read communication buffers that are reused"),
            ("kv_lora_rank", SET, "Transformer Engine does not support it with latent attention"),
            ("num_experts", SET, "Transformer Engine does not support it for experts"),
            ("fp8", other_than("off", "tensorwise"), "only bfloat16 and tensorwise FP8 are supported"),
            ("layer_pattern", SET, "it is not supported with hybrid models"),
            ("attention", "torch", "it requires Transformer Engine's layers"),
        ),
    }.items()
    for name, refused, why in others
)


def check_fields(model: ModelConfig) -> None:
    """Raise ConfigError for settings that cannot be trained on any layout."""
    _check_family(model)
    _check_encoder(model)
    _check_pattern(model)
    _check_heads(model)
    if not model.lora_targets or not set(model.lora_targets) <= set(LORA_TARGETS):
        what = f"lora_targets are {', '.join(map(str, model.lora_targets)) or 'none'}"
        raise ConfigError(what, where="model.lora_targets", fix=f"some of {', '.join(LORA_TARGETS)}")
    if model.num_experts:
        _check_experts(model)
    else:
        of_experts = (one for one in fields(model) if one.name.startswith(_OF_EXPERTS))
        if unused := [one.name for one in of_experts if getattr(model, one.name) != one.default]:
            what = f"the model has no experts, so {', '.join(unused)} would have no effect"
            fix = "use the defaults, or set model.num_experts"
            raise ConfigError(what, where=", ".join(f"model.{name}" for name in unused), fix=fix)
    _check_recomputed(model)


def _check_recomputed(model: ModelConfig) -> None:
    chosen, where = model.recompute_modules, "model.recompute_modules"
    parts = {part for layer in set(model.all_parts[: model.num_layers]) for part in layer}
    known = {"core_attn"}  # Megatron-Core's names; its other modules require Transformer Engine
    if model.fp8 == "off":
        has = {"mlp": "-" in parts, "moe": "E" in parts, "shared_experts": model.shared_ffn_hidden_size}
        known |= {name for name, there in has.items() if there}
    if chosen != ["core_attn"] and (model.recompute != "selective" or not chosen or not set(chosen) <= known):
        what = f"recompute_modules are {', '.join(map(str, chosen)) or 'none'}, with recompute={model.recompute}"
        fix = f"model.recompute=selective with some of {', '.join(sorted(known))}, which this model can recompute"
        raise ConfigError(what, where=f"{where}, model.recompute", fix=fix)
    if {"moe", "shared_experts"} <= set(chosen):
        raise ConfigError("moe includes shared_experts", where=where, fix="one or the other")


def _check_multiple(name: str, value: int, setting: str, divisor: int) -> None:
    if value % divisor:
        by = setting.partition(".")[2]
        what = f"{name} {value} is not a multiple of {by} {divisor}"
        raise ConfigError(what, where=f"model.{name}, {setting}", fix=f"a {by} that divides {value}")


def _check_heads(model: ModelConfig) -> None:
    if model.kv_lora_rank and model.num_query_groups != model.num_attention_heads:
        what = "latent attention requires as many query groups as attention heads"
        raise ConfigError(what, where="model.num_query_groups", fix=f"set it to {model.num_attention_heads}")
    if model.head_dim is None and not model.kv_lora_rank:
        _check_multiple("hidden_size", model.hidden_size, "model.num_attention_heads", model.num_attention_heads)
    _check_multiple("num_attention_heads", model.num_attention_heads, "model.num_query_groups", model.num_query_groups)
    if model.rotated_size % 2 or (model.head_size % 2 and not model.kv_lora_rank):
        what = f"the rotary embedding rotates {model.rotated_size} of the {model.head_size} numbers of a head "
        what += f"(hidden_size {model.hidden_size}, {model.num_attention_heads} attention heads): both must be even"
        where = "model.hidden_size, model.num_attention_heads, model.head_dim, model.qk_rope_head_dim"
        fix = "choose values that result in even numbers, such as a head size that is a multiple of 8"
        raise ConfigError(what, where=where, fix=fix)


def _check_family(model: ModelConfig) -> None:
    family, of = model.traits, f"models of the family {model.family}"
    # Name of a setting, True if models of the family have it, and an example value.
    for name, belongs, example in (
        ("qk_norm", family.chooses_head_norms, "true or false"),
        ("sliding_window", family.has_windows, "128"),
        ("kv_lora_rank", family.has_latents, "512"),
        ("layer_pattern", bool(family.pattern_letters), family.pattern_letters),
    ):
        value, unset = getattr(model, name), getattr(type(model), name)
        if (value != unset) != belongs:
            what = f"{of} {'require' if belongs else 'do not have'} the setting {name}, but it is {show_value(value)}"
            fix = f"model.{name}={example if belongs else show_value(unset)}, or another family"
            raise ConfigError(what, where=f"model.{name}, model.family", fix=fix)
    if model.rope_scaling == "yarn" and family.rotated_part != 1:
        what = f"Megatron-Core's yarn does not support the partial rotary embedding of the family {model.family}"
        raise ConfigError(what, where="model.rope_scaling, model.family", fix="model.rope_scaling=none, or linear")
    if not model.num_experts and family.experts is not None and "-" not in family.pattern_letters:
        what = f"{of} have experts, but num_experts is 0"
        raise ConfigError(what, where="model.num_experts", fix="set it, or choose a dense family")


def _check_encoder(model: ModelConfig) -> None:
    if model.encoder is None:
        return
    where, fix = "model.encoder", "omit it: model.init_from sets it to that of the weights"
    try:
        media, values = read_encoder(model.encoder)
    except ValueError as error:
        raise ConfigError(f"it is {error}", where=where, fix=fix) from None
    if model.family not in media.text_types.values():
        what = f"text models of {media.name} are of the family {', '.join(media.text_types.values())}"
        raise ConfigError(f"{what}, and family is {model.family}", where=f"{where}, model.family", fix=fix)
    parts = (part for part in values.values() if isinstance(part, dict))
    if dropped := [f"{name} {rate}" for part in parts for name, rate in part.items() if "drop" in name and rate]:
        raise ConfigError(f"its {' and '.join(dropped)} is not supported (0 is)", where=where, fix="set it to 0")
    axes = model.rope_axes
    if MROPE[0] in media.kept and (len(axes) != model.rotated_size or model.rope_scaling != "none"):
        what = f"its mrope_section has {len(axes) // 2} numbers for heads of {model.rotated_size}, and rope scaling "
        what += f"is {model.rope_scaling}: half as many, and none, are supported"
        raise ConfigError(what, where=f"{where}, model.head_dim, model.rope_scaling", fix=fix)


_LETTERS = {"M": "M (Mamba-2)", "D": "D (delta rule)", "*": "* (attention)", "-": "- (MLP)", "E": "E (experts)"}


def _check_pattern(model: ModelConfig) -> None:
    pattern, where = model.layer_pattern, "model.layer_pattern"
    letters = model.traits.pattern_letters
    if pattern is None:
        return
    if len(pattern) != model.num_layers or set(pattern) - set(letters):
        what = (
            f"layer_pattern has {len(pattern)} letters ({''.join(sorted(set(pattern)))}) for {model.num_layers} layers"
        )
        fix = f"a letter per layer: {', '.join(_LETTERS[letter] for letter in letters)}"
        raise ConfigError(what, where=f"{where}, model.num_layers", fix=fix)
    if "E" in letters and bool(model.num_experts) != ("E" in pattern):
        what = f"num_experts is {model.num_experts}, and the pattern has {pattern.count('E')} layers with experts"
        raise ConfigError(what, where=f"{where}, model.num_experts", fix="set both, or neither")
    if not (model.scan_num_heads and model.scan_head_dim):
        raise ConfigError("a size is 0", where="model.scan_num_heads, model.scan_head_dim", fix="set both")
    _check_multiple("scan_num_heads", model.scan_num_heads, "model.scan_num_groups", model.scan_num_groups)


def _check_scan_layout(model: ModelConfig, parallel: ParallelConfig) -> None:
    """Raise ConfigError unless tensor- and context-parallel ranks can divide the heads of layers with a scan.

    Each context-parallel rank exchanges its tokens for all tokens of some of the heads, so it scans whole sequences.
    """
    if model.layer_pattern is None:
        return
    tp, cp = parallel.tensor_parallel_size, parallel.context_parallel_size
    for name in ("scan_num_heads", "scan_num_groups"):
        _check_multiple(name, getattr(model, name), _TP, tp)
    heads, groups = model.scan_num_heads // tp, model.scan_num_groups // tp
    if heads % cp or (groups % cp and cp % groups):
        what = f"{cp} context-parallel ranks cannot share {heads} heads in {groups} groups of a tensor-parallel rank"
        where = "model.scan_num_heads, model.scan_num_groups, parallel.context_parallel_size"
        raise ConfigError(what, where=where, fix="a context_parallel_size that divides both")


def scan_numbers(model: ModelConfig, tp: int, ranks: int) -> int:
    """Return the numbers per token that Mamba-2 scans on one of `tp` ranks that share a layer and `ranks` a row."""
    heads, groups = model.scan_num_heads // (tp * ranks), max(1, model.scan_num_groups // (tp * ranks))
    return 2 * (heads * model.scan_head_dim + groups * model.scan_state_dim) + heads


def check_scan_offsets(tokens: int, numbers: int) -> None:
    """Raise ConfigError if a row of `tokens` tokens with `numbers` numbers each is too long for Mamba-2's kernels."""
    if tokens * numbers >= _OFFSETS:
        raise ConfigError(
            f"a rank would scan {tokens:,} tokens x {numbers:,} numbers = {tokens * numbers:,}, and mamba-ssm computes "
            "wrong values from 2^31 on",
            where="schedule.max_tokens_per_rank, parallel.tensor_parallel_size",
            fix=f"rows of at most {(_OFFSETS - 1) // numbers:,} tokens over context-parallel ranks (lower "
            "schedule.max_tokens_per_rank or the pack size), more tensor-parallel ranks, or trainer.deterministic=true",
        )


def _check_experts(model: ModelConfig) -> None:
    if model.experts_per_token > model.num_experts:
        what = f"a token cannot be routed to {model.experts_per_token} of {model.num_experts} experts"
        raise ConfigError(what, where="model.experts_per_token", fix=f"{model.num_experts} or fewer")
    if model.dense_layers >= model.num_layers:
        what = f"{model.dense_layers} of {model.num_layers} layers are dense, so no layer has experts"
        raise ConfigError(what, where="model.dense_layers", fix=f"{model.num_layers - 1} or fewer")
    _check_groups(model)
    names = model.traits.experts
    if names is not None and names.shared_gate and not model.shared_ffn_hidden_size:
        what = f"models of the family {model.family} have shared experts, and shared_ffn_hidden_size is 0"
        raise ConfigError(what, where="model.shared_ffn_hidden_size", fix="set it, such as to expert_ffn_hidden_size")
    if model.grouped_gemm == "on" and (reason := model.why_not_grouped):
        what = f"grouped matrix products of experts are not supported: {reason}"
        fix = "model.grouped_gemm=auto, which computes one expert after another"
        raise ConfigError(what, where="model.grouped_gemm", fix=fix)


def _check_groups(model: ModelConfig) -> None:
    groups, top, each = model.router_groups, model.router_top_groups, model.experts_per_token
    where = "model.router_groups, model.router_top_groups"
    if groups is None and top is None:
        return
    is_even = groups and top and top <= groups and not (model.num_experts % groups or each % top)
    if not groups or not top or not is_even or each // top > model.num_experts // groups:
        what = f"{each} experts per token cannot come evenly from {show_value(top)} of {show_value(groups)} groups of "
        what += f"{model.num_experts} experts"
        fix = "set both or neither; groups that divide num_experts and hold enough experts, and top groups that "
        fix += "divide experts_per_token"
        raise ConfigError(what, where=where, fix=fix)
    # Megatron-Core ranks a group by the sum of as many of its best experts as a token takes from each group.
    ranked_by = model.traits.ranks_groups_by
    if each // top != ranked_by:
        has = f"rank a group by the sum of its best {ranked_by} experts" if ranked_by else "have no groups of experts"
        what = f"models of the family {model.family} {has}, and Megatron-Core would choose {top} of {groups} groups by "
        what += f"the sum of the best {each // top}"
        fix = "model.router_groups=null model.router_top_groups=null, or an experts_per_token that fits"
        raise ConfigError(what, where=f"{where}, model.experts_per_token, model.family", fix=fix)


def check_division(model: ModelConfig, parallel: ParallelConfig) -> None:
    """Raise ConfigError, with the arithmetic, if a model cannot be divided over the layout."""
    tp = parallel.tensor_parallel_size
    for name in ("num_attention_heads", "num_query_groups", "ffn_hidden_size"):
        _check_multiple(name, getattr(model, name), _TP, tp)
    if tp > 1 and not parallel.sequence_parallel and (model.kv_lora_rank or model.num_experts):
        part = "latent attention" if model.kv_lora_rank else "experts"
        what = f"Megatron-Core trains {part} on {tp} tensor-parallel ranks only with sequence parallelism"
        raise ConfigError(what, where="parallel.sequence_parallel", fix="parallel.sequence_parallel=true")
    for name in ON_EVERY_RANK:
        # Without Transformer Engine, Megatron-Core builds these layers divided, and whole layers then replace them.
        outputs = model.attention_sizes.get(name, (0, 0))[1]
        if outputs % tp:
            what = f"the {outputs} outputs of {name} are not a multiple of tensor_parallel_size {tp}"
            where = f"model.q_lora_rank, model.kv_lora_rank, model.qk_rope_head_dim, {_TP}"
            raise ConfigError(what, where=where, fix=f"a tensor_parallel_size that divides {outputs}")
    _check_scan_layout(model, parallel)
    _check_expert_layout(model, parallel)
    _check_fp8_sizes(model, parallel)
    check_rules(SimpleNamespace(model=model, parallel=parallel), LAYOUT_RULES)
    if VOCAB_MULTIPLE % tp:
        what = f"the vocabulary is padded to a multiple of {VOCAB_MULTIPLE}, which {tp} tensor-parallel ranks do not "
        what += "divide evenly"
        raise ConfigError(what, where="parallel.tensor_parallel_size", fix="a power of two up to 128")
    _check_stages(model, parallel)
    if (deep := model.deep_layers) and deep > (first := len(parallel.chunks_of_stage(model.num_layers, 0)[0])):
        what = f"features of images are added after each of the first {deep} layers, and the first stage or model "
        where = "parallel.pipeline_parallel_size, parallel.virtual_pipeline_parallel_size, parallel.pipeline_layout"
        raise ConfigError(f"{what}chunk has {first} layers", where=where, fix=f"a layout with {deep} or more there")


def _check_stages(model: ModelConfig, parallel: ParallelConfig) -> None:
    chunks, further, what = parallel.num_chunks, model.mtp_layers, ""
    if parallel.pipeline_layout:
        letters = Counter("".join(read_stages(parallel.pipeline_layout)))
        if (letters["t"], letters["m"]) != (model.num_layers, further):
            what = f"pipeline_layout has {letters['t']} layers (t) and {letters['m']} MTP layers (m), and the model "
            what += f"has {model.num_layers} and {further}"
    elif model.num_layers % chunks:
        what = f"{model.num_layers} layers cannot be cut into {chunks} equal pipeline chunks"
    if what:
        balanced = balanced_layout(model, chunks)
        fix = (f"parallel.pipeline_layout='{balanced}', " if balanced else "") + "fewer stages, or other layers"
        where = "model.num_layers, parallel.pipeline_parallel_size, parallel.pipeline_layout"
        raise ConfigError(what, where=where, fix=fix)
    has_mlp = bool({"linear_fc1", "linear_fc2"} & set(model.lora_targets))
    for stage in range(parallel.pipeline_parallel_size if model.lora_rank else 0):
        layers = [layer for chunk in parallel.chunks_of_stage(model.num_layers, stage) for layer in chunk]
        parts = "".join(model.all_parts[layer] for layer in layers)
        if not any(has_mlp if part in "-E" else model.adapted_in(part) for part in parts):
            what = f"no layer of pipeline stage {stage} has an adapter, and nothing else of it is trained"
            fix = "layers with adapters on every stage, or model.lora_targets that all layers have"
            raise ConfigError(what, where="parallel.pipeline_layout, model.lora_targets", fix=fix)


def balanced_layout(model: ModelConfig, chunks: int) -> str | None:
    """Return the `parallel.pipeline_layout` whose chunks have the most even work; None if there are too few layers."""
    work = model.active_weights
    output = (1 + model.mtp_layers) * model.hidden_size * (model.vocab_size or 0) + sum(work[model.num_layers :])
    return balance_stages(
        model.num_layers,
        chunks,
        mtp_layers=model.mtp_layers,
        loss_layers=output * model.num_layers / sum(work[: model.num_layers]),
        least=int(model.lora_rank > 0),  # a stage without adapters would train nothing
    )


def _check_fp8_sizes(model: ModelConfig, parallel: ParallelConfig) -> None:
    block, tp = FP8_BLOCKS[model.fp8], parallel.tensor_parallel_size
    if model.fp8 == "off":
        return
    sizes = {
        f"the {side} of {name}": size
        for name, both in model.linear_sizes.items()
        for side, size in zip(("inputs", "outputs"), sizes_on_rank(name, both, tp), strict=True)
    }
    if model.num_experts:
        sizes["the inner size of an expert"] = model.expert_size // parallel.expert_tensor_parallel_size
    uneven = next((name for name, size in sizes.items() if size % block), None)
    if uneven is not None:
        what = f"model.fp8 is {model.fp8}, whose blocks are {block} wide, and {uneven} on a rank are {sizes[uneven]}"
        fix = "a smaller tensor_parallel_size, tensorwise, or off"
        raise ConfigError(what, where="model.fp8, parallel.tensor_parallel_size", fix=fix)


def _check_expert_layout(model: ModelConfig, parallel: ParallelConfig) -> None:
    tp, ep, etp = (parallel.tensor_parallel_size, parallel.expert_parallel_size, parallel.expert_tensor_parallel_size)
    if not model.num_experts:
        if ep > 1 or etp > 1:
            where = "parallel.expert_parallel_size, parallel.expert_tensor_parallel_size"
            raise ConfigError("the model has no experts to divide", where=where, fix="set both to 1")
        return
    _check_multiple("num_experts", model.num_experts, "parallel.expert_parallel_size", ep)
    if parallel.overlap_experts and model.num_experts == ep and parallel.expert_dispatcher == "alltoall":
        # Without a sort by expert, the tokens that an expert saves are those whose memory Megatron's schedule frees.
        what = f"{ep} expert-parallel ranks have one expert each of {ep}, and Megatron-Core overlaps two or more"
        where = "parallel.overlap_experts, parallel.expert_parallel_size, model.num_experts"
        raise ConfigError(what, where=where, fix="parallel.overlap_experts=false, or a smaller expert_parallel_size")
    _check_multiple("expert_ffn_hidden_size", model.expert_size, "parallel.expert_tensor_parallel_size", etp)
    has_adapters = model.lora_rank and set(model.lora_targets) & {"linear_fc1", "linear_fc2"}
    if etp > 1 and (model.traits.has_biases or has_adapters):
        what = f"experts with {'biases' if model.traits.has_biases else 'adapters'} cannot be cut into {etp} parts"
        fix = "parallel.expert_tensor_parallel_size=1"
        fix += "" if model.traits.has_biases else ", or model.lora_targets=[linear_qkv,linear_proj]"
        raise ConfigError(what, where="parallel.expert_tensor_parallel_size, model.family, model.lora_targets", fix=fix)
    _check_multiple("shared_ffn_hidden_size", model.shared_ffn_hidden_size, _TP, tp)
