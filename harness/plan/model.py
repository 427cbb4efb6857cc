"""Settings of the model: its sizes and family, with the checks that need no model."""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace

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
# Every tensor-parallel rank has all of these.
ON_EVERY_RANK = ("linear_q_down_proj", "linear_kv_down_proj")
# Bytes of one number.
DTYPE_BYTES = {"float32": 4, "bfloat16": 2}
# Tokens and features of a matrix that a product in 8 bits divides into blocks, by recipe.
FP8_BLOCKS = {"off": 1, "tensorwise": 16, "blockwise": 128, "mxfp8": 32}
_CHOICES = {
    "fp8": tuple(FP8_BLOCKS),
    "family": tuple(FAMILIES),
    "rope_scaling": ("none", "llama3", "linear", "yarn"),
    "dtype": ("auto", *DTYPE_BYTES),
    "recompute": ("none", "selective", "full"),
    "attention": ("auto", "transformer_engine", "flash", "fused", "unfused", "torch"),
    "fuse_swiglu": ("auto", "on", "off"),
    "fuse_cross_entropy": ("auto", "on", "off"),
    "fuse_weight_gradient": ("auto", "on", "off"),
    "grouped_gemm": ("auto", "on", "off"),
    "router_score": ("softmax", "sigmoid"),
}


@dataclass
class ModelConfig:
    """A decoder of the Llama shape: RMSNorm, RoPE, SwiGLU, grouped-query attention; dense, or a mixture of experts.

    Attributes:
        family: llama or mistral (no biases), qwen2 (biases of query, key and value), qwen3 (norms of query and key);
            with experts, qwen3_moe, mixtral, olmoe (norms of query and key over all heads), deepseek_v2
            and deepseek_v3 (latent attention; Moonlight too), glm4_moe (GLM-4.5), glm4_moe_lite (GLM-4.7-Flash) and
            gpt_oss (attention sinks, windows, biases).
        init_from: a folder of Hugging Face weights (safetensors), or a name on its hub; null draws random weights.
        num_layers, hidden_size, ffn_hidden_size, num_attention_heads, num_query_groups: sizes.
        head_dim: size of a head; null for hidden_size / num_attention_heads.
        max_sequence_length: the longest sequence that positions are meant for, in tokens.
        vocab_size: null for the tokenizer's; rounded up to a multiple of 128.
        tie_embeddings: share one matrix between the input embedding and the output layer.
        rotary_base: base of the rotary angles.
        rope_scaling, rope_scaling_factor: none, llama3, linear or yarn, by this factor.
        rope_original_positions, rope_mscale, rope_mscale_all_dim: of yarn: positions before scaling, and the factors of
            its scaling of angles and of attention.
        kv_lora_rank: size of the latent vector that keys and values of all heads are made of (multi-latent attention,
            of the families deepseek_v2 and deepseek_v3); 0 in other families.
        q_lora_rank: the same of the queries; null makes them of the hidden states.
        qk_nope_head_dim, qk_rope_head_dim, v_head_dim: sizes of a head with latent attention: its parts of queries and
            keys without and with a rotary embedding, and its values.
        sliding_window: tokens, its own included, that a token attends to in every second layer, the first included (of
            the family gpt_oss); null in other families.
        qk_norm: normalize the queries and keys of each head; null for what all models of the family do. Models of the
            family glm4_moe differ (GLM-4.5 has these norms, GLM-4.5-Air has none).
        norm_epsilon: added to the mean square in each norm.
        init_std: standard deviation of the initial weights.
        dtype: float32 or bfloat16 (with float32 master weights and gradients); `auto` is bfloat16 on GPUs and
            float32 on CPUs.
        fp8: multiply in 8 bits in Transformer Engine's layers, with a scale for each tensor (`tensorwise`), for each
            128 x 128 weights and 128 numbers of a token (`blockwise`, Hopper) or for each 32 numbers (`mxfp8`,
            Blackwell); `off` for none. Weights, gradients and the optimizer keep their dtypes. Rows are padded at their
            end to a multiple of 16, 128 or 32 tokens a rank, and so are the tokens of an expert.
        recompute: activations computed again in the backward pass: `none`, `selective` (attention) or `full` (whole
            layers).
        attention: `auto` (Transformer Engine on GPUs that have it), `transformer_engine`, one backend of it (`flash`,
            `fused` or `unfused`; it refuses one that cannot compute the model), or `torch`.
        fuse_swiglu, fuse_cross_entropy: one kernel for the activation of the feed-forward, and for the loss, whose
            logits are then not kept twice (in bfloat16 alone); `auto` (on GPUs), `on` or `off`.
        fuse_weight_gradient: add a weight's gradient where it is computed, which needs an extension of Apex; `auto` (on
            GPUs that have it), `on` or `off`.
        seed: of the initial weights.
        lora_rank: rank of LoRA adapters, which alone are trained; 0 trains all weights.
        lora_alpha: adapter outputs are scaled by lora_alpha / lora_rank.
        lora_targets: linear layers with an adapter, any of linear_qkv (all that make queries, keys and values),
            linear_proj, and linear_fc1 and linear_fc2 of dense layers, of each expert and of shared experts.
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
        grouped_gemm: multiply the tokens of all experts of a rank at once, with Transformer Engine; `auto` (where its
            layers are, without biases and without adapters of experts), `on` (refused elsewhere) or `off` (one expert
            after another, as on a CPU).
        mtp_layers: layers after the model's own that predict further tokens (multi-token prediction) and are trained
            with it; of weights in `init_from`, all of theirs or none. 0 leaves them out.
        mtp_loss: coefficient of the mean of their losses.
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
    rope_original_positions: int = bounded(4096, lowest=1)
    rope_mscale: float = bounded(1.0, above=0, highest=100)
    rope_mscale_all_dim: float = bounded(0.0, lowest=0, highest=100)
    kv_lora_rank: int = bounded(0, lowest=0, highest=1_000_000)
    q_lora_rank: int | None = bounded(None, lowest=1, highest=1_000_000)
    qk_nope_head_dim: int = bounded(128, lowest=1, highest=1_000_000)
    qk_rope_head_dim: int = bounded(64, lowest=2, highest=1_000_000)
    v_head_dim: int = bounded(128, lowest=1, highest=1_000_000)
    sliding_window: int | None = bounded(None, lowest=1, highest=1_000_000_000)
    qk_norm: bool | None = None
    norm_epsilon: float = bounded(1e-5, above=0, below=1)
    init_std: float = bounded(0.02, above=0, highest=10)
    dtype: str = "auto"
    fp8: str = "off"
    recompute: str = "none"
    attention: str = "auto"
    fuse_swiglu: str = "auto"
    fuse_cross_entropy: str = "auto"
    fuse_weight_gradient: str = "auto"
    seed: int = bounded(1234)
    lora_rank: int = bounded(0, highest=100_000)
    lora_alpha: float = bounded(32.0, above=0, highest=1_000_000)
    lora_targets: list[str] = field(default_factory=lambda: list(LORA_TARGETS))
    num_experts: int = bounded(0, lowest=0, highest=4096)
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
    grouped_gemm: str = "auto"
    mtp_layers: int = bounded(0, lowest=0, highest=100)
    mtp_loss: float = bounded(0.1, lowest=0, highest=100)

    def __post_init__(self) -> None:
        check_numbers(self, "model")
        for name, choices in _CHOICES.items():
            require_choice(getattr(self, name), choices, setting=f"model.{name}")
        self._check_latents()
        if self.head_dim is None and not self.kv_lora_rank and self.hidden_size % self.num_attention_heads:
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
        if not self.kv_lora_rank and (self.head_size < 2 or self.head_size % 2):
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
        if (self.qk_norm is not None) != FAMILIES[self.family].chooses_head_norms:
            all_have = "" if FAMILIES[self.family].has_head_norms else "no "
            raise ConfigError(
                f"some models of the family {self.family} have norms of queries and keys, and qk_norm is null"
                if self.qk_norm is None
                else f"models of the family {self.family} have {all_have}norms of queries and keys, and qk_norm is set",
                where="model.qk_norm, model.family",
                fix="model.qk_norm=true or false" if self.qk_norm is None else "model.qk_norm=null",
            )
        if self.rope_scaling == "yarn" and FAMILIES[self.family].rotated_part != 1:
            raise ConfigError(
                f"Megatron-Core's yarn turns whole heads, and the family {self.family} a part of each",
                where="model.rope_scaling, model.family",
                fix="model.rope_scaling=none, or linear",
            )
        if (self.sliding_window is not None) != FAMILIES[self.family].has_windows:
            raise ConfigError(
                f"models of the family {self.family} have {'' if self.sliding_window is None else 'no '}layers with a "
                f"window, and sliding_window is {self.sliding_window}",
                where="model.sliding_window, model.family",
                fix="model.sliding_window=128 for gpt_oss, null for other families",
            )
        if self.num_experts:
            self._check_experts()
        elif FAMILIES[self.family].experts is not None:
            raise ConfigError(
                f"models of the family {self.family} have experts, and num_experts is 0",
                where="model.num_experts",
                fix="set it, or choose a dense family",
            )

        if self.mtp_layers:
            self._check_predictions()

    def _check_predictions(self) -> None:
        where = "model.mtp_layers"
        if not FAMILIES[self.family].predicts_further:
            raise ConfigError(
                f"models of the family {self.family} have no layers that predict further tokens, and could not be "
                "exported",
                where=f"{where}, model.family",
                fix="model.mtp_layers=0, or a family such as deepseek_v3",
            )
        if self.lora_rank:
            raise ConfigError(
                "adapters do not train the layers that predict further tokens",
                where=f"{where}, model.lora_rank",
                fix="model.mtp_layers=0 leaves them out",
            )
        if self.fp8 != "off":
            raise ConfigError(
                "layers that predict further tokens are not proved in 8 bits",
                where=f"{where}, model.fp8",
                fix="model.fp8=off, or model.mtp_layers=0",
            )
        if self.tie_embeddings:
            raise ConfigError(
                "layers that predict further tokens share both the input embedding and the output layer with the "
                "model, and tie_embeddings makes these one",
                where=f"{where}, model.tie_embeddings",
                fix="model.tie_embeddings=false, or model.mtp_layers=0",
            )

    def _check_latents(self) -> None:
        if bool(self.kv_lora_rank) != FAMILIES[self.family].has_latents:
            raise ConfigError(
                f"models of the family {self.family} have "
                f"{'' if FAMILIES[self.family].has_latents else 'no '}latent attention, and kv_lora_rank is "
                f"{self.kv_lora_rank}",
                where="model.family, model.kv_lora_rank",
                fix="model.family=deepseek_v3 with a kv_lora_rank, or another family and model.kv_lora_rank=0",
            )
        if self.rope_mscale != 1 and not self.rope_mscale_all_dim:
            raise ConfigError(
                f"rope_mscale is {self.rope_mscale} and rope_mscale_all_dim 0, which transformers reads as 1 and 0",
                where="model.rope_mscale, model.rope_mscale_all_dim",
                fix="set both, or neither",
            )
        if not self.kv_lora_rank:
            return
        if self.num_query_groups != self.num_attention_heads or self.head_dim is not None:
            raise ConfigError(
                "with latent attention every head has its own keys and values, of other sizes",
                where="model.num_query_groups, model.head_dim",
                fix=f"model.num_query_groups={self.num_attention_heads} model.head_dim=null",
            )
        if self.qk_rope_head_dim % 2:
            raise ConfigError(
                f"{self.qk_rope_head_dim} numbers of a head cannot be rotated in pairs",
                where="model.qk_rope_head_dim",
                fix="an even number",
            )
        if self.rope_scaling not in ("none", "yarn"):
            raise ConfigError(
                f"Megatron-Core's latent attention has no rope_scaling {self.rope_scaling}",
                where="model.rope_scaling",
                fix="none or yarn",
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
            # Megatron-Core ranks a group by as many of its experts as a token takes of each.
            ranked_by = FAMILIES[self.family].ranks_groups_by
            if not ranked_by:
                raise ConfigError(
                    f"models of the family {self.family} have no groups of experts, and could not be exported",
                    where="model.router_groups, model.family",
                    fix="model.router_groups=null model.router_top_groups=null",
                )
            if self.experts_per_token // top != ranked_by:
                raise ConfigError(
                    f"models of the family {self.family} rank a group by the sum of its best {ranked_by} experts, and "
                    f"Megatron-Core by that of its best {self.experts_per_token // top}",
                    where="model.experts_per_token, model.router_top_groups",
                    fix=f"model.experts_per_token={ranked_by * top}, or no groups",
                )
        names = FAMILIES[self.family].experts
        if self.dense_layers and FAMILIES[self.family].has_experts_everywhere:
            raise ConfigError(
                f"models of the family {self.family} have experts in every layer, and could not be exported",
                where="model.dense_layers, model.family",
                fix="model.dense_layers=0, or a family such as qwen3_moe",
            )
        if names is not None and names.shared is not None and self.shared_ffn_hidden_size % self.expert_size:
            raise ConfigError(
                f"shared experts of {self.shared_ffn_hidden_size} are no whole number of experts of {self.expert_size}",
                where="model.shared_ffn_hidden_size, model.expert_ffn_hidden_size",
                fix=f"a multiple of {self.expert_size}",
            )
        if self.expert_bias and self.router_score != "sigmoid":
            raise ConfigError(
                "Megatron-Core adds a bias to the scores of a sigmoid router only",
                where="model.expert_bias",
                fix="model.router_score=sigmoid, or model.expert_bias=false",
            )
        if self.grouped_gemm == "on" and (reason := self.why_not_grouped):
            raise ConfigError(
                f"the products of experts cannot be grouped: {reason}",
                where="model.grouped_gemm",
                fix="model.grouped_gemm=auto, which computes one expert after another",
            )
        if self.experts_per_token == 1 and self.router_score == "softmax" and self.router_normalize:
            raise ConfigError(
                "the weight of a token's single expert would always be 1, and the router would not train",
                where="model.router_normalize",
                fix="model.router_normalize=false",
            )

    @property
    def names_engine(self) -> bool:
        """True if attention is Transformer Engine's by name, so that a run without it is refused."""
        return self.attention not in ("auto", "torch")

    def on(self, device: str) -> ModelConfig:
        """Return the model with the dtype that `auto` is on a device, `cpu` or `cuda`."""
        if self.dtype != "auto":
            return self
        return replace(self, dtype="bfloat16" if device == "cuda" else "float32")

    @property
    def number(self) -> str:
        """The dtype of a weight: for `auto` that of a CPU, as long as no device is chosen."""
        return self.on("cpu").dtype

    @property
    def why_not_grouped(self) -> str | None:
        """The reason why experts are computed one after another, on whatever device; None where there is none."""
        if self.attention == "torch":
            return "model.attention is torch, and only Transformer Engine has such products"
        if self.has_biases:
            return f"experts of the family {self.family} have biases, with which they are not proved"
        if self.lora_rank and {"linear_fc1", "linear_fc2"} & set(self.lora_targets):
            return "an adapter stands beside the matrices of one expert"
        return None

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
    def has_biases(self) -> bool:
        """True if the attention output, routers and experts have biases."""
        return FAMILIES[self.family].has_biases

    @property
    def has_sinks(self) -> bool:
        """True if each head attends to one more key of a trained score."""
        return FAMILIES[self.family].has_sinks

    @property
    def swiglu_limit(self) -> float:
        """Bound of the gate and of its factor; 0 for none."""
        return FAMILIES[self.family].swiglu_limit

    @property
    def has_head_norms(self) -> bool:
        """True if queries and keys are normalized."""
        return FAMILIES[self.family].has_head_norms if self.qk_norm is None else self.qk_norm

    @property
    def rotated_size(self) -> int:
        """Numbers of a head's query and key that a rotary embedding turns."""
        return self.qk_rope_head_dim if self.kv_lora_rank else int(self.head_size * FAMILIES[self.family].rotated_part)

    @property
    def norms_span_heads(self) -> bool:
        """True if those norms are over all heads together, not over each."""
        return FAMILIES[self.family].norms_span_heads

    @property
    def head_size(self) -> int:
        """Numbers in a head's query and key."""
        if self.kv_lora_rank:
            return self.qk_nope_head_dim + self.qk_rope_head_dim
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
    def value_size(self) -> int:
        """Numbers in the values of a token that its heads give, which the output projection takes."""
        return self.num_attention_heads * (self.v_head_dim if self.kv_lora_rank else self.head_size)

    @property
    def attention_sizes(self) -> dict[str, tuple[int, int]]:
        """Inputs and outputs of the linear layers of one Megatron attention, by their names."""
        hidden, query, values = self.hidden_size, self.query_size, self.value_size
        if not self.kv_lora_rank:
            return {"linear_qkv": (hidden, query + 2 * self.key_size), "linear_proj": (values, hidden)}
        made = {"linear_q_proj": (hidden, query)}
        if self.q_lora_rank is not None:
            made = {"linear_q_down_proj": (hidden, self.q_lora_rank), "linear_q_up_proj": (self.q_lora_rank, query)}
        return made | {
            "linear_kv_down_proj": (hidden, self.kv_lora_rank + self.qk_rope_head_dim),
            "linear_kv_up_proj": (self.kv_lora_rank, self.num_attention_heads * self.qk_nope_head_dim + values),
            "linear_proj": (values, hidden),
        }

    @property
    def linear_sizes(self) -> dict[str, tuple[int, int]]:
        """Inputs and outputs of the linear layers of one Megatron layer whose MLP is dense, by their names."""
        hidden, ffn = self.hidden_size, self.ffn_hidden_size
        return {**self.attention_sizes, "linear_fc1": (hidden, 2 * ffn), "linear_fc2": (ffn, hidden)}

    @property
    def adapted(self) -> list[str]:
        """Linear layers of one Megatron layer that have adapters: `linear_qkv` stands for all that make q, k and v."""
        made = (
            [name for name in self.attention_sizes if name != "linear_proj"]
            if "linear_qkv" in self.lora_targets
            else []
        )
        return made + [name for name in ("linear_proj", "linear_fc1", "linear_fc2") if name in self.lora_targets]

    def has_experts(self, layer: int) -> bool:
        """Return True if a layer, 0 for the first, has experts."""
        return bool(self.num_experts) and layer >= self.dense_layers

    def window(self, layer: int) -> int | None:
        """Return the tokens that a token of a layer, 0 for the first, attends to; None for all before it."""
        return None if layer % 2 else self.sliding_window

    def active_weights(self, layer: int) -> int:
        """Return the weights of the matrices of a layer that a token is multiplied by."""
        attention = sum(inputs * outputs for inputs, outputs in self.attention_sizes.values())
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
        if self.kv_lora_rank and tp > 1 and not parallel.sequence_parallel:
            raise ConfigError(
                f"latent attention on {tp} tensor-parallel ranks needs sequence parallelism: each has all of its "
                "down-projections",
                where="parallel.sequence_parallel",
                fix="parallel.sequence_parallel=true",
            )
        self._check_expert_layout(parallel)
        self._check_fp8_sizes(parallel)
        self._check_graphs(parallel)
        self._check_overlap(parallel)
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

    def _check_graphs(self, parallel: ParallelConfig) -> None:
        """Raise ConfigError for a model whose pass of a row cannot be captured."""
        reasons = {
            "num_experts": f"num_experts is {self.num_experts}: what an expert computes depends on the tokens that it "
            "gets, which are counted on the host"
            if self.num_experts
            else "",
            "fp8": f"fp8 is {self.fp8}: nothing has captured the scales of products in 8 bits"
            if self.fp8 != "off"
            else "",
        }
        for name, reason in reasons.items():
            if parallel.cuda_graphs and reason:
                raise ConfigError(
                    f"parallel.cuda_graphs captures the whole pass of a row, and {reason}",
                    where=f"parallel.cuda_graphs, model.{name}",
                    fix="parallel.cuda_graphs=false",
                )

    def _check_overlap(self, parallel: ParallelConfig) -> None:
        """Raise ConfigError for a model whose layers have no buffers for tensor-parallel exchanges."""
        reasons = {
            "lora_rank": f"lora_rank is {self.lora_rank}: adapters read what lies in a buffer that is written again"
            if self.lora_rank
            else "",
            "kv_lora_rank": f"kv_lora_rank is {self.kv_lora_rank}: Transformer Engine has no buffers for the "
            "projections of latent attention"
            if self.kv_lora_rank
            else "",
            "num_experts": f"num_experts is {self.num_experts}: Transformer Engine has no buffers for experts"
            if self.num_experts
            else "",
            "fp8": f"fp8 is {self.fp8}: only products in bfloat16 and tensorwise ones have buffers here"
            if self.fp8 not in ("off", "tensorwise")
            else "",
            "attention": "attention is torch: the buffers are those of Transformer Engine's layers"
            if self.attention == "torch"
            else "",
        }
        for name, reason in reasons.items():
            if parallel.overlap_tensor_parallel and reason:
                raise ConfigError(
                    f"parallel.overlap_tensor_parallel is true, and {reason}",
                    where=f"parallel.overlap_tensor_parallel, model.{name}",
                    fix="parallel.overlap_tensor_parallel=false",
                )

    def _check_fp8_sizes(self, parallel: ParallelConfig) -> None:
        """Raise ConfigError for a matrix whose sides on a rank are not whole blocks."""
        block, tp = FP8_BLOCKS[self.fp8], parallel.tensor_parallel_size
        if self.fp8 == "off":
            return
        sizes = {
            f"the {side} of {name}": size
            for name, both in self.linear_sizes.items()
            for side, size in _sides(name, both, tp)
        }
        if self.num_experts:
            sizes["the inner size of an expert"] = self.expert_size // parallel.expert_tensor_parallel_size
        uneven = next((name for name, size in sizes.items() if size % block), None)
        if uneven is not None:
            raise ConfigError(
                f"model.fp8 is {self.fp8}, whose blocks are {block} wide, and {uneven} on a rank are {sizes[uneven]}",
                where="model.fp8, parallel.tensor_parallel_size",
                fix="a smaller tensor_parallel_size, tensorwise, or off",
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
        if etp > 1 and self.has_biases:
            raise ConfigError(
                f"experts with biases cannot be cut into {etp} parts: Megatron-Core would add each bias {etp} times",
                where="model.family, parallel.expert_tensor_parallel_size",
                fix="parallel.expert_tensor_parallel_size=1",
            )
        if etp > 1 and self.lora_rank and set(self.lora_targets) & {"linear_fc1", "linear_fc2"}:
            raise ConfigError(
                f"adapters on experts cannot be cut into {etp} parts",
                where="model.lora_targets, parallel.expert_tensor_parallel_size",
                fix="parallel.expert_tensor_parallel_size=1, or model.lora_targets=[linear_qkv,linear_proj]",
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


def _sides(name: str, sizes: tuple[int, int], tp: int) -> list[tuple[str, int]]:
    """Return inputs and outputs of a linear layer on a tensor-parallel rank."""
    inputs, outputs = sizes
    if name in ON_EVERY_RANK:
        return [("inputs", inputs), ("outputs", outputs)]
    if name in DIVIDED_BY_COLUMNS:
        return [("inputs", inputs // tp), ("outputs", outputs)]
    return [("inputs", inputs), ("outputs", outputs // tp)]


def fp8_row_multiple(fp8: str, parallel: ParallelConfig) -> int:
    """Return the number of tokens to a multiple of which a whole row is padded for products in 8 bits; 1 for none.

    A rank's part of the row, which context and sequence parallelism divide, has whole blocks.
    """
    block = FP8_BLOCKS[fp8]
    if block == 1:
        return 1
    parts = parallel.context_parallel_size
    parts *= parallel.tensor_parallel_size if parallel.sequence_parallel else 1
    return math.lcm(block * parts, parallel.pad_to_multiple)


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
    weighted values of half the L x L square (it is causal): L^2 * heads * (head_dim of keys + that of values). A layer
    with a window adds them for as many keys a token, shorter sequences included.

    Source: the counting of Narayanan et al., "Efficient Large-Scale Language Model Training on GPU Clusters", 2021,
    without recomputation.
    """
    # Each layer that predicts a further token has a matrix before it, and the output matrix after it.
    numbers, further = range(model.num_layers + model.mtp_layers), model.mtp_layers
    layers = sum(map(model.active_weights, numbers)) + further * 2 * model.hidden_size**2
    output = (1 + further) * model.hidden_size * (model.vocab_size or 0)
    windows = [window for layer in numbers if (window := model.window(layer)) is not None]
    sizes = model.query_size + model.value_size
    quadratic = 1.0 * (len(numbers) - len(windows)) * sizes
    return SequenceCost(linear=2.0 * (layers + output + sum(windows) * sizes), quadratic=quadratic)
