"""The model's settings: sizes, family, and what can be checked of them without building it."""

from __future__ import annotations

from dataclasses import dataclass, field

from harness.errors import ConfigError
from harness.plan.layout import ParallelConfig
from harness.schedule import SequenceCost

VOCAB_MULTIPLE = 128
# The linear layers of a Megatron layer: the rows of queries, keys and values, what projects them back, and both of the
# gated layer.
LORA_TARGETS = ("linear_qkv", "linear_proj", "linear_fc1", "linear_fc2")
# Bytes of one number.
DTYPE_BYTES = {"float32": 4, "bfloat16": 2}
_CHOICES = {
    "family": ("llama", "mistral", "qwen2", "qwen3"),
    "rope_scaling": ("none", "llama3", "linear"),
    "dtype": tuple(DTYPE_BYTES),
    "recompute": ("none", "selective", "full"),
    "attention": ("auto", "transformer_engine", "torch"),
}


@dataclass
class ModelConfig:
    """A dense decoder of the Llama shape: RMSNorm, RoPE, SwiGLU, grouped-query attention.

    Attributes:
        family: llama or mistral (no biases), qwen2 (biases of query, key and value), qwen3 (norms of query and key).
        init_from: a folder of Hugging Face weights (safetensors), or a name on its hub; None draws the weights.
        num_layers, hidden_size, ffn_hidden_size, num_attention_heads, num_query_groups: sizes.
        head_dim: numbers of a head, None for hidden_size / num_attention_heads.
        max_sequence_length: the longest sequence that positions are meant for, in tokens.
        vocab_size: None for the tokenizer's; rounded up to a multiple of 128.
        tie_embeddings: one matrix for the first and the last layer.
        rotary_base: of the positions' angles.
        rope_scaling: none, llama3 or linear, by rope_scaling_factor.
        dtype: float32 or bfloat16 (with float32 master weights and gradients).
        recompute: activations of the backward pass: `none` are computed again, `selective` those of attention, `full`
            those of whole layers.
        attention: `auto` (Transformer Engine on GPUs that have it), `transformer_engine` or `torch`.
        seed: of the initial weights.
        lora_rank: of adapters beside the linear layers, which alone are trained then; 0 trains all weights.
        lora_alpha: adapters count lora_alpha / lora_rank times.
        lora_targets: layers that get one, of linear_qkv, linear_proj, linear_fc1 and linear_fc2.
    """

    family: str = "llama"
    init_from: str | None = None
    num_layers: int = 4
    hidden_size: int = 128
    ffn_hidden_size: int = 384
    num_attention_heads: int = 4
    num_query_groups: int = 2
    head_dim: int | None = None
    max_sequence_length: int = 4096
    vocab_size: int | None = None
    tie_embeddings: bool = True
    rotary_base: int = 10000
    rope_scaling: str = "none"
    rope_scaling_factor: float = 1.0
    norm_epsilon: float = 1e-5
    init_std: float = 0.02
    dtype: str = "float32"
    recompute: str = "none"
    attention: str = "auto"
    seed: int = 1234
    lora_rank: int = 0
    lora_alpha: float = 32.0
    lora_targets: list[str] = field(default_factory=lambda: list(LORA_TARGETS))

    def __post_init__(self) -> None:
        for name in ("num_layers", "hidden_size", "ffn_hidden_size", "num_attention_heads", "num_query_groups"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name} is {getattr(self, name)}", where=f"model.{name}", fix="1 or more")
        if self.head_dim is None and self.hidden_size % self.num_attention_heads:
            raise ConfigError(
                f"hidden_size {self.hidden_size} is not a multiple of {self.num_attention_heads} attention heads",
                where="model.num_attention_heads",
                fix="choose a number of heads that divides hidden_size, or set model.head_dim",
            )
        if self.num_attention_heads % self.num_query_groups:
            raise ConfigError(
                f"{self.num_attention_heads} attention heads cannot share {self.num_query_groups} query groups evenly",
                where="model.num_query_groups",
                fix="choose a number of groups that divides num_attention_heads",
            )
        if self.head_size < 2 or self.head_size % 2:
            raise ConfigError(
                f"a head of {self.head_size} numbers cannot be rotated in pairs "
                f"(hidden_size {self.hidden_size}, {self.num_attention_heads} attention heads)",
                where="model.hidden_size, model.num_attention_heads, model.head_dim",
                fix="choose them so that the size of a head is even",
            )
        if not (self.init_std > 0 and self.norm_epsilon > 0 and self.max_sequence_length > 0):
            raise ConfigError(
                f"init_std is {self.init_std}, norm_epsilon {self.norm_epsilon}, "
                f"max_sequence_length {self.max_sequence_length}",
                where="model",
                fix="numbers above 0",
            )
        if not self.rope_scaling_factor >= 1:
            raise ConfigError(
                f"rope_scaling_factor is {self.rope_scaling_factor}", where="model.rope_scaling_factor", fix="1 or more"
            )
        if self.lora_rank < 0 or (self.lora_rank and not self.lora_alpha > 0):
            raise ConfigError(
                f"lora_rank is {self.lora_rank} and lora_alpha {self.lora_alpha}",
                where="model.lora_rank, model.lora_alpha",
                fix="a rank of 1 or more and an alpha above 0, or a rank of 0 to train all weights",
            )
        if not self.lora_targets or not set(self.lora_targets) <= set(LORA_TARGETS):
            raise ConfigError(
                f"lora_targets are {', '.join(map(str, self.lora_targets)) or 'none'}",
                where="model.lora_targets",
                fix=f"some of {', '.join(LORA_TARGETS)}",
            )
        for name, known in _CHOICES.items():
            if getattr(self, name) not in known:
                raise ConfigError(
                    f"{name} {getattr(self, name)!r} is unknown",
                    where=f"model.{name}",
                    fix=f"one of {', '.join(known)}",
                )

    @property
    def head_size(self) -> int:
        return self.head_dim or self.hidden_size // self.num_attention_heads

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
    heads = model.num_attention_heads * model.head_size
    attention = 2 * model.hidden_size * (heads + model.num_query_groups * model.head_size)
    layer = attention + 3 * model.hidden_size * model.ffn_hidden_size
    output = model.hidden_size * (model.vocab_size or 0)
    return SequenceCost(linear=2.0 * (model.num_layers * layer + output), quadratic=2.0 * model.num_layers * heads)
