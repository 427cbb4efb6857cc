"""What opening and writing cost: time and memory, in processes of their own where memory is measured."""

from __future__ import annotations

import gc
import itertools
import os
import shutil
import time
import tracemalloc
from collections.abc import Callable
from pathlib import Path

import pyarrow as pa

from harness.bench.figures import BenchReport, Figure
from harness.bench.formats_settings import FormatsSettings
from harness.bench.probe import measure_apart
from harness.bench.timing import Work, measure_rates
from harness.bench.workspace import Workspace, make_packs
from harness.formats import open_writer
from harness.records import Pack

Say = Callable[[str], None]

OPENED = ("parquet", "memmap", "binidx", "jsonl")
WRITTEN = ("parquet", "memmap", "binidx")
_RAW = "one plain file"
# Opened in turns; medians of so many processes.
_MOST_PROCESSES = 5
_SHARD_PACKS = 16384
# More than a row group, so that compression finds no pack twice.
_DISTINCT_PACKS = 512
_BYTES_PER_TOKEN = 5


def measure_open(settings: FormatsSettings, workspace: Workspace, report: BenchReport, say: Say) -> None:
    """Opening a dataset of millions of packs whose shards are links to one another."""
    say("opening: writing the data")
    shard_packs = min(_SHARD_PACKS, settings.packs)
    paths = {
        name: workspace.large_dataset(
            name, packs=settings.open_packs, shard_packs=shard_packs, pack_size=settings.pack_size
        )
        for name in OPENED
    }
    say("opening")
    found: dict[str, list[dict[str, float]]] = {name: [] for name in OPENED}
    for _ in range(min(settings.rounds, _MOST_PROCESSES)):
        for name, path in paths.items():
            found[name].append(measure_apart("open", str(path)))
    for name, each in found.items():
        report.add_samples(f"{name}, open", [one["seconds"] for one in each], "s", at_most=0.5)
        report.add_samples(f"{name}, memory of open", [one["megabytes"] for one in each], "MB", at_most=60)
        packs, sequences = (int(each[0][key]) for key in ("packs", "sequences"))
        report.notes.append(f"{name} opened: {packs:,} packs, {sequences:,} sequences")


def measure_writing(settings: FormatsSettings, workspace: Workspace, report: BenchReport, say: Say) -> None:
    """Tokens and masks written a second, index, checksums and fsync included, and the peak of Python's heap."""
    say("writing")
    distinct = list(make_packs(min(_DISTINCT_PACKS, settings.write_packs), settings.write_pack_size))
    folder = workspace.folder / "written"
    folder.mkdir(exist_ok=True)
    total = sum(len(pack) for pack in _cycled(distinct, settings.write_packs)) * _BYTES_PER_TOKEN / 1e6

    processor: dict[str, list[float]] = {name: [] for name in WRITTEN}

    def write(name: str) -> None:
        path = folder / name
        with open_writer(path, format=name, pack_size=settings.write_pack_size) as writer:
            for pack in _cycled(distinct, settings.write_packs):
                writer.append(pack)
        shutil.rmtree(path)

    def of(name: str) -> Work:
        def side(number: int) -> float:
            began = time.process_time()
            write(name)
            if number >= 0:
                processor[name].append(total / (time.process_time() - began))
            return total

        return side

    def plain(number: int) -> float:
        _write_plain(folder / "plain", _cycled(distinct, settings.write_packs))
        return total

    sides = {f"{name}, write": of(name) for name in WRITTEN} | {f"{_RAW}, write": plain}
    for name, rates in measure_rates(sides, rounds=min(settings.rounds, 3)).items():
        target = 150.0 if name in ("parquet, write", "memmap, write") else None
        report.add_samples(name, rates, "MB/s", at_least=target)
    for name in WRITTEN:
        report.add_samples(f"{name}, write, by processor time", processor[name], "MB/s")
        report.add_ratio(f"{name} to {_RAW}, write", f"{name}, write", f"{_RAW}, write")
    say("memory of writing")
    for name in WRITTEN:
        target = 32.0 if name in ("parquet", "memmap") else None
        report.add(Figure(f"{name}, peak heap of write", _peak_heap(lambda: write(name)), "MB", at_most=target))  # noqa: B023
    arrow = pa.default_memory_pool().max_memory() / 1e6
    report.notes.append(f"Arrow, whose memory is not on Python's heap, held {arrow:.0f} MB at most in this process")


def _cycled(packs: list[Pack], count: int) -> itertools.islice[Pack]:
    return itertools.islice(itertools.cycle(packs), count)


def _write_plain(path: Path, packs: itertools.islice[Pack]) -> None:
    """The same bytes to one file, forced to disk, and nothing else."""
    with path.open("wb") as file:
        for pack in packs:
            file.write(pack.input_ids.data)
            file.write(pack.loss_mask.data)
        file.flush()
        os.fsync(file.fileno())
    path.unlink()


def _peak_heap(work: Callable[[], None]) -> float:
    """Megabytes by which Python's heap, numpy's arrays included, grows at most."""
    gc.collect()
    tracemalloc.start()
    try:
        before = tracemalloc.get_traced_memory()[0]
        work()
        return (tracemalloc.get_traced_memory()[1] - before) / 1e6
    finally:
        tracemalloc.stop()


def measure_legacy(settings: FormatsSettings, workspace: Workspace, report: BenchReport, say: Say) -> None:
    """Memory of opening Parquet, against loading a pickled `.npy` of the same packs as numpy does."""
    say("the legacy .npy: writing the data")
    packs, pack_size = settings.write_packs, settings.write_pack_size
    file = workspace.folder / f"legacy-{packs}x{pack_size}.npy"
    if not file.exists():
        with open_writer(file, format="npy", pack_size=pack_size) as writer:
            for pack in make_packs(packs, pack_size):
                writer.append(pack)
    parquet = workspace.dataset("parquet", packs=packs, pack_size=pack_size)
    say("the legacy .npy: loading it")
    began = time.perf_counter()
    loaded = measure_apart("numpy_load", str(file))
    opened = [measure_apart("open", str(parquet)) for _ in range(min(settings.rounds, _MOST_PROCESSES))]
    report.add(Figure("npy, memory of numpy.load", loaded["megabytes"], "MB"))
    report.add(Figure("npy, numpy.load", loaded["seconds"], "s"))
    report.add_samples(f"parquet, memory of open, {packs:,} packs", [one["megabytes"] for one in opened], "MB")
    report.add_ratio(
        "npy's memory to parquet's",
        "npy, memory of numpy.load",
        f"parquet, memory of open, {packs:,} packs",
        at_least=500,
    )
    say(f"the legacy .npy: took {time.perf_counter() - began:.0f} s")
