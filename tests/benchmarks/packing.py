"""Planning packs, against other packers and over stored sequences."""

from __future__ import annotations

import importlib
import shutil
import time
from collections.abc import Callable
from functools import partial

import numpy as np
import pyarrow as pa

from harness.bench.figures import CPU, BenchReport, Figure, Progress, Side
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

    plan = partial(plan_packs, lengths, pack_size=pack_size)
    packers: dict[str, Callable[[], int]] = {
        name: lambda name=name: plan(algorithm=name).num_packs for name in sizes.choose(_PACKERS)
    }
    best = next(iter(packers))
    trl = trl_packer(lengths, pack_size)
    if trl is None:
        report.notes.append("trl is not installed; with `pip install trl` it is measured too")
    else:
        packers["trl"] = trl
        report.notes.append(
            "trl gets tokens of type null, which it moves in little time; its slicing of lists is still in its figure"
        )
    suffix, least = f", {compared:,} sequences", lower_bound(lengths, pack_size)
    sides = {name + suffix: side(name, pack) for name, pack in packers.items()}
    report.compare("", sides, sizes.rounds, "M seq/s")
    for name, count in packs.items():
        report.add(Figure(f"{name}, packs beyond need", count - least, "packs"))
    if trl is not None:
        report.add_ratio(f"{best} to trl", best + suffix, f"trl{suffix}")


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
    """Measure the seconds on the clock of planning and writing a plan, and the bytes that it takes."""
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
    return report
