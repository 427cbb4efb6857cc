"""Memory of a rank: weights, gradients, optimizer state, and the activations that the layers keep.

Activations are those that layers keep for the backward pass, tensor by tensor. For this project's own layers and for
Megatron's fused SwiGLU and loss, tests compare the formula against what PyTorch saves, on one rank and on ranks of
every layout; only the masks of attention with context parallelism, which grow with the square of a sequence, are left
out. Transformer Engine's layers keep less: a norm keeps its input and output in the model's dtype alone, and attention
its output once. That is read in its source (`pytorch/module/layernorm_linear.py`, `pytorch/attention`), and known here
for attention that is neither latent nor with sinks, without adapters; elsewhere the larger figures of own layers are
planned.
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

# Share of a GPU's memory for CUDA's context, NCCL's buffers and fragments of the allocator.
ROOM = 0.1
# Buffers of Transformer Engine, each of a row's hidden states: three for each of the four linear layers' products.
_EXCHANGES = 12


# Of a rank's memory that only some runs have.
_PARTS = {"fp8": "weights in 8 bits", "logits": "gradient of the logits", "dispatch": "tokens to experts"}
_PARTS |= {"exchange": "tensor-parallel exchanges", "encoder": "activations of the encoder"}


@dataclass(frozen=True)
class Memory:
    """Bytes on the fullest rank, and its pipeline stage.

    Attributes:
        fp8: weights of layers in 8 bits, and the same transposed for the backward pass, kept from one microbatch to the
            next.
        logits: gradient of the logits, at the start of the last stage's backward pass.
        dispatch: buffers of tokens on their way to experts and back, and the workspace of grouped products.
        exchange: buffers of tensor-parallel exchanges that overlap with products.
        encoder: activations of the encoder, on the first stage.
        host: of the optimizer, in the memory of the rank's host, which is no part of the total.
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
        """Bytes on the rank's GPU by name: those of every run, and those of some where they are not 0."""
        sizes = {_PARTS.get(name, name): size for name, size in vars(self).items() if name not in ("stage", "host")}
        return {name: size for name, size in sizes.items() if size or name not in _PARTS.values()}

    @property
    def total(self) -> int:
        return sum(self.parts.values())

    def fits(self, gpu_bytes: float | None) -> bool:
        """Return True if a GPU, None for any, has this memory, with room for CUDA, NCCL and the allocator."""
        return gpu_bytes is None or self.total <= (1 - ROOM) * gpu_bytes

    def explain(self, gpu_bytes: float) -> str:
        """Return the arithmetic of this memory beside what a GPU has for tensors."""
        gib = 2**30
        parts = ", ".join(f"{name} {size / gib:,.1f}" for name, size in self.parts.items())
        return f"{self.total / gib:,.1f} GiB of {(1 - ROOM) * gpu_bytes / gib:,.1f} usable ({parts})"


@dataclass(frozen=True)
class Kernels:
    """Fused layers of a model; the default is what a CPU has.

    Attributes:
        engine: layers are those of Transformer Engine.
        swiglu: the gate and its product are one kernel.
        expert_swiglu: so is the gate of experts. No setting chooses this and what follows: other programs have it.
        fp8_weights: bytes of a weight in 8 bits alone: 2, or 1 if it is transposed when needed; 0 for bfloat16 too.
        recomputed: parts of layers that are computed again: `norm`, `activation` of experts, `latent` (up-projections).
        sharded: weights and gradients are divided over data-parallel ranks.
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
        """Return the fused layers that a model's settings choose on a GPU that has Transformer Engine."""
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
        whole: all but adapters.
        experts: of them, those of routed experts.
        words: of them, those of embeddings and output matrices.
        trained, trained_experts: adapters alone where there are some.
    """

    whole: int
    experts: int
    words: int
    adapters: int
    trained: int
    trained_experts: int

    def used_by_token(self, model: ModelConfig) -> int:
        """Return the number of weights, of the whole model, without those of experts that one token is not sent to."""
        idle = model.num_experts - model.experts_per_token
        return self.whole - self.experts * idle // max(1, model.num_experts)


@dataclass(frozen=True)
class Checkpoint:
    """Bytes of a checkpoint: of all files together, and of the rank that writes and holds on its host the most."""

    total_bytes: int
    own_bytes: int


_OWN = Kernels()
_PLAIN = OptimizerConfig()


def parts_of_stage(model: ModelConfig, parallel: ParallelConfig, stage: int) -> list[list[str]]:
    """Return the parts of each layer, by model chunk, of a pipeline stage; MTP layers follow the last chunk's."""
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
    # Each with its norm; routed experts are counted apart.
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
    # Embeddings, which MTP layers need too, and output matrices. A tied matrix exists once on a single stage, and on
    # both ends of a pipeline.
    matrices = is_first + (is_last and not (model.tie_embeddings and is_first))
    matrices += is_last and not is_first and model.mtp_layers > 0
    words, encoder = matrices * (padded_vocab_size(vocab_size) * hidden // tp), 0
    if is_first and model.encoder is not None:
        media, values = read_encoder(model.encoder)
        encoder = media.count(values, hidden)
    # The last norm is on the last stage, with MTP layers on that of the last layer.
    last = any(model.num_layers - 1 in chunk for chunk in parallel.chunks_of_stage(model.num_layers, stage))
    whole = sum(weights[part] for part in letters) + experts + words + encoder
    whole += hidden * (last if model.mtp_layers else is_last)
    # MTP layers have a matrix and three norms more.
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
    """Return the weights of a layer with a scan: both projections, the convolution of width 4, its heads, and its norm.

    With the delta rule the convolution has no biases, and heads of all ranks share the norm.
    """
    inner, states = model.scan_num_heads * model.scan_head_dim, model.scan_num_groups * model.scan_state_dim
    projections = sum(inputs * outputs for inputs, outputs in model.scan_sizes.values())
    if model.has_delta_rule:
        return (projections + 4 * (inner + 2 * states) + 2 * model.scan_num_heads) // tp + model.scan_head_dim
    return (projections + 5 * (inner + 2 * states) + 3 * model.scan_num_heads + inner) // tp


def _count_adapters(model: ModelConfig, letters: str, num_experts: int, tp: int) -> tuple[int, int]:
    """Return the numbers of adapter weights of layers with these parts, and of those that routed experts have."""

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
    # Of an MLP: what the first matrix gives, what the activation makes of it, and what it keeps.
    each = 2.0 if model.halves == 1 else 3.0 if kernels.swiglu else 5.0
    keeps_mlp = {"-": "mlp", "E": "moe"}.get(parts[-1]) not in model.recomputed
    inner = each * item * model.ffn_hidden_size * ("-" in parts and keeps_mlp)
    # A norm keeps its input in float32, and its output if its weight is trained; the matrix after it its own input.
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
    """Return the bytes per token that the kernel of a scan keeps, and the norm and the matrix after it.

    The kernels of the delta rule keep what the convolution gives, queries and keys of each head with their norms, the
    products of a chunk of 64 keys, and the outputs.
    """
    item, pieces, inner = DTYPE_BYTES[model.number], model.scan_pieces, model.scan_num_heads * model.scan_head_dim
    if model.has_delta_rule:
        keys = 2 * model.scan_num_heads * (model.scan_state_dim + 32)
        return item * (sum(pieces) + sum(pieces[:3]) + keys + 3.0 * inner) + 16 * model.scan_num_heads
    return item * (sum(pieces) + 3.0 * inner) + 4 * model.scan_num_groups


def _attention_bytes(model: ModelConfig, parallel: ParallelConfig) -> tuple[float, float]:
    """Return the bytes per token that attention keeps beside its norm: on every rank, and of all ranks' heads."""
    item, tp = DTYPE_BYTES[model.number], parallel.tensor_parallel_size
    query, key, whole = model.query_size, model.key_size, 0.0
    divided = item * (4 * query + (3 if model.rotated_size else 2) * key) + 4.0 * model.num_attention_heads
    if parallel.context_parallel_size > 1:
        # Queries, and keys and values of all ranks, are copies; what the matrix made of them is not kept.
        divided = item * (3 * query + 2 * parallel.context_parallel_size * key) + 4.0 * model.num_attention_heads
    if model.traits.has_sinks:
        # Queries, keys, values and what attention gives have one number more a head, and are copies.
        wide = 2 * (model.num_attention_heads + model.num_query_groups) * (model.head_size + 1)
        divided += item * (wide - 3 * (query + key))
    if model.kv_lora_rank:
        # Queries, keys, values padded to their size, what attention gives, and the input of the output matrix.
        divided = item * (4 * query + model.value_size) + 4.0 * model.num_attention_heads
        for latent in filter(None, (model.q_lora_rank, model.kv_lora_rank)):
            whole += (8 + item) * latent + 4
        # In float32 the norm keeps its input, which is a part of what the down-projection gives.
        whole += 4 * model.qk_rope_head_dim if item == 4 else 0
    if "core_attn" in model.recomputed:
        divided -= item * query + 4 * model.num_attention_heads
        divided -= item * (query - model.value_size) if model.kv_lora_rank else 0  # values, not padded
    divided += (4 + item) * query * model.traits.has_output_gate  # its sigmoid in float32, and the product
    if model.has_head_norms:
        divided += 8 * (query + key) + 4 * (model.num_attention_heads + model.num_query_groups)
    if model.lora_rank:
        # The norms' weights are frozen too; adapters keep their inner tokens.
        divided -= 4 * (query + key) if model.has_head_norms else 0
        divided += tp * item * model.lora_rank * len(model.adapted_in("*"))
        whole -= 4 * sum(filter(None, (model.q_lora_rank, model.kv_lora_rank))) if model.kv_lora_rank else 0
    return whole, divided


def _input_bytes(model: ModelConfig) -> int:
    """Return the bytes that a product of Transformer Engine keeps of a number of its input, for its weight."""
    return 0 if model.lora_rank else DTYPE_BYTES[model.number] if model.fp8 == "off" else 1


def _engine_bytes(model: ModelConfig, parallel: ParallelConfig, kernels: Kernels, parts: str) -> float:
    """Return the same of a layer of Transformer Engine with these parts."""
    item, query, key, kept = DTYPE_BYTES[model.number], model.query_size, model.key_size, _input_bytes(model)
    again = {*kernels.recomputed, *model.recomputed}
    tp, heads = parallel.tensor_parallel_size, model.num_attention_heads
    # A norm keeps its input and a float32 factor, and the product after it its output.
    whole = len(parts) * ((item + (0 if "norm" in again else kept)) * model.hidden_size + 4)
    divided = _scan_bytes(model) if has_scan(parts) else 0.0
    if "-" in parts and "mlp" not in again:
        # The gate keeps its two inputs, and its product the output; separate kernels keep two more.
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
    # Queries and keys before and after they are turned, values, the output of attention, and its sums of exponents.
    turned = 3 if model.rotated_size else 2
    attended = item * turned * (query + key) + (0 if "core_attn" in again else 4 * heads)
    if model.kv_lora_rank:
        whole += (item + kept) * ((model.q_lora_rank or 0) + model.kv_lora_rank)
        attended = item * ((0 if "latent" in again else 4 * query) + model.value_size) + 4 * heads
    # Of a gate of the output, its sigmoid in float32, and the product.
    divided += attended + (4 + item) * query * model.traits.has_output_gate
    if kept < item:  # of the input of the output matrix, which attention keeps too
        divided += kept * model.value_size
    if model.has_head_norms:
        divided += item * (query + key) + 4 * (heads + model.num_query_groups)
    return whole / (tp if parallel.sequence_parallel else 1) + divided / tp


def expert_activation_bytes(model: ModelConfig, parallel: ParallelConfig, kernels: Kernels, load: float) -> float:
    """Return the bytes per token of the row that the router, the dispatcher and the experts of one layer keep.

    With T tokens on a rank and even routing, its experts get T * experts_per_token of them, whatever the number of
    expert-parallel ranks: their own and those of others. The busiest rank gets `load` times as many.
    """
    if "moe" in model.recomputed:
        return 0.0
    item, width, sent = DTYPE_BYTES[model.number], model.expert_width, model.experts_per_token
    tp, etp = parallel.tensor_parallel_size, parallel.expert_tensor_parallel_size
    # Logits, weights and choice of the router, its scores where they are of all experts, and what the z-loss keeps;
    # ranks of a tensor-parallel group have a part of the row each.
    of_all = model.router_score == "sigmoid" or not model.router_normalize
    router = (9.0 + 4 * of_all + 4 * (model.z_loss > 0)) * model.num_experts
    # Tokens in the order of experts, their weights, and the indices of the permutations.
    came = sent * parallel.uneven_load(load)
    dispatched = came * (item * width + 32)
    inner = came * (8 if model.traits.swiglu_limit else 3 * model.halves) * item * model.expert_size
    if kernels.expert_swiglu:
        kept = _input_bytes(model)
        dispatched = came * (kept * width + 32)
        inner = came * (2 * item + (0 if "activation" in kernels.recomputed else kept)) * model.expert_size
    shared = (3 * model.halves - 1) * item * model.shared_ffn_hidden_size / tp
    shared *= "shared_experts" not in model.recomputed
    # Ranks that share an expert have all of its tokens.
    # What comes back is the input of the projection to the size of hidden states.
    joined = item * model.expert_latent_size * (not model.lora_rank)
    inner += came * item * model.lora_rank * len({"linear_fc1", "linear_fc2"} & set(model.lora_targets))
    return (router + joined + dispatched * etp + inner) / tp + shared


def plan_memory(model: ModelConfig, parallel: ParallelConfig, *, media_numbers: float = 0, **sizes: Any) -> Memory:
    """Return the memory of the fullest rank; further arguments are those of `plan_stage_memory` without `stage`.

    The encoder keeps `media_numbers` for the media of a row, or has them at a time if it is frozen.
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
        max_tokens_per_rank: of a microbatch on one rank; with context parallelism, its slice.
        microbatches: of a step; a pipeline keeps the activations of up to as many as it has stages.
        expert_load: tokens that the experts of the busiest rank get, over an even share.
    """
    item = DTYPE_BYTES[model.number]
    weights = count_weights(model, parallel, stage=stage, vocab_size=vocab_size)
    gradient = 2 if parallel.gradient_dtype == "bfloat16" else 4
    state, moved = float(state_bytes(model, optimizer)), 0.0
    if share := optimizer.offload:
        # Megatron's optimizer keeps float32 gradients: on the host copies of all, on the GPU copies of bfloat16 ones.
        state, moved = (1 - share) * (state + (4 if gradient == 2 else 0)), share * (state + 4)
    chunks = parts_of_stage(model, parallel, stage)
    count = partial(layer_activation_bytes, parallel=parallel, kernels=kernels, load=expert_load)
    plain = model.with_recompute("selective" if "core_attn" in model.recomputed else "none")
    kinds = {parts for chunk in chunks for parts in chunk}
    whole, kept = ({parts: count(one, parts=parts) for parts in kinds} for one in (plain, model))
    of_chunks = [_chunk_bytes(model, [whole[one] for one in chunk], [kept[one] for one in chunk]) for chunk in chunks]
    # Cosine and sine of the rotary angles are of a row, and all layers share them.
    sizes = [kept + 2 * item * model.rotated_size / len(chunks) for kept, _ in of_chunks]
    once = max(again for _, again in of_chunks)
    most, logits = _loss_bytes(model, parallel, stage=stage, vocab_size=vocab_size, kernels=kernels, once=once)
    most += _waiting(sizes, parallel, stage, microbatches)
    # Combined passes keep a layer of the next row before they free one of the row before it. A pipeline has as many
    # rows when they begin as others at most.
    is_combined = parallel.overlap_experts and microbatches > 1
    most += is_combined * max(kept.values(), default=0.0)
    sent = math.ceil(max_tokens_per_rank * parallel.uneven_load(expert_load))
    fp8 = 0 if model.fp8 == "off" else weights.whole - weights.words  # of layers alone
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
    """Return the bytes per token that the layers of a model chunk keep, and those that are computed again at a time.

    Each layer has `whole` bytes without the model's recomputation, and `kept` with it.
    """
    num = len(whole) if model.recompute_layers is None else model.recompute_layers
    kept = kept[:num] + whole[num:]
    more = [one - kept[n] - sum(kept[n + 1 :]) for n, one in enumerate(whole)]
    if model.recompute == "full" and whole[:num]:
        # One layer at a time, and the angles that each layer is given again, when what the others kept is gone.
        more = [max(whole[:num]) + 4 * model.rotated_size - sum(whole[num:])]
    return sum(kept), max([0.0, *more])


def _waiting(sizes: list[float], parallel: ParallelConfig, stage: int, microbatches: int) -> float:
    """Return the most that a stage keeps of microbatches whose backward pass is to come, as Megatron-Core orders them.

    `sizes` are of a microbatch, by model chunk. As many microbatches as there are stages pass a chunk before the next.
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
    """Return the bytes per token that layers and the loss keep once, and those of the gradient of the logits."""
    if stage < parallel.pipeline_parallel_size - 1:
        return once, 0.0
    item, tp, words = DTYPE_BYTES[model.number], parallel.tensor_parallel_size, padded_vocab_size(vocab_size)
    # The last norm, and the input of the output matrix for its gradient.
    norm = 2 * item if kernels.engine else 4 if model.lora_rank else 8 + item
    # Exponents of the logits in float32, which the fused loss keeps once too.
    last = (norm * model.hidden_size + 4) / (tp if parallel.sequence_parallel else 1) + (4 * words / tp + 17)
    # In float32, the gradient takes the place of the exponents.
    logits = item * words / tp if item < 4 else 0.0
    # What the loss keeps is gone before the first layer is computed again; layers of MTP come while it is there.
    if model.mtp_layers:
        # Two norms before the matrix (with full recomputation the embedding instead) and one after the layer, the
        # matrix's input, and that of the output matrix.
        hidden = model.hidden_size
        norms = item * hidden if model.recompute == "full" else 2 * (8 * hidden + 4) + 2 * item * hidden
        further = (norms + 8 * hidden + 4 + item * hidden) / (tp if parallel.sequence_parallel else 1)
        # The token that is joined, its label, and the mask of its loss.
        return model.mtp_layers * (further + 4 * words / tp + 17 + 12) + once + last, logits
    return max(once, last), max(once, last + logits) - max(once, last)


def state_bytes(model: ModelConfig, optimizer: OptimizerConfig) -> int:
    """Return the bytes of a weight's optimizer state: Adam's two moments, and a float32 copy of other weights."""
    return 2 * DTYPE_BYTES[optimizer.moments_dtype] + (0 if model.number == "float32" else 4)


def _own_bytes(weights: StageWeights, parallel: ParallelConfig, each: float, dp_size: int) -> int:
    """Return the bytes of optimizer state that a rank has if each of the trained weights of its stage has `each`."""
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

    The ranks of a data-parallel group share what they have in common evenly, whether the optimizer is distributed or
    not.
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
