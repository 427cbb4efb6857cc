"""Megatron-Core's own GPTModel, wrapped in its DistributedDataParallel, from a small config."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from megatron.core import parallel_state, tensor_parallel
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import (
    get_gpt_layer_local_spec,
    get_gpt_layer_with_transformer_engine_spec,
)
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules, get_num_layers_to_build
from megatron.core.transformer.transformer_config import TransformerConfig
from torch.nn import functional

from harness.errors import ConfigError
from harness.megatron import compat
from harness.megatron.attention import RMSNorm, VarlenAttention
from harness.megatron.topology import ParallelConfig
from harness.schedule import SequenceCost

VOCAB_MULTIPLE = 128
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


@dataclass
class ModelConfig:
    """A dense decoder of the Llama shape: RMSNorm, RoPE, SwiGLU, grouped-query attention, no biases.

    Attributes:
        num_layers, hidden_size, ffn_hidden_size, num_attention_heads, num_query_groups: sizes.
        max_sequence_length: the longest sequence that positions are meant for, in tokens.
        vocab_size: None for the tokenizer's; rounded up to a multiple of 128.
        tie_embeddings: one matrix for the first and the last layer.
        dtype: float32 or bfloat16 (with float32 master weights and gradients).
        attention: `auto` (Transformer Engine on GPUs that have it), `transformer_engine` or `torch`.
        seed: of the initial weights.
    """

    num_layers: int = 4
    hidden_size: int = 128
    ffn_hidden_size: int = 384
    num_attention_heads: int = 4
    num_query_groups: int = 2
    max_sequence_length: int = 4096
    vocab_size: int | None = None
    tie_embeddings: bool = True
    rotary_base: int = 10000
    norm_epsilon: float = 1e-5
    init_std: float = 0.02
    dtype: str = "float32"
    attention: str = "auto"
    seed: int = 1234

    def __post_init__(self) -> None:
        for name in ("num_layers", "hidden_size", "ffn_hidden_size", "num_attention_heads", "num_query_groups"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name} is {getattr(self, name)}", where=f"model.{name}", fix="1 or more")
        if self.hidden_size % self.num_attention_heads:
            raise ConfigError(
                f"hidden_size {self.hidden_size} is not a multiple of {self.num_attention_heads} attention heads",
                where="model.num_attention_heads",
                fix="choose a number of heads that divides hidden_size",
            )
        if self.num_attention_heads % self.num_query_groups:
            raise ConfigError(
                f"{self.num_attention_heads} attention heads cannot share {self.num_query_groups} query groups evenly",
                where="model.num_query_groups",
                fix="choose a number of groups that divides num_attention_heads",
            )
        if (self.hidden_size // self.num_attention_heads) % 2:
            raise ConfigError(
                f"a head of {self.hidden_size // self.num_attention_heads} numbers cannot be rotated in pairs "
                f"(hidden_size {self.hidden_size}, {self.num_attention_heads} attention heads)",
                where="model.hidden_size, model.num_attention_heads",
                fix="choose them so that hidden_size / num_attention_heads is even",
            )
        if not (self.init_std > 0 and self.norm_epsilon > 0 and self.max_sequence_length > 0):
            raise ConfigError(
                f"init_std is {self.init_std}, norm_epsilon {self.norm_epsilon}, "
                f"max_sequence_length {self.max_sequence_length}",
                where="model",
                fix="numbers above 0",
            )
        if self.dtype not in DTYPES:
            raise ConfigError(
                f"dtype {self.dtype!r} is unknown", where="model.dtype", fix=f"one of {', '.join(DTYPES)}"
            )
        if self.attention not in ("auto", "transformer_engine", "torch"):
            raise ConfigError(
                f"attention {self.attention!r} is unknown",
                where="model.attention",
                fix="one of auto, transformer_engine, torch",
            )

    def check(self, parallel: ParallelConfig) -> None:
        """Refuse a layout that this model cannot be divided over; raises ConfigError with the arithmetic."""
        tp, stages = parallel.tensor_parallel_size, parallel.pipeline_parallel_size
        for name in ("num_attention_heads", "num_query_groups", "ffn_hidden_size"):
            if getattr(self, name) % tp:
                raise ConfigError(
                    f"{name} {getattr(self, name)} is not a multiple of tensor_parallel_size {tp}",
                    where=f"model.{name}, parallel.tensor_parallel_size",
                    fix=f"a tensor_parallel_size that divides {getattr(self, name)}",
                )
        if VOCAB_MULTIPLE % tp:
            raise ConfigError(
                f"the vocabulary is padded to a multiple of {VOCAB_MULTIPLE}, which {tp} tensor-parallel ranks do not "
                "divide evenly",
                where="parallel.tensor_parallel_size",
                fix="a power of two up to 128",
            )
        chunks = stages * (parallel.virtual_pipeline_parallel_size or 1)
        if self.num_layers % chunks:
            raise ConfigError(
                f"{self.num_layers} layers cannot be cut into {chunks} equal pipeline chunks",
                where="model.num_layers, parallel.pipeline_parallel_size",
                fix=f"a number of layers that {chunks} divides, or fewer stages",
            )


def padded_vocab_size(vocab_size: int) -> int:
    """`vocab_size` rounded up to a multiple of 128.

    Megatron's training script rounds to 128 * tp. Rows beyond the vocabulary take part in the softmax, so there
    another layout is another loss, and a checkpoint of one does not fit the other.
    """
    return -(-vocab_size // VOCAB_MULTIPLE) * VOCAB_MULTIPLE


def sequence_cost(model: ModelConfig) -> SequenceCost:
    """Forward FLOPs of one sequence, by tokens and by tokens squared.

    A token costs 2 FLOPs a weight of the layers and of the output matrix; attention adds, per layer, scores and
    weighted values of half the L x L square (it is causal): 2 * L^2 * heads * head_dim.

    Source: the counting of Narayanan et al., "Efficient Large-Scale Language Model Training on GPU Clusters", 2021,
    without recomputation.
    """
    head = model.hidden_size // model.num_attention_heads
    attention = model.hidden_size * (2 * model.hidden_size + 2 * model.num_query_groups * head)
    layer = attention + 3 * model.hidden_size * model.ffn_hidden_size
    output = model.hidden_size * (model.vocab_size or 0)
    return SequenceCost(
        linear=2.0 * (model.num_layers * layer + output), quadratic=2.0 * model.num_layers * model.hidden_size
    )


def use_transformer_engine(choice: str, device: torch.device) -> bool:
    """Whether layers come from Transformer Engine; raises ConfigError where it is asked for and missing."""
    if choice == "torch" or (choice == "auto" and device.type != "cuda"):
        return False
    try:
        import transformer_engine.pytorch  # noqa: F401
    except (ImportError, OSError) as error:
        if choice == "auto":
            return False
        raise ConfigError(
            f"model.attention is transformer_engine, which cannot be imported: {error}",
            where="model.attention",
            fix="install the `gpu` extra, use a container that has it, or model.attention=torch",
        ) from error
    return True


def transformer_config(model: ModelConfig, parallel: ParallelConfig, device: torch.device) -> TransformerConfig:
    """Megatron's config for this model on this layout."""
    dtype = DTYPES[model.dtype]
    pipelined = parallel.pipeline_parallel_size > 1
    interleaved = parallel.virtual_pipeline_parallel_size is not None
    return TransformerConfig(
        num_layers=model.num_layers,
        hidden_size=model.hidden_size,
        ffn_hidden_size=model.ffn_hidden_size,
        num_attention_heads=model.num_attention_heads,
        num_query_groups=model.num_query_groups,
        layernorm_epsilon=model.norm_epsilon,
        init_method_std=model.init_std,
        normalization="RMSNorm",
        activation_func=functional.silu,
        gated_linear_unit=True,
        add_bias_linear=False,
        bias_activation_fusion=False,
        bias_dropout_fusion=False,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        apply_rope_fusion=False,
        masked_softmax_fusion=False,
        gradient_accumulation_fusion=False,
        persist_layer_norm=False,
        # A checkpoint of one layout must start every other from the same weights, and on a CPU the whole matrix is
        # drawn and then cut; on GPUs each shard is drawn in place, which large models need.
        use_cpu_initialization=device.type == "cpu",
        params_dtype=dtype,
        pipeline_dtype=dtype,
        bf16=dtype == torch.bfloat16,
        tensor_model_parallel_size=parallel.tensor_parallel_size,
        pipeline_model_parallel_size=parallel.pipeline_parallel_size,
        virtual_pipeline_model_parallel_size=parallel.virtual_pipeline_parallel_size,
        context_parallel_size=parallel.context_parallel_size,
        sequence_parallel=parallel.sequence_parallel,
        # Packed rows differ in length; Megatron ties this switch to a setting of its MoE code, used or not.
        variable_seq_lengths=pipelined and not parallel.static_rows,
        moe_token_dispatcher_type="alltoall",
        # A stage of an interleaved pipeline of two sends to the same rank in both directions. One exchange at a time
        # keeps them in order; batched ones are matched by order alone, and a gradient would arrive as an activation.
        overlap_p2p_comm=interleaved,
        batch_p2p_comm=not interleaved,
        # Gloo may still read a tensor that is being sent.
        deallocate_pipeline_outputs=pipelined and device.type == "cuda",
        calculate_per_token_loss=True,
    )


def _layers(config: TransformerConfig, *, transformer_engine: bool, vp_stage: int | None) -> Any:
    if transformer_engine:
        return get_gpt_layer_with_transformer_engine_spec()
    layer = get_gpt_layer_local_spec(normalization="RMSNorm")
    attention = layer.submodules.self_attention
    attention.submodules = replace(attention.submodules, core_attention=VarlenAttention)
    norms = {"input_layernorm": RMSNorm, "pre_mlp_layernorm": RMSNorm}
    layer = ModuleSpec(module=layer.module, submodules=replace(layer.submodules, **norms))
    stage = {"vp_stage": vp_stage} if compat.accepts(get_num_layers_to_build, "vp_stage") else {}
    return TransformerBlockSubmodules(
        layer_specs=[layer] * get_num_layers_to_build(config, **stage), layer_norm=RMSNorm
    )


def build_model(
    model: ModelConfig, parallel: ParallelConfig, *, vocab_size: int, device: torch.device
) -> list[DistributedDataParallel]:
    """This rank's chunks of the model (one, or one a virtual pipeline stage), ready to train.

    Args:
        vocab_size: of the tokenizer; padded here.
    """
    config = transformer_config(model, parallel, device)
    tensor_parallel.model_parallel_cuda_manual_seed(model.seed)
    torch.manual_seed(model.seed)
    chunks = []
    num_chunks = parallel.virtual_pipeline_parallel_size or 1
    for chunk in range(num_chunks):
        vp_stage = chunk if num_chunks > 1 else None
        chunks.append(
            GPTModel(
                config=config,
                transformer_layer_spec=_layers(
                    config,
                    transformer_engine=use_transformer_engine(model.attention, device),
                    vp_stage=vp_stage,
                ),
                vocab_size=padded_vocab_size(vocab_size),
                max_sequence_length=model.max_sequence_length,
                pre_process=parallel_state.is_pipeline_first_stage(ignore_virtual=False, vp_stage=vp_stage),
                post_process=parallel_state.is_pipeline_last_stage(ignore_virtual=False, vp_stage=vp_stage),
                share_embeddings_and_output_weights=model.tie_embeddings,
                position_embedding_type="rope",
                rotary_base=model.rotary_base,
                vp_stage=vp_stage,
            ).to(device)
        )
    if config.bf16:
        chunks = [chunk.bfloat16() for chunk in chunks]
    ddp = DistributedDataParallelConfig(
        grad_reduce_in_fp32=True,
        use_distributed_optimizer=parallel.distributed_optimizer,
        overlap_grad_reduce=device.type == "cuda",
        average_in_collective=False,
    )
    wrapped = [
        # Bucketing follows the order in which the backward pass meets parameters; only the first chunk overlaps.
        DistributedDataParallel(config, ddp, chunk, disable_bucketing=index > 0)
        for index, chunk in enumerate(chunks)
    ]
    config.finalize_model_grads_func = finalize_model_grads
    if ddp.overlap_grad_reduce:
        syncs = [chunk.no_sync for chunk in wrapped]
        config.no_sync_func = syncs if len(syncs) > 1 else syncs[0]
    for chunk in wrapped:
        chunk.broadcast_params()
    return wrapped
