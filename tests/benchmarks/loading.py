"""`python -m tests.benchmarks loader`: THD batches a second, from each format, with different numbers of workers."""

from __future__ import annotations

import itertools
import time
from pathlib import Path

from harness.bench.figures import BenchReport, Figure, Progress, Side
from harness.bench.sizes import Sizes
from harness.bench.workspace import Workspace
from harness.formats import open_dataset
from harness.loader import Loader, LoaderConfig
from harness.schedule import ScheduleConfig
from tests.benchmarks.links import make_dataset

_FORMATS = ("memmap", "binidx", "parquet", "npy", "jsonl")
# Million tokens a second that a format must reach with some number of workers.
_TARGETS = {"memmap": 30.0, "parquet": 15.0}
# Text is slow to read, and a pickled file is held whole by every worker.
_FEW_PACKS = {"jsonl": 1000, "npy": 1000}


def bench_loader(sizes: Sizes, workspace: Workspace, progress: Progress) -> BenchReport:
    """Measure all formats in turns, with each number of workers."""
    sizes.first("workers", 1)
    report = BenchReport("loader")
    progress("the loader: writing the data")
    paths = {
        name: make_dataset(workspace, name, packs=packs_of(name, sizes), pack_size=sizes.pack_size)
        for name in sizes.choose(_FORMATS)
    }
    for workers in sizes.workers:
        progress(f"batches with {workers} workers")
        sides = {f"{name}, {workers} workers": _stream(name, path, workers, sizes) for name, path in paths.items()}
        report.compare("", sides, sizes.rounds, "M tok/s")
    for name in paths:
        of = tuple(f"{name}, {workers} workers" for workers in sizes.workers)
        best = max(report.figure(side).value for side in of)
        title = f"{name}, best of {', '.join(map(str, sizes.workers))} workers"
        report.add(Figure(title, best, "M tok/s", at_least=_TARGETS.get(name), of=of))
    return report


def packs_of(name: str, sizes: Sizes) -> int:
    """Return the packs of a dataset in this format, fewer where it is slow to read."""
    return min(sizes.packs, _FEW_PACKS.get(name, sizes.packs))


def steps_of(name: str, sizes: Sizes, workers: int = 0) -> int:
    """Return the steps that are measured of a format."""
    # Text is read a hundred times slower. Workers finish together: a few steps of each are needed for a rate.
    return max(1, sizes.steps // 20, 4 * workers) if name == "jsonl" else max(sizes.steps, 4 * workers)


def _stream(name: str, path: Path, workers: int, sizes: Sizes) -> Side:
    """Start a loader, let it fill its queue, and count millions of tokens a second of the steps that follow."""
    config = LoaderConfig(num_workers=workers, global_batch_size=sizes.global_batch)
    steps = steps_of(name, sizes, workers)
    ahead = workers * config.prefetch_factor

    def side(number: int) -> float:
        schedule = ScheduleConfig(max_tokens_per_rank=sizes.max_tokens_per_rank)
        with Loader(open_dataset(path), config, schedule=schedule) as loader:
            batches = iter(loader)
            for _ in range(1 + ahead):
                next(batches)
            start = time.perf_counter()
            tokens = sum(batch.num_tokens for batch in itertools.islice(batches, steps))
            return tokens / (time.perf_counter() - start) / 1e6

    return side
