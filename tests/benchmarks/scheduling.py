"""`python -m tests.benchmarks schedule`: balance of the schedulers on a dataset or simulated batches."""

from __future__ import annotations

import statistics
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from harness.bench.figures import BenchReport, Figure, Progress
from harness.bench.sizes import Sizes
from harness.bench.workspace import Workspace, lognormal_lengths
from harness.checks import require_at_least
from harness.errors import ConfigError, ScheduleError
from harness.formats import open_dataset
from harness.loader import EpochOrder, LoaderConfig
from harness.loader.order import steps_per_epoch
from harness.prep import MIN_SEQUENCE_TOKENS, plan_packs
from harness.records import Int64Array
from harness.schedule import DYNAMIC, SCHEDULERS, Imbalance, SequenceCost, measure_imbalance, schedule
from harness.thd import padded_lengths, padding_multiple
from tests.benchmarks.__main__ import PEERS

NEXT_FIT = "next fit"
# Median of simulated lengths, and the tokens at which attention costs as much as everything else in a sequence.
MEDIAN, _ATTENTION_AT = 600.0, 8192
COST = SequenceCost(1.0, 1.0 / _ATTENTION_AT)


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
        return self.lengths if scheduler in ("dp_balanced", NEXT_FIT) else self.lengths[self.pack_order]


def bench_schedule(sizes: Sizes, workspace: Workspace, progress: Progress) -> BenchReport:
    """Place batches with every scheduler; raises ScheduleError if a sequence is longer than a row."""
    require_at_least(sizes.ranks, 1, setting="ranks")
    report = BenchReport("schedule")
    batches = list(read_batches(sizes) if sizes.path else simulate_batches(sizes))
    sequences = statistics.mean(len(batch.lengths) for batch in batches)
    report.notes.append(
        f"means over {len(batches)} batches of {sizes.path or 'lognormal lengths'}, {sequences:,.0f} sequences each; "
        f"dp {sizes.ranks}, cp {sizes.cp_size}, {sizes.max_tokens_per_rank:,} tokens a rank; "
        "x is the busiest rank over the mean"
    )
    # Where rows hold every sequence, `dynamic_context` is `cost_balanced`.
    schedulers = sizes.choose(name for name in SCHEDULERS if name != DYNAMIC)
    for name in (*schedulers, NEXT_FIT):
        progress(f"placing {len(batches)} batches: {name}")
        try:
            placed = [_place(name, batch, sizes) for batch in batches]
        except ScheduleError as error:
            if name != "as_packed":
                raise
            report.notes.append(f"as_packed cannot place them: {error.what}")
            continue
        _add_placement(name, placed, batches, sizes, report)
    return report


def simulate_batches(sizes: Sizes, *, median: float = MEDIAN) -> Iterator[SimulatedBatch]:
    """Yield batches of lognormal sequences, cut at the length of a row, packed by best-fit decreasing."""
    pad_to_multiple = padding_multiple(cp_size=sizes.cp_size)
    longest = sizes.max_tokens_per_rank * sizes.cp_size // pad_to_multiple * pad_to_multiple
    for number in range(sizes.steps):
        lengths = lognormal_lengths(sizes.global_batch, median=median, longest=longest, seed=number)
        lengths = padded_lengths(lengths + 1, pad_to_multiple)
        pack_size = sizes.max_tokens_per_rank * sizes.cp_size
        plan = plan_packs(np.maximum(lengths, MIN_SEQUENCE_TOKENS), pack_size=pack_size, seed=number)
        yield SimulatedBatch(lengths, plan.sequence_ids, plan.pack_offsets)


def read_batches(sizes: Sizes) -> Iterator[SimulatedBatch]:
    """Yield global batches of a dataset in the loader's order, from its index alone.

    Raises:
        FormatError: there is no such dataset.
        ConfigError: it has too few packs for one batch.
    """
    reader = open_dataset(sizes.path)
    order = LoaderConfig(global_batch_size=sizes.global_batch, drop_last=True)
    steps = steps_per_epoch(order, len(reader))
    if steps == 0:
        raise ConfigError(
            f"{len(reader):,} packs are fewer than the {sizes.global_batch:,} of a global batch",
            where=sizes.path,
            fix="lower global_batch",
        )
    epoch = EpochOrder(order, len(reader), 0)
    multiple = padding_multiple(cp_size=sizes.cp_size)
    for step in range(min(steps, sizes.steps)):
        packs = epoch.packs(step * sizes.global_batch, (step + 1) * sizes.global_batch)
        starts, ends = reader.pack_offsets[packs], reader.pack_offsets[packs + 1]
        stored = [reader.sequence_lengths[start:end] for start, end in zip(starts, ends, strict=True)]
        offsets = np.concatenate([np.zeros(1, np.int64), np.cumsum(ends - starts)])
        yield SimulatedBatch(padded_lengths(np.concatenate(stored), multiple), np.arange(offsets[-1]), offsets)


def _place(name: str, batch: SimulatedBatch, sizes: Sizes) -> Imbalance:
    lengths = batch.lengths_for(name)
    row = sizes.max_tokens_per_rank * sizes.cp_size
    placed = schedule(
        "as_packed" if name == NEXT_FIT else name,
        lengths,
        dp_size=sizes.ranks,
        cp_size=sizes.cp_size,
        max_tokens_per_rank=sizes.max_tokens_per_rank,
        pack_offsets=_next_fit_offsets(lengths, row) if name == NEXT_FIT else batch.pack_offsets,
        cost=COST,
    )
    return measure_imbalance(placed, lengths, max_tokens_per_row=row, cost=COST)


def least_sync_ratio(lengths: Int64Array, ranks: int, num_microbatches: int, max_tokens_per_row: int) -> float:
    """Return a ratio that the synchronized cost of no placement in this many microbatches is below.

    The first microbatch, by falling cost, takes as long as the longest sequence, and microbatch m as long as the
    longest but m * ranks if no two of those share a row. The first j hold at most the cost of the longest sequences
    that fill their rows, because a token costs more in a longer sequence. The others take an equal share of the rest.
    """
    longest_first = -np.sort(-lengths)
    costs = COST.of(longest_first)
    tokens, held = (np.concatenate([[0], np.cumsum(values)]) for values in (longest_first, costs))
    is_alone = longest_first > max_tokens_per_row // 2
    is_alone[0] = True
    longest = np.concatenate([(costs * is_alone)[::ranks], np.zeros(num_microbatches)])
    share = costs.sum() / ranks
    taken = [
        longest[:first].sum() + share - np.interp(first * ranks * max_tokens_per_row, tokens, held) / ranks
        for first in range(num_microbatches + 1)
    ]
    return float(max(taken) / share)


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
    name: str, placed: list[Imbalance], batches: list[SimulatedBatch], sizes: Sizes, report: BenchReport
) -> None:
    # The targets are set for these batches.
    reference = PEERS["schedule"].full
    fixed = ("path", "ranks", "cp_size", "max_tokens_per_rank", "global_batch")
    targeted = name == "cost_balanced" and all(getattr(sizes, key) == reference[key] for key in fixed)
    for what, ratio, target in (
        ("step cost", "cost_ratio", 1.01),
        ("synchronized cost", "sync_ratio", 1.10),
        ("step tokens", "token_ratio", None),
    ):
        samples = tuple(getattr(batch, ratio) for batch in placed)
        at_most = target if targeted else None
        report.add(Figure(f"{name}, {what}", statistics.mean(samples), "x", at_most=at_most, samples=samples))
    rows = [float(batch.num_microbatches) for batch in placed]
    report.add(Figure(f"{name}, microbatches", statistics.mean(rows), "", samples=tuple(rows)))
    if name == "cost_balanced":
        least = tuple(
            least_sync_ratio(
                batch.lengths, sizes.ranks, one.num_microbatches, sizes.max_tokens_per_rank * sizes.cp_size
            )
            for batch, one in zip(batches, placed, strict=True)
        )
        report.add(Figure(f"{name}, least synchronized cost", statistics.mean(least), "x", samples=least))

        def best_fit(batch: SimulatedBatch) -> int:
            lengths = np.maximum(batch.lengths, MIN_SEQUENCE_TOKENS)
            return -(-plan_packs(lengths, pack_size=sizes.max_tokens_per_rank * sizes.cp_size).num_packs // sizes.ranks)

        over = max(count - best_fit(batch) for count, batch in zip(rows, batches, strict=True))
        report.add(Figure(f"{name}, most microbatches above best fit", over, "", at_most=1 if targeted else None))
