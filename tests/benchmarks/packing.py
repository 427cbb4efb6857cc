"""Planning packs, against other packers and over stored sequences."""

from __future__ import annotations

import importlib
import shutil
import time
from bisect import bisect_left, insort
from collections.abc import Callable
from functools import partial
from pathlib import Path

import numpy as np
import pyarrow as pa

from harness.bench.figures import CPU, BenchReport, Case, Figure, Progress, Side
from harness.bench.sizes import Sizes
from harness.bench.workspace import Workspace, lognormal_lengths
from harness.formats import open_dataset
from harness.prep import plan_packs
from harness.prep.pipeline import repack_store
from harness.records import Int64Array
from tests.benchmarks.clocks import rate
from tests.benchmarks.links import large_dataset

_PACKERS = ("best_fit_decreasing", "first_fit_decreasing", "next_fit")


def bench_packing(sizes: Sizes, workspace: Workspace, progress: Progress) -> BenchReport:
    """Measure the time of a whole plan, and the capacity that it leaves empty beyond the unavoidable."""
    report = BenchReport("pack")
    report.notes.append("seconds are processor time, on one core")
    planned, compared = sizes.first("sequences", 2)
    for pack_size in (sizes.pack_size, 2 * sizes.pack_size):
        progress(f"packing {planned:,} sequences to {pack_size:,}")
        lengths = _draw_lengths(planned, pack_size)
        seconds, packs = [], 0
        for _ in range(sizes.rounds):
            start = time.process_time()
            packs = plan_packs(lengths, pack_size=pack_size).num_packs
            seconds.append(time.process_time() - start)
        name, least = f"{planned:,} in {pack_size:,}", lower_bound(lengths, pack_size)
        # The target is for 13 million sequences.
        report.add_samples(f"{name}, whole plan", seconds, "s", at_most=4.0 if planned == 13_000_000 else None)
        report.add(Figure(f"{name}, packs", packs, "packs"))
        report.add(Figure(f"{name}, packs needed", least, "packs"))
        report.add(Figure(f"{name}, empty beyond need", 100 * (packs - least) / packs, "%", at_most=0.01))
    progress(f"packing {compared:,} sequences to {sizes.pack_size:,} in other ways")
    _compare_packers(sizes, compared, report)
    return report


def lower_bound(lengths: Int64Array, pack_size: int) -> int:
    """Return the packs that any packing needs: all tokens over the capacity, or the sequences too long to share."""
    return max(-(-int(lengths.sum()) // pack_size), int(np.count_nonzero(2 * lengths > pack_size)))


def _draw_lengths(count: int, pack_size: int) -> Int64Array:
    return lognormal_lengths(count, median=600.0, longest=pack_size, seed=0)


def _compare_packers(sizes: Sizes, compared: int, report: BenchReport) -> None:
    pack_size, lengths = sizes.pack_size, _draw_lengths(compared, sizes.pack_size)
    packs: dict[str, int] = {}

    def side(name: str, pack: Callable[[], int]) -> Side:
        def run(number: int) -> float:
            packs[name] = pack()
            return compared / 1e6

        return rate(run, CPU)

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
    ours = {name: lambda name=name: plan(algorithm=name).num_packs for name in sizes.choose(_PACKERS)}
    suffix, least = f", {compared:,} sequences", lower_bound(lengths, pack_size)
    report.run(
        Case("", {name + suffix: side(name, pack) for name, pack in (ours | others).items()}, sizes.rounds, "M seq/s")
    )
    for name, count in packs.items():
        report.add(Figure(f"{name}, packs beyond need", count - least, "packs"))
    best = next(iter(ours))
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


def bench_repacking(sizes: Sizes, workspace: Workspace, progress: Progress) -> BenchReport:
    """Measure seconds on the clock of planning and writing a plan, and packs a second of processor time through one."""
    report = BenchReport("repack")
    progress("making a sequence store")
    store = large_dataset(
        workspace, "virtual", packs=sizes.large_packs, shard_packs=sizes.packs, pack_size=sizes.pack_size
    )
    sequences = open_dataset(store).sequence_lengths.shape[0]
    plan = workspace.folder / "plan"
    for pack_size in (sizes.pack_size, 2 * sizes.pack_size):
        progress(f"planning {sequences:,} sequences for {pack_size:,}")
        seconds = []
        for seed in range(sizes.rounds):
            start = time.perf_counter()
            repack_store(str(store), str(plan), pack_size=pack_size, seed=seed, overwrite=True)
            seconds.append(time.perf_counter() - start)
        # The target is for 13 million sequences.
        target = 10 if sequences >= 13_000_000 else None
        report.add_samples(f"{sequences:,} in {pack_size:,}, planned and written", seconds, "s", at_most=target)
    written = sum(path.stat().st_size for path in plan.rglob("*.*"))
    report.add(Figure("written, a sequence", written / sequences, "bytes"))
    shutil.rmtree(plan)
    progress("reading through a plan")
    paths = {
        name: workspace.dataset(format, packs=max(1, sizes.packs // 4), pack_size=sizes.pack_size)
        for name, format in (("memmap", "memmap"), ("sequence store", "virtual"))
    }
    paths["plan"] = workspace.folder / "plan-to-read"
    repack_store(str(paths["sequence store"]), str(paths["plan"]), pack_size=sizes.pack_size, seed=1, overwrite=True)
    sides = {f"{name}, packs at random": rate(_read_all(path), CPU) for name, path in paths.items()}
    report.run(Case("", sides, sizes.rounds, "packs/s"))
    report.add_ratio("plan to memmap", "plan, packs at random", "memmap, packs at random")
    return report


def _read_all(path: Path) -> Side:
    reader = open_dataset(path)
    ids = np.random.default_rng(0).integers(0, len(reader), 2 * len(reader)).tolist()

    def run(number: int) -> float:
        for index in ids:
            reader[index]
        return len(ids)

    return run
