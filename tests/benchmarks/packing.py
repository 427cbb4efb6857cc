"""Planning packs, against other packers and over stored sequences."""

from __future__ import annotations

import importlib
import shutil
import time
from bisect import bisect_left, insort
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path

import numpy as np
import pyarrow as pa

from harness.bench.figures import BenchReport, Figure, Progress, Work, measure_rates
from harness.bench.workspace import Workspace, lognormal_lengths
from harness.checks import bounded, check_numbers, require_choice
from harness.formats import open_dataset
from harness.prep import PACKERS, plan_packs, repack_store
from harness.records import Int64Array


@dataclass(frozen=True)
class PackSettings:
    """Sizes of the bench.

    Attributes:
        sequences: lengths to pack; lognormal, cut at the pack size.
        median, sigma: of the lengths.
        pack_sizes: tokens of a pack; each size is measured.
        compared: lengths that the slower packers get.
        algorithms: packers of this project to compare.
        rounds: turns of each side of a comparison; figures are medians over them.
    """

    sequences: int = bounded(13_000_000, lowest=1)
    median: float = bounded(600.0, above=0, highest=1_000_000)
    sigma: float = bounded(1.0, lowest=0, highest=10)
    pack_sizes: tuple[int, ...] = bounded((4096, 8192), lowest=2)
    compared: int = bounded(200_000, lowest=1)
    algorithms: tuple[str, ...] = ("best_fit_decreasing", "first_fit_decreasing", "next_fit")
    rounds: int = bounded(3, lowest=1)

    def __post_init__(self) -> None:
        for name in self.algorithms:
            require_choice(name, PACKERS, setting="algorithms")
        check_numbers(self, "")


@dataclass(frozen=True)
class BenchRepackSettings:
    """Sizes of the bench.

    Attributes:
        packs: packs of the store that is planned over, 6.5 sequences each.
        shard_packs: packs that are really on the disk; the store has links to them.
        store_pack_size: tokens of a pack of the store.
        pack_sizes: tokens of a planned pack; each size is measured.
        read_packs: packs of the dataset that is read.
        rounds: turns of each side of a comparison; figures are medians over them.
    """

    packs: int = bounded(2_000_000, lowest=1)
    shard_packs: int = bounded(20_000, lowest=1)
    store_pack_size: int = bounded(4096, lowest=2)
    pack_sizes: tuple[int, ...] = bounded((4096, 8192), lowest=2)
    read_packs: int = bounded(5_000, lowest=1)
    rounds: int = bounded(3, lowest=1)

    def __post_init__(self) -> None:
        check_numbers(self, "")


QUICK = PackSettings(sequences=500_000, compared=50_000)
QUICK_REPACK = BenchRepackSettings(packs=20_000, shard_packs=2000, read_packs=500, rounds=1)


def bench_packing(settings: PackSettings, workspace: Workspace, progress: Progress) -> BenchReport:
    """Measure the time of a whole plan, and the capacity that it leaves empty beyond the unavoidable."""
    report = BenchReport("pack", asdict(settings))
    report.notes.append("seconds are processor time, on one core")
    for pack_size in settings.pack_sizes:
        progress(f"packing {settings.sequences:,} sequences to {pack_size:,}")
        _measure_plan(settings, pack_size, report)
    pack_size = settings.pack_sizes[0]
    progress(f"packing {settings.compared:,} sequences to {pack_size:,} in other ways")
    _compare_packers(settings, pack_size, report)
    return report


def _measure_plan(settings: PackSettings, pack_size: int, report: BenchReport) -> None:
    lengths = _draw_lengths(settings, settings.sequences, pack_size)
    seconds, packs = [], 0
    for _ in range(settings.rounds):
        start = time.process_time()
        packs = plan_packs(lengths, pack_size=pack_size).num_packs
        seconds.append(time.process_time() - start)
    name = f"{settings.sequences:,} in {pack_size:,}"
    # The target is for 13 million sequences.
    target = 4.0 if settings.sequences == PackSettings.sequences else None
    report.add_samples(f"{name}, whole plan", seconds, "s", at_most=target)
    least = lower_bound(lengths, pack_size)
    report.add(Figure(f"{name}, packs", packs, "packs"))
    report.add(Figure(f"{name}, packs needed", least, "packs"))
    report.add(Figure(f"{name}, empty beyond need", 100 * (packs - least) / packs, "%", at_most=0.01))


def lower_bound(lengths: Int64Array, pack_size: int) -> int:
    """Return the packs that any packing needs: all tokens over the capacity, or the sequences too long to share."""
    return max(-(-int(lengths.sum()) // pack_size), int(np.count_nonzero(2 * lengths > pack_size)))


def _draw_lengths(settings: PackSettings, count: int, pack_size: int) -> Int64Array:
    return lognormal_lengths(count, median=settings.median, sigma=settings.sigma, longest=pack_size, seed=0)


def _compare_packers(settings: PackSettings, pack_size: int, report: BenchReport) -> None:
    lengths = _draw_lengths(settings, settings.compared, pack_size)
    packs: dict[str, int] = {}

    def side(name: str, pack: Callable[[], int]) -> Work:
        def run(number: int) -> float:
            packs[name] = pack()
            return settings.compared / 1e6

        return run

    others: dict[str, Callable[[], int]] = {"plain best-fit decreasing": lambda: pack_one_by_one(lengths, pack_size)}
    trl = trl_packer(lengths, pack_size)
    if trl is None:
        report.notes.append("trl is not installed; with `pip install trl` it is measured too")
    else:
        others["trl"] = trl
        report.notes.append(
            "trl gets tokens of type null, which it moves in little time; its slicing of lists is still in its figure"
        )
    plan = partial(plan_packs, lengths, pack_size=pack_size)
    ours = {name: lambda name=name: plan(algorithm=name).num_packs for name in settings.algorithms}
    sides = {name: side(name, pack) for name, pack in (ours | others).items()}
    least = lower_bound(lengths, pack_size)
    for name, rates in measure_rates(sides, rounds=settings.rounds, cpu_time=True).items():
        report.add_samples(f"{name}, {settings.compared:,} sequences", rates, "M seq/s")
        report.add(Figure(f"{name}, packs beyond need", packs[name] - least, "packs"))
    best, suffix = settings.algorithms[0], f", {settings.compared:,} sequences"
    for name in others:
        report.add_ratio(f"{best} to {name}", best + suffix, name + suffix)


def pack_one_by_one(lengths: Int64Array, pack_size: int) -> int:
    """Count the packs of a plain best-fit decreasing: one sequence at a time over a sorted list of rooms."""
    rooms: list[tuple[int, int]] = []
    packs: list[list[int]] = []
    order = np.argsort(-lengths, kind="stable").tolist()
    sizes = lengths.tolist()
    for sequence in order:
        size = sizes[sequence]
        at = bisect_left(rooms, (size, 0))
        if at == len(rooms):
            pack, room = len(packs), pack_size
            packs.append([])
        else:
            room, pack = rooms.pop(at)
        packs[pack].append(sequence)
        insort(rooms, (room - size, pack))
    return len(packs)


def trl_packer(lengths: Int64Array, pack_size: int) -> Callable[[], int] | None:
    """Return a function that packs sequences of these lengths by trl's `pack_dataset`; None where trl is missing.

    The tokens are nulls, because trl moves them into packs as it goes, which took most of its time.
    """
    try:
        datasets = importlib.import_module("datasets")
        pack_dataset = importlib.import_module("trl").pack_dataset
    except ImportError:
        return None
    datasets.disable_progress_bars()
    offsets = np.concatenate([[0], np.cumsum(lengths)])
    values = pa.nulls(int(offsets[-1]))
    column = pa.ListArray.from_arrays(pa.array(offsets.astype(np.int32)), values)
    data = datasets.Dataset(pa.table({"input_ids": column}))

    def run() -> int:
        # In one batch, as ours sees all lengths, and never from trl's cache of earlier results.
        options = {"batch_size": len(lengths), "load_from_cache_file": False, "keep_in_memory": True}
        return len(pack_dataset(data, seq_length=pack_size, strategy="bfd", map_kwargs=options))

    return run


def bench_repacking(settings: BenchRepackSettings, workspace: Workspace, progress: Progress) -> BenchReport:
    """Measure seconds on the clock of planning and writing a plan, and packs a second of processor time through one."""
    report = BenchReport("repack", asdict(settings))
    progress("making a sequence store")
    store = workspace.large_dataset(
        "virtual", packs=settings.packs, shard_packs=settings.shard_packs, pack_size=settings.store_pack_size
    )
    sequences = open_dataset(store).sequence_lengths.shape[0]
    plan = workspace.folder / "plan"
    for pack_size in settings.pack_sizes:
        progress(f"planning {sequences:,} sequences for {pack_size:,}")
        seconds = []
        for seed in range(settings.rounds):
            start = time.perf_counter()
            repack_store(str(store), str(plan), pack_size=pack_size, seed=seed, overwrite=True)
            seconds.append(time.perf_counter() - start)
        # The target is for 13 million sequences.
        target = 10 if settings.packs >= BenchRepackSettings.packs else None
        report.add_samples(f"{sequences:,} in {pack_size:,}, planned and written", seconds, "s", at_most=target)
    written = sum(path.stat().st_size for path in plan.rglob("*.*"))
    report.add(Figure("written, a sequence", written / sequences, "bytes"))
    shutil.rmtree(plan)
    progress("reading through a plan")
    _measure_reading(settings, workspace, report)
    return report


def _measure_reading(settings: BenchRepackSettings, workspace: Workspace, report: BenchReport) -> None:
    memmap, store = (
        workspace.dataset(name, packs=settings.read_packs, pack_size=settings.store_pack_size)
        for name in ("memmap", "virtual")
    )
    plan = workspace.folder / "plan-to-read"
    repack_store(str(store), str(plan), pack_size=settings.store_pack_size, seed=1, overwrite=True)
    paths = {"memmap": memmap, "sequence store": store, "plan": plan}
    sides = {f"{name}, packs at random": _read_all(path) for name, path in paths.items()}
    report.measure(sides, "packs/s", rounds=settings.rounds, cpu_time=True)
    report.add_ratio("plan to memmap", "plan, packs at random", "memmap, packs at random")


def _read_all(path: Path) -> Work:
    reader = open_dataset(path)
    ids = np.random.default_rng(0).integers(0, len(reader), 2 * len(reader)).tolist()

    def run(number: int) -> float:
        for index in ids:
            reader[index]
        return len(ids)

    return run
