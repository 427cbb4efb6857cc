"""Plan a run from its settings and the lengths of its data: memory of a GPU, microbatches, tokens and time."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import numpy as np
from rich.console import RenderableType

from harness.errors import ConfigError, HarnessError
from harness.loader import DataConfig, RunData, open_datasets
from harness.plan.encoders import EncoderWork, encoder_work
from harness.plan.hf_config import find_config, read_hf_config
from harness.plan.layout import ParallelConfig
from harness.plan.memory import ROOM, Checkpoint, Kernels, Memory, count_weights, plan_checkpoint, plan_memory
from harness.plan.settings import PretrainConfig, RunConfig, SftConfig
from harness.plan.waves import PlacedBatch
from harness.plan.work import Machine, Work, count_microbatches, estimate_step, plan_work, sequence_cost
from harness.printing import count_of, duration
from harness.records import Int64Array, Schedule
from harness.schedule import DYNAMIC, SequenceCost, schedule
from harness.schedule.batch import GlobalBatch, largest_share, row_costs
from harness.schedule.dynamic_context import place_alike, place_dynamic_context
from harness.tables import Table
from harness.thd import padded_lengths, shared_multiple

# Maximum number of sequences to place, which takes about a second.
_MOST_SEQUENCES = 100_000
# Bandwidth to a rank on the same node, relative to a rank on another node.
_NODE_SPEED = Machine.node_bytes_per_s / Machine.fabric_bytes_per_s
# Used if the settings have no vocabulary size: between the 128,256 of Llama 3 and the 151,936 of Qwen3.
ASSUMED_VOCABULARY = 131_072


@dataclass(frozen=True)
class AssumedPacks:
    """Data that does not exist yet: packs filled with sequences of one length."""

    packs: int
    pack_size: int
    sequence_tokens: int

    def __post_init__(self) -> None:
        if not 2 <= self.sequence_tokens <= self.pack_size:
            what = f"sequences of {self.sequence_tokens:,} tokens in packs of {self.pack_size:,}"
            raise ConfigError(what, where="sequence_tokens, pack_size", fix="sequences of 2 tokens up to a whole pack")

    @property
    def lengths(self) -> Int64Array:
        """int64 [sequences], model tokens."""
        return np.full(self.packs * (self.pack_size // self.sequence_tokens), self.sequence_tokens - 1, np.int64)


@dataclass(frozen=True)
class RunPlan:
    """Result of `harness plan`.

    Attributes:
        active_weights: number of weights that one token uses, with only the experts that it is routed to.
        work: work of an epoch; None if it is unknown, for the reason in `why_no_work`.
        mfu: model FLOPs utilization of a step; None without `work`.
        parts: seconds of a step by purpose; empty if the MFU was given.
        without_engine: memory without Transformer Engine; None with FP8, if `memory` is without it, or not requested.
        context: result of `compare_context_sizes`; empty if no row is shared.
        batch: a global batch as the schedule places it; None without data, with `as_packed`, and if no row is shared
            and `places` of `plan_run` is False.
    """

    name: str
    ranks: int
    dp_size: int
    weights: int
    active_weights: int
    memory: Memory
    without_engine: Memory | None
    checkpoint: Checkpoint
    machine: Machine
    work: Work | None
    mfu: float | None
    step_s: float
    parts: dict[str, float]
    why_no_work: str = ""
    notes: tuple[str, ...] = ()
    context: dict[str, float] = field(default_factory=dict)
    batch: PlacedBatch | None = None

    def render(self, *, gpu_bytes: float | None, file_system_bytes_per_s: float | None = None) -> RenderableType:
        """Return the plan as a table, with the time of a checkpoint if the bandwidth of the file system is given."""
        rows = [*self._memory_rows(gpu_bytes, file_system_bytes_per_s), *(("assumed", note) for note in self.notes)]
        return Table((), [*rows, *self._time_rows()]).to_terminal()

    def _memory_rows(self, gpu_bytes: float | None, file_system: float | None) -> Iterator[tuple[str, str]]:
        gib, memory, other, node_ranks = 2**30, self.memory, self.without_engine, min(self.ranks, self.machine.ranks)
        yield "run", f"{self.name} on {count_of(self.ranks, 'rank')}, {self.dp_size} of them data-parallel"
        active = f", {self.active_weights:,} of them used by a token" if self.active_weights < self.weights else ""
        yield "model", f"{self.weights:,} weights{active}"
        yield "fullest rank", f"{memory.total / gib:,.2f} GiB, pipeline stage {memory.stage}"
        yield from ((f"  {name}", f"{size / gib:,.2f} GiB") for name, size in memory.parts.items())
        if memory.host:
            node = memory.host * node_ranks
            yield "  optimizer on the host", f"{memory.host / gib:,.2f} GiB, {node / gib:,.2f} GiB per node"
        if gpu_bytes is not None:
            usable = (1 - ROOM) * gpu_bytes
            misfit = f"does NOT fit, {(memory.total - usable) / gib:,.2f} GiB too much"
            verdict = "fits" if memory.fits(gpu_bytes) else misfit
            yield "GPU", f"{verdict}: {usable / gib:,.1f} of {gpu_bytes / gib:,.0f} GiB are available to tensors"
        if other is not None:
            is_misfit = memory.fits(gpu_bytes) and not other.fits(gpu_bytes)
            size = f"{other.total / gib:,.2f} GiB on the fullest rank"
            yield "without Transformer Engine", size + ", which does NOT fit" * is_misfit
        own, whole = self.checkpoint.own_bytes, self.checkpoint.total_bytes
        yield "checkpoint", f"{whole / 1e9:,.3g} GB; each rank writes up to {own / 1e9:,.3g} GB"
        per_node = f"{own / 1e9:,.3g} GB per rank, {own * node_ranks / 1e9:,.3g} GB per node"
        yield "  host memory", f"{per_node}, while it is written"
        yield "  training waits", f"{own / self.machine.host_bytes_per_s:,.2g} s for the copy to the host"
        if file_system is not None:
            yield "  written after", f"{whole / file_system:,.3g} s at {file_system / 1e9:,g} GB/s"

    def _time_rows(self) -> Iterator[tuple[str, str]]:
        if self.work is None or self.mfu is None:
            yield "epoch", f"unknown: {self.why_no_work}"
            return
        yield "epoch", f"{count_of(self.work.steps, 'step')} of {self.work.tokens:,.0f} tokens"
        yield "microbatches", f"{self.work.microbatches:,} per rank and step"
        if self.work.padding:
            yield "padding", f"{self.work.padding:.1%} of the rows, which have one length: parallel.static_rows"
        encoder = f", {self.work.encoder_flops / self.work.model_flops:.0%} of them in the encoder"
        yield "work", f"{self.work.model_flops / 1e12:,.3g} TFLOPs per step{encoder if self.work.encoder_flops else ''}"
        yield "MFU", f"{self.mfu:.1%}, {'an estimate' if self.parts else 'as given'}"
        yield "step", f"{self.step_s:,.3g} s, {self.work.tokens / self.step_s / self.ranks:,.0f} tokens/s per rank"
        for name, seconds in self.parts.items():
            if seconds >= 0.005 * self.step_s:
                yield f"  {name}", f"{seconds / self.step_s:.0%}"
        if self.context:
            yield "context parallelism", "step / step without exchanges and waits"
        for size, cost in self.context.items():
            yield f"  {size if size == DYNAMIC else f'size {size} for all rows'}", f"{cost:.2f}"
        yield "time of an epoch", duration(max(1.0, self.work.steps * self.step_s))


@dataclass(frozen=True)
class Inputs:
    """A run's settings and data, for plans of any layout.

    Attributes:
        config: settings whose model has a dtype and a vocabulary size.
        lengths: int64 [sequences], model tokens; None if they are unknown, for the reason in `why_no_work`.
        media: encoder work by sequence; None for text.
    """

    config: SftConfig
    lengths: Int64Array | None
    num_packs: int
    pack_size: int | None
    why_no_work: str = ""
    notes: tuple[str, ...] = ()
    media: EncoderWork | None = None

    @property
    def work(self) -> Work:
        """Work of an epoch in steps of one microbatch; requires `lengths`."""
        assert self.lengths is not None
        sizes = {"num_packs": self.num_packs, "global_batch_size": self.config.loader.global_batch_size}
        return plan_work(self.config.model, self.lengths, media=self.media, **sizes)

    @property
    def batch_sequences(self) -> int:
        """Number of sequences in a global batch; requires `lengths`."""
        assert self.lengths is not None
        packs = min(self.config.loader.global_batch_size, self.num_packs)
        return max(1, len(self.lengths) * packs // max(1, self.num_packs))

    @property
    def media_numbers(self) -> float:
        """Numbers that the encoder keeps for a row filled with the sequences that need the most per token."""
        if self.media is None or self.lengths is None:
            return 0.0
        numbers = self.media.kept if self.config.model.train_encoder else self.media.once
        order = np.argsort(-numbers / self.lengths, kind="stable")
        tokens = np.cumsum(self.lengths[order])
        share = np.clip((self.config.max_tokens_per_row - tokens) / self.lengths[order] + 1, 0.0, 1.0)
        return float((numbers[order] * share).sum())

    def check_longest(self, ranks: int) -> None:
        """Raise ConfigError, with a sufficient size, if a sequence fits no row; requires `lengths`."""
        assert self.lengths is not None
        held, parallel = self.config.max_tokens_per_rank, self.config.parallel
        cp, multiple = parallel.context_parallel_size, 1
        if self.config.shares_rows:
            cp = largest_share(parallel.dp_size(ranks), _cost_of(self.config).most_ranks)
            multiple = shared_multiple(parallel.pad_to_multiple, 2) // 2
        longest = int(padded_lengths(self.lengths.max(initial=0) + 1, parallel.pad_to_multiple))
        if longest > held * cp:
            what = f"the longest sequence has {longest:,} model tokens after padding, more than the {held:,} * {cp} of "
            what += "rows"
            least = -(-longest // (cp * multiple)) * multiple
            more = "share rows between more ranks (parallel.context_parallel_size, or schedule=dynamic_context)"
            fix = f"raise it to {least:,} or more, {more}, or plan shorter sequences"
            raise ConfigError(what, where="schedule.max_tokens_per_rank", fix=fix)


def fine_tuning(config: RunConfig) -> SftConfig:
    """Return `config` if it is a fine-tuning run; raise ConfigError for other recipes, which cannot be planned."""
    if not isinstance(config, SftConfig):
        what = "only fine-tuning runs can be planned"
        raise ConfigError(what, where=config.name, fix="choose an experiment of fine-tuning, or sft")
    return config


def open_inputs(config: RunConfig, packs: AssumedPacks | None = None) -> Inputs:
    """Open the data of a run, or assume `packs`; raise ConfigError if the vocabulary size is unknown."""
    config = fine_tuning(config)
    model, (data, why) = config.model, _open(config.data) if packs is None else (None, "")
    vocab_size = model.vocab_size
    notes: list[str] = []
    if model.init_from is not None and vocab_size is None:
        vocab_size = read_hf_config(find_config(model.init_from)).vocab_size
    vocab_size = vocab_size or (data.vocab_size if data is not None else None)
    if vocab_size is None and packs is not None:
        vocab_size = ASSUMED_VOCABULARY
        notes.append(f"a vocabulary of {ASSUMED_VOCABULARY:,} tokens; model.vocab_size sets another")
    elif vocab_size is None:
        what = f"the vocabulary size is unknown: {why or 'the dataset does not record it'}"
        raise ConfigError(what, where="model.vocab_size", fix="set it to the size of the tokenizer")
    config = replace(config, model=replace(model, vocab_size=vocab_size)).planned()
    encoder = config.model.encoder
    if packs is not None:
        if encoder is not None:
            notes.append("text alone: the encoder's time and activations depend on the media of the data")
        return Inputs(config, packs.lengths, packs.packs, packs.pack_size, notes=tuple(notes))
    if data is not None:
        lengths, media = np.asarray(data.train.sequence_lengths, dtype=np.int64) - 1, None
        if lengths.min(initial=1) < 1:
            fix = "prepare the dataset again; sequences of one token are refused there"
            raise ConfigError("a sequence has one token, and training requires two", where=data.train.path, fix=fix)
        if encoder is not None and data.train.has_media:
            sequences, tokens = data.train.media_tokens(np.arange(lengths.shape[0]))
            media = encoder_work(encoder, config.model.hidden_size, tokens.astype(np.float64))
            media = media.by_sequence(sequences, lengths.shape[0])
        return Inputs(config, lengths, len(data.train), data.train.pack_size, media=media)
    return Inputs(config, None, 0, None, why)


def plan_run(
    config: RunConfig,
    *,
    ranks: int | None = None,
    machine: Machine | None = None,
    mfu: float | None = None,
    packs: AssumedPacks | None = None,
    expert_load: float = 1.0,
    places: bool = False,
) -> RunPlan:
    """Plan a run; raise ConfigError if the ranks cannot train it or would leave a node partly filled.

    Args:
        ranks: number of ranks; None uses `parallel.ranks`, or 8.
        mfu: model FLOPs utilization of a step; None estimates it.
        expert_load: tokens that the experts of the busiest rank receive, relative to an even share.
        places: place a batch even if the schedule shares no rows.
    """
    machine, ranks = machine or Machine(), ranks or config.parallel.ranks or 8
    machine.check(ranks, config.trainer.device)
    fine_tuning(config).check(ranks)
    inputs = open_inputs(config, packs)
    work = batch = None
    if inputs.lengths is not None:
        inputs.check_longest(ranks)
        batch = _place_batch(inputs, ranks) if places or inputs.config.shares_rows else None
        work = plan_rows(inputs.work, inputs, ranks, batch)
    options: dict[str, Any] = {"mfu": mfu, "expert_load": expert_load, "compares_engine": True}
    planned = plan_layout(inputs, ranks=ranks, machine=machine, work=work, **options)
    parallel, context = inputs.config.parallel, dict[str, float]()
    if inputs.lengths is not None and (inputs.config.shares_rows or parallel.context_parallel_size > 1):
        sizes: dict[str, Any] = {"sequences": inputs.batch_sequences, "cost": _cost_of(inputs.config)}
        sizes |= {"max_tokens_per_rank": inputs.config.max_tokens_per_rank, "parallel": parallel}
        near = machine.ranks // parallel.tensor_parallel_size
        shared = planned.dp_size * parallel.context_parallel_size
        context = compare_context_sizes(inputs.lengths, ranks=shared, near=near, **sizes)
    return replace(planned, context=context, batch=batch)


def _draw(lengths: Int64Array, sequences: int) -> Int64Array:
    return np.random.default_rng(0).choice(lengths, size=min(sequences, _MOST_SEQUENCES))


def _cost_of(config: SftConfig) -> SequenceCost:
    return sequence_cost(config.model, config.parallel, on_gpu=config.trainer.device != "cpu")


def _place_batch(inputs: Inputs, ranks: int) -> PlacedBatch | None:
    config, parallel, cost = inputs.config, inputs.config.parallel, _cost_of(inputs.config)
    if config.schedule.name == "as_packed" or inputs.lengths is None:
        return None
    lengths = _draw(inputs.lengths, inputs.batch_sequences)
    padded = padded_lengths(lengths + 1, parallel.pad_to_multiple)
    sizes: dict[str, Any] = {"dp_size": parallel.dp_size(ranks), "cp_size": parallel.context_parallel_size}
    sizes |= {"group_size": parallel.group_size, "pad_to_multiple": parallel.pad_to_multiple}
    sizes |= {"max_tokens_per_rank": config.max_tokens_per_rank}
    placed = schedule(config.schedule.name, padded, **sizes, cost=cost)
    return PlacedBatch(config.name, lengths, placed, cost)


def compare_context_sizes(
    lengths: Int64Array,
    *,
    sequences: int,
    ranks: int,
    max_tokens_per_rank: int,
    cost: SequenceCost,
    near: int = 1,
    parallel: ParallelConfig | None = None,
) -> dict[str, float]:
    """Return the cost of a step with each context-parallel size of all rows, and with `dynamic_context`.

    Args:
        lengths: int64 [sequences], model tokens; a global batch is drawn from them.
        ranks: data-parallel times context-parallel ranks.
        near: number of these ranks on one node, which exchange faster than `cost` assumes.
        parallel: layout, whose stages wait for each microbatch's costliest row, fill and drain; None for one stage.

    Returns:
        Cost of the busiest rank, or of a pipeline's step, relative to dividing all work evenly without exchanges; by
        size, or DYNAMIC. Sizes too small for the longest sequence are omitted.
    """
    drawn, longest, size = _draw(lengths, sequences), int(lengths.max()), 1
    parallel = parallel or ParallelConfig()
    stages = parallel.pipeline_parallel_size
    batch = GlobalBatch(drawn, ranks, max_tokens_per_rank, parallel.group_size, None, cost)
    even, found = float(cost.of(drawn).sum()) / ranks, dict[str, float]()
    in_node = replace(cost, exchange=cost.exchange / _NODE_SPEED)

    def step_of(placed: Schedule) -> float:
        works = (row_costs(placed, drawn, cost=one) for one in (in_node, cost))
        is_near = True if placed.shared_by is None else (placed.shared_by <= near).reshape(-1, ranks)
        work = np.where(is_near, *works)  # [microbatches, dp_size]
        if stages == 1:
            return float(work.sum(axis=0).max()) / even
        return float(work.max(axis=1).sum()) * (1 + (stages - 1) / (parallel.num_chunks // stages * len(work))) / even

    while size <= largest_share(ranks, cost.most_ranks):
        # Each rank has two chunks of equal length of a shared sequence.
        if longest <= size * (max_tokens_per_rank if size == 1 else max_tokens_per_rank // 2 * 2):
            found[str(size)] = step_of(place_alike(batch, size))
        size *= 2
    if found:
        found[DYNAMIC] = step_of(place_dynamic_context(batch))
    return found


def _fullest_rank(config: RunConfig, dp_size: int, **further: Any) -> Memory:
    sizes: dict[str, Any] = {
        "vocab_size": config.model.vocab_size or 1,
        "max_tokens_per_rank": config.max_tokens_per_rank,
    }
    return plan_memory(config.model, config.parallel, **sizes, dp_size=dp_size, optimizer=config.optimizer, **further)


def memory_without_data(config: RunConfig, ranks: int) -> Memory | None:
    """Return the memory of the fullest rank without reading the data; None on a CPU."""
    if config.trainer.device == "cpu":
        return None
    config = config.planned()
    dp_size = config.parallel.dp_size(ranks)
    samples = dp_size * (config.data.micro_batch_size if isinstance(config, PretrainConfig) else 1)
    microbatches = -(-config.loader.global_batch_size // samples)
    kernels = Kernels.on_gpu(config.model, config.parallel)
    return _fullest_rank(config, dp_size, microbatches=microbatches, kernels=kernels)


def plan_rows(work: Work, inputs: Inputs, ranks: int, batch: PlacedBatch | None = None) -> Work:
    """Return the work with its padding and its microbatches, counted from packs, row sizes or the placed `batch`."""
    config, parallel = inputs.config, inputs.config.parallel
    dp_size, row = parallel.dp_size(ranks), config.max_tokens_per_row
    if config.schedule.name == "as_packed":
        packs = min(config.loader.global_batch_size, inputs.num_packs)
        microbatches = count_microbatches(packs, dp_size, parallel.group_size)
    elif batch is not None and config.shares_rows:
        placed = batch.placed.num_microbatches * inputs.batch_sequences  # `batch` may have fewer
        microbatches = count_microbatches(placed, len(batch.lengths), parallel.group_size)
    else:
        microbatches = count_microbatches(work.tokens, dp_size * row, parallel.group_size)
    padding = 1 - work.tokens / (microbatches * dp_size * row) if parallel.static_rows else 0.0
    return replace(work, microbatches=microbatches, padding=max(0.0, padding))


def plan_layout(
    inputs: Inputs,
    *,
    ranks: int,
    machine: Machine,
    mfu: float | None = None,
    work: Work | None,
    expert_load: float = 1.0,
    kernels: Kernels | None = None,
    compares_engine: bool = False,
) -> RunPlan:
    """Plan a run whose settings accept `ranks`; None means unknown `work`, and `kernels` chosen by the settings."""
    config, model, parallel = inputs.config, inputs.config.model, inputs.config.parallel
    assert model.vocab_size is not None
    dp_size, notes = parallel.dp_size(ranks), inputs.notes
    if kernels is None:
        kernels = Kernels.on_gpu(model, parallel) if config.trainer.device != "cpu" else Kernels()
    if config.optimizer.offload:
        notes += ("no time for the copies and the CPU's updates of optimizer.offload",)
    memory_with = partial(
        _fullest_rank,
        config,
        dp_size,
        microbatches=work.microbatches if work is not None else 1_000_000,
        expert_load=expert_load,
        media_numbers=inputs.media_numbers,
    )
    memory = memory_with(kernels=kernels)
    parts = {}
    if work is not None and mfu is None:
        on: dict[str, Any] = {"ranks": ranks, "machine": machine, "kernels": kernels, "expert_load": expert_load}
        parts = estimate_step(model, parallel, work, **on)
        mfu = work.mfu(sum(parts.values()), ranks=ranks, peak_flops=machine.peak_flops)
    whole = count_weights(model, ParallelConfig(), stage=0, vocab_size=model.vocab_size)
    has_choice = compares_engine and kernels.engine and model.fp8 == "off"
    return RunPlan(
        name=config.name,
        ranks=ranks,
        dp_size=dp_size,
        weights=whole.whole,
        active_weights=whole.used_by_token(model),
        memory=memory,
        without_engine=memory_with(kernels=replace(kernels, engine=False, grouped=False)) if has_choice else None,
        checkpoint=plan_checkpoint(model, parallel, memory, config.optimizer, ranks, model.vocab_size),
        machine=machine,
        work=work,
        mfu=mfu if work is not None else None,
        step_s=work.model_flops / (ranks * machine.peak_flops * mfu) if work is not None and mfu else 0.0,
        parts=parts,
        why_no_work=inputs.why_no_work,
        notes=notes,
    )


def _open(data: DataConfig) -> tuple[RunData | None, str]:
    if data.live.folders:
        return None, "live chunks have no known end"
    if any(source.weight is not None for source in data.blend):
        return None, "a blend with weights has no end"
    try:
        return open_datasets(data), ""
    except HarnessError as error:
        return None, error.what
