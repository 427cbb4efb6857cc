"""Work of an epoch in steps, microbatches and FLOPs, and an estimate of the time of a step.

The estimate adds, part by part, what each rank multiplies, moves through its memory, sends and launches. What hardware
can do is from its maker; the share of it that kernels and links reach, and what a launch or a message costs, are round
figures, not measurements of a cluster: the first steps of a run show the real MFU, and `harness plan mfu=...` uses it
instead. Waiting for a fuller rank and the loader are not counted (BENCHMARKS.md has the wait for the loader).
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from harness.errors import ConfigError
from harness.plan.layout import DTYPE_BYTES, ParallelConfig, padded_vocab_size, uneven_load
from harness.plan.model import ModelConfig, sequence_cost
from harness.records import Int64Array

# A backward pass costs two forward passes; recomputation costs one more.
_MATMUL_PASSES = {"none": 3.0, "selective": 3.0, "full": 4.0}
_ATTENTION_PASSES = {"none": 3.0, "selective": 4.0, "full": 4.0}
# Kernels of a microbatch as `harness bench kernels` counts them: of a dense layer, and outside layers.
_LAYER_KERNELS, _OTHER_KERNELS = 93, 95


@dataclass(frozen=True)
class Machine:
    """A node of GPUs; the defaults are an H100 SXM node with a 400 Gb/s port per GPU.

    Sources: NVIDIA's H100 datasheet (989 TFLOP/s dense in bfloat16, 3.35 TB/s of memory, NVLink 450 GB/s each way) and
    DGX H100 datasheet (eight ports of 400 Gb/s, 50 GB/s each); of these, collectives and kernels reach about three
    quarters. Gaps: A. Gray, "Getting Started with CUDA Graphs", NVIDIA 2019, where kernels of 2.9 us took 3.8 us each.
    Launches: PyTorch takes 5 to 25 us of the host for an operation. Messages: NCCL's smallest collectives take 10 to 30
    us, by nccl-tests.

    Attributes:
        peak_flops: of a GPU, dense, in the dtype of the matrices.
        matmul_share, attention_share: shares of the peak that large matrix products and fused attention reach.
        memory_bytes_per_s: memory bandwidth of a GPU that streaming kernels reach.
        node_bytes_per_s: one-way bandwidth of a GPU to the others of its node that collectives reach.
        fabric_bytes_per_s: the same of a GPU's own network port.
        ranks: of a node.
        launch_s: of the host, to launch a kernel; a GPU that is faster waits for it.
        gap_s: between two kernels of a GPU.
        message_s: of a collective or an exchange, however small.
        fp8_speedup: of products in 8 bits over those in 16; the datasheet has 2, and casts take a part of it.
        host_bytes_per_s: of copies from a GPU to pinned memory; PCIe 5 has 64 GB/s each way.
    """

    peak_flops: float = 989e12
    matmul_share: float = 0.6
    attention_share: float = 0.4
    memory_bytes_per_s: float = 2.7e12
    node_bytes_per_s: float = 340e9
    fabric_bytes_per_s: float = 40e9
    ranks: int = 8
    launch_s: float = 10e-6
    gap_s: float = 1e-6
    message_s: float = 20e-6
    fp8_speedup: float = 1.6
    host_bytes_per_s: float = 50e9

    def check(self, ranks: int, device: str) -> None:
        """Raise ConfigError, with the arithmetic, if ranks on GPUs are on several nodes and do not fill the last."""
        nodes, rest = divmod(ranks, self.ranks)
        if device != "cpu" and nodes and rest:
            raise ConfigError(
                f"{ranks} ranks fill {nodes} node{'s' * (nodes > 1)} of {self.ranks} GPUs, and {rest} would be on "
                "another: a job has the same number of ranks on each node",
                where="parallel.ranks, gpus_per_node",
                fix=f"parallel.ranks={nodes * self.ranks} or {(nodes + 1) * self.ranks}, or a gpus_per_node that "
                f"divides {ranks}",
            )

    def link(self, group: int, stride: int) -> float:
        """Return the bytes per second that each of `group` ranks, `stride` apart, sends around their ring."""
        if group * stride <= self.ranks:
            return self.node_bytes_per_s
        # A ring leaves each node once, over the ports of all its members there.
        return min(self.node_bytes_per_s, self.fabric_bytes_per_s * max(1, self.ranks // stride))


@dataclass(frozen=True)
class Work:
    """Work of one epoch.

    Attributes:
        steps: optimizer steps.
        microbatches: per rank and step, on average.
        tokens: model tokens of a step, on average.
        linear_flops, attention_flops: of a step's forward pass, all ranks together, without padding.
        padding: share of the tokens of all rows that is padding of `parallel.static_rows`.
    """

    steps: int
    microbatches: int
    tokens: float
    linear_flops: float
    attention_flops: float
    padding: float = 0.0

    @property
    def model_flops(self) -> float:
        """FLOPs of a step, forward and backward, without recomputation."""
        return 3 * (self.linear_flops + self.attention_flops)

    def mfu(self, step_s: float, *, ranks: int, peak_flops: float) -> float:
        """Return the share of the peak of all GPUs that `model_flops` uses."""
        return self.model_flops / (step_s * ranks * peak_flops)


def count_microbatches(tokens: float, tokens_at_once: int, group_size: int) -> int:
    """Return the microbatches of a step, of which `tokens_at_once` tokens are one; a multiple of `group_size`."""
    return max(1, math.ceil(tokens / tokens_at_once / group_size)) * group_size


def plan_work(
    model: ModelConfig,
    lengths: Int64Array,
    *,
    num_packs: int,
    global_batch_size: int,
    dp_size: int,
    max_tokens_per_row: int,
    group_size: int = 1,
) -> Work:
    """Return the work of an epoch.

    Args:
        lengths: int64 [sequences], model tokens of every sequence.
        max_tokens_per_row: tokens of a whole row, all ranks of a context-parallel group together.
        group_size: divisor of the number of microbatches.
    """
    steps = math.ceil(num_packs / global_batch_size)
    cost = sequence_cost(model)
    wide = lengths.astype(np.float64)
    tokens = float(wide.sum())
    return Work(
        steps=steps,
        microbatches=count_microbatches(tokens / steps, dp_size * max_tokens_per_row, group_size),
        tokens=tokens / steps,
        linear_flops=cost.linear * tokens / steps,
        attention_flops=cost.quadratic * float((wide * wide).sum()) / steps,
    )


def count_kernels(model: ModelConfig, parallel: ParallelConfig) -> float:
    """Return the kernels that a rank launches for one microbatch, forward and backward.

    Those of this project's own layers, which are more than those of Transformer Engine; layers of experts have two
    products more for each expert of the rank in each of three passes.
    """
    experts = 6 * model.num_experts / parallel.expert_parallel_size * model.expert_layers
    # Each tensor-parallel layer gathers and scatters twice a pass, and gathers two inputs again.
    collectives = 10 * model.num_layers * (parallel.tensor_parallel_size > 1)
    layers = (_LAYER_KERNELS * model.num_layers + experts + collectives) / parallel.pipeline_parallel_size
    return layers * (4 / 3 if model.recompute == "full" else 1) + _OTHER_KERNELS


def _expert_flops(model: ModelConfig) -> float:
    return (
        2.0 * (1 + model.halves) * model.hidden_size * model.expert_size * model.experts_per_token * model.expert_layers
    )


@dataclass(frozen=True)
class _RankStep:
    """One step of a rank; its attributes are the arguments of `estimate_step`, and times are in seconds.

    Attributes:
        load: of the busiest rank's experts over an even share.
    """

    model: ModelConfig
    parallel: ParallelConfig
    work: Work
    ranks: int
    machine: Machine
    load: float

    @property
    def layers(self) -> float:
        return self.model.num_layers / self.parallel.pipeline_parallel_size

    @property
    def tokens(self) -> float:
        parallel = self.parallel
        tokens = self.work.tokens / (1 - self.work.padding)
        return tokens / (parallel.dp_size(self.ranks) * parallel.context_parallel_size)

    @property
    def hidden_bytes(self) -> float:
        return self.tokens * DTYPE_BYTES[self.model.number] * self.model.hidden_size

    @property
    def matmul_s(self) -> float:
        share = self.machine.peak_flops * self.ranks * (1 - self.work.padding)
        return _MATMUL_PASSES[self.model.recompute] * self.work.linear_flops / (share * self.machine.matmul_share)

    @property
    def output_s(self) -> float:
        model = self.model
        return self.matmul_s * (2 * model.hidden_size * (model.vocab_size or 0) / sequence_cost(model).linear)

    def compute(self, layer_bytes: float) -> dict[str, float]:
        model, machine = self.model, self.machine
        share = machine.peak_flops * self.ranks
        speedup = machine.fp8_speedup if model.fp8 != "off" else 1.0
        of_output, of_experts = self.output_s, self.matmul_s * _expert_flops(model) / sequence_cost(model).linear
        products = (self.matmul_s + (self.load - 1) * of_experts - of_output) / speedup + of_output
        attention = _ATTENTION_PASSES[model.recompute] * self.work.attention_flops / (share * machine.attention_share)
        # Written once, read by the next kernel and by the backward pass; logits five times, four bytes each.
        moved = (4 if model.recompute == "full" else 3) * self.layers * layer_bytes
        words = padded_vocab_size(model.vocab_size or 0)
        moved += 20 * words / self.parallel.tensor_parallel_size / self.parallel.pipeline_parallel_size
        memory = self.tokens * moved / machine.memory_bytes_per_s
        return {"matrix products": products, "attention": attention, "memory": memory}

    def exchange(self) -> dict[str, float]:
        model, machine, layers = self.model, self.machine, self.layers
        tp, cp = self.parallel.tensor_parallel_size, self.parallel.context_parallel_size
        passes = 3 if model.recompute == "full" else 2
        messages = machine.message_s * self.work.microbatches
        # Two gathers and two scatters of the hidden states per layer and pass; the backward pass gathers two inputs
        # again behind its products. An all-reduce is a gather and a scatter.
        gather = self.hidden_bytes * (tp - 1) / tp / machine.link(tp, 1) + messages * (tp > 1)
        values = model.v_head_dim / model.head_size if model.kv_lora_rank else 1
        keys = self.tokens * DTYPE_BYTES[model.number] * (1 + values) * model.key_size / tp
        context = (passes + 1) * layers * (cp - 1) * (keys / machine.link(cp, tp) + messages)
        # Tokens go to their experts and come back, in every pass.
        ep, layers_here = self.parallel.expert_parallel_size, model.expert_layers / self.parallel.pipeline_parallel_size
        sent = passes * 2 * layers_here * self.hidden_bytes / tp * model.experts_per_token * (ep - 1) / ep * self.load
        expert = sent / machine.link(ep * self.parallel.expert_tensor_parallel_size, 1)
        expert += passes * 2 * layers_here * messages * (ep > 1)
        return {"tensor": passes * 4 * layers * gather, "context": context, "expert": expert}

    def launch(self, busy: float) -> float:
        """Return the gaps between kernels, and the wait for the host where launches take longer than the work."""
        kernels = self.work.microbatches * count_kernels(self.model, self.parallel)
        gaps = kernels * self.machine.gap_s
        launched = self.work.microbatches if self.parallel.cuda_graphs else kernels
        return gaps + max(0.0, launched * self.machine.launch_s - busy - gaps)

    def pipeline(self, busy: float) -> float:
        parallel, machine, stages = self.parallel, self.machine, self.parallel.pipeline_parallel_size
        if stages == 1:
            return 0.0
        chunks = parallel.virtual_pipeline_parallel_size or 1
        idle = busy * (stages - 1) / (self.work.microbatches * chunks)
        # All stages wait for the last, which also has the output matrix.
        idle += self.output_s * (stages - 1)
        crossing = 2 * chunks * self.hidden_bytes / (parallel.tensor_parallel_size if parallel.sequence_parallel else 1)
        crossing /= machine.link(stages, self.ranks // stages)
        # Rows of any length send their sizes first.
        messages = machine.message_s * self.work.microbatches
        return idle + crossing + 2 * chunks * messages * (1 if parallel.static_rows else 2)

    def update(self, busy: float, weights: int, expert_weights: int) -> dict[str, float]:
        parallel, machine = self.parallel, self.machine
        shares = parallel.dp_size(self.ranks) * parallel.context_parallel_size
        copies = parallel.expert_copies(self.ranks)
        ring = (shares - 1) / shares / machine.link(shares, parallel.tensor_parallel_size)
        stride = self.ranks // parallel.pipeline_parallel_size // copies
        expert_ring = (copies - 1) / copies / machine.link(copies, stride)
        # Weights once around a ring of the ranks that hold them.
        rings = (weights - expert_weights) * ring + expert_weights * expert_ring
        # Gradients are reduced in the last microbatch's backward pass, weights gathered in the first's forward pass.
        gradient = 2 if parallel.gradient_dtype == "bfloat16" else 4
        reduce = gradient * rings * (1 if parallel.distributed_optimizer else 2)
        overlaps = parallel.overlap_gradients and not parallel.cuda_graphs
        hidden_by = busy / self.work.microbatches * 2 / 3 if overlaps else 0.0
        gather, own = 0.0, float(weights)
        if parallel.distributed_optimizer:
            gather = DTYPE_BYTES[self.model.number] * rings
            own = (weights - expert_weights) / shares + expert_weights / copies
        data = max(0.0, reduce - hidden_by) + max(0.0, gather - (hidden_by / 2 if parallel.overlap_weights else 0.0))
        # Gradient, two moments and a copy are read; all but the gradient and the weights themselves are written.
        return {"data": data, "optimizer": 30 * own / machine.memory_bytes_per_s}


def estimate_step(
    model: ModelConfig,
    parallel: ParallelConfig,
    work: Work,
    *,
    ranks: int,
    weights: int,
    layer_bytes: float,
    machine: Machine,
    expert_weights: int = 0,
    expert_load: float = 1.0,
) -> dict[str, float]:
    """Return the seconds of one step by purpose.

    Args:
        weights: of the fullest rank.
        layer_bytes: per token of the row, written by one layer in its forward pass (without recomputation).
        expert_weights: of `weights`, those of routed experts.
        expert_load: as in `plan_memory`; all ranks wait for the busiest.

    Returns:
        `matrix products`, `attention`, `memory`, the communication of `tensor`, `context` and `expert` parallelism,
        `launches` (gaps between kernels, and waiting for the host), the idle time and sends of the `pipeline`, the
        communication of `data` parallelism that is not overlapped, and the `optimizer`.
    """
    step = _RankStep(model, parallel, work, ranks, machine, uneven_load(parallel, expert_load))
    parts = {**step.compute(layer_bytes), **step.exchange()}
    parts["launches"] = step.launch(sum(parts.values()))
    busy = sum(parts.values())
    return {**parts, "pipeline": step.pipeline(busy), **step.update(busy, weights, expert_weights)}
