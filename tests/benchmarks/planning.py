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

# Ranks, sequences of each by default, and the milliseconds in which a scheduler that moves sequences places them.
_CASES = ((8, 128, None), (64, 128, 15.0), (512, 128, None), (4096, 32, 100.0))


def bench_planning(sizes: Sizes, workspace: Workspace, progress: Progress) -> BenchReport:
    """Measure milliseconds of processor time, the schedulers in turns."""
    report = BenchReport("planning")
    for ranks, each, at_most in _CASES:
        for planned in sizes.sequences or (ranks * each,) if ranks <= sizes.ranks else ():
            progress(f"planning {planned:,} sequences on {ranks} ranks")
            # Where rows hold every sequence, `dynamic_context` is `cost_balanced`.
            names = sizes.choose(name for name in SCHEDULERS if name != DYNAMIC)
            _measure(planned, ranks, names, sizes, report, at_most if planned == ranks * each else None)
    return report


def _measure(
    planned: int, ranks: int, schedulers: list[str], sizes: Sizes, report: BenchReport, at_most: float | None
) -> None:
    sizes = replace(sizes, global_batch=planned)
    batch = next(simulate_batches(sizes, median=min(MEDIAN, sizes.max_tokens_per_rank / 4)))

    def plan(name: str, number: int) -> None:
        schedule(
            name,
            batch.lengths_for(name),
            dp_size=ranks,
            max_tokens_per_rank=sizes.max_tokens_per_rank,
            pack_offsets=batch.pack_offsets,
            cost=COST,
        )

    sides = {name: milliseconds(partial(plan, name), CPU) for name in schedulers}
    for name, samples in take_turns(sides, rounds=sizes.rounds).items():
        title = f"{name}, {planned:,} sequences on {ranks} ranks"
        report.add_samples(title, samples, "ms", at_most=at_most if name != "as_packed" else None)
