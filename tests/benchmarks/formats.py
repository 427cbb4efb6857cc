"""Reading, opening and writing in each format, against plain arrays of the same data."""

from __future__ import annotations

import gc
import itertools
import os
import shutil
import tracemalloc
from bisect import bisect_right
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.parquet as pq

from harness.bench.apart import measure_apart
from harness.bench.figures import CPU, BenchReport, Figure, Progress, Side, take_turns
from harness.bench.sizes import Sizes
from harness.bench.workspace import Workspace, make_packs
from harness.formats import PackReader, open_dataset, open_writer
from harness.loader import EpochOrder, LoaderConfig
from harness.records import Int64Array, Pack
from tests.benchmarks.clocks import rate
from tests.benchmarks.links import large_dataset, make_dataset

_NUMPY = "np.memmap rows, copied, random"
_RAW = "one plain file"
_OPEN = "tests.benchmarks.probes:open_apart"
_MAPPED = ("memmap", "binidx")
_ORDERED = ("memmap", "binidx", "parquet")
_OPENED = ("parquet", "memmap", "binidx", "jsonl")
_WRITTEN = ("parquet", "memmap", "binidx")
# Packs that a loader reads at a time.
_BATCH = 64
# Processes that open a dataset, in turns.
_MOST_PROCESSES = 5
_SHARD_PACKS = 16384
# More than a row group, so that compression finds no pack twice.
_DISTINCT_PACKS = 512
_BYTES_PER_TOKEN = 5
ROWS_PER_GROUP = 500
_BRIDGE_TYPES = {"input_ids": pa.int64(), "seq_start_id": pa.int64(), "loss_mask": pa.int8()}


def bench_formats(sizes: Sizes, workspace: Workspace, progress: Progress) -> BenchReport:
    report = BenchReport("formats")
    report.notes.append("reading in one thread is timed by its processor time, all else on the clock")
    for part in sizes.choose(PARTS):
        progress(f"{part}: making the data, then measuring")
        PARTS[part](sizes, workspace, report)
    return report


class PlainRows:
    """Ids int32 and mask uint8 in two plain `.npy` arrays of one padded row a pack: nothing to look up or check."""

    def __init__(self, folder: Path, *, packs: int, pack_size: int) -> None:
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

    def copy_row(self, row: int) -> tuple[npt.NDArray[Any], npt.NDArray[Any]]:
        return np.array(self._ids[row]), np.array(self._mask[row])


def _table(packs: Iterable[Pack]) -> Any:
    rows = list(packs)
    columns = []
    for name, kind in _BRIDGE_TYPES.items():
        arrays = [getattr(pack, name) for pack in rows]
        offsets = np.cumsum([0, *(array.shape[0] for array in arrays)]).astype(np.int32)
        columns.append(pa.ListArray.from_arrays(pa.array(offsets), pa.array(np.concatenate(arrays)).cast(kind)))
    return pa.table(columns, names=list(_BRIDGE_TYPES))


def write_bridge_file(path: Path, packs: Iterable[Pack]) -> None:
    """Write packs with the types, row groups and compression of Megatron-Bridge."""
    schema = pa.schema([(name, pa.list_(kind)) for name, kind in _BRIDGE_TYPES.items()])
    with pq.ParquetWriter(path, schema) as writer:
        rest = iter(packs)
        while group := list(itertools.islice(rest, ROWS_PER_GROUP)):
            writer.write_table(_table(group).cast(schema), row_group_size=ROWS_PER_GROUP)


class BridgeReader:
    """Random access to one file the way Megatron-Bridge reads packed Parquet, a row group at a time.

    Written for the bench from what `GPTSFTPackedParquetDataset` of NVIDIA-NeMo/Megatron-Bridge does: files of 500-row
    groups as pyarrow writes them by default, of int64 ids and starts and an int8 mask; the last row group read is kept
    as an Arrow table; a row becomes Python lists, and those become arrays when a batch is collated.
    """

    def __init__(self, path: Path) -> None:
        self._file = pq.ParquetFile(path)
        metadata = self._file.metadata
        sizes = [metadata.row_group(group).num_rows for group in range(metadata.num_row_groups)]
        self._starts: list[int] = list(itertools.accumulate(sizes, initial=0))
        self._group = -1
        self._table: Any = None

    def __len__(self) -> int:
        return self._starts[-1]

    def __getitem__(self, index: int) -> tuple[Int64Array, Int64Array, npt.NDArray[np.int8]]:
        """Return input_ids int64 [n], seq_start_id int64 [k] and loss_mask int8 [n] of one pack."""
        ids, starts, mask = self.row(index)
        return np.array(ids, np.int64), np.array(starts, np.int64), np.array(mask, np.int8)

    def row(self, index: int) -> tuple[list[int], list[int], list[int]]:
        group = bisect_right(self._starts, index) - 1
        if group != self._group:
            self._table = self._file.read_row_group(group, columns=list(_BRIDGE_TYPES))
            self._group = group
        place = index - self._starts[group]
        ids, starts, mask = (self._table.column(name)[place].as_py() for name in _BRIDGE_TYPES)
        return ids, starts, mask


class UncheckedReader(PackReader):
    """Reads without comparing the checksums of packs. Never train from it."""

    def _check_pack(self, pack: Pack, pack_id: int, ids_digest: int | None = None) -> None:
        return None


def open_unchecked(path: Path) -> PackReader:
    """Open a dataset folder for reading without checksums, to measure what checking costs; sizes are still checked."""
    reader = open_dataset(path)
    reader.__class__ = UncheckedReader
    return reader


def _rates(works: Mapping[str, Side]) -> dict[str, Side]:
    """Return sides of the units a second of processor time: one thread reads, and waits for nothing."""
    return {name: rate(work, CPU) for name, work in works.items()}


def _read(draw: Callable[[int], list[int]], get: Callable[[int], object]) -> Side:
    def work(number: int) -> float:
        ids = draw(number)
        for index in ids:
            get(index)
        return len(ids)

    return work


def _read_batches(draw: Callable[[int], list[int]], reader: PackReader) -> Side:
    """Read the packs that `draw` gives for a round, in lists of the size that a loader asks for."""

    def work(number: int) -> float:
        ids = draw(number)
        for start in range(0, len(ids), _BATCH):
            reader.read(ids[start : start + _BATCH])
        return len(ids)

    return work


def _drawer(packs: int, reads: int, *, seed: int, warm_up: list[int] | None = None) -> Callable[[int], list[int]]:
    """Return a function that draws `reads` of the packs for a round; the warm-up reads `warm_up` where it is given."""

    def draw(number: int) -> list[int]:
        if number < 0 and warm_up is not None:
            return warm_up
        ids: list[int] = np.random.default_rng([seed, number + 1]).integers(0, packs, reads).tolist()
        return ids

    return draw


def _datasets(names: Iterable[str], sizes: Sizes, workspace: Workspace) -> dict[str, Path]:
    return {name: make_dataset(workspace, name, packs=sizes.packs, pack_size=sizes.pack_size) for name in names}


def _measure_random(sizes: Sizes, workspace: Workspace, report: BenchReport) -> None:
    """Read memmap and binidx at random, pack by pack, against numpy's maps."""
    readers = {name: open_dataset(path) for name, path in _datasets(_MAPPED, sizes, workspace).items()}
    rows = PlainRows(workspace.folder, packs=sizes.packs, pack_size=sizes.pack_size)

    # The warm-up touches every pack, so that no side pays for the pages that it maps first.
    draw = _drawer(sizes.packs, sizes.steps, seed=7, warm_up=list(range(sizes.packs)))
    sides = {_NUMPY: _read(draw, rows.copy_row)}
    sides |= {f"{name}, random": _read(draw, reader.__getitem__) for name, reader in readers.items()}
    report.compare("", _rates(sides), sizes.rounds, "packs/s")
    for name in readers:
        report.add_ratio(f"{name} to np.memmap, random", f"{name}, random", _NUMPY, at_least=0.8)
    _close(readers.values())


def _measure_order(sizes: Sizes, workspace: Workspace, report: BenchReport) -> None:
    """Read each format in the order of a loader with its default block and window, a batch at a time."""
    readers = {name: open_dataset(path) for name, path in _datasets(_ORDERED, sizes, workspace).items()}
    sides = {f"{name}, loader's order": _read_in_order(reader, sizes) for name, reader in readers.items()}
    report.compare("", _rates(sides), sizes.rounds, "packs/s")
    report.add_ratio(
        "parquet to memmap, loader's order", "parquet, loader's order", "memmap, loader's order", at_least=1 / 3
    )
    _close(readers.values())


def _read_in_order(reader: PackReader, sizes: Sizes) -> Side:
    """Warm up with an epoch, then read the next stretch of an epoch in every round, and the next epoch after it."""
    config = LoaderConfig()
    reads = min(sizes.steps, len(reader))
    rounds_per_epoch = len(reader) // reads
    orders: dict[int, EpochOrder] = {}

    def draw(number: int) -> list[int]:
        if number < 0:
            ids = EpochOrder(config, len(reader), 0).packs(0, len(reader))
        else:
            epoch, part = divmod(number, rounds_per_epoch)
            if epoch + 1 not in orders:
                orders.clear()
                orders[epoch + 1] = EpochOrder(config, len(reader), epoch + 1)
            ids = orders[epoch + 1].packs(part * reads, (part + 1) * reads)
        listed: list[int] = ids.tolist()
        return listed

    return _read_batches(draw, reader)


def _measure_peer(sizes: Sizes, workspace: Workspace, report: BenchReport) -> None:
    """Read Parquet at random, against a reader that keeps one large row group."""
    path = workspace.folder / f"bridge-{sizes.packs}x{sizes.pack_size}.idx.parquet"
    if not path.exists():
        write_bridge_file(path, make_packs(sizes.packs, sizes.pack_size))
    ours = open_dataset(_datasets(("parquet",), sizes, workspace)["parquet"])
    draw = _drawer(sizes.packs, max(4, sizes.steps // 64), seed=8)
    readers = {"parquet, random": ours, "Megatron-Bridge's Parquet, random": BridgeReader(path)}
    # On the clock: Megatron-Bridge's reader decodes in several threads.
    timed = {name: rate(_read(draw, reader.__getitem__)) for name, reader in readers.items()}
    report.compare("parquet to Megatron-Bridge's, random", timed, sizes.rounds, "packs/s", at_least=8)
    ours.close()


def _measure_checks(sizes: Sizes, workspace: Workspace, report: BenchReport) -> None:
    """Read in the loader's order with checksums compared, against the same reader that compares nothing."""
    paths = _datasets(_ORDERED, sizes, workspace)
    for name, path in paths.items():
        checked, unchecked = open_dataset(path), open_unchecked(path)
        readers = {f"{name}, unchecked": unchecked, f"{name}, checked": checked}
        sides = _rates({side: _read_in_order(reader, sizes) for side, reader in readers.items()})
        report.compare(f"{name}, time with checks to without", sides, sizes.rounds, "packs/s", at_most=1.15)
        _close((checked, unchecked))


def _close(readers: Iterable[PackReader]) -> None:
    for reader in readers:
        reader.close()


def _measure_open(sizes: Sizes, workspace: Workspace, report: BenchReport) -> None:
    """Open a dataset of millions of packs whose shards are links to one another, each time in a new process."""
    shard_packs = min(_SHARD_PACKS, sizes.packs)
    paths = {
        name: large_dataset(
            workspace, name, packs=sizes.large_packs, shard_packs=shard_packs, pack_size=sizes.pack_size
        )
        for name in _OPENED
    }
    rounds = range(min(sizes.rounds, _MOST_PROCESSES))
    turns = [{name: measure_apart(_OPEN, path) for name, path in paths.items()} for _ in rounds]
    opened = {name: [turn[name] for turn in turns] for name in _OPENED}
    for name, samples in opened.items():
        report.add_samples(f"{name}, open", [sample["seconds"] for sample in samples], "s", at_most=0.5)
        report.add_samples(f"{name}, memory of open", [sample["megabytes"] for sample in samples], "MB", at_most=60)
        packs, sequences = samples[0]["packs"], samples[0]["sequences"]
        report.notes.append(f"{name} opened: {packs:,} packs, {sequences:,} sequences")


def _measure_writing(sizes: Sizes, workspace: Workspace, report: BenchReport) -> None:
    """Measure tokens and masks written a second, with index, checksums and fsync, and the peak of Python's heap."""
    num_packs, pack_size = _written(sizes)
    distinct = list(make_packs(min(_DISTINCT_PACKS, num_packs), pack_size))
    folder = workspace.folder / "written"
    folder.mkdir(exist_ok=True)

    def packs() -> Iterable[Pack]:
        return itertools.islice(itertools.cycle(distinct), num_packs)

    total = sum(map(len, packs())) * _BYTES_PER_TOKEN / 1e6

    def write(name: str, number: int = -1) -> float:
        path = folder / name
        with open_writer(path, format=name, pack_size=pack_size) as writer:
            for pack in packs():
                writer.append(pack)
        shutil.rmtree(path)
        return total

    def write_plain(number: int) -> float:
        _write_plain(folder / "plain", packs())
        return total

    sides = {f"{name}, write": rate(partial(write, name)) for name in _WRITTEN}
    sides[f"{_RAW}, write"] = rate(write_plain)
    for name, rates in take_turns(sides, rounds=min(sizes.rounds, 3)).items():
        target = 150.0 if name in ("parquet, write", "memmap, write") else None
        report.add_samples(name, rates, "MB/s", at_least=target)
    for name in _WRITTEN:
        report.add_ratio(f"{name} to {_RAW}, write", f"{name}, write", f"{_RAW}, write")
        heap = _peak_heap(partial(write, name))
        target = 32.0 if name in ("parquet", "memmap") else None
        report.add(Figure(f"{name}, peak heap of write", heap, "MB", at_most=target))


def _written(sizes: Sizes) -> tuple[int, int]:
    return sizes.packs * 5 // 2, sizes.pack_size // 2


def _write_plain(path: Path, packs: Iterable[Pack]) -> None:
    """Write the same bytes to one file and force them to disk, and nothing else."""
    with path.open("wb") as file:
        for pack in packs:
            file.write(pack.input_ids.data)
            file.write(pack.loss_mask.data)
        file.flush()
        os.fsync(file.fileno())
    path.unlink()


def _peak_heap(work: Callable[[], object]) -> float:
    """Return the megabytes by which Python's heap, numpy's arrays included, grows at most."""
    gc.collect()
    tracemalloc.start()
    try:
        before = tracemalloc.get_traced_memory()[0]
        work()
        return (tracemalloc.get_traced_memory()[1] - before) / 1e6
    finally:
        tracemalloc.stop()


def _measure_legacy(sizes: Sizes, workspace: Workspace, report: BenchReport) -> None:
    """Measure the memory of opening Parquet, against `numpy.load` of a pickled `.npy` of the same packs."""
    packs, pack_size = _written(sizes)
    file = workspace.folder / f"legacy-{packs}x{pack_size}.npy"
    if not file.exists():
        with open_writer(file, format="npy", pack_size=pack_size) as writer:
            for pack in make_packs(packs, pack_size):
                writer.append(pack)
    parquet = make_dataset(workspace, "parquet", packs=packs, pack_size=pack_size)
    loaded = measure_apart("tests.benchmarks.probes:load_by_numpy", file)
    opened = [measure_apart(_OPEN, parquet) for _ in range(min(sizes.rounds, _MOST_PROCESSES))]
    ours, theirs = f"parquet, memory of open, {packs:,} packs", "npy, memory of numpy.load"
    report.add(Figure(theirs, loaded["megabytes"], "MB"))
    report.add(Figure("npy, numpy.load", loaded["seconds"], "s"))
    report.add_samples(ours, [sample["megabytes"] for sample in opened], "MB")
    report.add_ratio("npy's memory to parquet's", theirs, ours, at_least=500)


PARTS: dict[str, Callable[[Sizes, Workspace, BenchReport], None]] = {
    "random": _measure_random,
    "order": _measure_order,
    "peer": _measure_peer,
    "checks": _measure_checks,
    "open": _measure_open,
    "write": _measure_writing,
    "legacy": _measure_legacy,
}
