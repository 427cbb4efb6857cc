"""Context-parallel sizes of every row: balance and exchange of `dynamic_context`, one size for all, and Megatron's."""

from __future__ import annotations

import time
from types import SimpleNamespace
from typing import Any

import numpy as np
import numpy.typing as npt

from harness.bench.figures import BenchReport, Figure, Progress
from harness.bench.sizes import Sizes
from harness.bench.workspace import Workspace
from harness.records import Int64Array
from harness.schedule import measure_imbalance, schedule
from tests.samples.long_tails import COST, KINDS, TOKENS, fewest_ranks, lengths_of

_RANKS = (8, 64, 512, 4096)
# Megatron's planner visits every rank for every sequence.
_MOST_RANKS_OF_MEGATRON = 64


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
    return report


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
    work = np.zeros((len(groups), ranks))
    for number, of_ranks in enumerate(groups):
        held = np.concatenate([np.asarray(ids, dtype=np.int64) for ids in of_ranks])
        shared = np.bincount(held, minlength=len(lengths))
        costs = COST.of_rank(lengths, np.maximum(shared, 1))
        work[number] = [costs[ids].sum() for ids in of_ranks]
    return work
