"""Memory of a rank: weights, gradients, optimizer state, and the activations that the layers keep.

Activations are the tensors that layers keep for the backward pass, counted one by one. For this project's own layers
and for Megatron's fused SwiGLU and loss, tests compare the formula against the tensors that PyTorch saves, on one rank
and in every layout; only attention masks with context parallelism, which grow with the square of the sequence length,
are not counted. Transformer Engine's layers keep less: a norm keeps its input and output only in the model's dtype, and
attention keeps its output once. These figures follow from its source (`pytorch/module/layernorm_linear.py`,
`pytorch/attention`) and apply to attention without latents, sinks and adapters; otherwise, the larger figures of this
project's own layers are used.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import partial
from itertools import accumulate, cycle, islice
from typing import Any

from harness.plan.dispatch import dispatch_bytes
from harness.plan.encoders import read_encoder
from harness.plan.families.base import SCANS, has_scan
from harness.plan.layout import DTYPE_BYTES, ParallelConfig, padded_vocab_size, sizes_on_rank
from harness.plan.model import ModelConfig
from harness.plan.settings import OptimizerConfig

# Fraction of a GPU's memory for the CUDA context, NCCL's buffers and fragmentation of the allocator.
ROOM = 0.1
# Communication buffers of Transformer Engine, each as large as a row's hidden states: 3 for each of 4 linear layers.
_EXCHANGES = 12


# Parts of a rank's memory that only some runs have, by field of `Memory`.
_PARTS = {"fp8": "weights in 8 bits", "logits": "gradient of the logits", "dispatch": "tokens to experts"}
_PARTS |= {"exchange": "tensor-parallel exchanges", "encoder": "activations of the encoder"}


@dataclass(frozen=True)
class Memory:
    """Memory of a rank in bytes, and its pipeline stage.

    Attributes:
        fp8: FP8 weights of layers and their transposes for the backward pass, kept from one microbatch to the next.
        logits: gradient of the logits, at the start of the last stage's backward pass.
        dispatch: buffers for sending tokens to experts and back, and the workspace of grouped matrix products.
        exchange: buffers of tensor-parallel communication that overlaps with matrix products.
        encoder: activations of the encoder, on the first stage.
        host: optimizer state in host memory, which is not part of the total.
    """

    stage: int
    weights: int
    gradients: int
    optimizer: int
    activations: int
    fp8: int = 0
    logits: int = 0
    dispatch: int = 0
    exchange: int = 0
    encoder: int = 0
    host: int = 0

    @property
    def parts(self) -> dict[str, int]:
        """Bytes on the rank's GPU by name; parts that only some runs have are omitted if they are 0."""
        sizes = {_PARTS.get(name, name): size for name, size in vars(self).items() if name not in ("stage", "host")}
        return {name: size for name, size in sizes.items() if size or name not in _PARTS.values()}

    @property
    def total(self) -> int:
        return sum(self.parts.values())

    def fits(self, gpu_bytes: float | None) -> bool:
        """Return True if this memory fits a GPU (None for any), with room for CUDA, NCCL and the allocator."""
        return gpu_bytes is None or self.total <= (1 - ROOM) * gpu_bytes

    def explain(self, gpu_bytes: float) -> str:
        """Return the arithmetic of this memory and the memory that a GPU has available for tensors."""
        gib = 2**30
        parts = ", ".join(f"{name} {size / gib:,.1f}" for name, size in self.parts.items())
        return f"{self.total / gib:,.1f} GiB of {(1 - ROOM) * gpu_bytes / gib:,.1f} usable ({parts})"


@dataclass(frozen=True)
class Kernels:
    """Fused kernels of a model's layers; the defaults describe a CPU.

    Attributes:
        engine: layers are implemented by Transformer Engine.
        swiglu: one kernel computes the gate and its product.
        expert_swiglu: the same for experts. No setting selects this field or the next ones; they model other programs.
        fp8_weights: bytes per weight that is kept only in FP8: 2 with a transpose, 1 without; 0 if bfloat16 is kept.
        recomputed: recomputed parts of layers: `norm`, `activation` of experts, `latent` (up-projections).
        sharded: weights and gradients are sharded over data-parallel ranks.
        overlap_experts: tokens are sent to experts while another microbatch is computed.
    """

    engine: bool = False
    swiglu: bool = False
    grouped: bool = False
    expert_swiglu: bool = False
    fp8_weights: int = 0
    recomputed: tuple[str, ...] = ()
    sharded: bool = False
    overlap_experts: bool = False

    @classmethod
    def on_gpu(cls, model: ModelConfig, parallel: ParallelConfig) -> Kernels:
        """Return the kernels that the settings select on a GPU with Transformer Engine."""
        plain = not (model.lora_rank or model.kv_lora_rank or model.traits.has_sinks)
        has_attention = model.number != "float32" or parallel.padding_setting is None
        engine = model.attention != "torch" and has_attention
        is_grouped = model.num_experts > 0 and model.grouped_gemm != "off" and model.why_not_grouped is None
        return cls(
            engine=plain and engine,
            swiglu=model.fuse_swiglu != "off",
            grouped=engine and is_grouped,
            overlap_experts=parallel.overlap_experts,
        )


@dataclass(frozen=True)
class StageWeights:
    """Numbers of weights on a rank of a pipeline stage.

    Attributes:
        whole: all weights except adapters.
        experts: weights of routed experts, included in `whole`.
        words: weights of embeddings and output matrices, included in `whole`.
        trained, trained_experts: trained weights, in total and in routed experts; with LoRA, only adapters.
    """

    whole: int
    experts: int
    words: int
    adapters: int
    trained: int
    trained_experts: int

    def used_by_token(self, model: ModelConfig) -> int:
        """Return the number of weights that one token uses; requires the counts of the whole model."""
        idle = model.num_experts - model.experts_per_token
        return self.whole - self.experts * idle // max(1, model.num_experts)


@dataclass(frozen=True)
class Checkpoint:
    """Size of a checkpoint in bytes: all files together, and the most that one rank holds on its host and writes."""

    total_bytes: int
    own_bytes: int


_OWN = Kernels()
_PLAIN = OptimizerConfig()


def parts_of_stage(model: ModelConfig, parallel: ParallelConfig, stage: int) -> list[list[str]]:
    """Return the parts of each layer of a pipeline stage, by model chunk; MTP layers are at the end of the last."""
    all_parts = model.all_parts
    chunks = [[all_parts[layer] for layer in chunk] for chunk in parallel.chunks_of_stage(model.num_layers, stage)]
    if stage == parallel.pipeline_parallel_size - 1:
        chunks[-1] += all_parts[model.num_layers :]
    return chunks


def count_weights(model: ModelConfig, parallel: ParallelConfig, *, stage: int, vocab_size: int) -> StageWeights:
    """Count the weights on a rank of pipeline stage `stage`, 0 for the first."""
    tp, hidden, traits = parallel.tensor_parallel_size, model.hidden_size, model.traits
    is_first, is_last = stage == 0, stage == parallel.pipeline_parallel_size - 1
    letters = "".join(part for chunk in parts_of_stage(model, parallel, stage) for part in chunk)
    mlp = (1 + model.halves) * hidden
    # Each part includes its norm; routed experts are counted separately.
    weights = {
        "*": hidden + _count_attention(model, tp),
        **dict.fromkeys(SCANS, hidden + _count_scan(model, tp)),
        "-": hidden + mlp * model.ffn_hidden_size // tp,
        "E": hidden
        + model.num_experts * (hidden + traits.has_biases)
        + 2 * hidden * model.expert_latent_size
        + mlp * model.shared_ffn_hidden_size // tp
        + hidden * model.gates_shared_experts,
    }
    num_experts = letters.count("E") * model.num_experts // parallel.expert_parallel_size
    expert = (1 + model.halves) * model.expert_width * model.expert_size // parallel.expert_tensor_parallel_size
    experts = num_experts * (expert + (hidden + 2 * model.expert_size) * traits.has_biases)
    # Embeddings, which MTP layers also need, and output matrices. A tied matrix exists once on a single stage, and on
    # both the first and the last stage of a pipeline.
    matrices = is_first + (is_last and not (model.tie_embeddings and is_first))
    matrices += is_last and not is_first and model.mtp_layers > 0
    words, encoder = matrices * (padded_vocab_size(vocab_size) * hidden // tp), 0
    if is_first and model.encoder is not None:
        media, values = read_encoder(model.encoder)
        encoder = media.count(values, hidden)
    # The final norm is on the last stage, or with MTP layers, on the stage of the last regular layer.
    last = any(model.num_layers - 1 in chunk for chunk in parallel.chunks_of_stage(model.num_layers, stage))
    whole = sum(weights[part] for part in letters) + experts + words + encoder
    whole += hidden * (last if model.mtp_layers else is_last)
    # Each MTP layer adds a matrix and three norms.
    whole += is_last * model.mtp_layers * (2 * hidden * hidden // tp + 3 * hidden)
    if not model.lora_rank:
        return StageWeights(whole, experts, words, 0, whole - (0 if model.train_encoder else encoder), experts)
    adapters, of_experts = _count_adapters(model, letters, num_experts, tp)
    return StageWeights(whole, experts, words, adapters, adapters, of_experts)


def _count_attention(model: ModelConfig, tp: int) -> int:
    weights = sum(math.prod(sizes_on_rank(name, sizes, tp)) for name, sizes in model.attention_sizes.items())
    if model.kv_lora_rank:
        weights += model.kv_lora_rank + (model.q_lora_rank or 0)
    if model.traits.has_qkv_bias:
        weights += model.linear_sizes["linear_qkv"][1] // tp
    if model.traits.has_biases:
        weights += model.hidden_size + model.num_attention_heads // tp * model.traits.has_sinks
    if model.has_head_norms:
        weights += (model.query_size + model.key_size) // tp if model.traits.norms_span_heads else 2 * model.head_size
    return weights


def _count_scan(model: ModelConfig, tp: int) -> int:
    """Return the number of weights of a scan: both projections, the convolution of width 4, its heads and its norm.

    With the delta rule, the convolution has no biases, and all heads share one norm.
    """
    inner, states = model.scan_num_heads * model.scan_head_dim, model.scan_num_groups * model.scan_state_dim
    projections = sum(inputs * outputs for inputs, outputs in model.scan_sizes.values())
    if model.has_delta_rule:
        return (projections + 4 * (inner + 2 * states) + 2 * model.scan_num_heads) // tp + model.scan_head_dim
    return (projections + 5 * (inner + 2 * states) + 3 * model.scan_num_heads + inner) // tp


def _count_adapters(model: ModelConfig, letters: str, num_experts: int, tp: int) -> tuple[int, int]:
    """Return the number of adapter weights in layers with these parts, and their number in routed experts."""

    def mlp(inner: int, tp: int, width: int = model.hidden_size) -> int:
        gated, down = width + model.halves * inner // tp, inner // tp + width
        return gated * ("linear_fc1" in model.lora_targets) + down * ("linear_fc2" in model.lora_targets)

    routed = num_experts * mlp(model.expert_size, 1, model.expert_width)
    numbers = letters.count("-") * mlp(model.ffn_hidden_size, tp) + routed
    for part in "*" + SCANS:
        for name, sizes in model.adapted_in(part).items():
            numbers += letters.count(part) * sum(sizes_on_rank(name, sizes, tp))
    if model.shared_ffn_hidden_size:
        numbers += letters.count("E") * mlp(model.shared_ffn_hidden_size, tp)
    return model.lora_rank * numbers, model.lora_rank * routed


def layer_activation_bytes(
    model: ModelConfig, parallel: ParallelConfig, *, parts: str = "*-", kernels: Kernels = _OWN, load: float = 1.0
) -> float:
    """Return the bytes per token of the row that a layer with these parts keeps for the backward pass."""
    experts = expert_activation_bytes(model, parallel, kernels, load) if "E" in parts else 0.0
    item, tp = DTYPE_BYTES[model.number], parallel.tensor_parallel_size
    split = tp if parallel.sequence_parallel else 1
    if model.recompute == "full":
        return item * model.hidden_size / split
    if kernels.engine:
        return _engine_bytes(model, parallel, kernels, parts) + experts
    # MLP: outputs of the first matrix, output of the activation, and intermediate results that the activation keeps.
    each = 2.0 if model.halves == 1 else 3.0 if kernels.swiglu else 5.0
    keeps_mlp = {"-": "mlp", "E": "moe"}.get(parts[-1]) not in model.recomputed
    inner = each * item * model.ffn_hidden_size * ("-" in parts and keeps_mlp)
    # A norm keeps its input in float32, and its output if its weight is trained; the next matrix keeps its own input.
    whole = len(parts) * (((4.0 if model.lora_rank else 8.0) + item) * model.hidden_size + 4)
    if model.lora_rank and parts[-1] == "-" and keeps_mlp:
        inner += tp * item * model.lora_rank * len({"linear_fc1", "linear_fc2"} & set(model.lora_targets))
    if "*" in parts:
        of_all, of_rank = _attention_bytes(model, parallel)
        whole, inner = whole + of_all, inner + of_rank
    if has_scan(parts):
        inner += _scan_bytes(model) + tp * item * model.lora_rank * len(model.adapted_in(parts[0]))
    return whole / split + inner / tp + experts


def _scan_bytes(model: ModelConfig) -> float:
    """Return the bytes per token kept by the kernel of a scan and by the norm and the matrix that follow it.

    The kernels of the delta rule keep the output of the convolution, the queries and keys of each head with their
    norms, the products of a chunk of 64 keys, and the outputs.
    """
    item, pieces, inner = DTYPE_BYTES[model.number], model.scan_pieces, model.scan_num_heads * model.scan_head_dim
    if model.has_delta_rule:
        keys = 2 * model.scan_num_heads * (model.scan_state_dim + 32)
        return item * (sum(pieces) + sum(pieces[:3]) + keys + 3.0 * inner) + 16 * model.scan_num_heads
    return item * (sum(pieces) + 3.0 * inner) + 4 * model.scan_num_groups


def _attention_bytes(model: ModelConfig, parallel: ParallelConfig) -> tuple[float, float]:
    """Return the bytes per token that attention keeps besides its norm: on every rank, and over all ranks' heads."""
    item, tp = DTYPE_BYTES[model.number], parallel.tensor_parallel_size
    query, key, whole = model.query_size, model.key_size, 0.0
    divided = item * (4 * query + (3 if model.rotated_size else 2) * key) + 4.0 * model.num_attention_heads
    if parallel.context_parallel_size > 1:
        # Queries, and the keys and values of all ranks, are copies; the outputs of the projection are not kept.
        divided = item * (3 * query + 2 * parallel.context_parallel_size * key) + 4.0 * model.num_attention_heads
    if model.traits.has_sinks:
        # Queries, keys, values and the output of attention are copies with one more number per head.
        wide = 2 * (model.num_attention_heads + model.num_query_groups) * (model.head_size + 1)
        divided += item * (wide - 3 * (query + key))
    if model.kv_lora_rank:
        # Queries, keys, values padded to the same size, the output of attention, and the input of the output matrix.
        divided = item * (4 * query + model.value_size) + 4.0 * model.num_attention_heads
        for latent in filter(None, (model.q_lora_rank, model.kv_lora_rank)):
            whole += (8 + item) * latent + 4
        # In float32, the norm keeps its input, a view that keeps the whole output of the down-projection.
        whole += 4 * model.qk_rope_head_dim if item == 4 else 0
    if "core_attn" in model.recomputed:
        divided -= item * query + 4 * model.num_attention_heads
        divided -= item * (query - model.value_size) if model.kv_lora_rank else 0  # values, not padded
    divided += (4 + item) * query * model.traits.has_output_gate  # its sigmoid in float32, and the product
    if model.has_head_norms:
        divided += 8 * (query + key) + 4 * (model.num_attention_heads + model.num_query_groups)
    if model.lora_rank:
        # The weights of norms are frozen too; adapters keep their low-rank activations.
        divided -= 4 * (query + key) if model.has_head_norms else 0
        divided += tp * item * model.lora_rank * len(model.adapted_in("*"))
        whole -= 4 * sum(filter(None, (model.q_lora_rank, model.kv_lora_rank))) if model.kv_lora_rank else 0
    return whole, divided


def _input_bytes(model: ModelConfig) -> int:
    """Return the bytes per input number that a matrix product of Transformer Engine keeps for its weight gradient."""
    return 0 if model.lora_rank else DTYPE_BYTES[model.number] if model.fp8 == "off" else 1


def _engine_bytes(model: ModelConfig, parallel: ParallelConfig, kernels: Kernels, parts: str) -> float:
    """Return the bytes per token that a Transformer Engine layer with these parts keeps, without its experts."""
    item, query, key, kept = DTYPE_BYTES[model.number], model.query_size, model.key_size, _input_bytes(model)
    again = {*kernels.recomputed, *model.recomputed}
    tp, heads = parallel.tensor_parallel_size, model.num_attention_heads
    # A norm keeps its input and a float32 factor, and the next matrix product keeps the norm's output.
    whole = len(parts) * ((item + (0 if "norm" in again else kept)) * model.hidden_size + 4)
    divided = _scan_bytes(model) if has_scan(parts) else 0.0
    if "-" in parts and "mlp" not in again:
        # The gate keeps its two inputs, and the next matrix product its output; separate kernels keep two more.
        gate = 1 if model.halves == 1 else 2 if kernels.swiglu else 4
        divided += (gate * item + kept) * model.ffn_hidden_size
    if model.lora_rank:
        whole += (item * model.hidden_size) * ("linear_qkv" in model.lora_targets) * ("*" in parts)
        mlps = len({"linear_fc1", "linear_fc2"} & set(model.lora_targets)) * (parts[-1] in "-E")
        mlps *= {"-": "mlp", "E": "moe"}.get(parts[-1]) not in again
        mixers = sum(len(model.adapted_in(one)) for one in parts if one not in "-E")
        divided += tp * item * model.lora_rank * (mlps + mixers)
    if "*" not in parts:
        return whole / (tp if parallel.sequence_parallel else 1) + divided / tp
    # Queries and keys before and after rotation, values, the output of attention, and its sums of exponentials.
    turned = 3 if model.rotated_size else 2
    attended = item * turned * (query + key) + (0 if "core_attn" in again else 4 * heads)
    if model.kv_lora_rank:
        whole += (item + kept) * ((model.q_lora_rank or 0) + model.kv_lora_rank)
        attended = item * ((0 if "latent" in again else 4 * query) + model.value_size) + 4 * heads
    # An output gate keeps its sigmoid in float32 and the product.
    divided += attended + (4 + item) * query * model.traits.has_output_gate
    if kept < item:  # the output matrix keeps its own copy of its input, which attention keeps too
        divided += kept * model.value_size
    if model.has_head_norms:
        divided += item * (query + key) + 4 * (heads + model.num_query_groups)
    return whole / (tp if parallel.sequence_parallel else 1) + divided / tp


def expert_activation_bytes(model: ModelConfig, parallel: ParallelConfig, kernels: Kernels, load: float) -> float:
    """Return the bytes per token of the row that the router, the dispatcher and the experts of one layer keep.

    With T tokens per rank and even routing, the experts of a rank receive T * experts_per_token tokens, from this rank
    and from others, for any number of expert-parallel ranks. The busiest rank receives `load` times as many.
    """
    if "moe" in model.recomputed:
        return 0.0
    item, width, sent = DTYPE_BYTES[model.number], model.expert_width, model.experts_per_token
    tp, etp = parallel.tensor_parallel_size, parallel.expert_tensor_parallel_size
    # Logits, weights and choices of the router, its scores if they cover all experts, and the tensors of the z-loss;
    # each tensor-parallel rank has a part of the row.
    of_all = model.router_score == "sigmoid" or not model.router_normalize
    router = (9.0 + 4 * of_all + 4 * (model.z_loss > 0)) * model.num_experts
    # Tokens in expert order, their weights, and the indices of the permutations.
    came = sent * parallel.uneven_load(load)
    dispatched = came * (item * width + 32)
    inner = came * (8 if model.traits.swiglu_limit else 3 * model.halves) * item * model.expert_size
    if kernels.expert_swiglu:
        kept = _input_bytes(model)
        dispatched = came * (kept * width + 32)
        inner = came * (2 * item + (0 if "activation" in kernels.recomputed else kept)) * model.expert_size
    shared = (3 * model.halves - 1) * item * model.shared_ffn_hidden_size / tp
    shared *= "shared_experts" not in model.recomputed
    # Ranks that share an expert all have its tokens. The combined outputs are the input of the projection back to the
    # hidden size.
    joined = item * model.expert_latent_size * (not model.lora_rank)
    inner += came * item * model.lora_rank * len({"linear_fc1", "linear_fc2"} & set(model.lora_targets))
    return (router + joined + dispatched * etp + inner) / tp + shared


def plan_memory(model: ModelConfig, parallel: ParallelConfig, *, media_numbers: float = 0, **sizes: Any) -> Memory:
    """Return the memory of the fullest rank; `sizes` are the arguments of `plan_stage_memory` except `stage`.

    The encoder keeps `media_numbers` numbers for the media of a row, or if frozen, holds as many at once.
    """
    stages = range(parallel.pipeline_parallel_size)
    first, *others = (plan_stage_memory(model, parallel, stage=stage, **sizes) for stage in stages)
    if model.train_encoder:
        chunks = [0.0] * (parallel.num_chunks // len(stages) - 1)
        media_numbers = _waiting([media_numbers, *chunks], parallel, 0, sizes.get("microbatches", 1_000_000))
    first = replace(first, encoder=math.ceil(DTYPE_BYTES[model.number] * media_numbers))
    return max((first, *others), key=lambda memory: memory.total)


def plan_stage_memory(
    model: ModelConfig,
    parallel: ParallelConfig,
    *,
    stage: int,
    vocab_size: int,
    dp_size: int,
    max_tokens_per_rank: int,
    microbatches: int = 1_000_000,
    kernels: Kernels = _OWN,
    expert_load: float = 1.0,
    optimizer: OptimizerConfig = _PLAIN,
) -> Memory:
    """Return the memory of a rank of pipeline stage `stage`, 0 for the first.

    Args:
        max_tokens_per_rank: tokens of a microbatch on one rank; with context parallelism, of its slice.
        microbatches: number per step, which limits the microbatches whose activations a pipeline keeps.
        expert_load: tokens that the experts of the busiest rank receive, relative to an even share.
    """
    item = DTYPE_BYTES[model.number]
    weights = count_weights(model, parallel, stage=stage, vocab_size=vocab_size)
    gradient = 2 if parallel.gradient_dtype == "bfloat16" else 4
    state, moved = float(state_bytes(model, optimizer)), 0.0
    if share := optimizer.offload:
        # Megatron's optimizer keeps float32 gradients: copies of all on the host, and of bfloat16 ones on the GPU.
        state, moved = (1 - share) * (state + (4 if gradient == 2 else 0)), share * (state + 4)
    chunks = parts_of_stage(model, parallel, stage)
    count = partial(layer_activation_bytes, parallel=parallel, kernels=kernels, load=expert_load)
    plain = model.with_recompute("selective" if "core_attn" in model.recomputed else "none")
    kinds = {parts for chunk in chunks for parts in chunk}
    whole, kept = ({parts: count(one, parts=parts) for parts in kinds} for one in (plain, model))
    of_chunks = [_chunk_bytes(model, [whole[one] for one in chunk], [kept[one] for one in chunk]) for chunk in chunks]
    # Cosines and sines of the rotary angles exist once per row, and all layers share them.
    sizes = [kept + 2 * item * model.rotated_size / len(chunks) for kept, _ in of_chunks]
    once = max(again for _, again in of_chunks)
    most, logits = _loss_bytes(model, parallel, stage=stage, vocab_size=vocab_size, kernels=kernels, once=once)
    most += _waiting(sizes, parallel, stage, microbatches)
    # Combined passes keep a layer of the next row before they free one of the row before it. A pipeline has as many
    # rows when they begin as others at most.
    is_combined = parallel.overlap_experts and microbatches > 1
    most += is_combined * max(kept.values(), default=0.0)
    sent = math.ceil(max_tokens_per_rank * parallel.uneven_load(expert_load))
    fp8 = 0 if model.fp8 == "off" else weights.whole - weights.words  # layers only
    parts = dp_size if kernels.sharded else 1
    return Memory(
        stage=stage,
        weights=item * (weights.whole + weights.adapters - (fp8 if kernels.fp8_weights else 0)) // parts,
        gradients=gradient * weights.trained // parts,
        optimizer=_own_bytes(weights, parallel, state, dp_size),
        host=_own_bytes(weights, parallel, moved, dp_size),
        activations=math.ceil(most * max_tokens_per_rank),
        fp8=(kernels.fp8_weights or 2) * fp8 // parts,
        logits=math.ceil(logits * max_tokens_per_rank),
        dispatch=(1 + is_combined)
        * any("E" in parts for chunk in chunks for parts in chunk)
        * dispatch_bytes(model, parallel, tokens=sent, is_grouped=kernels.grouped),
        exchange=_EXCHANGES * item * max_tokens_per_rank * model.hidden_size * parallel.overlap_tensor_parallel,
    )


def _chunk_bytes(model: ModelConfig, whole: list[float], kept: list[float]) -> tuple[float, float]:
    """Return the bytes per token that the layers of a model chunk keep, and the additional peak of recomputation.

    `whole` and `kept` are the bytes per token of each layer without and with the model's recomputation.
    """
    num = len(whole) if model.recompute_layers is None else model.recompute_layers
    kept = kept[:num] + whole[num:]
    more = [one - kept[n] - sum(kept[n + 1 :]) for n, one in enumerate(whole)]
    if model.recompute == "full" and whole[:num]:
        # One layer at a time, with its own copy of the rotary angles; the layers that are kept whole are already freed.
        more = [max(whole[:num]) + 4 * model.rotated_size - sum(whole[num:])]
    return sum(kept), max([0.0, *more])


def _waiting(sizes: list[float], parallel: ParallelConfig, stage: int, microbatches: int) -> float:
    """Return the peak size of microbatches that wait for their backward pass on a stage, in Megatron-Core's order.

    `sizes` are per microbatch, by model chunk. A chunk runs as many microbatches as there are stages before the next.
    """
    stages, passes = parallel.pipeline_parallel_size, microbatches * len(sizes)
    if len(sizes) == 1:
        return min(microbatches, stages - stage) * sizes[0]
    first = min(passes, 2 * (stages - stage) - 1 + (len(sizes) - 1) * stages)
    order = [size for size in sizes for _ in range(stages)]
    forward, backward = cycle(order), cycle(reversed(order))
    held = sum(islice(forward, first))
    changes = (next(forward) - next(backward) for _ in range(min(len(order), passes - first)))
    return max(accumulate(changes, initial=held))


def _loss_bytes(
    model: ModelConfig, parallel: ParallelConfig, *, stage: int, vocab_size: int, kernels: Kernels, once: float
) -> tuple[float, float]:
    """Return the bytes per token that recomputation (`once`) and the loss keep, and those of the logits' gradient."""
    if stage < parallel.pipeline_parallel_size - 1:
        return once, 0.0
    item, tp, words = DTYPE_BYTES[model.number], parallel.tensor_parallel_size, padded_vocab_size(vocab_size)
    # The final norm, and the input of the output matrix, kept for the weight gradient.
    norm = 2 * item if kernels.engine else 4 if model.lora_rank else 8 + item
    # Exponentials of the logits in float32, which the fused loss also keeps once.
    last = (norm * model.hidden_size + 4) / (tp if parallel.sequence_parallel else 1) + (4 * words / tp + 17)
    # In float32, the gradient replaces the exponentials in place.
    logits = item * words / tp if item < 4 else 0.0
    # The loss's tensors are freed before the first layer is recomputed, except while MTP layers are recomputed.
    if model.mtp_layers:
        # Two norms before the matrix (with full recomputation, the embedding instead), one norm after the layer, and
        # the inputs of the matrix and of the output matrix.
        hidden = model.hidden_size
        norms = item * hidden if model.recompute == "full" else 2 * (8 * hidden + 4) + 2 * item * hidden
        further = (norms + 8 * hidden + 4 + item * hidden) / (tp if parallel.sequence_parallel else 1)
        # The token whose embedding is concatenated, its label, and its loss mask.
        return model.mtp_layers * (further + 4 * words / tp + 17 + 12) + once + last, logits
    return max(once, last), max(once, last + logits) - max(once, last)


def state_bytes(model: ModelConfig, optimizer: OptimizerConfig) -> int:
    """Return the bytes of optimizer state per weight: Adam's two moments, and a float32 copy of bfloat16 weights."""
    return 2 * DTYPE_BYTES[optimizer.moments_dtype] + (0 if model.number == "float32" else 4)


def _own_bytes(weights: StageWeights, parallel: ParallelConfig, each: float, dp_size: int) -> int:
    """Return the bytes of optimizer state on a rank, at `each` bytes per trained weight of its stage."""
    shares = expert_shares = 1
    if parallel.distributed_optimizer:
        shares = dp_size * parallel.context_parallel_size
        expert_shares = parallel.expert_copies(dp_size * parallel.model_ranks)
    others = each * (weights.trained - weights.trained_experts)
    return math.ceil(others / shares) + math.ceil(each * weights.trained_experts / expert_shares)


def plan_checkpoint(
    model: ModelConfig,
    parallel: ParallelConfig,
    memory: Memory,
    optimizer: OptimizerConfig,
    ranks: int,
    vocab_size: int,
) -> Checkpoint:
    """Return the size of a checkpoint: weights and optimizer state, once each, without a gather.

    Data-parallel ranks divide the replicated state evenly among themselves, with or without the distributed optimizer.
    """
    item, state = DTYPE_BYTES[model.number], state_bytes(model, optimizer)
    whole = count_weights(model, ParallelConfig(), stage=0, vocab_size=vocab_size)
    here = count_weights(model, parallel, stage=memory.stage, vocab_size=vocab_size)
    dp_size, expert_weights = parallel.dp_size(ranks), item * here.experts
    copies = dp_size * parallel.context_parallel_size
    own = math.ceil((memory.weights - expert_weights) / copies) + expert_weights // parallel.expert_copies(ranks)
    saved = _own_bytes(here, parallel, state, dp_size)
    own += saved if parallel.distributed_optimizer else math.ceil(saved / copies)
    return Checkpoint(item * (whole.whole + whole.adapters) + state * whole.trained, own)
