"""Token shards to Megatron's .bin and .idx, against Megatron-Core's own builder."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from harness.bench.figures import CPU, BenchReport, Case, Progress, Side
from harness.bench.sizes import Sizes
from harness.bench.workspace import Workspace, lognormal_lengths
from harness.indexed.convert import convert_tokens
from harness.indexed.index import UINT16
from harness.indexed.writer import IndexedWriter
from harness.records import Int64Array
from tests.benchmarks.clocks import rate

_OURS, _THEIRS = "ours", "Megatron's builder"
_CPU = ", by processor time"
_BLOCK = 1 << 20
# Lengths of documents, and documents of a Parquet row group.
_MEDIANS = (60.0, 600.0)
_ROWS_PER_GROUP = 1000


def bench_tokens(sizes: Sizes, workspace: Workspace, progress: Progress) -> BenchReport:
    """Measure millions of tokens a second on the clock, and by processor time where there is a target."""
    report = BenchReport("tokens")
    builder = _find_builder()
    if builder is None:
        report.notes.append("megatron-core is not installed; with `pip install megatron-core` it is measured too")
    for median in _MEDIANS:
        progress(f"documents of a median of {median:g} tokens")
        _measure(sizes, median, builder, workspace, report)
    report.notes.append("ours decodes row groups on all cores, and forces its files to the disk")
    report.notes.append("the target is for rows fed as torch tensors made of Python lists")
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

    sides = {
        f"{_OURS}, from Parquet": side(partial(_convert, shard), "ours"),
        f"{_OURS}, from memory": side(partial(_write, tokens, lengths), "ours-memory"),
    }
    if builder is not None:
        for name, rows in {"a tensor a row of Parquet": _tensors, "a list a row of Parquet": _lists}.items():
            sides[f"{_THEIRS}, {name}"] = side(partial(_build, builder, partial(rows, shard)), name)
        views = [tokens[begin:end] for begin, end in pairwise(offsets.tolist())]
        sides[f"{_THEIRS}, from memory"] = side(partial(_build, builder, lambda: views), "theirs-memory")
    case = f"median {median:g}: "
    report.run(Case("", {case + name: rate(work) for name, work in sides.items()}, sizes.rounds, "M tokens/s"))
    if builder is None:
        return
    tensors = f"{_THEIRS}, a tensor a row of Parquet"
    works = {f"{case}{name}{_CPU}": rate(sides[name], CPU) for name in (f"{_OURS}, from Parquet", tensors)}
    report.run(Case(f"{case}to tensors of rows{_CPU}", works, sizes.rounds, "M tokens/s"))
    _check_same_bytes(folder)
    for name, ours, theirs, target in (
        ("to tensors of rows", "from Parquet", tensors, 20.0),
        ("to lists of rows", "from Parquet", f"{_THEIRS}, a list a row of Parquet", None),
        ("to tokens in memory", "from memory", f"{_THEIRS}, from memory", None),
    ):
        report.add_ratio(case + name, f"{case}{_OURS}, {ours}", case + theirs, at_least=target)


def _convert(shard: Path, path: Path) -> None:
    convert_tokens([str(shard)], str(path), overwrite=True)


def _write(tokens: Any, lengths: Int64Array, path: Path) -> None:
    with IndexedWriter(path, dtype=UINT16, overwrite=True) as writer:
        for start in range(0, len(tokens), _BLOCK):
            writer.append_tokens(tokens[start : start + _BLOCK])
        writer.append_ledgers(lengths, np.arange(1, len(lengths) + 1))


def _build(builder: Any, rows: Callable[[], Iterable[Any]], path: Path) -> None:
    theirs = builder(f"{path}.bin", dtype=np.uint16)
    for row in rows():
        theirs.add_document(row, [len(row)])
    theirs.finalize(f"{path}.idx")


def _tensors(shard: Path) -> Iterator[Any]:
    torch = importlib.import_module("torch")
    for batch in pq.ParquetFile(shard).iter_batches():
        for row in batch.column(0):
            yield torch.tensor(row.as_py())


def _lists(shard: Path) -> Iterator[Any]:
    for batch in pq.ParquetFile(shard).iter_batches():
        yield from batch.column(0).to_pylist()


def _check_same_bytes(folder: Path) -> None:
    """Fail where the sides wrote different files: speeds compare only where the work is the same."""
    for suffix in (".bin", ".idx"):
        written = {path.read_bytes() for path in folder.glob(f"*{suffix}")}
        assert len(written) == 1, f"{len(written)} different {suffix}"
