"""`harness bench loader`: THD batches a second, and shares of a step."""

from __future__ import annotations

import itertools
import pickle
import time
from pathlib import Path

from harness.bench.figures import BenchReport, Case, Figure, Progress, Side
from harness.bench.sizes import Sizes
from harness.bench.workspace import Workspace
from harness.formats import PackReader, open_dataset
from harness.loader import BatchRange, Blend, Loader, LoaderConfig, LoaderState, RankLayout, build_batch
from harness.loader.plan import BatchReader
from harness.records import Pack
from harness.schedule import ScheduleConfig

_FORMATS = ("memmap", "binidx", "parquet", "npy", "jsonl")
# Million tokens a second that a format must reach with some number of workers.
_TARGETS = {"memmap": 30.0, "parquet": 15.0}
# Text is slow to read, and a pickled file is held whole by every worker.
_FEW_PACKS = {"jsonl": 1000, "npy": 1000}
_STAGES = ("plan", "read packs", "join", "between processes", "build rows")


def bench_loader(sizes: Sizes, workspace: Workspace, progress: Progress) -> BenchReport:
    """Measure all formats."""
    sizes.first("workers", 1)
    report = BenchReport("loader")
    progress("the loader: writing the data")
    paths = {
        name: workspace.dataset(name, packs=packs_of(name, sizes), pack_size=sizes.pack_size)
        for name in sizes.choose(_FORMATS)
    }
    _measure_rates(sizes, paths, report, progress)
    for name, path in paths.items():
        progress(f"stages of a step, {name}")
        _measure_stages(sizes, name, path, report)
    return report


def packs_of(name: str, sizes: Sizes) -> int:
    """Return the packs of a dataset in this format, fewer where it is slow to read."""
    return min(sizes.packs, _FEW_PACKS.get(name, sizes.packs))


def _steps_of(name: str, sizes: Sizes, workers: int = 0) -> int:
    # Text is read a hundred times slower. Workers finish together: a few steps of each are needed for a rate.
    return max(1, sizes.steps // 20, 4 * workers) if name == "jsonl" else max(sizes.steps, 4 * workers)


def _measure_rates(sizes: Sizes, paths: dict[str, Path], report: BenchReport, progress: Progress) -> None:
    for workers in sizes.workers:
        progress(f"batches with {workers} workers")
        sides = {f"{name}, {workers} workers": _stream(name, path, workers, sizes) for name, path in paths.items()}
        report.run(Case("", sides, sizes.rounds, "M tok/s"))
    for name in paths:
        of = tuple(f"{name}, {workers} workers" for workers in sizes.workers)
        best = max(report.figure(side).value for side in of)
        title = f"{name}, best of {', '.join(map(str, sizes.workers))} workers"
        report.add(Figure(title, best, "M tok/s", at_least=_TARGETS.get(name), of=of))


def _stream(name: str, path: Path, workers: int, sizes: Sizes) -> Side:
    """Start a loader, let it fill its queue, and count millions of tokens a second of the steps that follow."""
    config = LoaderConfig(num_workers=workers, global_batch_size=sizes.global_batch)
    steps = _steps_of(name, sizes, workers)
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


class _TimedSource:
    """A dataset that adds up the seconds that reading its packs takes."""

    def __init__(self, reader: PackReader) -> None:
        self._reader = reader
        self.pack_offsets, self.sequence_lengths = reader.pack_offsets, reader.sequence_lengths
        self.fingerprint = reader.fingerprint
        self.seconds = 0.0

    def __len__(self) -> int:
        return len(self._reader)

    def read(self, indices: list[int]) -> list[Pack]:
        start = time.perf_counter()
        packs = self._reader.read(indices)
        self.seconds += time.perf_counter() - start
        return packs


def _measure_stages(sizes: Sizes, name: str, path: Path, report: BenchReport) -> None:
    """Measure shares of a step's time in one process; a round through pickle stands for the queue of a worker."""
    source = _TimedSource(open_dataset(path))
    config, layout = LoaderConfig(global_batch_size=sizes.global_batch), RankLayout()
    schedule = ScheduleConfig(max_tokens_per_rank=sizes.max_tokens_per_rank)
    reader = BatchReader(source, config, schedule=schedule, layout=layout)
    state = LoaderState(seed=0, fingerprint=source.fingerprint, order=config.order_signature)

    def step_through(step: BatchRange) -> dict[str, float]:
        source.seconds = 0.0
        marks = [time.perf_counter()]
        reader.plan(step)
        marks.append(time.perf_counter())
        raw = reader.read(step)
        marks.append(time.perf_counter())
        raw = pickle.loads(pickle.dumps(raw, protocol=pickle.HIGHEST_PROTOCOL))
        marks.append(time.perf_counter())
        build_batch(raw, layout=layout, before=state, num_packs=len(source))
        marks.append(time.perf_counter())
        planned, read, sent, built = (later - sooner for sooner, later in itertools.pairwise(marks))
        # `read` plans once more, and joins packs as it reads them.
        joined = max(0.0, read - planned - source.seconds)
        return dict(zip(_STAGES, (planned, source.seconds, joined, sent, built), strict=True))

    steps = Blend.of_one(len(source)).steps(config, epoch=0, packs_consumed=0)
    step_through(next(steps))  # a warm-up
    spent = [step_through(step) for step in itertools.islice(steps, _steps_of(name, sizes))]
    seconds = {stage: sum(stages[stage] for stages in spent) for stage in _STAGES}
    total = sum(seconds.values())
    for stage in _STAGES:
        report.add(Figure(f"{name}, share of {stage}", 100 * seconds[stage] / total, "%"))
