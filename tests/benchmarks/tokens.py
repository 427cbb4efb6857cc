"""Token shards to Megatron's .bin and .idx, against Megatron-Core's own builder."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from harness.bench.figures import CPU, BenchReport, Progress, Side
from harness.bench.sizes import Sizes
from harness.bench.workspace import Workspace, lognormal_lengths
from harness.indexed.convert import convert_tokens
from tests.benchmarks.clocks import rate

_OURS, _THEIRS = "ours", "Megatron's builder"
_CPU = ", by processor time"
# Lengths of documents, and documents of a Parquet row group.
_MEDIANS = (60.0, 600.0)
_ROWS_PER_GROUP = 1000


def bench_tokens(sizes: Sizes, workspace: Workspace, progress: Progress) -> BenchReport:
    """Measure millions of tokens a second, on the clock and by processor time."""
    report = BenchReport("tokens")
    builder = _find_builder()
    if builder is None:
        report.notes.append("megatron-core is not installed; with `pip install megatron-core` it is measured too")
    for median in _MEDIANS:
        progress(f"documents of a median of {median:g} tokens")
        _measure(sizes, median, builder, workspace, report)
    report.notes.append("ours decodes row groups on all cores, and forces its files to the disk")
    report.notes.append("the builder gets rows of Parquet as torch tensors made of Python lists")
    return report


def _find_builder() -> Any:
    try:
        return importlib.import_module("megatron.core.datasets.indexed_dataset").IndexedDatasetBuilder
    except ImportError:
        return None


def _measure(sizes: Sizes, median: float, builder: Any, workspace: Workspace, report: BenchReport) -> None:
    count = int(sizes.packs * sizes.pack_size / (median * np.exp(0.5)))
    lengths = lognormal_lengths(count, median=median, longest=1 << 16, seed=0)
    offsets = np.concatenate([[0], np.cumsum(lengths)])
    # Skewed like the tokens of text, so that Parquet compresses as well.
    tokens = (np.random.default_rng(0).zipf(1.3, int(offsets[-1])) % 50_000).astype(np.int32)
    folder = workspace.folder / f"tokens-{median:g}"
    folder.mkdir(exist_ok=True)
    shard = folder / "shard.parquet"
    column = pa.ListArray.from_arrays(pa.array(offsets, pa.int32()), pa.array(tokens))
    pq.write_table(pa.table({"input_ids": column}), shard, row_group_size=_ROWS_PER_GROUP, compression="zstd")

    def side(write: Callable[[Path], None], name: str) -> Side:
        def run(number: int) -> float:
            write(folder / name)
            return len(tokens) / 1e6

        return run

    sides = {_OURS: side(partial(_convert, shard), "ours")}
    if builder is not None:
        sides[_THEIRS] = side(partial(_build, builder, shard), "theirs")
    case = f"median {median:g}: "
    works = {case + name: rate(work) for name, work in sides.items()}
    if builder is None:
        report.compare("", works, sizes.rounds, "M tokens/s")
        return
    report.compare(f"{case}to tensors of rows", works, sizes.rounds, "M tokens/s", at_least=20)
    works = {f"{case}{name}{_CPU}": rate(work, CPU) for name, work in sides.items()}
    report.compare(f"{case}to tensors of rows{_CPU}", works, sizes.rounds, "M tokens/s")
    _check_same_bytes(folder)


def _convert(shard: Path, path: Path) -> None:
    convert_tokens([str(shard)], str(path), overwrite=True)


def _build(builder: Any, shard: Path, path: Path) -> None:
    torch = importlib.import_module("torch")
    theirs = builder(f"{path}.bin", dtype=np.uint16)
    for batch in pq.ParquetFile(shard).iter_batches():
        for row in batch.column(0):
            theirs.add_document(torch.tensor(row.as_py()), [len(row)])
    theirs.finalize(f"{path}.idx")


def _check_same_bytes(folder: Path) -> None:
    """Fail where the sides wrote different files: speeds compare only where the work is the same."""
    for suffix in (".bin", ".idx"):
        written = {path.read_bytes() for path in folder.glob(f"*{suffix}")}
        assert len(written) == 1, f"{len(written)} different {suffix}"
