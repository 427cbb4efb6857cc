"""`harness bench schedule`: how evenly schedulers place a dataset, or simulated batches, on the ranks of a layout."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass

import numpy as np

from harness.bench.drawing import Drawing
from harness.bench.figures import BenchReport, Figure
from harness.bench.timing import Work, measure_rates
from harness.bench.workspace import lognormal_lengths
from harness.errors import ConfigError, ScheduleError
from harness.formats import open_dataset
from harness.loader.order import EpochOrder, OrderConfig, steps_per_epoch
from harness.prep.packing import MIN_SEQUENCE_TOKENS, plan_packs
from harness.records import Int64Array
from harness.schedule import SCHEDULERS, ScheduleConfig, SequenceCost, schedule
from harness.schedule.batch import Float64Array
from harness.schedule.imbalance import Imbalance, measure_imbalance
from harness.thd import padded_lengths, padding_multiple

NEXT_FIT = "next fit"
_PLANNED_ON = 64


@dataclass(frozen=True)
class ScheduleSettings:
    """What is placed on what.

    Attributes:
        path: a dataset; empty for simulated batches of lognormal lengths.
        dp_size, cp_size: the layout.
        max_tokens_per_rank: tokens of one rank in one microbatch.
        group_size: the number of microbatches is a multiple of this.
        global_batch: packs of a batch of a dataset, sequences of a simulated one.
        batches: global batches, at most those of one epoch.
        median, sigma: of simulated lengths, in model tokens.
        attention_at: model tokens at which a sequence's attention costs as much as everything else in it.
        schedulers: names in `SCHEDULERS`.
        planned: sequences of the global batch whose planning is timed, on 64 ranks; 0 leaves that out.
        rounds: plans that are timed.
        seed: of the simulated lengths, or of the dataset's order.
    """

    path: str = ""
    dp_size: int = 8
    cp_size: int = 1
    max_tokens_per_rank: int = 8192
    group_size: int = 1
    global_batch: int = 256
    batches: int = 40
    median: float = 600.0
    sigma: float = 1.0
    attention_at: int = 8192
    schedulers: tuple[str, ...] = tuple(SCHEDULERS)
    planned: int = 8192
    rounds: int = 9
    seed: int = 0

    def __post_init__(self) -> None:
        for name in self.schedulers:
            ScheduleConfig(name=name)
        names = ("dp_size", "cp_size", "max_tokens_per_rank", "group_size", "global_batch", "batches", "attention_at")
        for name in names:
            if getattr(self, name) < 1:
                raise ConfigError(f"{name} is {getattr(self, name)}, expected at least 1", where="bench schedule")

    @property
    def row_tokens(self) -> int:
        return self.max_tokens_per_rank * self.cp_size

    @property
    def cost(self) -> SequenceCost:
        return SequenceCost(1.0, 1.0 / self.attention_at)

    @property
    def is_reference(self) -> bool:
        """Whether these are the batches that the targets are set for."""
        layout = (self.dp_size, self.cp_size, self.max_tokens_per_rank)
        mine = (self.path, *layout, self.global_batch, self.median, self.sigma)
        return mine == ("", 8, 1, 8192, 256, 600.0, 1.0) and self.attention_at == 8192 and self.group_size == 1


QUICK = ScheduleSettings(batches=5, rounds=3)


@dataclass(frozen=True, eq=False)
class Batch:
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
        """As training would hand them to it: pack by pack where it places whole packs."""
        return self.lengths[self.pack_order] if scheduler == "as_packed" else self.lengths


def bench_schedule(settings: ScheduleSettings, say: Callable[[str], None]) -> tuple[BenchReport, Drawing]:
    """Place batches with every scheduler; the drawing is of the first batch.

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
        say(f"placing {len(batches)} batches: {name}")
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
        say(f"planning {settings.planned:,} sequences")
        _measure_planning(settings, report)
    return report, Drawing(f"cost of each of {settings.dp_size} ranks in the first batch, over their mean", ranks)


def simulate_batches(settings: ScheduleSettings) -> Iterator[Batch]:
    """Lognormal sequences, cut at the capacity; packs are what best-fit decreasing makes of each batch."""
    multiple = padding_multiple(cp_size=settings.cp_size)
    longest = settings.row_tokens // multiple * multiple
    for number in range(settings.batches):
        lengths = lognormal_lengths(
            settings.global_batch,
            median=settings.median,
            sigma=settings.sigma,
            longest=longest,
            seed=settings.seed + number,
        )
        lengths = padded_lengths(lengths + 1, multiple)
        plan = plan_packs(np.maximum(lengths, MIN_SEQUENCE_TOKENS), pack_size=settings.row_tokens, seed=number)
        yield Batch(lengths, plan.sequence_ids, plan.pack_offsets)


def read_batches(settings: ScheduleSettings) -> Iterator[Batch]:
    """Global batches of a dataset in the loader's order, from its index alone.

    Raises:
        FormatError: there is no such dataset.
        ConfigError: it has not enough packs for one batch.
    """
    reader = open_dataset(settings.path)
    order = OrderConfig(seed=settings.seed, global_batch_size=settings.global_batch, drop_last=True)
    steps = steps_per_epoch(order, len(reader))
    if steps == 0:
        raise ConfigError(
            f"{len(reader):,} packs are fewer than the {settings.global_batch:,} of a global batch",
            where=settings.path,
            fix="lower --global-batch",
        )
    epoch = EpochOrder(order, len(reader), 0)
    multiple = padding_multiple(cp_size=settings.cp_size)
    for step in range(min(steps, settings.batches)):
        packs = epoch.packs(step * settings.global_batch, (step + 1) * settings.global_batch)
        starts, ends = reader.pack_offsets[packs], reader.pack_offsets[packs + 1]
        stored = [reader.sequence_lengths[start:end] for start, end in zip(starts, ends, strict=True)]
        offsets = np.concatenate([np.zeros(1, np.int64), np.cumsum(ends - starts)])
        yield Batch(padded_lengths(np.concatenate(stored), multiple), np.arange(offsets[-1]), offsets)


def _place(name: str, batch: Batch, settings: ScheduleSettings) -> Imbalance:
    lengths = batch.lengths_for(name)
    offsets = _next_fit_offsets(lengths, settings.row_tokens) if name == NEXT_FIT else batch.pack_offsets
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
    return measure_imbalance(placed, lengths, row_tokens=settings.row_tokens, cost=settings.cost)


def _next_fit_offsets(lengths: Int64Array, capacity: int) -> Int64Array:
    """int64 [rows + 1]: rows filled in order, a new one where the next sequence does not fit."""
    starts, used = [0], 0
    for at, length in enumerate(lengths.tolist()):
        if used + length > capacity:
            starts.append(at)
            used = 0
        used += length
    return np.array([*starts, lengths.shape[0]], np.int64)


def _add_placement(
    name: str, placed: list[Imbalance], batches: list[Batch], settings: ScheduleSettings, report: BenchReport
) -> None:
    targeted = settings.is_reference and name == "cost_balanced"
    sides = (
        ("step cost", [one.cost_ratio for one in placed], 1.01),
        ("synchronised cost", [one.sync_ratio for one in placed], 1.10),
        ("step tokens", [one.token_ratio for one in placed], None),
    )
    for what, ratios, target in sides:
        at_most = target if targeted else None
        report.add(Figure(f"{name}, {what}", statistics.mean(ratios), "x", at_most=at_most, samples=tuple(ratios)))
    rows = [float(one.num_microbatches) for one in placed]
    report.add(Figure(f"{name}, microbatches", statistics.mean(rows), "", samples=tuple(rows)))
    if name == "cost_balanced":
        multiple = settings.dp_size * settings.group_size
        over = max(
            count - settings.group_size * -(-_best_fit_rows(batch, settings) // multiple)
            for count, batch in zip(rows, batches, strict=True)
        )
        report.add(Figure(f"{name}, most microbatches above best fit", over, "", at_most=1 if targeted else None))


def _best_fit_rows(batch: Batch, settings: ScheduleSettings) -> int:
    lengths = np.maximum(batch.lengths, MIN_SEQUENCE_TOKENS)
    return plan_packs(lengths, pack_size=settings.row_tokens).num_packs


def _measure_planning(settings: ScheduleSettings, report: BenchReport) -> None:
    """Milliseconds that placing one large global batch takes, in turns."""
    planned = ScheduleSettings(
        dp_size=_PLANNED_ON,
        max_tokens_per_rank=settings.max_tokens_per_rank,
        global_batch=settings.planned,
        batches=1,
        median=min(settings.median, settings.max_tokens_per_rank / 4),
        sigma=settings.sigma,
        attention_at=settings.attention_at,
    )
    batch = next(simulate_batches(planned))

    def work(name: str) -> Work:
        lengths = batch.lengths_for(name)

        def plan(number: int) -> float:
            schedule(
                name,
                lengths,
                dp_size=planned.dp_size,
                max_tokens_per_rank=planned.max_tokens_per_rank,
                pack_offsets=batch.pack_offsets,
                cost=planned.cost,
            )
            return 1.0

        return plan

    rates = measure_rates({name: work(name) for name in settings.schedulers}, rounds=settings.rounds, cpu_time=True)
    for name, each in rates.items():
        title = f"{name}, {settings.planned:,} sequences on {_PLANNED_ON} ranks"
        target = 15.0 if settings.planned == ScheduleSettings.planned and name != "as_packed" else None
        report.add_samples(title, [1e3 / rate for rate in each], "ms", at_most=target)
