"""`harness bench repack`: planning again over a sequence store, and what reading through a plan costs."""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np

from harness.bench.figures import BenchReport, Figure
from harness.bench.timing import Work, measure_rates
from harness.bench.workspace import Workspace
from harness.formats import open_dataset
from harness.prep.repack import repack_store


@dataclass(frozen=True)
class RepackSettings:
    """Sizes of the bench.

    Attributes:
        packs: of the store that is planned over, 6.5 sequences each.
        shard_packs: packs that are really on the disk, of which the store has links.
        pack_size: of the store.
        pack_sizes: to plan for.
        read_packs: of the dataset that is read.
        rounds: turns of each side.
    """

    packs: int = 2_000_000
    shard_packs: int = 20_000
    pack_size: int = 4096
    pack_sizes: tuple[int, ...] = (4096, 8192)
    read_packs: int = 5_000
    rounds: int = 3


QUICK = RepackSettings(packs=20_000, shard_packs=2000, read_packs=500, rounds=1)


def bench_repacking(settings: RepackSettings, workspace: Workspace, say: Callable[[str], None]) -> BenchReport:
    """Seconds on a clock of planning and writing, and packs a second of processor time through a plan."""
    report = BenchReport("repack", asdict(settings))
    say("making a sequence store")
    store = workspace.large_dataset(
        "virtual", packs=settings.packs, shard_packs=settings.shard_packs, pack_size=settings.pack_size
    )
    sequences = open_dataset(store).sequence_lengths.shape[0]
    plan = workspace.folder / "plan"
    for pack_size in settings.pack_sizes:
        say(f"planning {sequences:,} sequences for {pack_size:,}")
        name = f"{sequences:,} in {pack_size:,}, planned and written"
        seconds = [_repack(store, plan, pack_size, seed) for seed in range(settings.rounds)]
        # The target is that of 13 million sequences.
        report.add_samples(name, seconds, "s", at_most=10 if settings.packs >= RepackSettings.packs else None)
    written = sum(path.stat().st_size for path in plan.rglob("*.*"))
    report.add(Figure("written, a sequence", written / sequences, "bytes"))
    shutil.rmtree(plan)
    say("reading through a plan")
    _measure_reading(settings, workspace, report)
    return report


def _repack(store: Path, plan: Path, pack_size: int, seed: int) -> float:
    began = time.perf_counter()
    repack_store(str(store), str(plan), pack_size=pack_size, seed=seed, overwrite=True)
    return time.perf_counter() - began


def _measure_reading(settings: RepackSettings, workspace: Workspace, report: BenchReport) -> None:
    paths = {
        name: workspace.dataset(name, packs=settings.read_packs, pack_size=settings.pack_size)
        for name in ("memmap", "virtual")
    }
    plan = workspace.folder / "plan-to-read"
    repack_store(str(paths["virtual"]), str(plan), pack_size=settings.pack_size, seed=1, overwrite=True)
    readers = {"memmap": paths["memmap"], "sequence store": paths["virtual"], "plan": plan}
    sides: Mapping[str, Work] = {name: _reading(path) for name, path in readers.items()}
    for name, rates in measure_rates(sides, rounds=settings.rounds, cpu_time=True).items():
        report.add_samples(f"{name}, packs at random", rates, "packs/s")
    report.add_ratio("plan to memmap", "plan, packs at random", "memmap, packs at random")


def _reading(path: Path) -> Work:
    reader = open_dataset(path)
    ids = np.random.default_rng(0).integers(0, len(reader), 2 * len(reader)).tolist()

    def run(number: int) -> float:
        for index in ids:
            reader[index]
        return len(ids)

    return run
