"""`python -m tests.benchmarks planning`: the time that the schedulers take to place one large global batch."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

from harness.bench.figures import CPU, BenchReport, Progress, take_turns
from harness.bench.sizes import Sizes
from harness.bench.workspace import Workspace
from harness.schedule import DYNAMIC, SCHEDULERS, schedule
from tests.benchmarks.clocks import milliseconds
from tests.benchmarks.scheduling import COST, MEDIAN, simulate_batches

_RANKS = 64


def bench_planning(sizes: Sizes, workspace: Workspace, progress: Progress) -> BenchReport:
    """Measure milliseconds of processor time, the schedulers in turns."""
    report = BenchReport("planning")
    for planned in sizes.sequences:
        progress(f"planning {planned:,} sequences")
        # Where rows hold every sequence, `dynamic_context` is `cost_balanced`.
        _measure(planned, sizes.choose(name for name in SCHEDULERS if name != DYNAMIC), sizes, report)
    return report


def _measure(planned: int, schedulers: list[str], sizes: Sizes, report: BenchReport) -> None:
    sizes = replace(sizes, global_batch=planned)
    batch = next(simulate_batches(sizes, median=min(MEDIAN, sizes.max_tokens_per_rank / 4)))

    def plan(name: str, number: int) -> None:
        schedule(
            name,
            batch.lengths_for(name),
            dp_size=_RANKS,
            max_tokens_per_rank=sizes.max_tokens_per_rank,
            pack_offsets=batch.pack_offsets,
            cost=COST,
        )

    sides = {name: milliseconds(partial(plan, name), CPU) for name in schedulers}
    for name, samples in take_turns(sides, rounds=sizes.rounds).items():
        title = f"{name}, {planned:,} sequences on {_RANKS} ranks"
        target = 15.0 if planned == 8192 and name != "as_packed" else None
        report.add_samples(title, samples, "ms", at_most=target)
