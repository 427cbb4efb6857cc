"""Search over layouts: every way to divide a model over a number of GPUs, by predicted step time and memory.

The model, the batch and the dtypes keep their settings. The search varies the parallelism (tensor, pipeline, virtual
pipeline, context, expert and data), the recomputation of activations, and the length of rows.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cache, partial
from operator import attrgetter
from typing import Any

from rich.console import Group, RenderableType
from rich.text import Text

from harness.checks import show_value
from harness.errors import ConfigError
from harness.plan.layout import ParallelConfig, fp8_rank_multiple
from harness.plan.memory import ROOM
from harness.plan.model import ModelConfig
from harness.plan.model_checks import balanced_layout
from harness.plan.run_plan import AssumedPacks, RunPlan, memory_without_data, open_inputs, plan_layout, plan_rows
from harness.plan.settings import RunConfig, SftConfig
from harness.plan.work import Machine
from harness.printing import count_of
from harness.tables import Table

# Layout settings that the search chooses.
_SEARCHED = (
    *("tensor_parallel_size", "sequence_parallel", "pipeline_parallel_size", "virtual_pipeline_parallel_size"),
    *("pipeline_layout", "context_parallel_size", "expert_parallel_size", "expert_tensor_parallel_size"),
    *("distributed_optimizer", "ranks"),
)
_RECOMPUTE = ("none", "selective", "full")
# Settings that save memory without changing the layout, the cheapest in time first.
_SAVINGS: tuple[tuple[str, object], ...] = (
    ("parallel.distributed_optimizer", True),
    ("model.recompute", "selective"),
    ("model.recompute", "full"),
    ("optimizer.moments_dtype", "bfloat16"),
    ("optimizer.offload", 1.0),
)
_ADAPTERS = ("model.lora_rank", 16)
# Numbers of packs per row to try.
_PACKS_A_ROW = (1, 2, 4)
# Model chunks per stage to try if the layers do not divide evenly over the stages.
_CHUNKS = 4


@dataclass(frozen=True)
class Candidate:
    """A layout and its plan; `overrides` are the settings that select it, `config` is the run with them on a device."""

    config: SftConfig
    parallel: ParallelConfig
    plan: RunPlan

    @property
    def overrides(self) -> list[str]:
        values = {f"parallel.{name}": show_value(getattr(self.parallel, name)) for name in _SEARCHED}
        if self.parallel.pipeline_layout:
            values["parallel.pipeline_layout"] = f"'{self.parallel.pipeline_layout}'"
        values |= {"model.recompute": self.config.model.recompute, "model.recompute_modules": "[core_attn]"}
        values |= {
            "model.recompute_layers": "null",
            "schedule.max_tokens_per_rank": str(self.config.max_tokens_per_rank),
        }
        return [f"{name}={value}" for name, value in values.items()]


@dataclass(frozen=True)
class LayoutSearch:
    """Result of `harness plan auto`.

    Attributes:
        fitting: layouts that fit, the shortest step first, each with its fastest recomputation and row length.
    """

    fitting: list[Candidate]
    smallest: Candidate
    considered: int

    def render(self, *, gpu_bytes: float | None, top: int) -> RenderableType:
        """Return the best layouts as a table, or the layout with the least memory if none fits."""
        gib = 2**30
        shown = self.fitting[:top] or [self.smallest]
        first = shown[0].plan
        usable = "" if gpu_bytes is None else f" of {(1 - ROOM) * gpu_bytes / gib:,.1f} usable"
        assert first.work is not None
        title = (
            f"{count_of(first.ranks, 'GPU')}, {first.weights:,} weights, {first.work.tokens:,.0f} tokens per step: "
            f"{count_of(len(self.fitting), 'layout')} fit ({count_of(self.considered, 'plan')} compared)"
        )
        head = ["TP", "PP", "VPP", "CP", "EP", "DP", "recompute", "tokens per rank", "microbatches"]
        head += [f"GiB{usable}", "MFU", "s per step", "sent and waited"]
        rows = []
        for one in shown:
            plan, parallel = one.plan, one.parallel
            assert plan.work is not None
            waits = sum(plan.parts[name] for name in ("tensor", "context", "expert", "pipeline", "data", "launches"))
            sizes: list[object] = [parallel.tensor_parallel_size]
            sizes += [f"{parallel.pipeline_parallel_size}{' uneven' if parallel.pipeline_layout else ''}"]
            sizes += [parallel.virtual_pipeline_parallel_size or "-", parallel.context_parallel_size]
            sizes += [parallel.expert_parallel_size, plan.dp_size, one.config.model.recompute]
            sizes += [f"{one.config.max_tokens_per_rank:,}", plan.work.microbatches, f"{plan.memory.total / gib:,.1f}"]
            sizes += [f"{plan.mfu:.1%}", f"{plan.step_s:,.3g}", f"{waits / plan.step_s:.0%}"]
            rows.append(list(map(str, sizes)))
        return Group(Text(title), Table(head, rows, "r").to_terminal())


def search_layouts(
    config: RunConfig, *, machine: Machine, packs: AssumedPacks | None, gpu_bytes: float | None, expert_load: float = 1
) -> LayoutSearch:
    """Plan a run on every layout of its ranks (8 by default) that its settings accept.

    GPUs have `gpu_bytes` of memory; None sets no limit. Raises ConfigError if the data is unknown, or if no layout
    divides the model over the ranks.
    """
    ranks = config.parallel.ranks or 8
    machine.check(ranks, config.trainer.device)
    inputs = open_inputs(config, packs)
    if inputs.lengths is None or inputs.pack_size is None:
        what = f"layouts are compared by the work of their data, which is unknown: {inputs.why_no_work}"
        fix = "assume data with packs=100000 data.pack_size=8192 sequence_tokens=1024"
        raise ConfigError(what, where="data.path", fix=fix)
    base = replace(inputs.config, parallel=config.parallel)
    # Cached, so that each model is checked once.
    as_recomputed = cache(lambda kind: replace(base.model.with_recompute(kind)))
    found, refused, whole = [], [], inputs.work
    for parallel, recompute, tokens in _choices(base, ranks, inputs.pack_size):
        try:
            schedule = replace(base.schedule, max_tokens_per_rank=tokens)
            run = replace(base, model=as_recomputed(recompute), parallel=parallel, schedule=schedule)
            (run := run.planned()).check(ranks)
            (one := replace(inputs, config=run)).check_longest(ranks)
        except ConfigError as error:
            refused.append(error)
            continue
        work = plan_rows(whole, one, ranks)
        planned = plan_layout(one, ranks=ranks, machine=machine, work=work, expert_load=expert_load)
        found.append(Candidate(run, parallel, planned))
    if not found:
        raise refused[0]
    smallest = min(found, key=lambda one: one.plan.memory.total)
    best: dict[str, Candidate] = {}
    for candidate in sorted(found, key=lambda one: (one.plan.step_s, one.plan.memory.total)):
        if candidate.plan.memory.fits(gpu_bytes):
            best.setdefault(repr(candidate.parallel), candidate)
    return LayoutSearch(list(best.values()), smallest, len(found))


def check_memory(config: RunConfig, ranks: int, *, gpu_gib: float) -> None:
    """Raise ConfigError if the fullest rank needs more memory than GPUs of `gpu_gib` GiB have available for tensors.

    An unknown vocabulary counts as a single token, so that only runs that are certainly too large are refused.
    """
    memory, gpu_bytes = memory_without_data(config, ranks), gpu_gib * 2**30
    if memory is None or memory.fits(gpu_bytes):
        return

    def fits(run: RunConfig) -> bool:
        run.check(ranks)
        return (found := memory_without_data(run, ranks)) is None or found.fits(gpu_bytes)

    raise ConfigError(
        f"{config.name} does not fit the cluster's GPUs: the fullest rank, of pipeline stage {memory.stage}, needs "
        f"{memory.explain(gpu_bytes)}",
        where=f"cluster.gpu_gib={gpu_gib:g}",
        fix="".join(f"add {line}; or " for line in suggest_settings(config, fits))
        + "divide the model over more ranks (`harness plan auto` lists layouts that fit), or shorten its rows; "
        "cluster.gpu_gib is another for other GPUs, and null submits the run without this check",
    )


def suggest_settings(config: RunConfig, fits: Callable[[RunConfig], bool]) -> list[str]:
    """Return changes that make a run fit its GPUs, each as a line of settings.

    One line has the fewest savings that suffice on the same layout, another the fewest together with LoRA adapters. A
    run for which `fits` raises ConfigError does not fit.
    """
    lines = []
    for first in ((), (_ADAPTERS,)) if config.model.init_from and not config.model.lora_rank else ((),):
        tried = (
            changes
            for number in range(0 if first else 1, len(_SAVINGS) + 1)
            for added in itertools.combinations(_SAVINGS, number)
            if len(dict(added)) == number and (changes := (*first, *added))
            if all(attrgetter(key)(config) != value for key, value in changes)
        )
        for changes in tried:
            with suppress(ConfigError):
                if fits(_changed(config, changes)):
                    lines.append(" ".join(f"{key}={str(value).lower()}" for key, value in changes))
                    break
    return lines


def _changed(config: RunConfig, changes: Sequence[tuple[str, object]]) -> RunConfig:
    for key, value in changes:
        section, _, name = key.partition(".")
        config = replace(config, **{section: replace(getattr(config, section), **{name: value})})
    return config


def _choices(base: SftConfig, ranks: int, pack_size: int) -> Iterator[tuple[ParallelConfig, str, int]]:
    """Yield every layout with every kind of recomputation and several row sizes, in tokens per rank."""
    is_one = base.schedule.name == "as_packed" or base.shares_rows  # schedules with only one row size
    model, packs = base.model, _PACKS_A_ROW[:1] if is_one else _PACKS_A_ROW
    for parallel in _layouts(base.parallel, ranks, model):
        multiple = math.lcm(parallel.pad_to_multiple, fp8_rank_multiple(model.fp8, parallel))
        for packs_a_row, recompute in itertools.product(packs, _RECOMPUTE):
            tokens = -(-packs_a_row * pack_size // (parallel.context_parallel_size * multiple)) * multiple
            if base.shares_rows:
                tokens = base.max_tokens_per_rank
            yield parallel, recompute, tokens


def _layouts(asked: ParallelConfig, ranks: int, model: ModelConfig) -> list[ParallelConfig]:
    found: list[ParallelConfig] = []
    refused: ConfigError | None = None
    layers, experts, balanced = model.num_layers, model.num_experts, cache(partial(balanced_layout, model))
    sizes = [size for size in range(1, ranks + 1) if ranks % size == 0]
    for tp, pp, cp in itertools.product(sizes, sizes, sizes):
        if ranks % (tp * pp * cp) or pp > layers:
            continue
        # Layers that do not divide evenly over the stages are divided as evenly as possible.
        counts = [n for n in range(2, layers // pp + 1) if layers % (pp * n) == 0 or (layers % pp and n == _CHUNKS)]
        chunks = [None, *counts] if pp > 1 else [None]
        shares = [size for size in sizes if experts % size == 0 and ranks // pp % size == 0] if experts else [1]
        for vpp, ep in itertools.product(chunks, shares):
            num_chunks = pp * (vpp or 1)
            layout = balanced(num_chunks) if layers % num_chunks else None
            own: tuple[Any, ...] = (tp, tp > 1, pp, vpp, layout, cp, ep, 1, True, ranks)
            try:
                found.append(replace(asked, **dict(zip(_SEARCHED, own, strict=True))))
            except ConfigError as error:  # the dispatcher does not support so many ranks
                refused = refused or error
    if refused is not None and not found:
        raise refused
    return found
