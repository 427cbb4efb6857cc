"""Settings of the model: its family and sizes, and values derived from them."""

from __future__ import annotations

from copy import copy
from dataclasses import dataclass, field, replace
from functools import cache

from harness.checks import CheckedSettings, bounded, one_of
from harness.plan.encoders import MediaModel, deep_layers, read_encoder, rope_axes
from harness.plan.families import FAMILIES
from harness.plan.families.base import SCANS, Family
from harness.plan.layout import DTYPE_BYTES, FP8_BLOCKS, LORA_TARGETS
from harness.plan.model_checks import LAYOUT_RULES, RULES, check_fields

_SWITCH = ("auto", "on", "off")


@dataclass
class ModelConfig(CheckedSettings, section="model"):
    """A decoder of the Llama shape: RMSNorm, RoPE, SwiGLU, grouped-query attention; dense, or a mixture of experts.

    Attributes:
        family: model architecture. Dense: llama, mistral, qwen2 (biases of query, key and value), qwen3 (query and key
            norms). Mixture of experts: qwen3_moe, mixtral, olmoe (query and key norms over all heads), deepseek_v2 and
            deepseek_v3 (latent attention, also for Moonlight), glm4_moe (GLM-4.5), glm4_moe_lite (GLM-4.7-Flash) and
            gpt_oss (attention sinks, sliding windows, biases). Hybrid: nemotron_h (Mamba-2; also Nemotron 3);
            qwen3_next, qwen3_5_text and qwen3_5_moe_text (gated delta rule).
        init_from: folder of Hugging Face weights (safetensors), or a model on the hub; null initializes random weights.
            Family, sizes, vocabulary and max_sequence_length default to its config.json; other values are refused.
        encoder: audio or image encoder in front of the text model, as JSON: `model_type`, the id of the placeholder
            token, and the encoder's part of config.json (qwen2_audio, qwen3_omni_moe_thinker, llava, qwen2_5_vl,
            qwen3_vl and qwen3_vl_moe). Null for a text model; set by init_from.
        train_encoder: also train the encoder and its projector, which are frozen otherwise.
        num_layers: number of layers.
        layer_pattern: one letter per layer of a hybrid model; null for other families. In nemotron_h, a layer is only
            `M` (Mamba-2), `*` (attention), `-` (MLP) or `E` (experts). In other families, a layer is `D` (gated
            delta rule) or `*` (attention), followed by an MLP or experts.
        scan_num_heads, scan_head_dim: number and size of the heads of a layer with a scan (Mamba-2), or of its value
            heads (gated delta rule); 0 for other families.
        scan_state_dim: size of the state per channel of a head (Mamba-2), or size of a key head (gated delta rule).
        scan_num_groups: number of groups of heads with the same input and output matrices, or number of key heads.
        hidden_size: size of the hidden states.
        ffn_hidden_size: inner size of the MLP.
        num_attention_heads: number of query heads.
        num_query_groups: number of key and value heads.
        head_dim: size of an attention head; null uses hidden_size / num_attention_heads.
        max_sequence_length: maximum sequence length of the positional encoding, in tokens.
        vocab_size: size of the vocabulary, rounded up to a multiple of 128; null uses the tokenizer's.
        tie_embeddings: share one matrix between the input embedding and the output layer.
        rotary_base: base of the rotary embedding.
        rope_scaling: scaling of the rotary embedding: none, llama3, linear or yarn.
        rope_scaling_factor: factor of the scaling.
        rope_original_positions: maximum sequence length before scaling with yarn.
        rope_mscale, rope_mscale_all_dim: magnitude scaling of yarn's rotary embedding and attention, as in config.json.
        kv_lora_rank: size of the latent vector of keys and values (multi-latent attention, for deepseek_v2, deepseek_v3
            and glm4_moe_lite); 0 for other families.
        q_lora_rank: size of the latent vector of queries; null projects queries from the hidden states.
        qk_nope_head_dim: size of the part of each query and key without rotary embedding, with latent attention.
        qk_rope_head_dim: size of the part with rotary embedding.
        v_head_dim: size of each value head, with latent attention.
        sliding_window: attention window in tokens, including the token itself, of every other layer, starting with the
            first (gpt_oss); null for other families.
        qk_norm: normalize the queries and keys of each head. Null uses the default of the family, but models of
            glm4_moe differ: GLM-4.5 has these norms and GLM-4.5-Air does not.
        norm_epsilon: epsilon of the RMS norms.
        init_std: standard deviation of the initial weights.
        dtype: float32, or bfloat16 with float32 master weights and gradients. `auto` selects bfloat16 on GPUs and
            float32 on CPUs.
        fp8: 8-bit matrix products in Transformer Engine's layers, with a scale for each tensor (`tensorwise`), for each
            128 x 128 weights and 128 activations (`blockwise`, Hopper) or for each 32 values (`mxfp8`, Blackwell);
            `off` disables them. Weights, gradients and the optimizer keep their dtypes. Rows and the tokens of each
            expert are padded to a multiple of 16, 128 or 32 tokens per rank.
        recompute: activations to recompute in the backward pass: `none`, `selective` (those of recompute_modules) or
            `full` (whole layers).
        recompute_modules: with `selective`, parts of each layer to recompute: core_attn (attention without its
            projections), mlp (dense), moe (router and all experts) or shared_experts.
        recompute_layers: with `full`, number of layers to recompute, the first ones of each model chunk of a pipeline
            stage. Null recomputes all layers.
        attention: attention implementation: `auto` (Transformer Engine on GPUs that have it), `transformer_engine`, one
            of its backends (`flash`, `fused` or `unfused`; refused if it does not support the model), or `torch`.
        fuse_swiglu: use a fused kernel for the activation of the MLP; `auto` (on GPUs), `on` or `off`.
        fuse_cross_entropy: use a fused cross-entropy kernel, in bfloat16; `auto` (on GPUs), `on` or `off`.
        fuse_weight_gradient: accumulate each weight gradient in its matrix product. Requires Apex's extension; `auto`
            (on GPUs that have it), `on` or `off`.
        fuse_permutation: sort tokens by expert with Transformer Engine's kernels, so that the host does not wait;
            `auto` (on GPUs that have it), `on` or `off`.
        fuse_router: choose experts and compute their scores and weights with Transformer Engine's kernels (2.7 or
            later); `auto` (on GPUs that have them), `on` or `off`. With expert_bias, weights are rounded as scores with
            biases are.
        seed: seed of the initial weights.
        lora_rank: rank of the LoRA adapters, which are trained instead of the weights; 0 trains all weights.
        lora_alpha: scale of LoRA; the output of an adapter is multiplied by lora_alpha / lora_rank.
        lora_targets: linear layers with an adapter: linear_qkv (all projections of queries, keys and values, and the
            input projection of a layer with a scan), linear_proj (also its output projection), and linear_fc1 and
            linear_fc2 of dense layers, of each expert and of shared experts.
        num_experts: number of routed experts per layer; 0 for a dense model.
        experts_per_token: number of experts that each token is routed to.
        expert_ffn_hidden_size: inner size of one expert; null uses ffn_hidden_size.
        expert_latent_size: size to which hidden states are projected before the routed experts, and from which the
            outputs are projected back; 0 for no projection.
        shared_ffn_hidden_size: total inner size of the shared experts of a layer; 0 for none.
        dense_layers: number of leading layers with a dense MLP of ffn_hidden_size instead of experts.
        router_score: softmax or sigmoid of the router's logits, always computed in float32.
        router_normalize: normalize the weights of the experts of a token to sum to 1.
        router_groups, router_top_groups: restrict the experts of a token to its best router_top_groups of router_groups
            equal groups; null disables the restriction.
        router_scale: scaling factor of the weights of a token's experts.
        aux_loss: coefficient of the load-balancing loss; 0 disables it.
        aux_loss_scope: tokens that the load-balancing loss balances together: those of a `row`, or of each `sequence`
            (Megatron's seq_aux_loss), which is independent of the other sequences.
        z_loss: coefficient of the router z-loss, which keeps logits small; 0 disables it.
        expert_bias: add a bias to the score of each expert for the selection of experts (load balancing without a
            loss). Requires router_score=sigmoid.
        expert_bias_rate: change of an expert's bias per step, upward if it received too few tokens; 0 keeps the bias.
        freeze_router: do not train the router's weights.
        grouped_gemm: compute all experts of a rank in one grouped matrix product of Transformer Engine; `auto` (where
            supported: no biases, no adapters on experts), `on` (refused where unsupported) or `off`.
        mtp_layers: number of multi-token prediction layers, which are trained with the model; 0 for none. With
            `init_from`, either all of the model's MTP layers or 0.
        mtp_loss: coefficient of the mean loss of the MTP layers.
    """

    family: str = one_of("llama", FAMILIES)
    init_from: str | None = None
    encoder: str | None = None
    train_encoder: bool = False
    num_layers: int = bounded(4, lowest=1, highest=10_000)
    layer_pattern: str | None = None
    scan_num_heads: int = bounded(0, lowest=0, highest=1_000_000)
    scan_head_dim: int = bounded(0, lowest=0, highest=1_000_000)
    scan_state_dim: int = bounded(128, lowest=1, highest=1_000_000)
    scan_num_groups: int = bounded(8, lowest=1, highest=1_000_000)
    hidden_size: int = bounded(128, lowest=1, highest=1_000_000)
    ffn_hidden_size: int = bounded(384, lowest=1, highest=1_000_000)
    num_attention_heads: int = bounded(4, lowest=1, highest=1_000_000)
    num_query_groups: int = bounded(2, lowest=1, highest=1_000_000)
    head_dim: int | None = bounded(None, lowest=1, highest=1_000_000)
    max_sequence_length: int = bounded(4096, lowest=1)
    vocab_size: int | None = bounded(None, lowest=1, highest=100_000_000)
    tie_embeddings: bool = True
    rotary_base: int = bounded(10000, lowest=1, highest=10**12)
    rope_scaling: str = one_of("none", ("none", "llama3", "linear", "yarn"))
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
    dtype: str = one_of("auto", ("auto", *DTYPE_BYTES))
    fp8: str = one_of("off", FP8_BLOCKS)
    recompute: str = one_of("none", ("none", "selective", "full"))
    recompute_modules: list[str] = field(default_factory=lambda: ["core_attn"])
    recompute_layers: int | None = bounded(None, lowest=1, highest=10_000)
    attention: str = one_of("auto", ("auto", "transformer_engine", "flash", "fused", "unfused", "torch"))
    fuse_swiglu: str = one_of("auto", _SWITCH)
    fuse_cross_entropy: str = one_of("auto", _SWITCH)
    fuse_weight_gradient: str = one_of("auto", _SWITCH)
    fuse_permutation: str = one_of("auto", _SWITCH)
    fuse_router: str = one_of("auto", _SWITCH)
    seed: int = bounded(1234)
    lora_rank: int = bounded(0, highest=100_000)
    lora_alpha: float = bounded(32.0, above=0, highest=1_000_000)
    lora_targets: list[str] = field(default_factory=lambda: list(LORA_TARGETS))
    num_experts: int = bounded(0, lowest=0, highest=4096)
    experts_per_token: int = bounded(2, lowest=1, highest=100_000)
    expert_ffn_hidden_size: int | None = bounded(None, lowest=1, highest=1_000_000)
    expert_latent_size: int = bounded(0, lowest=0, highest=1_000_000)
    shared_ffn_hidden_size: int = bounded(0, lowest=0, highest=1_000_000)
    dense_layers: int = bounded(0, lowest=0, highest=10_000)
    router_score: str = one_of("softmax", ("softmax", "sigmoid"))
    router_normalize: bool = True
    router_groups: int | None = bounded(None, lowest=1, highest=100_000)
    router_top_groups: int | None = bounded(None, lowest=1, highest=100_000)
    router_scale: float = bounded(1.0, above=0, highest=1000)
    aux_loss: float = bounded(0.0, lowest=0, highest=100)
    aux_loss_scope: str = one_of("row", ("row", "sequence"))
    z_loss: float = bounded(0.0, lowest=0, highest=100)
    expert_bias: bool = False
    expert_bias_rate: float = bounded(0.001, lowest=0, highest=1)
    freeze_router: bool = False
    grouped_gemm: str = one_of("auto", _SWITCH)
    mtp_layers: int = bounded(0, lowest=0, highest=100)
    mtp_loss: float = bounded(0.1, lowest=0, highest=100)

    rules, job_rules = RULES, LAYOUT_RULES

    def __post_init__(self) -> None:
        super().__post_init__()
        check_fields(self)

    def on(self, device: str) -> ModelConfig:
        """Return the model with dtype `auto` resolved for a device, `cpu` or `cuda`."""
        if self.dtype != "auto":
            return self
        return replace(self, dtype="bfloat16" if device == "cuda" else "float32")

    @property
    def number(self) -> str:
        """The dtype of a weight; `auto` means the dtype on a CPU until a device is chosen."""
        return self.on("cpu").dtype

    @property
    def why_not_grouped(self) -> str | None:
        """The reason why experts are computed one after another on any device, or None."""
        if self.attention == "torch":
            return "they require Transformer Engine, and model.attention is torch"
        if self.traits.has_biases:
            return f"experts of the family {self.family} have biases"
        if self.lora_rank and {"linear_fc1", "linear_fc2"} & set(self.lora_targets):
            return "experts have LoRA adapters"
        return None

    @property
    def expert_size(self) -> int:
        """Inner size of one routed expert."""
        return self.expert_ffn_hidden_size or self.ffn_hidden_size

    @property
    def expert_width(self) -> int:
        """Size of the vectors that routed experts read and write."""
        return self.expert_latent_size or self.hidden_size

    @property
    def traits(self) -> Family:
        """Differences of the model's family from the Llama architecture."""
        return FAMILIES[self.family]

    @property
    def media(self) -> MediaModel | None:
        """The kind of audio or image model, or None for a text model."""
        return None if self.encoder is None else read_encoder(self.encoder)[0]

    @property
    def left_out(self) -> tuple[str, ...]:
        """Name prefixes of tensors in published weights that are not trained."""
        return self.traits.left_out if self.media is None else self.media.left_out

    @property
    def deep_layers(self) -> int:
        """Number of leading layers after which image features are added."""
        return 0 if self.encoder is None else deep_layers(read_encoder(self.encoder)[1])

    @property
    def has_head_norms(self) -> bool:
        """True if queries and keys are normalized."""
        return self.traits.has_head_norms if self.qk_norm is None else self.qk_norm

    @property
    def rotated_size(self) -> int:
        """Number of dimensions of a head's query and key that the rotary embedding rotates."""
        return self.qk_rope_head_dim if self.kv_lora_rank else int(self.head_size * self.traits.rotated_part)

    @property
    def rope_axes(self) -> tuple[int, ...]:
        """Position axis of each rotated dimension of a head: 0 time, 1 height, 2 width; () for one-axis positions."""
        return () if self.encoder is None else rope_axes(read_encoder(self.encoder)[1])

    @property
    def head_size(self) -> int:
        """Size of a head's query and key."""
        if self.kv_lora_rank:
            return self.qk_nope_head_dim + self.qk_rope_head_dim
        return self.head_dim or self.hidden_size // self.num_attention_heads

    @property
    def query_size(self) -> int:
        """Size of a token's queries over all heads."""
        return self.num_attention_heads * self.head_size

    @property
    def key_size(self) -> int:
        """Size of a token's keys over all groups; without latent attention, also of its values."""
        return self.num_query_groups * self.head_size

    @property
    def value_size(self) -> int:
        """Size of a token's attention output over all heads, the input of the output projection."""
        return self.num_attention_heads * (self.v_head_dim if self.kv_lora_rank else self.head_size)

    @property
    def attention_sizes(self) -> dict[str, tuple[int, int]]:
        """Input and output sizes of the linear layers of Megatron's attention, by name."""
        hidden, query, values = self.hidden_size, self.query_size, self.value_size
        if not self.kv_lora_rank:
            made_at_once = query * (1 + self.traits.has_output_gate) + 2 * self.key_size
            return {"linear_qkv": (hidden, made_at_once), "linear_proj": (values, hidden)}
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
        """Input and output sizes of the linear layers of a Megatron layer with a dense MLP, by name."""
        hidden, ffn = self.hidden_size, self.ffn_hidden_size
        return {**self.attention_sizes, "linear_fc1": (hidden, self.halves * ffn), "linear_fc2": (ffn, hidden)}

    @property
    def adapted(self) -> list[str]:
        """Linear layers with adapters; the target `linear_qkv` covers all projections of q, k and v or of a scan."""
        parts = sorted({"*", *(self.layer_pattern or "")} & {"*", *SCANS}, reverse=True)
        mixers = dict.fromkeys(name for part in parts for name in self.adapted_in(part))
        return [*mixers, *(name for name in ("linear_fc1", "linear_fc2") if name in self.lora_targets)]

    def adapted_in(self, part: str) -> dict[str, tuple[int, int]]:
        """Return the input and output sizes, by name, of the adapted linear layers of attention (`*`) or a scan."""
        sizes, last = (self.attention_sizes, "linear_proj") if part == "*" else (self.scan_sizes, "out_proj")
        targets = {name: "linear_proj" if name == last else "linear_qkv" for name in sizes}
        return {name: size for name, size in sizes.items() if targets[name] in self.lora_targets}

    @property
    def all_parts(self) -> tuple[str, ...]:
        """The parts of each layer, including MTP layers, as letters of `layer_pattern`."""
        layers, letters = self.num_layers + self.mtp_layers, self.traits.pattern_letters
        return _all_parts(self.layer_pattern, letters, layers, self.dense_layers if self.num_experts else layers)

    def is_recomputed(self, place: int) -> bool:
        """Return True if a layer is recomputed as a whole; `place` is its index in its model chunk."""
        return self.recompute == "full" and (self.recompute_layers is None or place < self.recompute_layers)

    def with_recompute(self, recompute: str) -> ModelConfig:
        """Return the model with `none`, `selective` (attention) or `full` recomputation, without checking it again."""
        made = copy(self)
        made.recompute, made.recompute_modules, made.recompute_layers = recompute, ["core_attn"], None
        return made

    @property
    def recomputed(self) -> list[str]:
        """Parts of layers that are recomputed one by one."""
        return self.recompute_modules if self.recompute == "selective" else []

    @property
    def gates_shared_experts(self) -> bool:
        """True if the output of the shared experts is multiplied by a gate for each token."""
        names = self.traits.experts
        return bool(self.num_experts and names is not None and names.shared_gate)

    @property
    def halves(self) -> int:
        """Number of matrices in the first layer of an MLP or an expert: 2 with a gate, otherwise 1."""
        return 2 if self.traits.is_gated else 1

    @property
    def scan_pieces(self) -> tuple[int, ...]:
        """Output sizes of the input projection of a layer with a scan.

        Mamba-2: gate, input, both state matrices, and the time steps of heads. Gated delta rule: queries, keys, values,
        gate, and the rates and the decays of heads.
        """
        inner, states = self.scan_num_heads * self.scan_head_dim, self.scan_num_groups * self.scan_state_dim
        if self.has_delta_rule:
            return states, states, inner, inner, self.scan_num_heads, self.scan_num_heads
        return inner, inner, states, states, self.scan_num_heads

    @property
    def has_delta_rule(self) -> bool:
        """True if layers with a scan use the gated delta rule."""
        return "D" in self.traits.pattern_letters

    @property
    def scan_sizes(self) -> dict[str, tuple[int, int]]:
        """Input and output sizes of the linear layers of a layer with a scan, by name."""
        inner = self.scan_num_heads * self.scan_head_dim
        return {"in_proj": (self.hidden_size, sum(self.scan_pieces)), "out_proj": (inner, self.hidden_size)}

    def window(self, layer: int) -> int | None:
        """Return the attention window of a layer (0 is the first) in tokens, or None for full attention."""
        return None if layer % 2 else self.sliding_window

    @property
    def active_weights(self) -> list[int]:
        """Number of matrix weights that a token is multiplied by in each layer."""
        routed, shared = self.experts_per_token * self.expert_size, self.shared_ffn_hidden_size
        weights = {
            "*": sum(inputs * outputs for inputs, outputs in self.attention_sizes.values()),
            **dict.fromkeys(SCANS, sum(inputs * outputs for inputs, outputs in self.scan_sizes.values())),
            "-": (1 + self.halves) * self.hidden_size * self.ffn_hidden_size,
            "E": (1 + self.halves) * (self.expert_width * routed + self.hidden_size * shared)
            + self.hidden_size * (self.num_experts + 2 * self.expert_latent_size),
        }
        of_kinds = {parts: sum(weights[part] for part in parts) for parts in set(self.all_parts)}
        return [of_kinds[parts] for parts in self.all_parts]


@cache
def _all_parts(pattern: str | None, letters: str, layers: int, dense: int) -> tuple[str, ...]:
    mixers = "*" * layers if pattern is None else pattern
    if "-" in letters:
        return tuple(mixers)
    return tuple(mixer + ("E" if layer >= dense else "-") for layer, mixer in enumerate(mixers))
