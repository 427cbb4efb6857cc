"""Plan a run from its settings and the lengths of its data: memory of a GPU, microbatches, tokens and time.

`harness.plan.memory` counts the memory; the needs of the allocator, NCCL and CUDA themselves are covered by `ROOM`.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np
from rich.box import SIMPLE
from rich.table import Table

from harness.errors import ConfigError, HarnessError
from harness.loader import BlendSource, DataConfig, LiveConfig, RunData, open_datasets
from harness.plan.hf_config import find_weights, read_hf_config
from harness.plan.layout import ParallelConfig
from harness.plan.memory import Memory, count_experts, count_weights, layer_activation_bytes, plan_memory
from harness.plan.model import DTYPE_BYTES, ModelConfig
from harness.plan.work import Machine, Work, estimate_step, plan_work
from harness.records import Int64Array

# Share of a GPU's memory for CUDA's context, NCCL's buffers and fragments of the allocator.
ROOM = 0.1


@dataclass(frozen=True)
class AssumedPacks:
    """Data that does not exist yet: packs filled with sequences of one length.

    Attributes:
        packs: their number.
        pack_size, sequence_tokens: stored tokens.
    """

    packs: int
    pack_size: int
    sequence_tokens: int

    def __post_init__(self) -> None:
        if not 2 <= self.sequence_tokens <= self.pack_size:
            raise ConfigError(
                f"sequences of {self.sequence_tokens:,} tokens in packs of {self.pack_size:,}",
                where="sequence_tokens, pack_size",
                fix="sequences of 2 tokens up to a whole pack",
            )

    @property
    def lengths(self) -> Int64Array:
        """int64 [sequences], model tokens."""
        return np.full(self.packs * (self.pack_size // self.sequence_tokens), self.sequence_tokens - 1, np.int64)


@dataclass(frozen=True)
class RunPlan:
    """Result of `harness plan`.

    Attributes:
        weights: of the whole model.
        active_weights: of them, those without the experts that a token is not sent to.
        work: of an epoch; None if the data is not on this machine, for the reason in `why_no_work`.
        mfu: share of the GPUs' peak in a step; None without `work`.
        step_s: seconds of a step.
        parts: seconds of a step by purpose; empty if the MFU was given.
    """

    name: str
    ranks: int
    dp_size: int
    weights: int
    active_weights: int
    memory: Memory
    work: Work | None
    mfu: float | None
    step_s: float
    parts: dict[str, float]
    why_no_work: str = ""

    def render(self, *, gpu_bytes: float | None) -> Table:
        table = Table(box=SIMPLE, show_header=False, padding=(0, 1))
        row, gib, memory = table.add_row, 2**30, self.memory
        row("run", f"{self.name} on {self.ranks} ranks, {self.dp_size} of them data-parallel")
        active = f", {self.active_weights:,} of them met by a token" if self.active_weights < self.weights else ""
        row("model", f"{self.weights:,} weights{active}")
        row("fullest rank", f"{memory.total / gib:,.2f} GiB, pipeline stage {memory.stage}")
        for name in ("weights", "gradients", "optimizer", "activations"):
            row(f"  {name}", f"{getattr(memory, name) / gib:,.2f} GiB")
        if gpu_bytes is not None:
            usable = (1 - ROOM) * gpu_bytes
            verdict = "fits" if memory.total <= usable else "does NOT fit"
            row("GPU", f"{verdict}: {usable / gib:,.1f} of {gpu_bytes / gib:,.0f} GiB are available to tensors")
        if self.work is None or self.mfu is None:
            row("an epoch", f"unknown: {self.why_no_work}")
            return table
        row("an epoch", f"{self.work.steps:,} steps of {self.work.tokens:,.0f} tokens")
        row("microbatches", f"{self.work.microbatches:,} per rank and step")
        row("work", f"{self.work.model_flops / 1e12:,.3g} TFLOPs per step")
        row("MFU", f"{self.mfu:.1%}, {'an estimate' if self.parts else 'as given'}")
        row("a step", f"{self.step_s:,.3g} s, {self.work.tokens / self.step_s / self.ranks:,.0f} tokens/s per rank")
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
    """Plan the run with these settings, an `SftConfig` as plain values.

    Args:
        ranks: None for the settings' own number, or 8.
        machine: None for H100 nodes.
        mfu: share of the peak that a step reaches; None for an estimate.
        packs: None for the dataset of the settings.

    Raises:
        ConfigError: the layout does not divide the ranks or the model, or was planned for another number of ranks.
    """
    model, parallel = ModelConfig(**settings["model"]), ParallelConfig(**settings["parallel"])
    machine = machine or Machine()
    ranks = ranks or parallel.ranks or 8
    if "schedule" not in settings:
        raise ConfigError(
            "only fine-tuning runs can be planned", where=settings["name"], fix="name an experiment of recipes.sft"
        )
    max_tokens_per_rank = settings["schedule"]["max_tokens_per_rank"]
    batch = settings["loader"]["global_batch_size"]
    model.check(parallel)
    parallel.check(ranks, global_batch_size=batch, max_tokens_per_rank=max_tokens_per_rank)
    dp_size = parallel.dp_size(ranks)
    data, why = _open(settings["data"]) if packs is None else (None, "")
    # If the settings have the vocabulary size, planning downloads no weights.
    if model.init_from is not None and (model.vocab_size is None or Path(model.init_from).is_dir()):
        model.vocab_size = read_hf_config(find_weights(model.init_from)).vocab_size
    model.vocab_size = model.vocab_size or (data.vocab_size if data is not None else None)
    if model.vocab_size is None:
        raise ConfigError(
            f"the vocabulary size is unknown: {why or 'the dataset does not record it'}",
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
            max_tokens_per_row=parallel.max_tokens_per_row(max_tokens_per_rank),
        )
    memory = plan_memory(
        model,
        parallel,
        vocab_size=model.vocab_size,
        dp_size=dp_size,
        max_tokens_per_rank=max_tokens_per_rank,
        microbatches=work.microbatches if work is not None else 1_000_000,
    )
    parts = {}
    if work is not None and mfu is None:
        parts = estimate_step(
            model,
            parallel,
            work,
            ranks=ranks,
            weights=memory.weights // DTYPE_BYTES[model.dtype],
            layer_bytes=layer_activation_bytes(
                replace(model, recompute="none"), parallel, with_experts=model.num_experts > 0
            ),
            expert_weights=count_experts(model, parallel, stage=memory.stage),
            machine=machine,
        )
        mfu = work.mfu(sum(parts.values()), ranks=ranks, peak_flops=machine.peak_flops)
    total = count_weights(model, ParallelConfig(), stage=0, vocab_size=model.vocab_size)
    idle = 3 * model.hidden_size * model.expert_size * (model.num_experts - model.experts_per_token)
    idle *= model.expert_layers
    return RunPlan(
        name=settings["name"],
        ranks=ranks,
        dp_size=dp_size,
        weights=total,
        active_weights=total - idle,
        memory=memory,
        work=work,
        mfu=mfu if work is not None else None,
        step_s=work.model_flops / (ranks * machine.peak_flops * mfu) if work is not None and mfu else 0.0,
        parts=parts,
        why_no_work=why,
    )


def _open(settings: dict[str, Any]) -> tuple[RunData | None, str]:
    if settings["live"]["path"] or settings["live"].get("blend"):
        return None, "live chunks have no known end"
    blend = [BlendSource(**source) for source in settings["blend"]]
    if any(source.weight is not None for source in blend):
        return None, "a blend with weights has no end"
    try:
        return open_datasets(DataConfig(**{**settings, "blend": blend, "live": LiveConfig()})), ""
    except HarnessError as error:
        return None, error.what
