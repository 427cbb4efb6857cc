"""How fast packs are read: at random, in the loader's order, against another reader, with and without checks."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from harness.bench.arrow_reader import open_arrow
from harness.bench.bridge_reader import BridgeReader, write_bridge_file
from harness.bench.figures import BenchReport
from harness.bench.formats_settings import FormatsSettings
from harness.bench.timing import Work, measure_rates
from harness.bench.unchecked import open_unchecked
from harness.bench.workspace import Workspace, make_packs
from harness.formats import PackReader, open_dataset
from harness.loader.config import LoaderConfig
from harness.loader.order import EpochOrder
from harness.records import Int64Array

Say = Callable[[str], None]

_NUMPY, _PREAD = "np.memmap rows, copied, random", "pread of rows, random"
_ARROW = "datasets' Arrow, random"
# A chunk of JSON is a thousand packs by default, and a large dataset of it takes long to write.
_JSONL_PACKS = 1000
# Packs that a loader asks for at a time.
_BATCH = 64


class PlainRows:
    """Ids int32 and mask uint8 as two plain `.npy` arrays of one padded row a pack: nothing to look up or check."""

    def __init__(self, folder: Path, *, packs: int, pack_size: int) -> None:
        self._pack_size = pack_size
        paths = [folder / f"plain-{name}-{packs}x{pack_size}.npy" for name in ("ids", "mask")]
        if not all(path.exists() for path in paths):
            files = [
                np.lib.format.open_memmap(path, mode="w+", dtype=dtype, shape=(packs, pack_size))
                for path, dtype in zip(paths, (np.int32, np.uint8), strict=True)
            ]
            for row, pack in enumerate(make_packs(packs, pack_size)):
                files[0][row, : len(pack)] = pack.input_ids
                files[1][row, : len(pack)] = pack.loss_mask
        self._ids, self._mask = (np.lib.format.open_memmap(path, mode="r") for path in paths)
        self._descriptors = [os.open(path, os.O_RDONLY | os.O_CLOEXEC) for path in paths]
        self._data_starts = [
            path.stat().st_size - packs * pack_size * size for path, size in zip(paths, (4, 1), strict=True)
        ]

    def copy_row(self, row: int) -> tuple[npt.NDArray[Any], npt.NDArray[Any]]:
        """Ids and mask of a row, copied from the maps."""
        return np.array(self._ids[row]), np.array(self._mask[row])

    def pread_row(self, row: int) -> tuple[npt.NDArray[Any], npt.NDArray[Any]]:
        """Ids and mask of a row, read with one system call each."""
        size = self._pack_size
        ids = os.pread(self._descriptors[0], 4 * size, self._data_starts[0] + 4 * size * row)
        mask = os.pread(self._descriptors[1], size, self._data_starts[1] + size * row)
        return np.frombuffer(ids, np.int32), np.frombuffer(mask, np.uint8)

    def close(self) -> None:
        for descriptor in self._descriptors:
            os.close(descriptor)


def measure_random(settings: FormatsSettings, workspace: Workspace, report: BenchReport, say: Say) -> None:
    """memmap and binidx, one random pack at a time and lists of them, against numpy's maps and pread."""
    say("random reads: writing the data")
    sizes = {"packs": settings.packs, "pack_size": settings.pack_size}
    readers = {name: open_dataset(workspace.dataset(name, **sizes)) for name in ("memmap", "binidx")}
    chunk = min(settings.packs, _JSONL_PACKS)
    readers["jsonl"] = open_dataset(workspace.dataset("jsonl", packs=chunk, pack_size=settings.pack_size))
    rows = PlainRows(workspace.folder, **sizes)

    def draw(number: int, packs: int = settings.packs, reads: int = settings.reads) -> list[int]:
        # The warm-up touches every pack, so that no side pays for the pages that it maps first.
        if number < 0:
            return list(range(packs))
        ids: list[int] = np.random.default_rng([7, number]).integers(0, packs, reads).tolist()
        return ids

    def one_by_one(get: Callable[[int], object]) -> Work:
        def side(number: int) -> float:
            ids = draw(number)
            for index in ids:
                get(index)
            return len(ids)

        return side

    def in_lists(reader: PackReader) -> Work:
        def side(number: int) -> float:
            ids = draw(number)
            for start in range(0, len(ids), _BATCH):
                reader.read(ids[start : start + _BATCH])
            return len(ids)

        return side

    def few(number: int) -> float:
        ids = draw(number, chunk, max(1, settings.reads // 16))
        for index in ids:
            readers["jsonl"][index]
        return len(ids)

    say("random reads")
    sides: dict[str, Work] = {_NUMPY: one_by_one(rows.copy_row), _PREAD: one_by_one(rows.pread_row)}
    for name in ("memmap", "binidx"):
        sides[f"{name}, random"] = one_by_one(readers[name].__getitem__)
        sides[f"{name}, random, {_BATCH} at a time"] = in_lists(readers[name])
    sides["jsonl, random"] = few
    for name, rates in measure_rates(sides, rounds=settings.rounds, cpu_time=True).items():
        report.add_samples(name, rates, "packs/s")
    for name in ("memmap", "binidx"):
        report.add_ratio(f"{name} to np.memmap, random", f"{name}, random", _NUMPY, at_least=0.8)
        report.add_ratio(f"{name} to pread, random", f"{name}, random", _PREAD)
    rows.close()
    _close(readers.values())


def measure_order(settings: FormatsSettings, workspace: Workspace, report: BenchReport, say: Say) -> None:
    """All formats in the order of a loader with its default block and window, a batch at a time."""
    say("the loader's order: writing the data")
    names = ("memmap", "binidx", "parquet")
    sizes = {"packs": settings.packs, "pack_size": settings.pack_size}
    readers = {name: open_dataset(workspace.dataset(name, **sizes)) for name in names}
    say("the loader's order")
    sides = {f"{name}, loader's order": in_order(readers[name], settings) for name in names}
    for name, rates in measure_rates(sides, rounds=settings.rounds, cpu_time=True).items():
        report.add_samples(name, rates, "packs/s")
    report.add_ratio(
        "parquet to memmap, loader's order", "parquet, loader's order", "memmap, loader's order", at_least=1 / 3
    )
    _close(readers.values())


def in_order(reader: PackReader, settings: FormatsSettings) -> Work:
    """Warms up with an epoch; then reads the next stretch of an epoch in every round, and the next epoch after it."""
    config = LoaderConfig().order()
    reads = min(settings.reads, len(reader))
    rounds_per_epoch = len(reader) // reads
    orders: dict[int, EpochOrder] = {}

    def ids_of(number: int) -> Int64Array:
        if number < 0:
            return EpochOrder(config, len(reader), 0).packs(0, len(reader))
        epoch, part = divmod(number, rounds_per_epoch)
        if epoch + 1 not in orders:
            orders.clear()
            orders[epoch + 1] = EpochOrder(config, len(reader), epoch + 1)
        return orders[epoch + 1].packs(part * reads, (part + 1) * reads)

    def side(number: int) -> float:
        ids = ids_of(number).tolist()
        for start in range(0, len(ids), _BATCH):
            reader.read(ids[start : start + _BATCH])
        return len(ids)

    return side


def measure_peer(settings: FormatsSettings, workspace: Workspace, report: BenchReport, say: Say) -> None:
    """Fully random reads: Parquet against a reader of large row groups that keeps one, memmap against mapped Arrow."""
    say("fully random Parquet: writing the data")
    sizes = {"packs": settings.packs, "pack_size": settings.pack_size}
    path = workspace.folder / f"bridge-{settings.packs}x{settings.pack_size}.idx.parquet"
    if not path.exists():
        write_bridge_file(path, make_packs(settings.packs, settings.pack_size))
    theirs = BridgeReader(path)
    ours = open_dataset(workspace.dataset("parquet", **sizes))
    say("fully random Parquet")

    mapped = open_dataset(workspace.dataset("memmap", **sizes))
    arrow_path = workspace.folder / f"arrow-{settings.packs}x{settings.pack_size}"
    arrow = open_arrow(arrow_path, make_packs(settings.packs, settings.pack_size))

    def of(get: Callable[[int], object], reads: int = settings.peer_reads) -> Work:
        def side(number: int) -> float:
            ids = np.random.default_rng([8, number + 1]).integers(0, settings.packs, reads).tolist()
            for index in ids:
                get(index)
            return len(ids)

        return side

    sides = {
        "parquet, random": of(ours.__getitem__),
        "Megatron-Bridge's Parquet, random": of(theirs.__getitem__),
    }
    if arrow is None:
        report.notes.append("datasets is not installed; with `pip install datasets` its Arrow is measured too")
    else:
        sides["memmap, random, on the clock"] = of(mapped.__getitem__, settings.reads)
        sides[_ARROW] = of(arrow.__getitem__, settings.reads)
    # On the clock: theirs decodes in several threads.
    for name, rates in measure_rates(sides, rounds=settings.rounds).items():
        report.add_samples(name, rates, "packs/s")
    report.add_ratio(
        "parquet to Megatron-Bridge's, random", "parquet, random", "Megatron-Bridge's Parquet, random", at_least=8
    )
    if arrow is not None:
        report.add_ratio("memmap to datasets' Arrow, random", "memmap, random, on the clock", _ARROW)
        report.add_ratio("parquet to datasets' Arrow, random", "parquet, random", _ARROW)
    _close((ours, mapped))


def measure_checks(settings: FormatsSettings, workspace: Workspace, report: BenchReport, say: Say) -> None:
    """The loader's order with checksums compared, and with the same reader that compares nothing."""
    say("cost of checks: writing the data")
    names = ("memmap", "binidx", "parquet")
    paths = {name: workspace.dataset(name, packs=settings.packs, pack_size=settings.pack_size) for name in names}
    say("cost of checks")
    for name in names:
        checked, unchecked = open_dataset(paths[name]), open_unchecked(paths[name])
        sides = {
            f"{name}, checked": in_order(checked, settings),
            f"{name}, unchecked": in_order(unchecked, settings),
        }
        for side, rates in measure_rates(sides, rounds=settings.rounds, cpu_time=True).items():
            report.add_samples(side, rates, "packs/s")
        report.add_ratio(f"{name}, time with checks to without", f"{name}, unchecked", f"{name}, checked", at_most=1.15)
        _close((checked, unchecked))


def _close(readers: Any) -> None:
    for reader in readers:
        reader.close()
