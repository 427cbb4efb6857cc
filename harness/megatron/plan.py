"""What a run would take: memory of a GPU, microbatches, tokens and time, from its settings and the data's lengths.

Weights, gradients and optimizer state are counted. Activations are those that this project's own layers keep for the
backward pass, counted tensor by tensor (a test holds the formula against what PyTorch saves); Transformer Engine's
fused layers keep less. What the allocator, NCCL and CUDA themselves take is left as room (`ROOM`).
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np
from rich.box import SIMPLE
from rich.table import Table

from harness.errors import ConfigError, HarnessError
from harness.loader.datasets import BlendSource, DataConfig, RunData, open_datasets
from harness.loader.live.config import LiveConfig
from harness.megatron.hf_config import read_hf_config
from harness.megatron.model_config import DTYPES, ModelConfig, padded_vocab_size
from harness.megatron.topology import ParallelConfig
from harness.megatron.weights import find_weights
from harness.megatron.work import Machine, Work, estimate_step, plan_work
from harness.records import Int64Array

# Of a GPU's memory, for CUDA's context, NCCL's buffers and what the allocator cannot use.
ROOM = 0.1


@dataclass(frozen=True)
class Memory:
    """Bytes of the fullest rank, and its pipeline stage."""

    stage: int
    weights: int
    gradients: int
    optimizer: int
    activations: int

    @property
    def total(self) -> int:
        return self.weights + self.gradients + self.optimizer + self.activations


def count_weights(model: ModelConfig, parallel: ParallelConfig, *, stage: int, vocab_size: int) -> int:
    """Weights of a rank of pipeline stage `stage`, 0 for the first."""
    tp, stages = parallel.tensor_parallel_size, parallel.pipeline_parallel_size
    hidden, ffn, head = model.hidden_size, model.ffn_hidden_size, model.head_size
    heads, groups = model.num_attention_heads * head, model.num_query_groups * head
    layer = (heads + 2 * groups) * hidden // tp + heads * hidden // tp + 3 * ffn * hidden // tp + 2 * hidden
    if model.family == "qwen2":
        layer += (heads + 2 * groups) // tp
    if model.family == "qwen3":
        layer += 2 * head
    words = padded_vocab_size(vocab_size) * hidden // tp
    total = model.num_layers // stages * layer
    is_first, is_last = stage == 0, stage == stages - 1
    total += words if is_first else 0
    if is_last:
        # A tied matrix is there once on a lone stage, and on both ends of a pipeline.
        total += hidden + (0 if model.tie_embeddings and is_first else words)
    return total


def layer_activation_bytes(model: ModelConfig, parallel: ParallelConfig) -> float:
    """What one layer keeps for the backward pass, bytes a token of the row."""
    item = DTYPES[model.dtype].itemsize
    if model.recompute == "full":
        return item * model.hidden_size / (parallel.tensor_parallel_size if parallel.sequence_parallel else 1)
    tp = parallel.tensor_parallel_size
    query, key = model.num_attention_heads * model.head_size, model.num_query_groups * model.head_size
    # Both norms keep their input and what they make of it in float32; the matrices behind them keep it as they take it.
    whole = 16.0 * model.hidden_size + 8 + 2 * item * model.hidden_size
    divided = 5 * item * model.ffn_hidden_size + item * (4 * query + 3 * key) + 4 * model.num_attention_heads
    if model.recompute == "selective":
        divided -= item * query + 4 * model.num_attention_heads
    if model.family == "qwen3":
        divided += 8 * (query + key) + 4 * (model.num_attention_heads + model.num_query_groups)
    return whole / (tp if parallel.sequence_parallel else 1) + divided / tp + 4 * item * model.head_size


def plan_memory(
    model: ModelConfig,
    parallel: ParallelConfig,
    *,
    vocab_size: int,
    dp_size: int,
    row_tokens: int,
    microbatches: int = 1_000_000,
) -> Memory:
    """Memory of the fullest rank.

    Args:
        dp_size: data-parallel ranks.
        row_tokens: of a microbatch on one rank; with context parallelism, its slice.
        microbatches: of a step; a pipeline keeps the activations of as many as it has stages, if there are.
    """
    item = DTYPES[model.dtype].itemsize
    stages, tp = parallel.pipeline_parallel_size, parallel.tensor_parallel_size
    shares = dp_size * parallel.context_parallel_size if parallel.distributed_optimizer else 1
    # Adam's two moments, and a copy of the weights where these are not float32 themselves.
    state = 8 if item == 4 else 12
    chunks = parallel.virtual_pipeline_parallel_size or 1
    found = []
    for stage in range(stages):
        weights = count_weights(model, parallel, stage=stage, vocab_size=vocab_size)
        waiting = min(microbatches, stages - stage)
        if chunks > 1:
            waiting = min(microbatches, math.ceil(stages * (1 + (stages - 1) / (stages * chunks))))
        kept = waiting * model.num_layers / stages * layer_activation_bytes(model, parallel)
        if model.recompute == "full":
            again = replace(model, recompute="none")
            # One layer at a time, and the angles of the positions, which all of them are given.
            kept += layer_activation_bytes(again, parallel) + 4 * model.head_size
        if stage == stages - 1:
            kept += 8 * model.hidden_size + 4 + item * model.hidden_size + 4 * padded_vocab_size(vocab_size) / tp + 17
        found.append(
            Memory(
                stage=stage,
                weights=item * weights,
                gradients=4 * weights,
                optimizer=math.ceil(state * weights / shares),
                activations=math.ceil(kept * row_tokens),
            )
        )
    return max(found, key=lambda one: one.total)


@dataclass(frozen=True)
class AssumedPacks:
    """Data that is not made yet: packs, each of as many sequences of one length as it holds.

    Attributes:
        pack_size, sequence_tokens: stored tokens.
    """

    packs: int
    pack_size: int
    sequence_tokens: int

    def __post_init__(self) -> None:
        if not 2 <= self.sequence_tokens <= self.pack_size:
            raise ConfigError(
                f"sequences of {self.sequence_tokens:,} tokens in packs of {self.pack_size:,}",
                where="--sequence-tokens, --pack-size",
                fix="sequences of 2 tokens up to a whole pack",
            )

    @property
    def lengths(self) -> Int64Array:
        """int64 [sequences], model tokens."""
        return np.full(self.packs * (self.pack_size // self.sequence_tokens), self.sequence_tokens - 1, np.int64)


@dataclass(frozen=True)
class RunPlan:
    """What `harness plan` tells.

    Attributes:
        weights: of the whole model.
        work: of an epoch; None where the data is not on this machine, and `why_no_work` says so.
        mfu: share of the GPUs' peak in a step; None without `work`.
        step_s: seconds of a step.
        parts: of them, by what they are spent on; none where the MFU was given.
    """

    name: str
    ranks: int
    dp_size: int
    weights: int
    memory: Memory
    work: Work | None
    mfu: float | None
    step_s: float
    parts: dict[str, float]
    why_no_work: str = ""

    def render(self, *, gpu_bytes: float | None) -> Table:
        table = Table(box=SIMPLE, show_header=False, padding=(0, 1))

        def row(name: str, value: str) -> None:
            table.add_row(name, value)

        gib = 2**30
        memory = self.memory
        row("run", f"{self.name} on {self.ranks} ranks, {self.dp_size} of them data-parallel")
        row("model", f"{self.weights:,} weights")
        row("fullest rank", f"{memory.total / gib:,.2f} GiB, pipeline stage {memory.stage}")
        for name in ("weights", "gradients", "optimizer", "activations"):
            row(f"  {name}", f"{getattr(memory, name) / gib:,.2f} GiB")
        if gpu_bytes is not None:
            usable = (1 - ROOM) * gpu_bytes
            verdict = "fits" if memory.total <= usable else "does NOT fit"
            row("GPU", f"{verdict}: {usable / gib:,.1f} of {gpu_bytes / gib:,.0f} GiB are left to tensors")
        if self.work is None or self.mfu is None:
            row("an epoch", f"not known: {self.why_no_work}")
            return table
        row("an epoch", f"{self.work.steps:,} steps of {self.work.tokens:,.0f} tokens")
        row("microbatches", f"{self.work.microbatches:,} of a rank and step")
        row("work", f"{self.work.model_flops / 1e12:,.3g} TFLOPs a step")
        row("MFU", f"{self.mfu:.1%}, {'an estimate' if self.parts else 'as it was given'}")
        row("a step", f"{self.step_s:,.3g} s, {self.work.tokens / self.step_s / self.ranks:,.0f} tokens/s a rank")
        for name, seconds in self.parts.items():
            if seconds >= 0.005 * self.step_s:
                row(f"  {name}", f"{seconds / self.step_s:.0%}")
        row("time of an epoch", str(timedelta(seconds=max(1, round(self.work.steps * self.step_s)))))
        return table


def plan_run(
    settings: dict[str, Any],
    *,
    ranks: int | None = None,
    machine: Machine | None = None,
    mfu: float | None = None,
    packs: AssumedPacks | None = None,
) -> RunPlan:
    """What the run with these settings (as `recipes.sft --cfg` prints them) would take.

    Args:
        ranks: None for the settings' own number, or 8.
        machine: what it runs on; None for H100 nodes.
        mfu: what a step reaches; None for an estimate.
        packs: None for the dataset of the settings.

    Raises:
        ConfigError: the layout does not divide the ranks or the model, or is meant for another number of ranks.
    """
    model, parallel = ModelConfig(**settings["model"]), ParallelConfig(**settings["parallel"])
    machine = machine or Machine()
    ranks = ranks or parallel.ranks or 8
    row_tokens = settings["schedule"]["max_tokens_per_rank"]
    batch = settings["loader"]["global_batch_size"]
    model.check(parallel)
    parallel.check(ranks, global_batch_size=batch, max_tokens_per_rank=row_tokens)
    dp_size = parallel.dp_size(ranks)
    data, why = _open(settings["data"]) if packs is None else (None, "")
    # Of weights that are not here the settings may tell enough: planning downloads none then.
    if model.init_from is not None and (model.vocab_size is None or Path(model.init_from).is_dir()):
        model.vocab_size = read_hf_config(find_weights(model.init_from)).vocab_size
    model.vocab_size = model.vocab_size or (data.vocab_size if data is not None else None)
    if model.vocab_size is None:
        raise ConfigError(
            f"the vocabulary size is not known: {why or 'the dataset does not say'}",
            where="model.vocab_size",
            fix="set it to the size of the tokenizer",
        )
    stored = None
    if packs is not None:
        stored = packs.packs, packs.lengths
    elif data is not None:
        stored = len(data.train), np.asarray(data.train.sequence_lengths, dtype=np.int64) - 1
    work = None
    if stored is not None:
        work = plan_work(
            model,
            stored[1],
            num_packs=stored[0],
            global_batch_size=batch,
            dp_size=dp_size,
            row_capacity=parallel.row_capacity(row_tokens),
        )
    memory = plan_memory(
        model,
        parallel,
        vocab_size=model.vocab_size,
        dp_size=dp_size,
        row_tokens=row_tokens,
        microbatches=work.microbatches if work is not None else 1_000_000,
    )
    parts = {}
    if work is not None and mfu is None:
        parts = estimate_step(
            model,
            parallel,
            work,
            ranks=ranks,
            weights=memory.weights // DTYPES[model.dtype].itemsize,
            layer_bytes=layer_activation_bytes(replace(model, recompute="none"), parallel),
            machine=machine,
        )
        mfu = work.mfu(sum(parts.values()), ranks=ranks, peak_flops=machine.peak_flops)
    return RunPlan(
        name=settings["name"],
        ranks=ranks,
        dp_size=dp_size,
        weights=count_weights(model, ParallelConfig(), stage=0, vocab_size=model.vocab_size),
        memory=memory,
        work=work,
        mfu=mfu if work is not None else None,
        step_s=work.model_flops / (ranks * machine.peak_flops * mfu) if work is not None and mfu else 0.0,
        parts=parts,
        why_no_work=why,
    )


def _open(settings: dict[str, Any]) -> tuple[RunData | None, str]:
    if settings["live"]["path"]:
        return None, "live chunks have no end yet"
    blend = [BlendSource(**source) for source in settings["blend"]]
    if any(source.weight is not None for source in blend):
        return None, "a blend with weights has no end"
    try:
        return open_datasets(DataConfig(**{**settings, "blend": blend, "live": LiveConfig()})), ""
    except HarnessError as error:
        return None, error.what
