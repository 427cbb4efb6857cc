"""`python -m tests.benchmarks reading`: bytes read and decoded by many ranks, and the first batch of large data."""

from __future__ import annotations

import itertools
import time
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from harness.bench.apart import measure_apart
from harness.bench.figures import BenchReport, Figure, Progress
from harness.bench.sizes import Sizes
from harness.bench.workspace import Workspace
from harness.formats import FORMATS, load_format, open_dataset, open_writer
from harness.formats.layouts.parquet import SCHEMA
from harness.loader import Blend, EpochOrder, Loader, LoaderConfig, RankLayout
from harness.loader.plan import BatchReader
from harness.printing import count_of
from harness.records import Pack
from harness.schedule import ScheduleConfig
from tests.benchmarks.links import large_dataset, make_dataset
from tests.benchmarks.loading import packs_of

# Without npy, which unpickles the sixteen whole files of a first batch: that took 40 s.
_FORMATS = ("memmap", "binidx", "parquet", "jsonl")
_FIRST_BATCH_WORKERS = 4
# Bytes read over bytes stored that are allowed, by schedule; and ranks and workers of each that read.
_BYTES_AT_MOST = {"as_packed": 1.2, "dp_balanced": 2.0, "cost_balanced": 2.0}
_RANKS, _WORKERS = (1, 64, 512), (1, 4)
# Lists as other tools write them, in the form that takes the fewest bytes, of so many packs.
_LISTS: dict[str, Any] = {"compression": "zstd", "row_group_size": 64, "use_dictionary": False}
_LISTS["column_encoding"] = {f"{name}.list.element": "BYTE_STREAM_SPLIT" for name in ("input_ids", "loss_mask")}
_LISTED_PACKS = 1024
# A sequence that ranks share, and the ranks.
_LONG_TOKENS, _LONG_RANKS = 1 << 20, 64


def bench_reading(sizes: Sizes, workspace: Workspace, progress: Progress) -> BenchReport:
    """Count and decode bytes of Parquet, and measure the wait for the first batch of each format."""
    report = BenchReport("reading")
    progress("bytes read by one of many ranks, parquet")
    path = make_dataset(workspace, "parquet", packs=sizes.packs, pack_size=sizes.pack_size)
    _measure_bytes(sizes, path, report)
    progress("a rank's own packs of parquet, decoded")
    _measure_decoding(sizes, path, workspace, report)
    if sizes.large_packs:
        progress("the chunks of a context-parallel rank")
        _measure_chunks(workspace, report)
    for name in sizes.choose(_FORMATS) if sizes.large_packs else ():
        progress(f"the first batch of {sizes.large_packs:,} packs, {name}")
        path = large_dataset(
            workspace, name, packs=sizes.large_packs, shard_packs=packs_of(name, sizes), pack_size=sizes.pack_size
        )
        place, arguments = f"{__name__}:wait_for_first_batch", (path, sizes.global_batch, sizes.max_tokens_per_rank)
        samples = [measure_apart(place, *arguments) for _ in range(min(sizes.rounds, 3))]
        title = f"{name}, first batch of {samples[0]['packs']:,} packs, {_FIRST_BATCH_WORKERS} workers"
        report.add_samples(title, [sample["seconds"] for sample in samples], "s", at_most=2.0)
    return report


def _measure_bytes(sizes: Sizes, path: Path, report: BenchReport) -> None:
    """Count the bytes that ranks read from shards, over the stored bytes of the tokens that they train."""
    reader = open_dataset(path)
    per_token = sum(Path(str(place)).stat().st_size for place in reader.files()) / int(reader.sequence_lengths.sum())
    reader.read([0])  # which also loads libraries
    for (name, at_most), ranks, workers in itertools.product(_BYTES_AT_MOST.items(), _RANKS, _WORKERS):
        num_bytes, tokens = _read_as_ranks(sizes, path, name, ranks, workers)
        title = f"parquet, {name}, bytes read, {count_of(ranks, 'rank')}, {count_of(workers, 'worker')}"
        report.add(Figure(title, num_bytes / (tokens * per_token), "x", at_most=at_most))


def _measure_decoding(sizes: Sizes, path: Path, workspace: Workspace, report: BenchReport) -> None:
    """Time what a rank decodes per token that it trains, and compare the bytes with those of lists in row groups."""
    reader, ranks = open_dataset(path), _RANKS[-1]
    order = EpochOrder(LoaderConfig(), len(reader), 0).packs(0, len(reader))
    own = [pack for rank in range(0, ranks, ranks // 4) for pack in order[rank::ranks].tolist()]
    tokens, samples = sum(map(len, reader.read(own))), []  # which also fills caches
    for _ in range(sizes.rounds):
        start = time.process_time_ns()
        for pack in own:
            reader.read([pack])
        samples.append((time.process_time_ns() - start) / tokens)
    report.add_samples(f"parquet, as_packed, decoded per own token, {ranks} ranks", samples, "ns", at_most=15.0)
    packs = reader.read(range(min(_LISTED_PACKS, len(reader))))
    table = pa.table([[getattr(pack, name) for pack in packs] for name in SCHEMA.names], schema=SCHEMA)
    pq.write_table(table, lists := workspace.folder / "lists.parquet", **_LISTS)
    stored = sum(Path(str(place)).stat().st_size for place in reader.files()) / int(reader.sequence_lengths.sum())
    listed = lists.stat().st_size / sum(map(len, packs))
    report.add(Figure("parquet, bytes stored, to lists in groups of 64 packs", stored / listed, "x", at_most=1.06))


def _measure_chunks(workspace: Workspace, report: BenchReport) -> None:
    """Count the bytes that ranks read of a sequence that they share, over the stored bytes of their own tokens."""
    path, random = workspace.folder / "long", np.random.default_rng(0)
    with open_writer(path, pack_size=_LONG_TOKENS, overwrite=True) as writer:
        mask = np.arange(1, _LONG_TOKENS + 1) % 1024 > 512
        writer.append(Pack(random.zipf(1.3, _LONG_TOKENS) % 100_000, mask, [0]))
    stored, num_bytes, ranks = (path / "shard_000000.parquet").stat().st_size, 0, range(0, _LONG_RANKS, 16)
    config = LoaderConfig(global_batch_size=1)
    for rank in ranks:
        layout = RankLayout(cp_rank=rank, cp_size=_LONG_RANKS, pad_to_multiple=2 * _LONG_RANKS, reads_ahead=1)
        schedule = ScheduleConfig(max_tokens_per_rank=_LONG_TOKENS // _LONG_RANKS)
        reader = BatchReader(open_dataset(path), config, schedule=schedule, layout=layout)
        before = _bytes_read()
        reader.read(next(iter(Blend.of_one(1).steps(config, epoch=0, packs_consumed=0))))
        num_bytes += _bytes_read() - before
    title = f"parquet, {_LONG_TOKENS:,} tokens of {_LONG_RANKS} ranks, bytes read"
    report.add(Figure(title, num_bytes / (stored * len(ranks) / _LONG_RANKS), "x", at_most=2.0))


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
