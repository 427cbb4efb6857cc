"""`python -m tests.benchmarks reading`: stages of a step, bytes read by many ranks, the first batch of large data."""

from __future__ import annotations

import itertools
import pickle
import time
from pathlib import Path

import numpy as np

from harness.bench.apart import measure_apart
from harness.bench.figures import BenchReport, Figure, Progress
from harness.bench.sizes import Sizes
from harness.bench.workspace import Workspace
from harness.formats import FORMATS, PackReader, load_format, open_dataset
from harness.loader import BatchRange, Blend, Loader, LoaderConfig, LoaderState, RankLayout, build_batch
from harness.loader.plan import BatchReader
from harness.printing import count_of
from harness.records import Pack
from harness.schedule import ScheduleConfig
from tests.benchmarks.links import large_dataset
from tests.benchmarks.loading import packs_of, steps_of

_FORMATS = ("memmap", "binidx", "parquet", "npy", "jsonl")
_STAGES = ("plan", "read packs", "join", "between processes", "build rows")
_FIRST_BATCH_WORKERS = 4
# Bytes read over bytes stored that are allowed, by schedule; and ranks and workers of each that read.
_BYTES_AT_MOST = {"as_packed": 1.2, "dp_balanced": 2.0, "cost_balanced": 2.0}
_RANKS, _WORKERS = (1, 64, 512), (1, 4)


def bench_reading(sizes: Sizes, workspace: Workspace, progress: Progress) -> BenchReport:
    """Measure stages of a step, count bytes of Parquet, and measure the wait for the first batch of each format."""
    report = BenchReport("reading")
    chosen = sizes.choose(_FORMATS)
    for name in chosen:
        progress(f"stages of a step, {name}")
        path = workspace.dataset(name, packs=packs_of(name, sizes), pack_size=sizes.pack_size)
        _measure_stages(sizes, name, path, report)
    progress("bytes read by one of many ranks, parquet")
    path = workspace.dataset("parquet", packs=sizes.packs, pack_size=sizes.pack_size)
    _measure_bytes(sizes, path, report)
    # Not for npy: it unpickles the sixteen whole files of a first batch, which took 40 s.
    for name in (name for name in chosen if name != "npy" and sizes.large_packs):
        progress(f"the first batch of {sizes.large_packs:,} packs, {name}")
        path = large_dataset(
            workspace, name, packs=sizes.large_packs, shard_packs=packs_of(name, sizes), pack_size=sizes.pack_size
        )
        place, arguments = f"{__name__}:wait_for_first_batch", (path, sizes.global_batch, sizes.max_tokens_per_rank)
        samples = [measure_apart(place, *arguments) for _ in range(min(sizes.rounds, 3))]
        title = f"{name}, first batch of {samples[0]['packs']:,} packs, {_FIRST_BATCH_WORKERS} workers"
        report.add_samples(title, [sample["seconds"] for sample in samples], "s", at_most=2.0)
    return report


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
    spent = [step_through(step) for step in itertools.islice(steps, steps_of(name, sizes))]
    seconds = {stage: sum(stages[stage] for stages in spent) for stage in _STAGES}
    total = sum(seconds.values())
    for stage in _STAGES:
        report.add(Figure(f"{name}, share of {stage}", 100 * seconds[stage] / total, "%"))


def _measure_bytes(sizes: Sizes, path: Path, report: BenchReport) -> None:
    """Count the bytes that ranks read from shards, over the stored bytes of the tokens that they train."""
    reader = open_dataset(path)
    per_token = sum(Path(str(place)).stat().st_size for place in reader.files()) / int(reader.sequence_lengths.sum())
    ids = np.random.default_rng(0).permutation(len(reader))[:512]
    for count in (64, 1):
        reader.read(ids[:count])  # which also loads libraries
        start = time.process_time()
        tokens = sum(len(pack) for at in range(0, len(ids), count) for pack in reader.read(ids[at : at + count]))
        seconds = time.process_time() - start
        report.add(Figure(f"parquet, packs {count} by {count}", 1e9 * seconds / tokens, "ns/token"))
    report.add_ratio("parquet, packs 1 by 1 to 64 by 64", "parquet, packs 1 by 1", "parquet, packs 64 by 64")
    for (name, at_most), ranks, workers in itertools.product(_BYTES_AT_MOST.items(), _RANKS, _WORKERS):
        num_bytes, tokens = _read_as_ranks(sizes, path, name, ranks, workers)
        title = f"parquet, {name}, bytes read, {count_of(ranks, 'rank')}, {count_of(workers, 'worker')}"
        report.add(Figure(title, num_bytes / (tokens * per_token), "x", at_most=at_most))


def _read_as_ranks(sizes: Sizes, path: Path, name: str, ranks: int, workers: int) -> tuple[int, int]:
    """Return the bytes that some of the ranks read, whose workers take turns, and the tokens that they train."""
    config = LoaderConfig(global_batch_size=max(sizes.global_batch, ranks))
    schedule = ScheduleConfig(name=name, max_tokens_per_rank=sizes.max_tokens_per_rank)
    # Two windows of the shuffle, within which a rank meets the same parts of a file again.
    num_steps = max(1, 2 * config.block_packs * config.window_blocks // config.global_batch_size)
    num_bytes, tokens = 0, 1  # not 0, in a dataset with too few packs for these ranks
    for rank in range(0, ranks, max(1, ranks // 4)):
        layout = RankLayout(dp_rank=rank, dp_size=ranks)
        sources = [open_dataset(path) for _ in range(workers)]
        readers = [BatchReader(source, config, schedule=schedule, layout=layout) for source in sources]
        steps = Blend.of_one(len(sources[0])).steps(config, epoch=0, packs_consumed=0)
        before = _bytes_read()
        for reader, step in zip(itertools.cycle(readers), itertools.islice(steps, num_steps), strict=False):
            tokens += reader.read(step).tokens["input_ids"].shape[0]
        num_bytes += _bytes_read() - before
    return num_bytes, tokens


def _bytes_read() -> int:
    """Return the bytes that this process has read from files; mapped ones do not count."""
    return int(Path("/proc/self/io").read_text().split()[1])


def wait_for_first_batch(path: str, global_batch: str, max_tokens_per_rank: str) -> dict[str, float]:
    """Open a dataset and build the first batch, in a process that has PyTorch already, as a training process has."""
    import torch.utils.data  # noqa: F401

    for name in FORMATS:
        load_format(name)
    config = LoaderConfig(num_workers=_FIRST_BATCH_WORKERS, global_batch_size=int(global_batch))
    start = time.perf_counter()
    reader = open_dataset(path)
    with Loader(reader, config, schedule=ScheduleConfig(max_tokens_per_rank=int(max_tokens_per_rank))) as loader:
        next(iter(loader))
        return {"seconds": time.perf_counter() - start, "packs": len(reader)}
