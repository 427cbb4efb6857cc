"""`harness bench loader`: THD batches a second, shares of a step's time, and the wait for the first batch.
`harness bench live`: the same stream read by several ranks, packed or in windows: tokens a second, and imbalance.
"""

from __future__ import annotations

import importlib.util
import itertools
import pickle
import statistics
import sys
import threading
import time
import warnings
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from harness.bench.figures import BenchReport, Figure, Progress, Side, take_turns
from harness.bench.probe import measure_apart
from harness.bench.workspace import Workspace, lognormal_lengths
from harness.checks import bounded, check_numbers, require_choice
from harness.errors import ConfigError
from harness.formats import FORMATS, PackReader, open_dataset
from harness.loader import (
    BatchRange,
    BatchReader,
    LiveConfig,
    LoaderConfig,
    LoaderState,
    RankBatch,
    RankLayout,
    build_batch,
    steps_from,
)
from harness.prep import Member, StreamPacker, pack_of
from harness.records import Pack, SequenceView
from harness.schedule import ScheduleConfig, SequenceCost

# Million tokens a second that a format must reach with some number of workers.
_TARGETS = {"memmap": 30.0, "parquet": 15.0}
# Text is slow to read, and a pickled file is held whole by every worker.
_FEW_PACKS = {"jsonl": 1000, "npy": 1000}
_STAGES = ("plan", "read packs", "join", "between processes", "build rows")


@dataclass(frozen=True)
class LoaderSettings:
    """Sizes of the bench.

    Attributes:
        packs, pack_size: size of the dataset.
        formats: formats of the dataset; each is measured.
        workers: numbers of worker processes; each is measured.
        scheduler, max_tokens_per_rank: as `schedule.name` and `schedule.max_tokens_per_rank` of a recipe.
        global_batch: packs of a global batch.
        steps: global batches of a round.
        rounds: turns of each side of a comparison; figures are medians over them.
        first_batch_packs: packs of the dataset of which the wait for the first batch is measured; 0 leaves that out.
        first_batch_workers: worker processes for it.
    """

    packs: int = bounded(20_000, lowest=1)
    pack_size: int = bounded(4096, lowest=2)
    formats: tuple[str, ...] = ("memmap", "binidx", "parquet", "npy", "jsonl")
    workers: tuple[int, ...] = bounded((0, 2, 4), highest=1024)
    scheduler: str = "dp_balanced"
    max_tokens_per_rank: int = bounded(8192, lowest=1)
    global_batch: int = bounded(64, lowest=1)
    steps: int = bounded(120, lowest=1)
    rounds: int = bounded(5, lowest=1)
    first_batch_packs: int = bounded(2_000_000)
    first_batch_workers: int = bounded(4, highest=1024)

    def __post_init__(self) -> None:
        for name in self.formats:
            require_choice(name, FORMATS, setting="formats")
        check_numbers(self, "")


QUICK = LoaderSettings(
    packs=2000, formats=("memmap", "parquet"), workers=(0, 2), steps=20, rounds=1, first_batch_packs=50_000
)


def bench_loader(settings: LoaderSettings, workspace: Workspace, progress: Progress) -> BenchReport:
    """Measure all formats.

    Raises:
        ConfigError: torch is not installed.
    """
    if importlib.util.find_spec("torch") is None:
        raise ConfigError("the loader needs torch", where=sys.executable, fix="install the extra `train`")
    report = BenchReport("loader", asdict(settings))
    progress("the loader: writing the data")
    paths = {
        name: workspace.dataset(name, packs=_packs_of(name, settings), pack_size=settings.pack_size)
        for name in settings.formats
    }
    _measure_rates(settings, paths, report, progress)
    for name, path in paths.items():
        progress(f"stages of a step, {name}")
        _measure_stages(settings, name, path, report)
    if settings.first_batch_packs:
        _measure_first_batch(settings, workspace, report, progress)
    return report


def _packs_of(name: str, settings: LoaderSettings) -> int:
    return min(settings.packs, _FEW_PACKS.get(name, settings.packs))


def _steps_of(name: str, settings: LoaderSettings, workers: int = 0) -> int:
    # Text is read a hundred times slower. Workers finish together: a few steps of each are needed for a rate.
    return max(1, settings.steps // 20, 4 * workers) if name == "jsonl" else max(settings.steps, 4 * workers)


def _measure_rates(settings: LoaderSettings, paths: dict[str, Path], report: BenchReport, progress: Progress) -> None:
    for workers in settings.workers:
        progress(f"batches with {workers} workers")
        sides = {f"{name}, {workers} workers": _stream(name, path, workers, settings) for name, path in paths.items()}
        for side, rates in take_turns(sides, rounds=settings.rounds).items():
            report.add_samples(side, rates, "M tok/s")
    for name in paths:
        of = tuple(f"{name}, {workers} workers" for workers in settings.workers)
        best = max(report.figure(side).value for side in of)
        title = f"{name}, best of {', '.join(map(str, settings.workers))} workers"
        report.add(Figure(title, best, "M tok/s", at_least=_TARGETS.get(name), of=of))


def _stream(name: str, path: Path, workers: int, settings: LoaderSettings) -> Side:
    """Start a loader, let it fill its queue, and count millions of tokens a second of the steps that follow."""
    from harness.loader import Loader

    config = LoaderConfig(num_workers=workers, global_batch_size=settings.global_batch)
    steps = _steps_of(name, settings, workers)
    ahead = workers * config.prefetch_factor

    def side(number: int) -> float:
        with warnings.catch_warnings():
            # Torch warns about more workers than cores, which this bench measures on purpose.
            warnings.filterwarnings("ignore", "This DataLoader will create")
            with Loader(open_dataset(path), config, schedule=_schedule(settings)) as loader:
                batches = iter(loader)
                for _ in range(1 + ahead):
                    next(batches)
                start = time.perf_counter()
                tokens = sum(batch.num_tokens for batch in itertools.islice(batches, steps))
                return tokens / (time.perf_counter() - start) / 1e6

    return side


def _schedule(settings: LoaderSettings) -> ScheduleConfig:
    return ScheduleConfig(name=settings.scheduler, max_tokens_per_rank=settings.max_tokens_per_rank)


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


def _measure_stages(settings: LoaderSettings, name: str, path: Path, report: BenchReport) -> None:
    """Measure shares of a step's time in one process; a round through pickle stands for the queue of a worker."""
    source = _TimedSource(open_dataset(path))
    config = LoaderConfig(global_batch_size=settings.global_batch)
    layout = RankLayout()
    reader = BatchReader(source, config, schedule=_schedule(settings), layout=layout)
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

    steps = steps_from(config, len(source), epoch=0, packs_consumed=0)
    step_through(next(steps))  # a warm-up
    spent = [step_through(step) for step in itertools.islice(steps, _steps_of(name, settings))]
    seconds = {stage: sum(stages[stage] for stages in spent) for stage in _STAGES}
    total = sum(seconds.values())
    for stage in _STAGES:
        report.add(Figure(f"{name}, share of {stage}", 100 * seconds[stage] / total, "%"))


def _measure_first_batch(
    settings: LoaderSettings, workspace: Workspace, report: BenchReport, progress: Progress
) -> None:
    progress(f"the first batch of {settings.first_batch_packs:,} packs: writing the data")
    workers = settings.first_batch_workers
    # Not for npy: it unpickles the sixteen whole files of a first batch, which took 40 s.
    for name in (name for name in settings.formats if name != "npy"):
        path = workspace.large_dataset(
            name, packs=settings.first_batch_packs, shard_packs=_packs_of(name, settings), pack_size=settings.pack_size
        )
        progress(f"the first batch, {name}")
        arguments = (str(path), str(workers), str(settings.global_batch), str(settings.max_tokens_per_rank))
        samples = [measure_apart("first_batch", *arguments) for _ in range(min(settings.rounds, 3))]
        title = f"{name}, first batch of {int(samples[0]['packs']):,} packs, {workers} workers"
        report.add_samples(title, [sample["seconds"] for sample in samples], "s", at_most=2.0)


@dataclass(frozen=True)
class LiveSettings:
    """Sizes of the bench of live data.

    Attributes:
        dp_size: data-parallel ranks, as threads of one process.
        sequences: of the stream.
        window_sequences: sequences of a global batch, on average where it is made of packs.
        rows_per_chunk: sequences of a chunk; of packs, as many as hold these.
        max_tokens_per_rank: tokens of a row, and of a pack.
        median, sigma: of the lognormal lengths, in stored tokens.
        rounds: passes over the stream; rates are medians over them.
    """

    dp_size: int = bounded(8, lowest=1, highest=64)
    sequences: int = bounded(8192, lowest=64)
    window_sequences: int = bounded(512, lowest=1)
    rows_per_chunk: int = bounded(64, lowest=1)
    max_tokens_per_rank: int = bounded(8192, lowest=64)
    median: float = bounded(600.0, lowest=2, highest=1_000_000)
    sigma: float = bounded(1.0, lowest=0, highest=10)
    rounds: int = bounded(3, lowest=1)

    def __post_init__(self) -> None:
        check_numbers(self, "")


QUICK_LIVE = LiveSettings(dp_size=4, sequences=512, window_sequences=64, rows_per_chunk=16, rounds=1)


def bench_live(settings: LiveSettings, workspace: Workspace, progress: Progress) -> BenchReport:
    """Read one stream by several ranks in four ways, and compare rates and imbalance.

    Raises:
        ConfigError: torch is not installed.
    """
    if importlib.util.find_spec("torch") is None:
        raise ConfigError("live data needs torch", where=sys.executable, fix="install the extra `train`")
    report = BenchReport("live", asdict(settings))
    progress("writing the streams")
    alone, packed = workspace.folder / "live-sequences", workspace.folder / "live-packs"
    num_packs = _write_streams(settings, alone, packed)
    per_pack = settings.sequences / num_packs
    packs_of_a_step = max(settings.dp_size, round(settings.window_sequences / per_pack))
    window = {"window": settings.window_sequences}
    # Sequences one by one in rows of their own, from the chunks of a rank's number: the reading of Megatron-SWIFT's
    # sharded lazy dataset.
    ways: dict[str, tuple[Path, str, dict[str, int]]] = {
        "modulo": (alone, "as_packed", {"size": settings.window_sequences}),
        "as_packed": (packed, "as_packed", {"size": packs_of_a_step}),
        "dp_balanced windows": (alone, "dp_balanced", window),
        "cost_balanced windows": (alone, "cost_balanced", window),
    }
    report.notes += [
        f"{settings.sequences:,} sequences of median {settings.median:g} tokens, {per_pack:.1f} in a pack; "
        f"{settings.dp_size} ranks as threads of one process: rates are of all ranks together",
        "modulo is a rank that trains each sequence of its own chunks in a row of its own, as Megatron-SWIFT reads; "
        "as_packed trains packs of its own chunks",
        "training speed is what a step costs that lasts as long as its busiest rank, without waits in microbatches",
    ]
    steps: dict[str, list[RankBatch]] = {}

    def side(name: str) -> Side:
        folder, scheduler, of = ways[name]

        def read(number: int) -> float:
            start = time.perf_counter()
            steps[name] = _read_live(settings, folder, scheduler, **of)
            return sum(step.num_tokens for step in steps[name]) / (time.perf_counter() - start) / 1e6

        return read

    progress(f"reading the streams on {settings.dp_size} ranks")
    for name, rates in take_turns({name: side(name) for name in ways}, rounds=settings.rounds).items():
        report.add_samples(f"{name}, read", rates, "M tok/s")
    for name, batches in ((name, steps[name]) for name in ways):
        # The ends of the streams differ: packs leave as many in the last steps as their ranks have.
        full = [step.imbalance for step in batches[:-1]] or [step.imbalance for step in batches]
        cost = sum(one.rank_cost.max() for one in full) / sum(one.rank_cost.mean() for one in full)
        tokens = sum(int(one.rank_tokens.max()) for one in full) / sum(float(one.rank_tokens.mean()) for one in full)
        target = 1.05 if name.startswith("cost") and settings == LiveSettings() else None
        report.add(Figure(f"{name}, step cost", float(cost), "x", at_most=target))
        report.add(Figure(f"{name}, step tokens", tokens, "x"))
        report.add(Figure(f"{name}, filled", 100 * statistics.mean(one.fill for one in full), "%"))
        report.add(Figure(f"{name}, microbatches", statistics.mean(one.num_microbatches for one in full), ""))
    for name, other in itertools.product(ways, ("as_packed", "modulo")):
        if name not in (other, "modulo"):
            report.add_ratio(f"{name}, training speed to {other}", f"{other}, step cost", f"{name}, step cost")
    return report


def _write_streams(settings: LiveSettings, alone: Path, packed: Path) -> int:
    """Write the same sequences as rows of their own and in packs; return the number of packs."""
    from harness.loader.live import LiveProducer

    size = settings.max_tokens_per_rank
    sizes = {"median": settings.median, "sigma": settings.sigma}
    lengths = lognormal_lengths(settings.sequences, **sizes, longest=size, seed=0).tolist()
    random = np.random.default_rng(0)
    packer: StreamPacker[int] = StreamPacker(size, max_open=16)
    packs: list[Pack] = []
    with LiveProducer(
        alone, kind="packs", suffix=".parquet", rows_per_chunk=settings.rows_per_chunk, max_waiting=1 << 30
    ) as producer:
        for number, length in enumerate(lengths):
            mask = np.ones(length, np.uint8)
            mask[-1] = 0
            view = SequenceView(random.integers(0, 50_000, length, dtype=np.int32), mask)
            producer.add(Pack(view.input_ids, view.loss_mask, np.zeros(1, np.int32)))
            if (full := packer.add(Member(number, view, length))) is not None:
                packs.append(pack_of(full))
        producer.end()
    while (rest := packer.flush()) is not None:
        packs.append(pack_of(rest))
    rows = max(1, round(settings.rows_per_chunk * len(packs) / len(lengths)))
    with LiveProducer(packed, kind="packs", suffix=".parquet", rows_per_chunk=rows, max_waiting=1 << 30) as producer:
        for pack in packs:
            producer.add(pack)
        producer.end()
    return len(packs)


def _read_live(
    settings: LiveSettings, folder: Path, scheduler: str, *, size: int = 1, window: int | None = None
) -> list[RankBatch]:
    """Read a stream to its end on all ranks, and return the batches of the first."""
    from harness.loader.live import BatchPlan, FolderReader, LiveLoader

    ranks = settings.dp_size
    config = LiveConfig(path=str(folder), pack_size=settings.max_tokens_per_rank, timeout_s=60)
    meeting = threading.Barrier(ranks)
    slots: list[Any] = [None] * ranks

    def gather(rank: int, mine: Any) -> list[Any]:
        slots[rank] = mine
        meeting.wait(60)
        gathered = list(slots)
        meeting.wait(60)
        return gathered

    def run(rank: int) -> list[RankBatch]:
        plan = BatchPlan(
            RankLayout(dp_rank=rank, dp_size=ranks),
            size,
            settings.max_tokens_per_rank,
            SequenceCost(),
            scheduler,
            window_sequences=window,
        )

        def swap(outgoing: list[Any], expected: Sequence[int]) -> list[Any]:
            return [parts[rank] for parts in gather(rank, outgoing)]

        loader = LiveLoader(
            [FolderReader(config, plan)],
            plan,
            exchange=lambda offers: [offer for some in gather(rank, offers) for offer in some],
            share=lambda rows: rows or [],
            swap=swap,
            state=LoaderState(seed=0),
            timeout_s=60,
        )
        batches = []
        try:
            for batch in loader:
                # The tokens themselves are not kept.
                batch.rows.clear()
                batches.append(batch)
        except BaseException:
            meeting.abort()
            raise
        finally:
            loader.close()
        return batches

    with ThreadPoolExecutor(ranks) as pool:
        futures = [pool.submit(run, rank) for rank in range(ranks)]
        batches_of = [future.result() for future in futures]
    return batches_of[0]
