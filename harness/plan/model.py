"""Settings of the model: its sizes and family, with the checks that need no model."""

from __future__ import annotations

from dataclasses import dataclass, field

from harness.checks import bounded, check_numbers, require_choice
from harness.errors import ConfigError
from harness.plan.layout import ParallelConfig
from harness.schedule import SequenceCost

VOCAB_MULTIPLE = 128
# The linear layers of a Megatron layer: queries, keys and values; the attention output; both of the gated MLP.
LORA_TARGETS = ("linear_qkv", "linear_proj", "linear_fc1", "linear_fc2")
# Tensor-parallel ranks divide the inputs of these, and the outputs of the others.
DIVIDED_BY_COLUMNS = ("linear_proj", "linear_fc2")
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
        init_from: a folder of Hugging Face weights (safetensors), or a name on its hub; null draws random weights.
        num_layers, hidden_size, ffn_hidden_size, num_attention_heads, num_query_groups: sizes.
        head_dim: size of a head; null for hidden_size / num_attention_heads.
        max_sequence_length: the longest sequence that positions are meant for, in tokens.
        vocab_size: null for the tokenizer's; rounded up to a multiple of 128.
        tie_embeddings: share one matrix between the input embedding and the output layer.
        rotary_base: base of the rotary angles.
        rope_scaling, rope_scaling_factor: none, llama3 or linear, by this factor.
        norm_epsilon: added to the mean square in each norm.
        init_std: standard deviation of the initial weights.
        dtype: float32 or bfloat16 (with float32 master weights and gradients).
        recompute: activations computed again in the backward pass: `none`, `selective` (attention) or `full` (whole
            layers).
        attention: `auto` (Transformer Engine on GPUs that have it), `transformer_engine` or `torch`.
        seed: of the initial weights.
        lora_rank: rank of LoRA adapters, which alone are trained; 0 trains all weights.
        lora_alpha: adapter outputs are scaled by lora_alpha / lora_rank.
        lora_targets: linear layers with an adapter, any of linear_qkv, linear_proj, linear_fc1 and linear_fc2.
    """

    family: str = "llama"
    init_from: str | None = None
    num_layers: int = bounded(4, lowest=1, highest=10_000)
    hidden_size: int = bounded(128, lowest=1, highest=1_000_000)
    ffn_hidden_size: int = bounded(384, lowest=1, highest=1_000_000)
    num_attention_heads: int = bounded(4, lowest=1, highest=1_000_000)
    num_query_groups: int = bounded(2, lowest=1, highest=1_000_000)
    head_dim: int | None = bounded(None, lowest=1, highest=1_000_000)
    max_sequence_length: int = bounded(4096, lowest=1)
    vocab_size: int | None = bounded(None, lowest=1, highest=100_000_000)
    tie_embeddings: bool = True
    rotary_base: int = bounded(10000, lowest=1, highest=10**12)
    rope_scaling: str = "none"
    rope_scaling_factor: float = bounded(1.0, lowest=1, highest=10_000)
    norm_epsilon: float = bounded(1e-5, above=0, below=1)
    init_std: float = bounded(0.02, above=0, highest=10)
    dtype: str = "float32"
    recompute: str = "none"
    attention: str = "auto"
    seed: int = bounded(1234)
    lora_rank: int = bounded(0, highest=100_000)
    lora_alpha: float = bounded(32.0, above=0, highest=1_000_000)
    lora_targets: list[str] = field(default_factory=lambda: list(LORA_TARGETS))

    def __post_init__(self) -> None:
        check_numbers(self, "model")
        for name, choices in _CHOICES.items():
            require_choice(getattr(self, name), choices, setting=f"model.{name}")
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
        if not self.lora_targets or not set(self.lora_targets) <= set(LORA_TARGETS):
            raise ConfigError(
                f"lora_targets are {', '.join(map(str, self.lora_targets)) or 'none'}",
                where="model.lora_targets",
                fix=f"some of {', '.join(LORA_TARGETS)}",
            )

    @property
    def head_size(self) -> int:
        return self.head_dim or self.hidden_size // self.num_attention_heads

    @property
    def query_size(self) -> int:
        """Numbers in the queries of a token, over all heads."""
        return self.num_attention_heads * self.head_size

    @property
    def key_size(self) -> int:
        """Numbers in the keys of a token, over all groups; its values have as many."""
        return self.num_query_groups * self.head_size

    @property
    def linear_sizes(self) -> dict[str, tuple[int, int]]:
        """Inputs and outputs of the linear layers of one Megatron layer, by the names of `LORA_TARGETS`."""
        hidden, ffn, query = self.hidden_size, self.ffn_hidden_size, self.query_size
        sizes = (hidden, query + 2 * self.key_size), (query, hidden), (hidden, 2 * ffn), (ffn, hidden)
        return dict(zip(LORA_TARGETS, sizes, strict=True))

    def check(self, parallel: ParallelConfig) -> None:
        """Raise ConfigError, with the arithmetic, if this model cannot be divided over the layout."""
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
    """Return `vocab_size` rounded up to a multiple of 128.

    Megatron's training script rounds to 128 * tp. Rows beyond the vocabulary take part in the softmax, so with that
    rule the loss would depend on the layout, and a checkpoint of one layout would not fit another.
    """
    return -(-vocab_size // VOCAB_MULTIPLE) * VOCAB_MULTIPLE


def sequence_cost(model: ModelConfig) -> SequenceCost:
    """Return the forward FLOPs of one sequence, by tokens and by tokens squared.

    A token costs 2 FLOPs a weight of the layers and of the output matrix; attention adds, per layer, scores and
    weighted values of half the L x L square (it is causal): 2 * L^2 * heads * head_dim.

    Source: the counting of Narayanan et al., "Efficient Large-Scale Language Model Training on GPU Clusters", 2021,
    without recomputation.
    """
    layer = sum(inputs * outputs for inputs, outputs in model.linear_sizes.values())
    output = model.hidden_size * (model.vocab_size or 0)
    quadratic = 2.0 * model.num_layers * model.query_size
    return SequenceCost(linear=2.0 * (model.num_layers * layer + output), quadratic=quadratic)
