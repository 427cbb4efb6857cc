"""Sizes of the parallel dimensions, the division of a model and its rows, and checks that need only numbers."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import cache
from itertools import accumulate, pairwise

from harness.checks import CheckedSettings, bounded, one_of, read_rules
from harness.errors import ConfigError
from harness.plan.stages import read_stages
from harness.printing import count_of
from harness.thd import padding_multiple

VOCAB_MULTIPLE = 128
# The linear layers of a Megatron layer: queries, keys and values; the attention output; both layers of the gated MLP.
LORA_TARGETS = ("linear_qkv", "linear_proj", "linear_fc1", "linear_fc2")
# Tensor-parallel ranks divide the inputs of these layers, and the outputs of the others.
DIVIDED_BY_COLUMNS = ("linear_proj", "linear_fc2", "out_proj")
# Layers that every tensor-parallel rank holds as a whole.
ON_EVERY_RANK = ("linear_q_down_proj", "linear_kv_down_proj")
DTYPE_BYTES = {"float32": 4, "bfloat16": 2}
# Block size that the tokens and features of an FP8 matrix product are divided into, by recipe.
FP8_BLOCKS = {"off": 1, "tensorwise": 16, "blockwise": 128, "mxfp8": 32}
# Numbers of ranks that DeepEP is tuned for, each with the tokens that a channel can buffer from a rank over NVLink and
# from a node over RDMA: the larger values of its two tables (`deep_ep/buffer.py`), rounded up to whole messages.
DEEPEP_RANKS = {
    **{2: (256, 132), 4: (256, 132), 8: (256, 132), 16: (288, 140), 24: (288, 140), 32: (288, 140)},
    **{64: (288, 140), 128: (560, 132), 144: (720, 132), 160: (720, 132)},
}


@dataclass
class ParallelConfig(CheckedSettings, section="parallel"):
    """Sizes of the parallel dimensions; data parallelism takes the ranks that are left.

    Attributes:
        tensor_parallel_size: number of ranks that share each layer.
        pipeline_parallel_size: number of pipeline stages.
        virtual_pipeline_parallel_size: model chunks per pipeline stage (interleaved schedule); null for one.
        pipeline_layout: layers of each stage in Megatron-Core's notation, such as Et*3|t*4|t*4|t*3L for 14 layers on
            four stages: E is the embedding, t a layer, m an MTP layer, L the loss. With model chunks, the stages follow
            one another once per chunk. Null divides the layers evenly; if that is impossible, the error suggests one.
        context_parallel_size: number of ranks that share each sequence.
        expert_parallel_size: number of ranks that share the experts of each layer. These ranks are also tensor-,
            context- or data-parallel ranks.
        expert_tensor_parallel_size: number of ranks that share each expert.
        expert_dispatcher: token dispatcher of the experts: `alltoall`, `allgather` (requires static_rows, because every
            rank receives all tokens in rows of equal length) or `flex` (DeepEP's kernels, on GPUs that have it).
        sequence_parallel: also split norms and dropout over the tensor-parallel group.
        distributed_optimizer: shard the optimizer state over data-parallel ranks.
        static_rows: pad every row to the maximum size, so that shapes are constant. Otherwise pipeline stages exchange
            shapes, and Megatron-Core stops the GPU at every send and receive. Null selects true on GPUs with several
            pipeline stages, otherwise false.
        cuda_graphs: capture the forward and backward pass of a row once and replay it for every row, which reduces
            launch overhead. Gradients are reduced after the last row, regardless of overlap_gradients, and the memory
            of one pass stays reserved. Requires GPUs, static_rows, a dense model, one pipeline stage and no CP.
        gradient_dtype: dtype in which gradients are accumulated and reduced: float32, or bfloat16 for half the memory
            and traffic with a bfloat16 model.
        overlap_gradients: reduce gradients during the backward pass (GPUs only).
        overlap_weights: gather updated weights during the next forward pass, while earlier layers are computed (GPUs
            only). Requires overlap_gradients and the distributed optimizer; LoRA adapters are gathered at once.
        overlap_weights_with_step: gather the weights of each stage's first model chunk while the optimizer updates the
            others (GPUs only). Requires overlap_weights, virtual_pipeline_parallel_size, a dense model without LoRA,
            and an optimizer that is not offloaded.
        overlap_tensor_parallel: overlap tensor-parallel communication with matrix products, using buffers of one row's
            shape. Requires GPUs with Transformer Engine, sequence_parallel, static_rows, a dense model without LoRA,
            and tensor-parallel ranks on one node.
        overlap_shared_experts: compute shared experts while tokens travel to the other experts. Requires the dispatcher
            `alltoall`.
        overlap_experts: exchange tokens with the experts of other ranks while another row is computed: the forward pass
            of each row is combined with the backward pass of the one before it. Requires expert_parallel_size of 2 or
            more, and with pipeline stages also model chunks.
        delay_weight_gradients: compute gradients of weights after those of activations, while tokens travel. Requires
            overlap_experts, and GPUs with Transformer Engine.
        ranks: number of ranks that the run is planned for. `harness train` starts this many on one machine; a run on
            any other number is refused. Null accepts any number.
    """

    tensor_parallel_size: int = bounded(1, lowest=1, highest=100_000)
    pipeline_parallel_size: int = bounded(1, lowest=1, highest=100_000)
    virtual_pipeline_parallel_size: int | None = bounded(None, lowest=2, highest=10_000)
    pipeline_layout: str | None = None
    context_parallel_size: int = bounded(1, lowest=1, highest=100_000)
    expert_parallel_size: int = bounded(1, lowest=1, highest=100_000)
    expert_tensor_parallel_size: int = bounded(1, lowest=1, highest=100_000)
    expert_dispatcher: str = one_of("alltoall", ("alltoall", "allgather", "flex"))
    sequence_parallel: bool = False
    distributed_optimizer: bool = False
    static_rows: bool | None = None
    cuda_graphs: bool = False
    gradient_dtype: str = one_of("float32", DTYPE_BYTES)
    overlap_gradients: bool = True
    overlap_weights: bool = True
    overlap_weights_with_step: bool = False
    overlap_tensor_parallel: bool = False
    overlap_shared_experts: bool = False
    overlap_experts: bool = False
    delay_weight_gradients: bool = False
    ranks: int | None = bounded(None, lowest=1, highest=1_000_000)

    rules = read_rules("""
        parallel.virtual_pipeline_parallel_size, parallel.pipeline_parallel_size=1
          | model chunks require at least two pipeline stages
          | parallel.pipeline_parallel_size=2 or more, or parallel.virtual_pipeline_parallel_size=null
        parallel.pipeline_layout, parallel.pipeline_parallel_size=1 | a single stage contains all layers
          | parallel.pipeline_parallel_size=2 or more, or parallel.pipeline_layout=null
        parallel.sequence_parallel=true, parallel.tensor_parallel_size=1 | the tensor-parallel group has only one rank
          | parallel.tensor_parallel_size=2 or more, or parallel.sequence_parallel=false
        parallel.cuda_graphs=true, parallel.static_rows!=true | CUDA graphs require rows of constant length
          | parallel.cuda_graphs=false, or parallel.static_rows=true
        parallel.cuda_graphs=true, parallel.pipeline_parallel_size!=1 | CUDA graphs do not support pipeline stages
          | parallel.cuda_graphs=false, or parallel.pipeline_parallel_size=1
        parallel.cuda_graphs=true, parallel.context_parallel_size!=1 | CUDA graphs do not support context parallelism
          | parallel.cuda_graphs=false, or parallel.context_parallel_size=1
        parallel.overlap_weights_with_step=true, parallel.virtual_pipeline_parallel_size=null | a stage has one model
          chunk, so nothing is updated while it is gathered
          | parallel.overlap_weights_with_step=false, or parallel.virtual_pipeline_parallel_size=2 or more
        parallel.overlap_weights_with_step=true, parallel.distributed_optimizer=false | weights are not gathered
          | parallel.overlap_weights_with_step=false, or parallel.distributed_optimizer=true
        parallel.overlap_weights_with_step=true, parallel.overlap_weights=false | weights are gathered at once
          | parallel.overlap_weights_with_step=false, or parallel.overlap_weights=true
        parallel.overlap_weights_with_step=true, parallel.overlap_gradients=false | weights are gathered at once
          | parallel.overlap_weights_with_step=false, or parallel.overlap_gradients=true
        parallel.overlap_tensor_parallel=true, parallel.sequence_parallel!=true | it overlaps that communication
          | parallel.overlap_tensor_parallel=false, or parallel.sequence_parallel=true
        parallel.overlap_tensor_parallel=true, parallel.cuda_graphs!=false | CUDA graphs do not support its streams
          | parallel.overlap_tensor_parallel=false, or parallel.cuda_graphs=false
        parallel.overlap_shared_experts=true, parallel.expert_dispatcher!=alltoall | only this dispatcher can overlap
          them | parallel.overlap_shared_experts=false, or parallel.expert_dispatcher=alltoall
        parallel.overlap_tensor_parallel=true, parallel.static_rows=false | its buffers require rows of constant shape
          | parallel.overlap_tensor_parallel=false, or parallel.static_rows=true
        parallel.overlap_tensor_parallel=true, parallel.static_rows=null, parallel.pipeline_parallel_size=1
          | its buffers require rows of constant shape
          | parallel.overlap_tensor_parallel=false, or parallel.static_rows=true
        parallel.overlap_experts=true, parallel.expert_parallel_size=1 | every rank has all experts
          | parallel.overlap_experts=false, or parallel.expert_parallel_size=2 or more
        parallel.overlap_experts=true, parallel.pipeline_parallel_size!=1, parallel.virtual_pipeline_parallel_size=null
          | Megatron-Core combines passes on pipeline stages only in the interleaved schedule
          | parallel.overlap_experts=false, or parallel.virtual_pipeline_parallel_size=2 or more
        parallel.overlap_experts=true, parallel.expert_dispatcher=allgather | Megatron-Core does not support it
          | parallel.overlap_experts=false, or parallel.expert_dispatcher=alltoall
        parallel.overlap_experts=true, parallel.overlap_shared_experts=true | shared experts would be computed in both
          | one or the other
        parallel.delay_weight_gradients=true, parallel.overlap_experts=false | only combined passes delay them
          | parallel.delay_weight_gradients=false, or parallel.overlap_experts=true
    """)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.pipeline_layout and (found := len(read_stages(self.pipeline_layout))) != self.num_chunks:
            what = f"pipeline_layout has {found} stages instead of {self.num_chunks} (pipeline "
            what += f"{self.pipeline_parallel_size} x virtual pipeline {self.virtual_pipeline_parallel_size or 1})"
            fix = f"{self.num_chunks} stages with | between them, or other sizes"
            raise ConfigError(what, where="parallel.pipeline_layout, parallel.pipeline_parallel_size", fix=fix)
        shared = self.expert_parallel_size * self.expert_tensor_parallel_size
        # As on a GPU; `on("cpu")` runs this check again.
        is_static = self.pipeline_parallel_size > 1 if self.static_rows is None else self.static_rows
        if self.expert_dispatcher == "allgather" and max(shared, self.pipeline_parallel_size) > 1 and not is_static:
            what = f"allgather requires rows of equal length for {shared} ranks that share experts on "
            what += f"{self.pipeline_parallel_size} pipeline stages"
            fix = "parallel.static_rows=true, or parallel.expert_dispatcher=alltoall"
            raise ConfigError(what, where="parallel.expert_dispatcher, parallel.static_rows", fix=fix)
        if self.expert_dispatcher == "flex" and shared not in DEEPEP_RANKS:
            ranks = ", ".join(map(str, DEEPEP_RANKS))
            what = f"DeepEP supports experts on {ranks} ranks, but the layout has {shared} (expert "
            what += f"{self.expert_parallel_size} x expert tensor {self.expert_tensor_parallel_size})"
            fix = f"parallel.expert_dispatcher=alltoall, or experts on {ranks} ranks"
            raise ConfigError(what, where="parallel.expert_dispatcher, parallel.expert_parallel_size", fix=fix)

    def on(self, device: str) -> ParallelConfig:
        """Return the layout with null `static_rows` resolved for a device, `cpu` or `cuda`."""
        if self.static_rows is not None:
            return self
        return replace(self, static_rows=device == "cuda" and self.pipeline_parallel_size > 1)

    @property
    def model_ranks(self) -> int:
        """Number of ranks that hold one copy of the model: tp * pp * cp."""
        return self.tensor_parallel_size * self.pipeline_parallel_size * self.context_parallel_size

    @property
    def pad_to_multiple(self) -> int:
        """Multiple that the tokens of every sequence are padded to."""
        sizes = {"cp_size": self.context_parallel_size, "tp_size": self.tensor_parallel_size}
        return padding_multiple(**sizes, sequence_parallel=self.sequence_parallel)

    @property
    def padding_setting(self) -> str | None:
        """Name of the setting that pads or divides the sequences of a row; None if none does."""
        if self.context_parallel_size > 1:
            return "parallel.context_parallel_size"
        if self.static_rows:
            return "parallel.static_rows"
        return "parallel.sequence_parallel" if self.pad_to_multiple > 1 else None

    def device_connections(self, shares_rows: bool = False) -> int:
        """Return CUDA_DEVICE_MAX_CONNECTIONS for GPUs up to Hopper: 1, or the maximum of 32.

        With 1, kernels start in launch order: a tensor- or context-parallel exchange before the matrix product that it
        overlaps. Sources: Megatron-Core's `tensor_parallel/layers.py`, which warns about other values than 1, and
        Megatron-Bridge's `perf_recipes/environment.py`, which uses CUDA's 8 instead of 32 unless experts use DeepEP.
        """
        if self.overlap_experts:  # whose streams would wait for each other
            return 32
        return 1 if shares_rows or self.tensor_parallel_size > 1 or self.context_parallel_size > 1 else 32

    @property
    def group_size(self) -> int:
        """Divisor of the number of microbatches; interleaved pipelines require a multiple of their stages."""
        return self.pipeline_parallel_size if self.virtual_pipeline_parallel_size else 1

    def dp_size(self, world_size: int) -> int:
        """Return the data-parallel size of a job; raise ConfigError if ranks would be left over."""
        if world_size % self.model_ranks:
            what = f"{count_of(world_size, 'rank')} cannot hold whole copies of a model on {self.model_ranks} ranks "
            what += f"(tensor {self.tensor_parallel_size} x pipeline {self.pipeline_parallel_size} x context "
            what += f"{self.context_parallel_size})"
            fix = f"start a multiple of {self.model_ranks} ranks, or lower the parallel sizes"
            raise ConfigError(what, where="parallel", fix=fix)
        experts, stage = self.expert_parallel_size * self.expert_tensor_parallel_size, self.pipeline_parallel_size
        if (world_size // stage) % experts:
            what = f"the {world_size // stage} ranks of a pipeline stage ({world_size} / {stage} stages) cannot hold "
            what += f"whole copies of experts on {experts} ranks (expert {self.expert_parallel_size} x expert tensor "
            what += f"{self.expert_tensor_parallel_size})"
            where = "parallel.expert_parallel_size, parallel.expert_tensor_parallel_size"
            fix = f"start a multiple of {math.lcm(self.model_ranks, experts * stage)} ranks, or make them smaller"
            raise ConfigError(what, where=where, fix=fix)
        return world_size // self.model_ranks

    @property
    def num_chunks(self) -> int:
        """Number of model chunks of all pipeline stages."""
        return self.pipeline_parallel_size * (self.virtual_pipeline_parallel_size or 1)

    def chunks_of_stage(self, num_layers: int, stage: int) -> list[range]:
        """Return the layers of each model chunk of a pipeline stage; layer 0 is the first of the model."""
        return _chunks(num_layers, self.num_chunks, self.pipeline_layout)[stage :: self.pipeline_parallel_size]

    def uneven_load(self, expert_load: float) -> float:
        """Return the tokens of the busiest rank's experts relative to an even share: 1 if each rank has all experts."""
        return expert_load if self.expert_parallel_size > 1 else 1.0

    def expert_copies(self, world_size: int) -> int:
        """Return the number of ranks that hold the same experts."""
        experts = self.expert_parallel_size * self.expert_tensor_parallel_size
        return world_size // (self.pipeline_parallel_size * experts)

    def check(self, world_size: int, *, global_batch_size: int, max_tokens_per_rank: int) -> None:
        """Raise ConfigError, with the arithmetic, if the ranks, the batch or the rows do not fit this layout."""
        if self.ranks not in (None, world_size):
            what = f"the settings are planned for {count_of(self.ranks, 'rank')}, but the job has {world_size}"
            fix = f"start {self.ranks} ranks, or plan again with parallel.ranks={world_size}"
            raise ConfigError(what, where="parallel.ranks", fix=fix)
        dp_size = self.dp_size(world_size)
        if dp_size > global_batch_size:
            what = f"a global batch of {count_of(global_batch_size, 'pack')} is too small for {dp_size} data-parallel "
            what += f"ranks ({world_size} ranks / {self.model_ranks} that share a model)"
            raise ConfigError(what, where="loader.global_batch_size", fix=f"{dp_size} packs or more, or fewer ranks")
        max_tokens_per_row = max_tokens_per_rank * self.context_parallel_size
        pad_to_multiple = self.pad_to_multiple
        if max_tokens_per_row % pad_to_multiple:
            raise ConfigError(
                f"a row of {max_tokens_per_row:,} tokens ({max_tokens_per_rank:,} per rank * context "
                f"{self.context_parallel_size}) is not a multiple of {pad_to_multiple}, to which every sequence is "
                f"padded (2 * context {self.context_parallel_size} chunks"
                + (f", and context * tensor {self.tensor_parallel_size} parts)" if self.sequence_parallel else ")"),
                where="schedule.max_tokens_per_rank",
                fix=f"a multiple of {pad_to_multiple // math.gcd(pad_to_multiple, self.context_parallel_size)}",
            )


def sizes_on_rank(name: str, sizes: tuple[int, int], tp: int) -> tuple[int, int]:
    """Return the input and output sizes of a linear layer on a tensor-parallel rank, given those of the whole layer."""
    inputs, outputs = sizes
    if name in ON_EVERY_RANK:
        return inputs, outputs
    return (inputs // tp, outputs) if name in DIVIDED_BY_COLUMNS else (inputs, outputs // tp)


@cache
def _chunks(num_layers: int, num_chunks: int, layout: str | None) -> list[range]:
    sizes = [chunk.count("t") for chunk in read_stages(layout)] if layout else [num_layers // num_chunks] * num_chunks
    return [range(*chunk) for chunk in pairwise(accumulate(sizes, initial=0))]


def fp8_row_multiple(fp8: str, parallel: ParallelConfig) -> int:
    """Return the multiple that the tokens of a row are padded to for FP8 matrix products, or 1.

    The part of a row on each rank, after division by context and sequence parallelism, consists of whole blocks.
    """
    block = FP8_BLOCKS[fp8]
    if block == 1:
        return 1
    parts = parallel.context_parallel_size
    parts *= parallel.tensor_parallel_size if parallel.sequence_parallel else 1
    return math.lcm(block * parts, parallel.pad_to_multiple)


def fp8_rank_multiple(fp8: str, parallel: ParallelConfig) -> int:
    """Return the multiple of the tokens per context-parallel rank that results from `fp8_row_multiple`."""
    multiple = fp8_row_multiple(fp8, parallel)
    return multiple // math.gcd(multiple, parallel.context_parallel_size)


def padded_vocab_size(vocab_size: int) -> int:
    """Return `vocab_size` rounded up to a multiple of 128.

    Megatron's training script rounds to 128 * tp. Matrix rows beyond the vocabulary take part in the softmax, so under
    that rule the loss would depend on the layout, and a checkpoint of one layout would not fit another.
    """
    return -(-vocab_size // VOCAB_MULTIPLE) * VOCAB_MULTIPLE
