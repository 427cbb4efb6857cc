"""`harness bench pack`: how long packing takes, how full packs become, and how others compare."""

from __future__ import annotations

import importlib
import time
from bisect import bisect_left, insort
from collections.abc import Callable
from dataclasses import asdict, dataclass

import numpy as np
import pyarrow as pa

from harness.bench.figures import BenchReport, Figure
from harness.bench.timing import Work, measure_rates
from harness.bench.workspace import lognormal_lengths
from harness.errors import ConfigError
from harness.prep.packing import PACKERS, plan_packs
from harness.records import Int64Array

# Of every capacity that is measured on its own.
_ROUNDS = 3


@dataclass(frozen=True)
class PackSettings:
    """Sizes of the bench.

    Attributes:
        sequences: lengths to pack; lognormal, cut at the pack size.
        median, sigma: of the lengths.
        pack_sizes: each is measured.
        compared: lengths that the slower packers get.
        algorithms: packers of this project to compare.
        rounds: turns of each side of a comparison.
    """

    sequences: int = 13_000_000
    median: float = 600.0
    sigma: float = 1.0
    pack_sizes: tuple[int, ...] = (4096, 8192)
    compared: int = 200_000
    algorithms: tuple[str, ...] = ("best_fit_decreasing", "first_fit_decreasing", "next_fit")
    rounds: int = _ROUNDS

    def __post_init__(self) -> None:
        for name in self.algorithms:
            if name not in PACKERS:
                raise ConfigError(f"there is no packer {name!r}", where="algorithms", fix=f"of {', '.join(PACKERS)}")


QUICK = PackSettings(sequences=500_000, compared=50_000)


def bench_packing(settings: PackSettings, say: Callable[[str], None]) -> BenchReport:
    """Time of a whole plan, and what of the capacity it leaves empty beyond the unavoidable."""
    report = BenchReport("pack", asdict(settings))
    report.notes.append("seconds are processor time, on one core")
    for pack_size in settings.pack_sizes:
        say(f"packing {settings.sequences:,} sequences to {pack_size:,}")
        _measure_plan(settings, pack_size, report)
    pack_size = settings.pack_sizes[0]
    say(f"packing {settings.compared:,} sequences to {pack_size:,} in other ways")
    _compare(settings, pack_size, report)
    return report


def _measure_plan(settings: PackSettings, pack_size: int, report: BenchReport) -> None:
    lengths = _lengths(settings, settings.sequences, pack_size)
    seconds, packs = [], 0
    for _ in range(settings.rounds):
        began = time.process_time()
        packs = plan_packs(lengths, pack_size=pack_size).num_packs
        seconds.append(time.process_time() - began)
    name = f"{settings.sequences:,} in {pack_size:,}"
    # The target is that of 13 million sequences.
    target = 4.0 if settings.sequences == PackSettings.sequences else None
    report.add_samples(f"{name}, whole plan", seconds, "s", at_most=target)
    least = lower_bound(lengths, pack_size)
    report.add(Figure(f"{name}, packs", packs, "packs"))
    report.add(Figure(f"{name}, packs needed", least, "packs"))
    report.add(Figure(f"{name}, empty beyond need", 100 * (packs - least) / packs, "%", at_most=0.01))


def lower_bound(lengths: Int64Array, pack_size: int) -> int:
    """Packs that any packing needs: all tokens over the capacity, or the sequences too long to share, if more."""
    by_tokens = -(-int(lengths.sum()) // pack_size)
    alone = int(np.count_nonzero(2 * lengths > pack_size))
    return max(by_tokens, alone)


def _lengths(settings: PackSettings, count: int, pack_size: int) -> Int64Array:
    return lognormal_lengths(count, median=settings.median, sigma=settings.sigma, longest=pack_size, seed=0)


def _compare(settings: PackSettings, pack_size: int, report: BenchReport) -> None:
    lengths = _lengths(settings, settings.compared, pack_size)
    packs: dict[str, int] = {}

    def side(name: str, pack: Callable[[], int]) -> Work:
        def run(number: int) -> float:
            packs[name] = pack()
            return settings.compared / 1e6

        return run

    def planned(algorithm: str) -> Callable[[], int]:
        return lambda: plan_packs(lengths, pack_size=pack_size, algorithm=algorithm).num_packs

    plain, others = "plain best-fit decreasing", []
    sides = {name: side(name, planned(name)) for name in settings.algorithms}
    sides[plain] = side(plain, lambda: pack_one_by_one(lengths, pack_size))
    others.append(plain)
    peer = trl_packer(lengths, pack_size)
    if peer is None:
        report.notes.append("trl is not installed; with `pip install trl` it is measured too")
    else:
        sides["trl"] = side("trl", peer)
        others.append("trl")
        report.notes.append(
            "trl gets tokens of type null, which it moves in little time; its slicing of lists is still in its figure"
        )
    least = lower_bound(lengths, pack_size)
    for name, rates in measure_rates(sides, rounds=settings.rounds, cpu_time=True).items():
        report.add_samples(f"{name}, {settings.compared:,} sequences", rates, "M seq/s")
        report.add(Figure(f"{name}, packs beyond need", packs[name] - least, "packs"))
    ours = f"{settings.algorithms[0]}, {settings.compared:,} sequences"
    for name in others:
        under = f"{name}, {settings.compared:,} sequences"
        report.add_ratio(f"{settings.algorithms[0]} to {name}", ours, under)


def pack_one_by_one(lengths: Int64Array, pack_size: int) -> int:
    """Packs of best-fit decreasing written out plainly: sequence by sequence over a sorted list of rooms."""
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
    """Runs trl's `pack_dataset` on sequences of these lengths; None where trl is not installed.

    The tokens are nulls, because it moves them into packs as it goes, which took most of its time.
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
