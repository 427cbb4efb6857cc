"""Context-parallel sizes of every row: balance and exchange of `dynamic_context`, one size for all, and Megatron's."""

from __future__ import annotations

import time
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np
import numpy.typing as npt

from harness.bench.figures import BenchReport, Figure, Progress
from harness.bench.sizes import Sizes
from harness.bench.workspace import Workspace
from harness.records import Int64Array
from harness.schedule import measure_imbalance, schedule
from harness.schedule.batch import GlobalBatch, largest_share, row_costs
from harness.schedule.dynamic_context import place_alike, place_dynamic_context
from tests.samples.long_tails import COST, KINDS, TOKENS, fewest_ranks, lengths_of

_RANKS = (8, 64, 512, 4096)
# Megatron's planner visits every rank for every sequence.
_MOST_RANKS_OF_MEGATRON = 64
# Sequences a rank of small batches.
_FEW = (1, 4, 16)

Groups = Sequence[Sequence[Sequence[int]]]


def bench_context(sizes: Sizes, workspace: Workspace, progress: Progress) -> BenchReport:
    """Place one batch of each kind of lengths, and count; times are processor time of this process."""
    report = BenchReport("context")
    report.notes.append(
        f"{TOKENS:,} tokens a rank, Llama 3 8B's cost; a step is the busiest rank's, to a perfect balance of sequences "
        "that are each on as few ranks as hold them; a wave is a microbatch in which all ranks wait for the busiest; "
        "sent is keys and values to what these ranks must send"
    )
    for ranks in (number for number in _RANKS if number <= sizes.ranks):
        num = ranks * (sizes.global_batch if ranks < _RANKS[-1] else sizes.global_batch // 4)
        for kind in KINDS:
            progress(f"placing {num:,} sequences on {ranks} ranks: {kind}")
            _measure(f"{ranks} ranks, {kind}", lengths_of(kind, num, TOKENS * ranks), ranks, report)
            for each in (one for one in _FEW if one * ranks < num):
                _measure_few(f"{ranks} ranks, {each} a rank, {kind}", kind, each, ranks, report)
    return report


def _measure_few(title: str, kind: str, each: int, ranks: int, report: BenchReport) -> None:
    """Compare a small batch with the bound, and with the best of layouts that have one size for all sequences."""
    lengths = lengths_of(kind, each * ranks, TOKENS * ranks)
    batch, size = GlobalBatch(lengths, ranks, TOKENS, 1, None, COST), int(fewest_ranks(lengths).max())
    least, fixed = least_step(lengths, ranks), []
    while size <= largest_share(ranks):
        fixed.append(float(row_costs(place_alike(batch, size), lengths, cost=COST).sum(axis=0).max()))
        size *= 2
    work = row_costs(place_dynamic_context(batch), lengths, cost=COST)
    report.add(Figure(f"{title}, step to the best fixed size", work.sum(axis=0).max() / min(fixed), "x", at_most=1.005))
    report.add(Figure(f"{title}, step to the least possible", float(work.sum(axis=0).max() / least), "x"))
    report.add(Figure(f"{title}, waves to the least possible step", float(work.max(axis=1).sum() / least), "x"))
    report.add(Figure(f"{title}, least possible step", least * ranks / COST.of(lengths).sum(), "x"))


def _measure(title: str, lengths: Int64Array, ranks: int, report: BenchReport) -> None:
    fewest = fewest_ranks(lengths)
    ideal = (COST.of_rank(lengths, fewest) * fewest).sum() / ranks
    start = time.process_time()
    placed = schedule("dynamic_context", lengths, dp_size=ranks, max_tokens_per_rank=TOKENS, cost=COST)
    spent = time.process_time() - start
    found = measure_imbalance(placed, lengths, max_tokens_per_row=TOKENS, cost=COST)
    shared = np.ones_like(lengths)
    if placed.shared_by is not None:
        shared[placed.order] = np.repeat(placed.shared_by, np.diff(placed.row_offsets))
    report.add(Figure(f"{title}, step", float(found.rank_cost.max() / ideal), "x", at_most=1.02))
    report.add(Figure(f"{title}, wave", found.sync_ratio, "x", at_most=1.10))
    if fewest.max() > 1:
        sent = (lengths * (shared - 1)).sum() / (lengths * (fewest - 1)).sum()
        report.add(Figure(f"{title}, sent", float(sent), "x", at_most=1.10))
        fixed = int(fewest.max())
        even = (COST.of_rank(lengths, np.full_like(fewest, fixed)) * fixed).sum() / ranks
        report.add(Figure(f"{title}, {fixed} ranks for every row, step", float(even / ideal), "x"))
    report.add(Figure(f"{title}, placed in", spent, "s", at_most={512: 0.5, 4096: 1.0}.get(ranks)))
    if ranks <= _MOST_RANKS_OF_MEGATRON:
        start = time.process_time()
        work = megatron_costs(lengths, ranks)
        spent = time.process_time() - start
        report.add(Figure(f"{title}, Megatron's planner, step", float(work.sum(axis=0).max() / ideal), "x"))
        report.add(
            Figure(f"{title}, Megatron's planner, wave", float(work.max(axis=1).sum() / work.sum(0).mean()), "x")
        )
        report.add(Figure(f"{title}, Megatron's planner, placed in", spent, "s"))


def megatron_costs(lengths: Int64Array, ranks: int) -> npt.NDArray[np.float64]:
    """Return the cost of each rank in each microbatch by Megatron's planner, float64 [microbatches, ranks]."""
    from megatron.core.pipeline_parallel.hybrid_cp_schedule import BalancedCPScheduler

    group: Any = SimpleNamespace(size=lambda: ranks)
    planner = BalancedCPScheduler(TOKENS, group)
    _, groups = planner.get_groups_and_subsamples(list(enumerate(lengths.tolist())), None)
    return costs_of_groups(groups, lengths)


def costs_of_groups(groups: Groups, lengths: Int64Array) -> npt.NDArray[np.float64]:
    """Return the cost of each rank in each microbatch, float64 [microbatches, ranks], of the sequences it has there."""
    work = np.zeros((len(groups), len(groups[0])))
    for number, of_ranks in enumerate(groups):
        held = np.concatenate([np.asarray(ids, dtype=np.int64) for ids in of_ranks])
        shared = np.bincount(held, minlength=len(lengths))
        costs = COST.of_rank(lengths, np.maximum(shared, 1))
        work[number] = [costs[ids].sum() for ids in of_ranks]
    return work


def least_step(lengths: Int64Array, ranks: int) -> float:
    """Return a cost that the busiest rank of no placement is below.

    A sequence that costs no more than the step is on enough ranks, and its work grows with them: of the steps in which
    the work of all sequences fits, on ranks that are just enough, this is the least. It has no fragments of rows, and
    no capacity of a microbatch.
    """
    powers = 2 ** np.arange(int(np.log2(largest_share(ranks))) + 1)
    costs = np.array([COST.of_rank(lengths, power) for power in powers.tolist()])
    costs[powers[:, None] < fewest_ranks(lengths)] = np.inf
    low, high = 0.0, float(np.minimum.reduce(costs).sum() * ranks)
    for _ in range(60):
        step = (low + high) / 2
        is_enough = costs <= step
        at = np.argmax(is_enough, axis=0)
        work = np.where(is_enough.any(axis=0), costs[at, np.arange(len(lengths))] * powers[at], np.inf).sum()
        low, high = (low, step) if work <= step * ranks else (step, high)
    return low
