"""Work of an epoch in steps, microbatches and FLOPs, and an estimate of the time of a step.

The estimate adds up the matrix products, memory traffic, communication and kernel launches of a rank, layer by layer
and for each pipeline stage. It is within 10% of ten published runs, half of which were used to set its constants
(`tests/unit/plan`). The first steps of a run show the real MFU, and `harness plan mfu=...` uses it instead. Waits for
ranks with more tokens and for the loader are not counted (BENCHMARKS.md gives the wait for the loader).
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial

import numpy as np

from harness.errors import ConfigError
from harness.plan.encoders import EncoderWork, encoder_work
from harness.plan.families.base import has_scan
from harness.plan.layout import DIVIDED_BY_COLUMNS, DTYPE_BYTES, ON_EVERY_RANK, ParallelConfig, padded_vocab_size
from harness.plan.memory import Kernels, count_weights, layer_activation_bytes, parts_of_stage
from harness.plan.model import ModelConfig
from harness.plan.model_checks import scan_numbers
from harness.records import Float64Array, Int64Array
from harness.schedule import SequenceCost

# A backward pass costs two forward passes; in attention it costs two and a half, because it computes the scores again.
# Recomputation costs one more.
_PASSES, _ATTENTION_PASSES = 3.0, 3.5
# Kernels per microbatch of a dense layer and outside layers, as counted by `python -m tests.benchmarks kernels`, and of
# a router with its permutations, as counted in Megatron-Core's sources.
LAYER_KERNELS, OTHER_KERNELS, _ROUTER_KERNELS = 93, 95, 60
# Multiprocessors that NCCL is assumed to occupy for sends and receives.
_SENDERS = 16
# Rows and columns of the output tile that cuBLAS's Hopper kernels assign to one multiprocessor.
_TILE = (128, 256)
# FLOPs that an H100 computes, at 60% of its 989 TFLOP/s, while its network port sends one byte at 40 GB/s.
FLOPS_PER_BYTE = 15_000
# The same at 340 GB/s within a node, which suffices for scans: few ranks can divide their heads.
_FLOPS_PER_BYTE_OF_NODE = 1_800


@dataclass(frozen=True)
class Machine:
    """A node of GPUs; the defaults are an H100 SXM node with a 400 Gb/s port per GPU.

    Sources: NVIDIA's H100 datasheet (989 TFLOP/s dense in bfloat16, twice that in FP8, 132 multiprocessors, 3.35 TB/s
    of memory bandwidth, NVLink at 450 GB/s each way) and DGX H100 datasheet (eight 400 Gb/s ports, 50 GB/s each);
    kernels and collectives reach about three quarters of these. Gaps: A. Gray, "Getting Started with CUDA Graphs",
    NVIDIA 2019, where kernels of 2.9 us took 3.8 us each. Launches: Megatron-Bridge 26.02 took 0.42 s for 4,096 tokens
    of Qwen3 30B-A3B on B200 GPUs, which compute four times as many tokens in 0.61 s, so the host took this time to
    launch 12,000 kernels. Messages: NCCL's smallest collectives take 10 to 30 us in nccl-tests; an all-to-all across
    nodes counts as five. DeepEP's README reports 43 to 58 GB/s between nodes. The shares and `tile_s` were fitted to
    published runs (`tests/unit/plan`), not measured on a cluster of this project.

    Attributes:
        peak_flops: dense peak of a GPU in the dtype of the matrices, in FLOP/s.
        matmul_share: fraction of the peak that matrix products reach when they keep all multiprocessors busy.
        attention_share: fraction of the peak that fused attention reaches with very wide heads.
        multiprocessors: multiprocessors per GPU; a matrix product computes this many tiles per round.
        tile_s: time to start the tiles of a round.
        memory_bytes_per_s: memory bandwidth of a GPU that streaming kernels reach.
        node_bytes_per_s: one-way bandwidth that collectives reach between a GPU and the other GPUs of its node.
        fabric_bytes_per_s: the same for a GPU's own network port.
        launch_s: host time to launch a kernel, including the Python code around it; a faster GPU waits for the host.
        gap_s: time between two kernels on a GPU.
        message_s: latency of a collective or an exchange of any size.
        fp8_speedup: speed of an FP8 tile relative to a 16-bit tile; casts are counted separately.
        all_to_all_share: fraction of the port's bandwidth reached by sending tokens to experts without DeepEP.
        host_bytes_per_s: bandwidth of copies from a GPU to pinned memory; PCIe 5 supports 64 GB/s each way.
    """

    peak_flops: float = 989e12
    matmul_share: float = 0.70
    attention_share: float = 0.67
    memory_bytes_per_s: float = 2.7e12
    node_bytes_per_s: float = 340e9
    fabric_bytes_per_s: float = 40e9
    ranks: int = 8
    launch_s: float = 35e-6
    gap_s: float = 1e-6
    message_s: float = 20e-6
    fp8_speedup: float = 2.0
    host_bytes_per_s: float = 50e9
    multiprocessors: int = 132
    tile_s: float = 1e-6
    all_to_all_share: float = 0.85

    def check(self, ranks: int, device: str) -> None:
        """Raise ConfigError, with the arithmetic, if ranks on GPUs need several nodes and do not fill the last one."""
        nodes, rest = divmod(ranks, self.ranks)
        if device != "cpu" and nodes and rest:
            what = f"{ranks} ranks fill {nodes} node{'s' * (nodes > 1)} of {self.ranks} GPUs, and {rest} would be on "
            what += "another: a job has the same number of ranks on each node"
            fix = f"parallel.ranks={nodes * self.ranks} or {(nodes + 1) * self.ranks}, or a gpus_per_node that "
            fix += f"divides {ranks}"
            raise ConfigError(what, where="parallel.ranks, gpus_per_node", fix=fix)

    def link(self, group: int, stride: int) -> float:
        """Return the bytes per second that each of `group` ranks, `stride` apart, sends around their ring."""
        if group * stride <= self.ranks:
            return self.node_bytes_per_s
        # A ring leaves each node once, through the ports of all its members on that node.
        return min(self.node_bytes_per_s, self.fabric_bytes_per_s * max(1, self.ranks // stride))


@dataclass(frozen=True)
class Work:
    """Work of one epoch.

    Attributes:
        microbatches: average number of microbatches per rank and step.
        linear_flops, attention_flops: FLOPs of a step's forward pass over all ranks, without padding.
        padding: fraction of the tokens of all rows that is padding added by `parallel.static_rows`.
        encoder_flops: FLOPs of a step's media over all ranks, including the backward pass if encoders are trained.
        shares: for each group of sequences of similar length, its share of all tokens and of all squared lengths.
    """

    steps: int
    microbatches: int
    tokens: float
    linear_flops: float
    attention_flops: float
    padding: float = 0.0
    encoder_flops: float = 0.0
    shares: tuple[tuple[float, float], ...] = ((1.0, 1.0),)

    @property
    def model_flops(self) -> float:
        """FLOPs of a step, forward and backward, without recomputation."""
        return 3 * (self.linear_flops + self.attention_flops) + self.encoder_flops

    def mfu(self, step_s: float, *, ranks: int, peak_flops: float) -> float:
        """Return the model FLOPs utilization of a step: `model_flops` relative to the peak of all GPUs."""
        return self.model_flops / (step_s * ranks * peak_flops)


def sequence_cost(model: ModelConfig, parallel: ParallelConfig | None = None, *, on_gpu: bool = False) -> SequenceCost:
    """Return the forward FLOPs of a sequence per token and per token squared, and its exchanges as equivalent FLOPs.

    A token costs 2 FLOPs per weight of the output matrix and of the layers, counting only the experts that it is routed
    to. Attention adds, per layer, the scores and weighted values of half the L x L square (it is causal):
    L^2 * heads * (head_dim of keys + head_dim of values). A layer with a window adds them for a whole window of keys
    per token, even in shorter sequences. Exchanging a token's keys and values over the network, or its features within
    a node in a layer with a scan, counts as the FLOPs of large matrix products on an H100 in the same time. The ranks
    that hold a copy of the model (by default, one) do not divide the encoder, so all of them wait for it. A frozen
    encoder has no backward pass, which costs two forward passes.

    Source: the counting of Narayanan et al., "Efficient Large-Scale Language Model Training on GPU Clusters", 2021,
    without recomputation.
    """
    # Each layer that predicts a further token has a matrix before it, and the output matrix after it.
    further = model.mtp_layers
    layers = sum(model.active_weights) + further * 2 * model.hidden_size**2
    output = (1 + further) * model.hidden_size * (model.vocab_size or 0)
    attending = [layer for layer, parts in enumerate(model.all_parts) if "*" in parts]
    windows = [window for layer in attending if (window := model.window(layer)) is not None]
    sizes = model.query_size + model.value_size
    quadratic = 1.0 * (len(attending) - len(windows)) * sizes
    values = model.v_head_dim / model.head_size if model.kv_lora_rank else 1
    sent = len(attending) * DTYPE_BYTES["bfloat16"] * (1 + values) * model.key_size
    scans = sum(map(has_scan, model.all_parts))
    linear = 2.0 * (layers + output + scans * scan_products(model) + sum(windows) * sizes)
    swapped = scans * DTYPE_BYTES["bfloat16"] * (sum(model.scan_pieces) + model.scan_num_heads * model.scan_head_dim)
    parallel, encode = parallel or ParallelConfig(), None
    if model.encoder is not None:
        scale = parallel.model_ranks * (1.0 if model.train_encoder else 1 / 3)
        encode = partial(_encoder_flops, model.encoder, model.hidden_size, scale)
    return SequenceCost(
        linear=linear,
        quadratic=quadratic,
        exchange=FLOPS_PER_BYTE * sent,
        swap=_FLOPS_PER_BYTE_OF_NODE * swapped,
        most_ranks=scan_ranks(model, parallel.tensor_parallel_size, on_gpu=on_gpu) if scans else None,
        encode=encode,
    )


def scan_ranks(model: ModelConfig, tp_size: int, *, on_gpu: bool) -> int:
    """Return the largest number of ranks, a power of two, that can divide a tensor-parallel rank's heads and groups.

    On a GPU, Mamba-2's convolution requires a multiple of 8 numbers per token (causal-conv1d).
    """
    heads, groups, ranks = model.scan_num_heads // tp_size, model.scan_num_groups // tp_size, 1
    while heads % (2 * ranks) == 0 and (groups % (2 * ranks) == 0 or 2 * ranks % groups == 0):
        if on_gpu and not model.has_delta_rule and scan_numbers(model, tp_size, 2 * ranks) % 8:
            break
        ranks *= 2
    return ranks


def _encoder_flops(encoder: str, hidden_size: int, scale: float, tokens: Float64Array) -> Float64Array:
    return scale * encoder_work(encoder, hidden_size, tokens).flops


def scan_products(model: ModelConfig) -> float:
    """Return the multiplications per token of a scan in chunks of 128 tokens (Mamba-2) or 64 (gated delta rule).

    Inside a chunk, each token interacts with half of the others, once per group over the state size, and once per head
    over the value size. Between chunks, it is added to the state and read from it. With the delta rule, keys are also
    multiplied by keys, values and keys are corrected by the preceding ones, and the state is read once more.

    Source: Dao and Gu, "Transformers are SSMs", 2024, section 6; Yang et al., "Gated Delta Networks", 2024, section
    3.3.
    """
    inner, states = model.scan_num_heads * model.scan_head_dim, model.scan_num_groups * model.scan_state_dim
    if model.has_delta_rule:
        keys = model.scan_num_heads * model.scan_state_dim
        return 32.0 * (states + 2 * keys + 2 * inner) + 3 * inner * model.scan_state_dim
    return 64.0 * (states + inner) + 2 * inner * model.scan_state_dim


def count_microbatches(tokens: float, tokens_at_once: int, group_size: int) -> int:
    """Return the number of microbatches of `tokens_at_once` tokens in a step, a multiple of `group_size`."""
    return max(1, math.ceil(tokens / tokens_at_once / group_size)) * group_size


def plan_work(
    model: ModelConfig, lengths: Int64Array, *, num_packs: int, global_batch_size: int, media: EncoderWork | None = None
) -> Work:
    """Return the work of an epoch, in steps of one microbatch.

    Args:
        lengths: int64 [sequences], model tokens of every sequence.
        media: work of encoding the media of every sequence; None for text.
    """
    steps, cost, wide = math.ceil(num_packs / global_batch_size), sequence_cost(model), lengths.astype(np.float64)
    tokens, squares = float(wide.sum()), float((wide * wide).sum())
    about = np.rint(4 * np.log2(wide)).astype(np.int64)
    sums = (np.bincount(about, wide) / tokens, np.bincount(about, wide * wide) / squares)
    return Work(
        steps=steps,
        microbatches=1,
        tokens=tokens / steps,
        linear_flops=cost.linear * tokens / steps,
        attention_flops=cost.quadratic * squares / steps,
        encoder_flops=0.0 if media is None else (3 if model.train_encoder else 1) * float(media.flops.sum()) / steps,
        shares=tuple((float(one), float(other)) for one, other in zip(*sums, strict=True) if one),
    )


def count_kernels(model: ModelConfig, parallel: ParallelConfig, *, parts: str = "*-") -> float:
    """Return the number of kernels that a rank launches for one microbatch of a layer, forward and backward.

    This project's own layers are counted, which launch more kernels than Transformer Engine's. Layers with experts add
    a router, and two products per expert of the rank in each of three passes; biases are added expert by expert.
    Tensor-parallel layers gather and scatter twice per pass, and gather two inputs again.
    """
    here = model.num_experts / parallel.expert_parallel_size
    routed = _ROUTER_KERNELS + (6 + 12 * model.traits.has_biases) * here
    layer = len(parts) / 2 * (LAYER_KERNELS + 10 * (parallel.tensor_parallel_size > 1)) + routed * ("E" in parts)
    return layer * (4 / 3 if model.recompute == "full" else 1)


@dataclass(frozen=True)
class _Product:
    """Matrix products of [tokens, inputs] and [inputs, outputs], one per expert.

    Attributes:
        again: forward passes in addition to the first, from recomputation.
        gathered, scattered: number of ranks that the input is gathered from, and that the output is scattered to.
    """

    tokens: float
    inputs: float
    outputs: float
    again: float
    experts: float = 1
    gathered: int = 1
    scattered: int = 1


@dataclass(frozen=True)
class _RankStep:
    """Time of one step on a rank, in seconds. The busiest experts receive `load` times an even share of the tokens."""

    model: ModelConfig
    parallel: ParallelConfig
    work: Work
    ranks: int
    machine: Machine
    kernels: Kernels
    load: float

    @property
    def tokens(self) -> float:
        """Tokens of a microbatch on a rank."""
        parallel, tokens = self.parallel, self.work.tokens / (1 - self.work.padding)
        shares = parallel.dp_size(self.ranks) * parallel.context_parallel_size
        return tokens / shares / self.work.microbatches

    @property
    def hidden_bytes(self) -> float:
        return self.tokens * DTYPE_BYTES[self.model.number] * self.model.hidden_size

    @cached_property
    def again(self) -> float:
        """Fraction of the layers that are recomputed as a whole."""
        layers, stages = self.model.num_layers, range(self.parallel.pipeline_parallel_size)
        chunks = [chunk for stage in stages for chunk in self.parallel.chunks_of_stage(layers, stage)]
        return sum(self.model.is_recomputed(place) for chunk in chunks for place in range(len(chunk))) / layers

    def products(self, parts: str) -> Iterator[_Product]:
        """Yield the matrix products that a rank computes in a layer with these parts."""
        model, tp, hidden, again = self.model, self.parallel.tensor_parallel_size, self.model.hidden_size, self.again
        sizes = model.attention_sizes if "*" in parts else model.scan_sizes if has_scan(parts) else {}
        for name, (inputs, outputs) in sizes.items():
            if name in ON_EVERY_RANK:
                yield _Product(self.tokens / tp, inputs, outputs, again)
            elif name in DIVIDED_BY_COLUMNS:
                yield _Product(self.tokens, inputs / tp, outputs, again, scattered=tp)
            else:
                latent = name.endswith("_up_proj") and "latent" in self.kernels.recomputed
                yield _Product(self.tokens, inputs, outputs / tp, again or float(latent), gathered=tp)
        of_experts = again or float("moe" in model.recomputed)
        of_all = {"mlp"} if "-" in parts else {"moe", "shared_experts"}
        again = again or float(bool(of_all & set(model.recomputed)))
        if inner := {"E": model.shared_ffn_hidden_size, "-": model.ffn_hidden_size}.get(parts[-1], 0):
            yield _Product(self.tokens, hidden, model.halves * inner / tp, again, gathered=tp)
            yield _Product(self.tokens, inner / tp, hidden, again, scattered=tp)
        if "E" in parts:
            here = model.num_experts / self.parallel.expert_parallel_size
            etp = self.parallel.expert_tensor_parallel_size
            each = self.tokens / tp * model.experts_per_token * etp * self.load / here
            yield _Product(each, model.expert_width, model.halves * model.expert_size / etp, of_experts, here)
            yield _Product(each, model.expert_size / etp, model.expert_width, of_experts, here)
            if latent_size := model.expert_latent_size:
                yield _Product(self.tokens / tp, hidden, latent_size, of_experts)
                yield _Product(self.tokens / tp, latent_size, hidden, of_experts)

    def product_s(self, one: _Product, *, in_8_bits: bool) -> float:
        """Return the time of a product in all passes: forward, input gradient and weight gradient."""
        machine, (high, wide), item = self.machine, _TILE, DTYPE_BYTES[self.model.number]
        rate = machine.peak_flops * machine.matmul_share * (machine.fp8_speedup if in_8_bits else 1)

        def of(rows: float, columns: float, inner: float, written: int, parts: int = 1) -> float:
            # Tokens that are sent in parts are multiplied part by part, in rounds of one tile per multiprocessor.
            edges = ((high, wide), (wide, high))
            tiles = min(math.ceil(rows / parts / up) * math.ceil(columns / across) for up, across in edges)
            round_s = high * wide * machine.multiprocessors * (2 * inner / rate + written / machine.memory_bytes_per_s)
            return parts * math.ceil(tiles / machine.multiprocessors) * (round_s + machine.tile_s)

        parts = self.parallel.tensor_parallel_size if self.parallel.overlap_tensor_parallel else 1
        times = (1 + one.again) * of(one.tokens, one.outputs, one.inputs, item, parts)
        times += of(one.tokens, one.inputs, one.outputs, item, parts if one.scattered > 1 else 1)
        if not self.model.lora_rank:
            # The weight gradient is read and written, because it accumulates over microbatches.
            times += of(one.inputs, one.outputs, one.tokens, 2 * DTYPE_BYTES[self.parallel.gradient_dtype])
        return one.experts * times

    def cast_bytes(self, one: _Product) -> float:
        """Return the bytes moved to cast a product's input and output gradient to FP8.

        Each is read once to find its maximum and once to be cast. Hopper supports FP8 products along rows only, so the
        weight gradient needs both tensors transposed, after they are gathered.
        """
        again, sizes = not self.model.lora_rank, ((one.inputs, one.gathered), (one.outputs, one.scattered))
        return sum(one.experts * one.tokens * size * (5 / ranks + again * (1 + (ranks > 1))) for size, ranks in sizes)

    def permuted_bytes(self) -> float:
        """Return the bytes moved to permute tokens into expert order and back, forward and backward."""
        model, parallel = self.model, self.parallel
        sent, sorts = model.experts_per_token * self.load, model.num_experts > parallel.expert_parallel_size > 1
        copies = 4 * sent if parallel.expert_dispatcher == "flex" else 2 + (6 if sorts else 2) * sent
        # In FP8, the tokens of each expert are padded to whole blocks, and the padding is removed from its outputs.
        copies += 4 * sent * (model.fp8 != "off")
        # Outputs are split by expert, added to the biases and concatenated again.
        biases = model.traits.has_biases * sent * 12 * (1 + 2 * model.expert_size / model.hidden_size)
        size = self.hidden_bytes * model.expert_width / model.hidden_size
        return (2 * copies + biases) * size / parallel.tensor_parallel_size

    def layer(self, parts: str) -> dict[str, float]:
        """Return the seconds of a microbatch in one layer with these parts, by purpose, without launches."""
        once = replace(self.model.with_recompute("none"), fp8="off")
        products = list(self.products(parts))
        kept = layer_activation_bytes(once, self.parallel, parts=parts, kernels=self.kernels)
        # Saved activations are written once, and read by the next kernel and by the backward pass.
        moved = (_PASSES + self.again) * kept * self.tokens + (self.permuted_bytes() if "E" in parts else 0.0)
        if in_8_bits := self.model.fp8 != "off":
            moved += sum(map(self.cast_bytes, products))
        times = {
            "matrix products": sum(self.product_s(one, in_8_bits=in_8_bits) for one in products),
            "attention": self.attention_s(parts),
            "memory": moved / self.machine.memory_bytes_per_s,
        }
        return times | self.exchange(parts, times)

    def attention_s(self, parts: str) -> float:
        """Return the average time of attention per attention layer, or the time of a scan at the rate of attention."""
        model, machine = self.model, self.machine
        if "*" not in parts:
            flops = 2 * scan_products(model) * self.tokens / self.parallel.tensor_parallel_size * has_scan(parts)
            return (_ATTENTION_PASSES + self.again) * flops / (machine.peak_flops * machine.attention_share)
        numbers = [layer for layer, parts in enumerate(model.all_parts) if "*" in parts]
        windows = 2 * (model.query_size + model.value_size) * sum(filter(None, map(model.window, numbers)))
        flops = (self.work.attention_flops + self.work.tokens * windows) / self.work.microbatches / len(numbers)
        # Exponentials take as long in narrow heads as in wide ones, and the first and last tokens fill no tile; Shah et
        # al., "FlashAttention-3", 2024, show curves of this shape.
        length = max(1.0, self.work.attention_flops / self.work.tokens / (sequence_cost(model).quadratic or 1))
        share = machine.attention_share * model.head_size / (model.head_size + 32) * length / (length + 640)
        again = 1.0 if "core_attn" in model.recomputed else self.again
        rate = machine.peak_flops * share * self.ranks / self.parallel.pipeline_parallel_size
        return (_ATTENTION_PASSES + again) * flops / rate

    def exchange(self, parts: str, computed: dict[str, float]) -> dict[str, float]:
        """Return the seconds of a microbatch that a rank waits for other ranks in one layer, by parallel dimension."""
        model, parallel, machine, passes = self.model, self.parallel, self.machine, 2 + self.again
        tp, cp, item = parallel.tensor_parallel_size, parallel.context_parallel_size, DTYPE_BYTES[model.number]
        # A gather before and a scatter after both attention and the MLP, in each pass; the backward pass gathers two
        # inputs again, hidden by its products. An all-reduce is a gather and a scatter. FP8 inputs are gathered in FP8.
        size = self.hidden_bytes * (2 if model.fp8 == "off" else 1 + 1 / item) * (tp - 1) / tp
        blocks = len(parts) - ("E" in parts and not model.shared_ffn_hidden_size)
        tensor = passes * blocks * (size / machine.link(tp, 1) + 2 * machine.message_s) * (tp > 1)
        if parallel.overlap_tensor_parallel:
            # All parts except the first are sent while another part is multiplied.
            tensor = tensor / tp + max(0.0, tensor * (tp - 1) / tp - computed["matrix products"] * 2 / 3)
        values = model.v_head_dim / model.head_size if model.kv_lora_rank else 1
        keys = self.tokens * item * (1 + values) * model.key_size / tp
        # A rank sends to one other rank, and to another node through its own port.
        link = machine.node_bytes_per_s if cp * tp <= machine.ranks else machine.fabric_bytes_per_s
        context = (passes + 1) * (cp - 1) * (keys / link + machine.message_s) * ("*" in parts)
        if cp > 1:  # the next rank's keys arrive during attention over the last ones, which is brief in short sequences
            hidden = computed["attention"]
            context = sum(max(context * one / cp, context * one - hidden * other) for one, other in self.work.shares)
        # Tokens are sent to their experts and back in every pass.
        is_shared = parallel.expert_parallel_size * parallel.expert_tensor_parallel_size > 1
        expert = passes * 2 * ("E" in parts) * is_shared * self.expert_exchange_s()
        if has_scan(parts) and cp > 1:  # an all-to-all from tokens to heads and one back
            heads = sum(model.scan_pieces) + model.scan_num_heads * model.scan_head_dim
            size = self.tokens * item * heads / tp * (cp - 1) / cp
            context = passes * (size / machine.link(cp, tp) + 2 * machine.message_s)
        if self.kernels.overlap_experts:  # of a step's first pass and last, which are alone, only other stages hide it
            alone = 1 / self.work.microbatches if parallel.pipeline_parallel_size == 1 else 0.0
            expert = max(expert * alone, expert - sum(computed.values()) * (1 - alone))
        return {"tensor": tensor, "context": context, "expert": expert}

    def expert_exchange_s(self) -> float:
        """Return the time to send the tokens of a microbatch to their experts, or back."""
        model, parallel, machine = self.model, self.parallel, self.machine
        ranks = parallel.expert_parallel_size * parallel.expert_tensor_parallel_size
        size = self.hidden_bytes * model.expert_width / model.hidden_size / parallel.tensor_parallel_size * self.load
        here, nodes = min(ranks, machine.ranks), max(1.0, ranks / machine.ranks)
        near = size * model.experts_per_token * (here - 1) / here
        away = size * model.experts_per_token * (nodes - 1) / nodes
        if parallel.expert_dispatcher == "flex" and model.num_experts:
            # A token is sent to a node once, however many of its experts are on the node.
            others = model.num_experts - int(model.num_experts / nodes)
            missed = math.comb(others, model.experts_per_token) / math.comb(model.num_experts, model.experts_per_token)
            groups = (model.router_top_groups or 1) / (model.router_groups or 1)
            away = size * min(1 - missed, groups) * (nodes - 1)
        else:
            near, away = near / nodes, away / machine.all_to_all_share
        messages = machine.message_s * (5 if nodes > 1 else 1)
        return max(near / machine.node_bytes_per_s, away / machine.fabric_bytes_per_s) + messages

    def launch(self, layers: Sequence[str], busy: float, loss: float) -> float:
        """Return the seconds of gaps between kernels, in these layers and the loss, and of waits for the host."""
        kernels = sum(count_kernels(self.model, self.parallel, parts=one) for one in layers) + OTHER_KERNELS
        routers = sum("E" in one for one in layers)
        # A router's kernels are too short to fill the GPU.
        gaps = (kernels + 3 * _ROUTER_KERNELS * routers) * self.machine.gap_s
        host, busy = (1 if self.parallel.cuda_graphs else kernels) * self.machine.launch_s, busy + gaps
        if not routers or self.kernels.overlap_experts:
            return gaps + max(0.0, host - busy - loss)
        # The host reads the number of tokens of each expert, so it cannot run ahead of the GPU in the forward pass.
        forward = busy * (1 + self.again) / (_PASSES + self.again)
        return gaps + max(0.0, host / 2 - forward) + max(0.0, host / 2 - (busy - forward) - loss)

    def pipeline(self, slowest: float, busy: float) -> float:
        """Return the seconds that a stage waits for the slowest stage, for pipeline fill and drain, and for sends."""
        parallel, machine, stages = self.parallel, self.machine, self.parallel.pipeline_parallel_size
        if stages == 1:
            return 0.0
        chunks = parallel.virtual_pipeline_parallel_size or 1
        idle = slowest - busy + slowest * (stages - 1) / (self.work.microbatches * chunks)
        size = self.hidden_bytes / (parallel.tensor_parallel_size if parallel.sequence_parallel else 1)
        send_s = size / machine.link(stages, self.ranks // stages)
        if parallel.static_rows and chunks > 1:  # overlaps with another chunk, on the other multiprocessors
            send_s *= min(1.0, _SENDERS / machine.multiprocessors)
        # Rows of variable length send their sizes first.
        send_s += machine.message_s * (1 if parallel.static_rows else 2)
        return idle + 2 * chunks * self.work.microbatches * send_s

    def update(self, busy: float) -> dict[str, float]:
        model, parallel, machine = self.model, self.parallel, self.machine
        count = partial(count_weights, model, parallel, vocab_size=model.vocab_size or 0)
        # The stage with the most weights; the last one of several.
        stages = (count(stage=stage) for stage in reversed(range(parallel.pipeline_parallel_size)))
        most = max(stages, key=lambda one: one.adapters if model.lora_rank else one.whole)
        weights, expert_weights = (most.adapters, 0) if model.lora_rank else (most.whole, most.experts)
        shares = parallel.dp_size(self.ranks) * parallel.context_parallel_size
        copies = parallel.expert_copies(self.ranks)
        ring = (shares - 1) / shares / machine.link(shares, parallel.tensor_parallel_size)
        stride = self.ranks // parallel.pipeline_parallel_size // copies
        expert_ring = (copies - 1) / copies / machine.link(copies, stride)
        # Seconds to pass one byte per weight around the ring of the ranks that hold copies.
        rings = (weights - expert_weights) * ring + expert_weights * expert_ring
        # Gradients are reduced in the last backward pass of a step, and weights are gathered in its first forward pass.
        reduce = DTYPE_BYTES[parallel.gradient_dtype] * rings * (1 if parallel.distributed_optimizer else 2)
        overlaps = parallel.overlap_gradients and not parallel.cuda_graphs
        hidden_by = busy / self.work.microbatches * 2 / 3 if overlaps else 0.0
        gather, own = 0.0, float(weights)
        if parallel.distributed_optimizer:
            gather = (1 if self.kernels.fp8_weights else DTYPE_BYTES[self.model.number]) * rings
            own = (weights - expert_weights) / shares + expert_weights / copies
        data = max(0.0, reduce - hidden_by) + max(0.0, gather - (hidden_by / 2 if parallel.overlap_weights else 0.0))
        if self.kernels.sharded:  # weights are gathered in both passes of every microbatch, and gradients reduced
            data = max(0.0, self.work.microbatches * (reduce + 2 * gather) - busy)
        # The gradient, two moments and a float32 copy are read; the moments, the copy and the weights are written.
        return {"data": data, "optimizer": 30 * own / machine.memory_bytes_per_s}


def estimate_step(
    model: ModelConfig,
    parallel: ParallelConfig,
    work: Work,
    *,
    ranks: int,
    machine: Machine,
    kernels: Kernels,
    expert_load: float = 1.0,
) -> dict[str, float]:
    """Return the seconds of one step by purpose, averaged over pipeline stages.

    Args:
        expert_load: as in `plan_stage_memory`; all ranks wait for the busiest.

    Returns:
        `matrix products`, `attention`, `memory` and the `encoder` of media; the communication of `tensor`, `context`
        and `expert` parallelism that does not overlap with products; `launches` (gaps between kernels, and waiting for
        the host); the `pipeline` (waiting for the slowest stage, for fill and drain, and for sends); the communication
        of `data` parallelism that does not overlap; and the `optimizer`.
    """
    step = _RankStep(model, parallel, work, ranks, machine, kernels, parallel.uneven_load(expert_load))
    kinds = {parts: step.layer(parts) for parts in set(model.all_parts)}
    words, stages = padded_vocab_size(model.vocab_size or 0) / parallel.tensor_parallel_size, []
    output_s = step.product_s(_Product(step.tokens, model.hidden_size, words, 0.0), in_8_bits=False)
    # Logits are written once, then read and written by the loss and by its gradient, at 4 bytes each.
    loss = {"matrix products": output_s, "memory": 20 * words * step.tokens / machine.memory_bytes_per_s}
    for stage in range(parallel.pipeline_parallel_size):
        layers = [parts for chunk in parts_of_stage(model, parallel, stage) for parts in chunk]
        outputs = (1 + model.mtp_layers) * (stage == parallel.pipeline_parallel_size - 1)
        parts = {name: sum(kinds[one][name] for one in layers) for name in next(iter(kinds.values()))}
        busy = sum(parts.values())
        parts = {name: seconds + outputs * loss.get(name, 0.0) for name, seconds in parts.items()}
        parts["launches"] = step.launch(layers, busy, sum(parts.values()) - busy)
        if work.encoder_flops:  # not divided: every rank of the first stage encodes all media of its rows
            flops = work.encoder_flops / parallel.dp_size(ranks) / work.microbatches * (stage == 0)
            parts["encoder"] = flops / (machine.peak_flops * machine.matmul_share)
        stages.append(parts)
    parts = {name: sum(one[name] for one in stages) * work.microbatches / len(stages) for name in stages[0]}
    busy, slowest = sum(parts.values()), max(sum(one.values()) for one in stages) * work.microbatches
    return {**parts, "pipeline": step.pipeline(slowest, busy), **step.update(busy)}
