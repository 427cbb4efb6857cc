"""Settings of the model: its sizes and family, with the checks that need no model."""

from __future__ import annotations

from dataclasses import dataclass, field

from harness.checks import bounded, check_numbers, require_choice
from harness.errors import ConfigError
from harness.plan.families import FAMILIES
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
    "family": tuple(FAMILIES),
    "rope_scaling": ("none", "llama3", "linear"),
    "dtype": tuple(DTYPE_BYTES),
    "recompute": ("none", "selective", "full"),
    "attention": ("auto", "transformer_engine", "torch"),
    "router_score": ("softmax", "sigmoid"),
}


@dataclass
class ModelConfig:
    """A decoder of the Llama shape: RMSNorm, RoPE, SwiGLU, grouped-query attention; dense, or a mixture of experts.

    Attributes:
        family: llama or mistral (no biases), qwen2 (biases of query, key and value), qwen3 (norms of query and key);
            with experts, qwen3_moe and mixtral.
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
        num_experts: routed experts of a layer; 0 for a dense model.
        experts_per_token: experts that a token is sent to.
        expert_ffn_hidden_size: inner size of one expert; null for ffn_hidden_size.
        shared_ffn_hidden_size: inner size of the shared experts of a layer together; 0 for none.
        dense_layers: first layers that have one dense MLP of ffn_hidden_size instead of experts.
        router_score: softmax or sigmoid of the router's logits, which are float32 whatever the dtype.
        router_normalize: the weights of a token's experts sum to 1; false keeps their share of all experts.
        router_groups, router_top_groups: a token's experts come from its best router_top_groups of router_groups
            equal groups; null for all.
        router_scale: factor of the weights of a token's experts.
        aux_loss: coefficient of the loss that balances the experts over the tokens of a row; 0 for none.
        z_loss: coefficient of the loss that keeps the router's logits small; 0 for none.
        expert_bias: add a bias to an expert's score when experts are chosen, as balancing without a loss does; needs
            router_score sigmoid.
        expert_bias_rate: change of the bias of an expert per step, up where it got too few tokens; 0 keeps the bias.
        freeze_router: do not train the router's weights.
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
    num_experts: int = bounded(0, lowest=0, highest=100_000)
    experts_per_token: int = bounded(2, lowest=1, highest=100_000)
    expert_ffn_hidden_size: int | None = bounded(None, lowest=1, highest=1_000_000)
    shared_ffn_hidden_size: int = bounded(0, lowest=0, highest=1_000_000)
    dense_layers: int = bounded(0, lowest=0, highest=10_000)
    router_score: str = "softmax"
    router_normalize: bool = True
    router_groups: int | None = bounded(None, lowest=1, highest=100_000)
    router_top_groups: int | None = bounded(None, lowest=1, highest=100_000)
    router_scale: float = bounded(1.0, above=0, highest=1000)
    aux_loss: float = bounded(0.0, lowest=0, highest=100)
    z_loss: float = bounded(0.0, lowest=0, highest=100)
    expert_bias: bool = False
    expert_bias_rate: float = bounded(0.001, lowest=0, highest=1)
    freeze_router: bool = False

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
        if self.num_experts:
            self._check_experts()
        elif FAMILIES[self.family].experts is not None:
            raise ConfigError(
                f"models of the family {self.family} have experts, and num_experts is 0",
                where="model.num_experts",
                fix="set it, or choose a dense family",
            )

    def _check_experts(self) -> None:
        if self.experts_per_token > self.num_experts:
            raise ConfigError(
                f"a token cannot be sent to {self.experts_per_token} of {self.num_experts} experts",
                where="model.experts_per_token",
                fix=f"{self.num_experts} or fewer",
            )
        if self.dense_layers >= self.num_layers:
            raise ConfigError(
                f"{self.dense_layers} of {self.num_layers} layers are dense, so no layer has experts",
                where="model.dense_layers",
                fix=f"{self.num_layers - 1} or fewer, or model.num_experts=0",
            )
        groups, top = self.router_groups, self.router_top_groups
        if (groups is None) != (top is None):
            fix = "set both, or neither"
            raise ConfigError("one of them is set", where="model.router_groups, model.router_top_groups", fix=fix)
        if groups is not None and top is not None:
            if self.num_experts % groups or top > groups or self.experts_per_token % top:
                raise ConfigError(
                    f"{self.experts_per_token} experts a token cannot come evenly from {top} of {groups} groups of "
                    f"{self.num_experts} experts",
                    where="model.router_groups, model.router_top_groups",
                    fix="groups that divide num_experts, and top groups that divide experts_per_token",
                )
            if self.experts_per_token // top > self.num_experts // groups:
                raise ConfigError(
                    f"a group has {self.num_experts // groups} experts, and a token needs "
                    f"{self.experts_per_token // top} of each",
                    where="model.router_groups, model.router_top_groups",
                    fix="fewer groups, or more top groups",
                )
        if self.expert_bias and self.router_score != "sigmoid":
            raise ConfigError(
                "Megatron-Core adds a bias to the scores of a sigmoid router only",
                where="model.expert_bias",
                fix="model.router_score=sigmoid, or model.expert_bias=false",
            )
        if self.experts_per_token == 1 and self.router_score == "softmax" and self.router_normalize:
            raise ConfigError(
                "the weight of a token's single expert would always be 1, and the router would not train",
                where="model.router_normalize",
                fix="model.router_normalize=false",
            )
        if self.lora_rank and set(self.lora_targets) & {"linear_fc1", "linear_fc2"}:
            raise ConfigError(
                "adapters on experts are not supported",
                where="model.lora_targets",
                fix="model.lora_targets=[linear_qkv,linear_proj]",
            )

    @property
    def expert_size(self) -> int:
        """Inner size of one routed expert."""
        return self.expert_ffn_hidden_size or self.ffn_hidden_size

    @property
    def expert_layers(self) -> int:
        """Number of layers that have experts."""
        return self.num_layers - self.dense_layers if self.num_experts else 0

    @property
    def has_qkv_bias(self) -> bool:
        """True if queries, keys and values have biases."""
        return FAMILIES[self.family].has_qkv_bias

    @property
    def has_head_norms(self) -> bool:
        """True if queries and keys of each head are normalized."""
        return FAMILIES[self.family].has_head_norms

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

    def has_experts(self, layer: int) -> bool:
        """Return True if a layer, 0 for the first, has experts."""
        return bool(self.num_experts) and layer >= self.dense_layers

    def active_weights(self, layer: int) -> int:
        """Return the weights of the matrices of a layer that a token is multiplied by."""
        sizes = self.linear_sizes
        attention = sum(sizes[name][0] * sizes[name][1] for name in ("linear_qkv", "linear_proj"))
        if not self.has_experts(layer):
            return attention + 3 * self.hidden_size * self.ffn_hidden_size
        inner = self.experts_per_token * self.expert_size + self.shared_ffn_hidden_size
        return attention + self.hidden_size * (3 * inner + self.num_experts)

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
        self._check_expert_layout(parallel)
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

    def _check_expert_layout(self, parallel: ParallelConfig) -> None:
        tp, ep, etp = (
            parallel.tensor_parallel_size,
            parallel.expert_parallel_size,
            parallel.expert_tensor_parallel_size,
        )
        if not self.num_experts:
            if ep > 1 or etp > 1:
                raise ConfigError(
                    "the model has no experts to divide",
                    where="parallel.expert_parallel_size, parallel.expert_tensor_parallel_size",
                    fix="set both to 1, or model.num_experts",
                )
            return
        if self.num_experts % ep:
            raise ConfigError(
                f"{self.num_experts} experts cannot be divided evenly over {ep} expert-parallel ranks",
                where="model.num_experts, parallel.expert_parallel_size",
                fix=f"an expert_parallel_size that divides {self.num_experts}",
            )
        if self.expert_size % etp:
            raise ConfigError(
                f"experts of inner size {self.expert_size} cannot be cut into {etp} equal parts",
                where="model.expert_ffn_hidden_size, parallel.expert_tensor_parallel_size",
                fix=f"an expert_tensor_parallel_size that divides {self.expert_size}",
            )
        if self.shared_ffn_hidden_size % tp:
            raise ConfigError(
                f"shared_ffn_hidden_size {self.shared_ffn_hidden_size} is not a multiple of tensor_parallel_size {tp}",
                where="model.shared_ffn_hidden_size, parallel.tensor_parallel_size",
                fix=f"a tensor_parallel_size that divides {self.shared_ffn_hidden_size}",
            )
        if tp > 1 and not parallel.sequence_parallel:
            raise ConfigError(
                f"Megatron-Core trains experts on {tp} tensor-parallel ranks only with sequence parallelism",
                where="parallel.sequence_parallel",
                fix="parallel.sequence_parallel=true",
            )


def padded_vocab_size(vocab_size: int) -> int:
    """Return `vocab_size` rounded up to a multiple of 128.

    Megatron's training script rounds to 128 * tp. Rows beyond the vocabulary take part in the softmax, so with that
    rule the loss would depend on the layout, and a checkpoint of one layout would not fit another.
    """
    return -(-vocab_size // VOCAB_MULTIPLE) * VOCAB_MULTIPLE


def sequence_cost(model: ModelConfig) -> SequenceCost:
    """Return the forward FLOPs of one sequence, by tokens and by tokens squared.

    A token costs 2 FLOPs a weight of the output matrix and of the layers, where it meets only the experts that it is
    sent to; attention adds, per layer, scores and
    weighted values of half the L x L square (it is causal): 2 * L^2 * heads * head_dim.

    Source: the counting of Narayanan et al., "Efficient Large-Scale Language Model Training on GPU Clusters", 2021,
    without recomputation.
    """
    layers = sum(model.active_weights(number) for number in range(model.num_layers))
    output = model.hidden_size * (model.vocab_size or 0)
    quadratic = 2.0 * model.num_layers * model.query_size
    return SequenceCost(linear=2.0 * (layers + output), quadratic=quadratic)
