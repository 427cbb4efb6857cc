"""`harness bench schedule`: balance of the schedulers on a dataset or simulated batches, without training."""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path

import numpy as np
from rich.bar import Bar
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from harness.bench.figures import BenchReport, Figure, Progress, measure_rates
from harness.bench.workspace import Workspace, lognormal_lengths
from harness.checks import bounded, check_numbers, require_choice
from harness.errors import ConfigError, ScheduleError
from harness.formats import open_dataset
from harness.loader import EpochOrder, LoaderConfig, steps_per_epoch
from harness.prep import MIN_SEQUENCE_TOKENS, plan_packs
from harness.records import Float64Array, Int64Array
from harness.schedule import SCHEDULERS, Imbalance, SequenceCost, measure_imbalance, schedule
from harness.thd import padded_lengths, padding_multiple

NEXT_FIT = "next fit"
_PLANNED_RANKS = 64
_BAR_CELLS = 48
_MOST_BARS = 16


@dataclass(frozen=True)
class ScheduleSettings:
    """Sizes of the bench.

    Attributes:
        path: a dataset; empty for simulated batches of lognormal lengths.
        dp_size: data-parallel ranks.
        cp_size: context-parallel ranks that share a row.
        max_tokens_per_rank: tokens of one rank in one microbatch.
        group_size: the number of microbatches is a multiple of this.
        global_batch: packs of a batch of a dataset, sequences of a simulated one.
        batches: global batches, at most those of one epoch.
        median, sigma: of simulated lengths, in model tokens.
        attention_at: model tokens at which a sequence's attention costs as much as everything else in it.
        schedulers: names of schedulers; each is measured.
        planned: sequences of the global batch whose planning is timed, on 64 ranks; 0 leaves that out.
        rounds: plans that are timed.
        seed: of the simulated lengths, or of the dataset's order.
        png: file of a picture of the first batch; empty for none.
    """

    path: str = ""
    dp_size: int = bounded(8, lowest=1)
    cp_size: int = bounded(1, lowest=1)
    max_tokens_per_rank: int = bounded(8192, lowest=1)
    group_size: int = bounded(1, lowest=1)
    global_batch: int = bounded(256, lowest=1)
    batches: int = bounded(40, lowest=1)
    median: float = bounded(600.0, lowest=2, highest=1_000_000)
    sigma: float = bounded(1.0, lowest=0, highest=10)
    attention_at: int = bounded(8192, lowest=1)
    schedulers: tuple[str, ...] = tuple(SCHEDULERS)
    planned: int = bounded(8192)
    rounds: int = bounded(9, lowest=1)
    seed: int = bounded(0)
    png: str = ""

    def __post_init__(self) -> None:
        for name in self.schedulers:
            require_choice(name, SCHEDULERS, setting="schedulers")
        check_numbers(self, "")

    @property
    def max_tokens_per_row(self) -> int:
        return self.max_tokens_per_rank * self.cp_size

    @property
    def cost(self) -> SequenceCost:
        return SequenceCost(1.0, 1.0 / self.attention_at)

    @property
    def is_reference(self) -> bool:
        """True for the batches that the targets are set for."""
        free = {"batches", "schedulers", "planned", "rounds", "seed", "png"}
        return all(value == getattr(ScheduleSettings, name) for name, value in asdict(self).items() if name not in free)


QUICK = ScheduleSettings(batches=5, rounds=3)


@dataclass(frozen=True, eq=False)
class SimulatedBatch:
    """The sequences of one global batch.

    Attributes:
        lengths: int64 [sequences], padded model tokens, in the order of training.
        pack_order: int64 [sequences], indices into `lengths`, pack by pack.
        pack_offsets: int64 [packs + 1], where each pack begins in `pack_order`.
    """

    lengths: Int64Array
    pack_order: Int64Array
    pack_offsets: Int64Array

    def lengths_for(self, scheduler: str) -> Int64Array:
        """Return the lengths in the order a scheduler gets them: by pack where it places whole packs."""
        return self.lengths[self.pack_order] if scheduler == "as_packed" else self.lengths


def bench_schedule(settings: ScheduleSettings, workspace: Workspace, progress: Progress) -> BenchReport:
    """Place batches with every scheduler; the report's drawing shows the first batch.

    Raises:
        ScheduleError: a sequence is longer than a row.
    """
    report = BenchReport("schedule", asdict(settings))
    batches = list(read_batches(settings) if settings.path else simulate_batches(settings))
    sequences = statistics.mean(len(batch.lengths) for batch in batches)
    source = settings.path or "lognormal lengths"
    report.notes.append(
        f"means over {len(batches)} batches of {source}, {sequences:,.0f} sequences each; "
        f"dp {settings.dp_size}, cp {settings.cp_size}, {settings.max_tokens_per_rank:,} tokens a rank; "
        "x is the busiest rank over the mean"
    )
    ranks: dict[str, Float64Array] = {}
    for name in (*settings.schedulers, NEXT_FIT):
        progress(f"placing {len(batches)} batches: {name}")
        try:
            placed = [_place(name, batch, settings) for batch in batches]
        except ScheduleError as error:
            if name != "as_packed":
                raise
            report.notes.append(f"as_packed cannot place them: {error.what}")
            continue
        ranks[name] = placed[0].rank_cost / placed[0].rank_cost.mean()
        _add_placement(name, placed, batches, settings, report)
    if settings.planned:
        progress(f"planning {settings.planned:,} sequences")
        _measure_planning(settings, report)
    report.drawing = Drawing(f"cost of each of {settings.dp_size} ranks in the first batch, over their mean", ranks)
    if settings.png:
        save_picture(report.drawing, Path(settings.png))
    return report


def simulate_batches(settings: ScheduleSettings) -> Iterator[SimulatedBatch]:
    """Yield batches of lognormal sequences, cut at the length of a row, packed by best-fit decreasing."""
    pad_to_multiple = padding_multiple(cp_size=settings.cp_size)
    longest = settings.max_tokens_per_row // pad_to_multiple * pad_to_multiple
    for number in range(settings.batches):
        sizes = {"median": settings.median, "sigma": settings.sigma}
        lengths = lognormal_lengths(settings.global_batch, **sizes, longest=longest, seed=settings.seed + number)
        lengths = padded_lengths(lengths + 1, pad_to_multiple)
        plan = plan_packs(np.maximum(lengths, MIN_SEQUENCE_TOKENS), pack_size=settings.max_tokens_per_row, seed=number)
        yield SimulatedBatch(lengths, plan.sequence_ids, plan.pack_offsets)


def read_batches(settings: ScheduleSettings) -> Iterator[SimulatedBatch]:
    """Yield global batches of a dataset in the loader's order, from its index alone.

    Raises:
        FormatError: there is no such dataset.
        ConfigError: it has too few packs for one batch.
    """
    reader = open_dataset(settings.path)
    order = LoaderConfig(seed=settings.seed, global_batch_size=settings.global_batch, drop_last=True)
    steps = steps_per_epoch(order, len(reader))
    if steps == 0:
        raise ConfigError(
            f"{len(reader):,} packs are fewer than the {settings.global_batch:,} of a global batch",
            where=settings.path,
            fix="lower global_batch",
        )
    epoch = EpochOrder(order, len(reader), 0)
    multiple = padding_multiple(cp_size=settings.cp_size)
    for step in range(min(steps, settings.batches)):
        packs = epoch.packs(step * settings.global_batch, (step + 1) * settings.global_batch)
        starts, ends = reader.pack_offsets[packs], reader.pack_offsets[packs + 1]
        stored = [reader.sequence_lengths[start:end] for start, end in zip(starts, ends, strict=True)]
        offsets = np.concatenate([np.zeros(1, np.int64), np.cumsum(ends - starts)])
        yield SimulatedBatch(padded_lengths(np.concatenate(stored), multiple), np.arange(offsets[-1]), offsets)


def _place(name: str, batch: SimulatedBatch, settings: ScheduleSettings) -> Imbalance:
    lengths = batch.lengths_for(name)
    offsets = _next_fit_offsets(lengths, settings.max_tokens_per_row) if name == NEXT_FIT else batch.pack_offsets
    placed = schedule(
        "as_packed" if name == NEXT_FIT else name,
        lengths,
        dp_size=settings.dp_size,
        cp_size=settings.cp_size,
        max_tokens_per_rank=settings.max_tokens_per_rank,
        group_size=settings.group_size,
        pack_offsets=offsets,
        cost=settings.cost,
    )
    return measure_imbalance(placed, lengths, max_tokens_per_row=settings.max_tokens_per_row, cost=settings.cost)


def _next_fit_offsets(lengths: Int64Array, max_tokens_per_row: int) -> Int64Array:
    """Fill rows in order, a new one where the next sequence does not fit; return their offsets, int64 [rows + 1]."""
    starts, used = [0], 0
    for at, length in enumerate(lengths.tolist()):
        if used + length > max_tokens_per_row:
            starts.append(at)
            used = 0
        used += length
    return np.array([*starts, lengths.shape[0]], np.int64)


def _add_placement(
    name: str, placed: list[Imbalance], batches: list[SimulatedBatch], settings: ScheduleSettings, report: BenchReport
) -> None:
    targeted = settings.is_reference and name == "cost_balanced"
    for what, ratio, target in (
        ("step cost", "cost_ratio", 1.01),
        ("synchronised cost", "sync_ratio", 1.10),
        ("step tokens", "token_ratio", None),
    ):
        samples = tuple(getattr(batch, ratio) for batch in placed)
        at_most = target if targeted else None
        report.add(Figure(f"{name}, {what}", statistics.mean(samples), "x", at_most=at_most, samples=samples))
    rows = [float(batch.num_microbatches) for batch in placed]
    report.add(Figure(f"{name}, microbatches", statistics.mean(rows), "", samples=tuple(rows)))
    if name == "cost_balanced":
        multiple = settings.dp_size * settings.group_size

        def best_fit(batch: SimulatedBatch) -> int:
            lengths = np.maximum(batch.lengths, MIN_SEQUENCE_TOKENS)
            packs = plan_packs(lengths, pack_size=settings.max_tokens_per_row).num_packs
            return settings.group_size * -(-packs // multiple)

        over = max(count - best_fit(batch) for count, batch in zip(rows, batches, strict=True))
        report.add(Figure(f"{name}, most microbatches above best fit", over, "", at_most=1 if targeted else None))


def _measure_planning(settings: ScheduleSettings, report: BenchReport) -> None:
    """Measure the milliseconds that placing one large global batch takes, in turns."""
    planned = replace(
        settings,
        dp_size=_PLANNED_RANKS,
        cp_size=1,
        global_batch=settings.planned,
        batches=1,
        median=min(settings.median, settings.max_tokens_per_rank / 4),
        seed=0,
    )
    batch = next(simulate_batches(planned))

    def plan(name: str, number: int) -> float:
        schedule(
            name,
            batch.lengths_for(name),
            dp_size=planned.dp_size,
            max_tokens_per_rank=planned.max_tokens_per_rank,
            pack_offsets=batch.pack_offsets,
            cost=planned.cost,
        )
        return 1.0

    works = {name: partial(plan, name) for name in settings.schedulers}
    rates = measure_rates(works, rounds=settings.rounds, cpu_time=True)
    for name, samples in rates.items():
        title = f"{name}, {settings.planned:,} sequences on {_PLANNED_RANKS} ranks"
        target = 15.0 if settings.planned == ScheduleSettings.planned and name != "as_packed" else None
        report.add_samples(title, [1e3 / rate for rate in samples], "ms", at_most=target)


@dataclass(frozen=True, eq=False)
class Drawing:
    """Bar charts of the cost of every rank over the mean, float64 [dp_size], of each scheduler."""

    title: str
    ranks: Mapping[str, Float64Array]

    def __rich__(self) -> RenderableType:
        """Return a bar for each rank, or for the busiest of a few neighbors where there are more than fit a screen."""
        longest = max(float(costs.max()) for costs in self.ranks.values())
        parts: list[RenderableType] = [Text(self.title, style="bold")]
        for name, costs in self.ranks.items():
            busiest = int(np.argmax(costs))
            parts.append(Text(f"\n{name}: rank {busiest} is the busiest, {costs[busiest]:.3f} x mean", style="cyan"))
            table = Table(box=None, show_header=False, pad_edge=False)
            together = -(-costs.shape[0] // _MOST_BARS)
            for first in range(0, costs.shape[0], together):
                neighbors = costs[first : first + together]
                cost = float(neighbors.max())
                label = f"rank {first}" if together == 1 else f"ranks {first}-{first + neighbors.shape[0] - 1}"
                color = "red" if cost > 1.1 else "yellow" if cost > 1.02 else "green"
                table.add_row(label, Bar(longest, 0, cost, width=_BAR_CELLS, color=color), f"{cost:.3f}")
            parts.append(table)
        return Group(*parts)


def save_picture(drawing: Drawing, path: Path) -> None:
    """Write the same bars as a picture, with all ranks.

    Raises:
        ConfigError: matplotlib is not installed, or the picture cannot be written.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError:
        raise ConfigError("a picture needs matplotlib", where="png", fix="pip install matplotlib") from None
    figure = Figure(figsize=(9, 2.2 * len(drawing.ranks)), layout="constrained")
    axes = figure.subplots(len(drawing.ranks), 1, sharex=True, sharey=True, squeeze=False)[:, 0]
    figure.suptitle(drawing.title)
    for axis, (name, costs) in zip(axes, drawing.ranks.items(), strict=True):
        axis.bar(np.arange(costs.shape[0]), costs)
        axis.axhline(1.0, color="black", linewidth=0.8)
        axis.set_title(f"{name}: busiest {costs.max():.3f} x mean", fontsize="medium")
    axes[-1].set_xlabel("data-parallel rank")
    try:
        figure.savefig(path)
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"the picture cannot be written: {error}", where=str(path), fix="name another file"
        ) from error
