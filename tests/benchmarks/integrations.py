"""The rows that other trainers get here, against each trainer's own data path."""

from __future__ import annotations

import itertools
import time
import warnings
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np

from harness.bench.figures import BenchReport, Case, Progress, Side
from harness.bench.sizes import Sizes
from harness.bench.workspace import Workspace, make_packs
from harness.errors import ConfigError
from harness.formats import open_dataset
from harness.integrations import INTEGRATIONS, FixedRows, HuggingFaceRow, MegatronRow, RankStream, missing_packages
from harness.loader import LoaderConfig
from harness.schedule import ScheduleConfig
from harness.thd import build_thd_batch
from tests.benchmarks.formats import BridgeReader, write_bridge_file

_PREFETCH = 2
# Yields the tokens of each row, inside a block that ends workers.
Rows = Callable[[int], Any]


def bench_integrations(sizes: Sizes, workspace: Workspace, progress: Progress) -> BenchReport:
    """Measure every trainer that is installed; the others are notes.

    Raises:
        ConfigError: there are fewer packs than a round reads.
    """
    sizes.first("workers", 1)
    needed = sizes.steps + _rows_ahead(sizes, max(sizes.workers))
    if sizes.packs < needed:
        raise ConfigError(
            f"{sizes.packs:,} packs are fewer than the {needed:,} of a round and of what workers read ahead",
            where="packs",
            fix=f"set packs={needed} or more, or fewer steps",
        )
    report = BenchReport("integrations")
    for trainer, sides in _comparisons(sizes, workspace, report, progress).items():
        for workers in sizes.workers:
            progress(f"{trainer}, {workers} workers")
            works = {f"{trainer}, {side}, {workers} workers": _rate(of, workers, sizes) for side, of in sides.items()}
            report.run(Case(f"{trainer}, ours to theirs, {workers} workers", works, sizes.rounds, "M tok/s"))
    return report


def _rows_ahead(sizes: Sizes, workers: int) -> int:
    """Return the rows after which queues of workers are as full as they stay."""
    return sizes.global_batch * (1 + workers * _PREFETCH)


def _comparisons(
    sizes: Sizes, workspace: Workspace, report: BenchReport, progress: Progress
) -> dict[str, dict[str, Rows]]:
    """Return the two sides of each comparison, by trainer, with their data written; note what is left out."""
    found: dict[str, dict[str, Rows]] = {}
    progress("the integrations: writing the data")
    memmap, parquet = (
        workspace.dataset(name, packs=sizes.packs, pack_size=sizes.pack_size) for name in ("memmap", "parquet")
    )
    if _is_measured("trl", report):
        arrow = write_trl_dataset(workspace.folder / f"trl-{sizes.packs}x{sizes.pack_size}", sizes)
        found["TRL"] = {
            "rows of a step": partial(_rows_of_steps, sizes, memmap, "huggingface"),
            "its packed dataset": partial(_trl_rows, arrow),
        }
    bridge = workspace.folder / f"bridge-{sizes.packs}x{sizes.pack_size}.parquet"
    if not bridge.exists():
        write_bridge_file(bridge, make_packs(sizes.packs, sizes.pack_size))
    found["Megatron-Bridge"] = {
        "fixed rows": partial(_fixed_rows, sizes, parquet),
        "its packed Parquet": partial(_bridge_rows, bridge),
    }
    report.notes.append(
        "Megatron-Bridge's reader and collation are written out for this bench, and read in the order of the file, "
        "which is their best case"
    )
    if _is_measured("torchtitan", report, beside=("datasets",)):
        arrow = write_titan_dataset(workspace.folder / f"titan-{sizes.packs}x{sizes.pack_size}", sizes)
        found["torchtitan"] = {
            "dataloader": partial(_our_titan_rows, sizes, memmap),
            "its text loader": partial(_titan_rows, sizes, arrow),
        }
        report.notes.append("torchtitan's loader gets token ids for text, so that its figure has no tokenizer in it")
    return found


def _is_measured(name: str, report: BenchReport, *, beside: tuple[str, ...] = ()) -> bool:
    missing = missing_packages(name, beside=beside)
    if missing:
        report.notes.append(
            f"{name} is left out: {' and '.join(missing)} not installed; `{INTEGRATIONS[name].install}` adds it"
        )
    return not missing


def _rate(rows: Rows, workers: int, sizes: Sizes) -> Side:
    """Open a data path, let its workers fill their queues, and count millions of tokens a second of a round."""

    import torch

    def side(number: int) -> float:
        threads = torch.get_num_threads()
        torch.set_num_threads(1)  # as a worker has; the arrays of a row are too small for more
        try:
            with warnings.catch_warnings():
                # Torch warns about more workers than cores, which may be measured on purpose.
                warnings.filterwarnings("ignore", "This DataLoader will create")
                with rows(workers) as counts:
                    for _ in range(_rows_ahead(sizes, workers)):
                        next(counts)
                    start = time.perf_counter()
                    tokens = sum(itertools.islice(counts, sizes.steps))
                    return float(tokens / (time.perf_counter() - start) / 1e6)
        finally:
            torch.set_num_threads(threads)

    return side


def _stream(sizes: Sizes, path: Path, workers: int) -> RankStream:
    config = LoaderConfig(global_batch_size=sizes.global_batch, num_workers=workers, prefetch_factor=_PREFETCH)
    return RankStream(path, config, schedule=ScheduleConfig("as_packed", sizes.pack_size))


@contextmanager
def _rows_of_steps(sizes: Sizes, path: Path, dialect: str, workers: int) -> Iterator[Iterator[int]]:
    """Open the rows that `PackedTraining` of harness.integrations.huggingface and loops of one's own read."""
    from harness.integrations.torch import PackedDataset

    with _stream(sizes, path, workers) as stream:
        steps = PackedDataset(stream, dialect=dialect).steps()
        yield (row["input_ids"].numel() for step in steps for row in step.rows)


@contextmanager
def _fixed_rows(sizes: Sizes, path: Path, workers: int) -> Iterator[Iterator[int]]:
    """Open the rows that the loaders for Megatron-LM and Megatron-Bridge yield."""
    with _stream(sizes, path, workers) as stream:
        rows = FixedRows(stream, rows_per_step=sizes.global_batch)
        yield (MegatronRow.of(row).tensors()["tokens"].numel() for row in rows)


def write_trl_dataset(path: Path, sizes: Sizes) -> Path:
    """Write the packs as TRL's `pack_dataset` returns them: token ids, labels and the lengths of sequences."""
    import datasets

    def rows() -> Iterator[dict[str, Any]]:
        for pack in make_packs(sizes.packs, sizes.pack_size):
            row = HuggingFaceRow.of(build_thd_batch(pack.sequences()))
            lengths = np.diff(row["cu_seq_lens_q"])
            yield {"input_ids": row["input_ids"][0], "labels": row["labels"][0], "seq_lengths": lengths}

    kinds = {"input_ids": "int32", "labels": "int64", "seq_lengths": "int32"}
    _write_arrow(path, rows(), {name: datasets.List(datasets.Value(kind)) for name, kind in kinds.items()})
    return path


def trl_loader(path: Path, workers: int, *, shuffle: bool = True) -> Iterable[dict[str, Any]]:
    """Return the DataLoader that TRL's `SFTTrainer` makes for packed data without padding, a pack a batch."""
    import datasets
    from torch.utils.data import DataLoader
    from trl.trainer.sft_trainer import DataCollatorForLanguageModeling

    rows: Any = datasets.load_from_disk(str(path))
    collate = DataCollatorForLanguageModeling(pad_token_id=0, padding_free=True)
    return DataLoader(rows, batch_size=1, shuffle=shuffle, collate_fn=collate, num_workers=workers)


@contextmanager
def _trl_rows(path: Path, workers: int) -> Iterator[Iterator[int]]:
    yield (row["input_ids"].numel() for row in trl_loader(path, workers))


class _BridgeRows:
    """A map-style dataset of the samples of a packed Parquet file; each worker opens the file itself."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._size = len(BridgeReader(path))
        self._reader: BridgeReader | None = None

    def __len__(self) -> int:
        return self._size

    def __getitem__(self, index: int) -> dict[str, list[int]]:
        if self._reader is None:
            self._reader = BridgeReader(self._path)
        ids, starts, mask = self._reader.row(index)
        return {"input_ids": ids, "seq_boundaries": [*starts, len(ids)], "loss_mask": mask}


def collate_for_bridge(samples: list[dict[str, list[int]]]) -> dict[str, Any]:
    """Return a batch of one sample as Megatron-Bridge's `GPTSFTPackedDataset` collates it.

    Written for the bench from what that class does: Python lists are cut at the bounds of sequences, padded to a
    multiple of 16 and made into tensors.
    """
    import torch

    (sample,) = samples
    ids, mask, ends = sample["input_ids"], sample["loss_mask"], sample["seq_boundaries"]
    spans = list(itertools.pairwise(ends))
    tokens = np.concatenate([ids[start : stop - 1] for start, stop in spans])
    labels = np.concatenate([ids[start + 1 : stop] for start, stop in spans])
    trained = np.concatenate([mask[start : stop - 1] for start, stop in spans])
    positions: list[int] = []
    bounds = [0]
    for start, stop in spans:
        positions.extend(range(stop - start - 1))
        bounds.append(bounds[-1] + stop - start - 1)
    total = -(-len(tokens) // 16) * 16
    if bounds[-1] != total:
        bounds.append(total)

    def padded(values: list[int]) -> torch.Tensor:
        return torch.tensor([values + [0] * (total - len(values))])

    cu_seqlens = torch.tensor([bounds], dtype=torch.int32)
    longest = torch.diff(cu_seqlens).max(dim=1, keepdim=True).values
    return {
        "tokens": padded(tokens.tolist()),
        "labels": padded(labels.tolist()),
        "loss_mask": padded(trained.tolist()),
        "position_ids": padded(positions),
        "token_count": [len(tokens)],
        **{f"cu_seqlens_{name}": cu_seqlens for name in ("q", "kv")},
        **{f"max_seqlen_{name}": longest for name in ("q", "kv")},
    }


def bridge_loader(path: Path, workers: int) -> Iterable[dict[str, Any]]:
    """Return a DataLoader over a packed Parquet file of Megatron-Bridge, a pack a batch, in the order of the file."""
    from torch.utils.data import DataLoader

    rows: Any = _BridgeRows(path)
    return DataLoader(rows, batch_size=1, collate_fn=collate_for_bridge, num_workers=workers)


@contextmanager
def _bridge_rows(path: Path, workers: int) -> Iterator[Iterator[int]]:
    yield (batch["token_count"][0] for batch in bridge_loader(path, workers))


def write_titan_dataset(path: Path, sizes: Sizes) -> Path:
    """Write the sequences of the packs one by one, as a text loader gets documents."""
    import datasets

    def rows() -> Iterator[dict[str, Any]]:
        for pack in make_packs(sizes.packs, sizes.pack_size):
            for sequence in pack.sequences():
                yield {"input_ids": sequence.input_ids}

    _write_arrow(path, rows(), {"input_ids": datasets.List(datasets.Value("int32"))})
    return path


@contextmanager
def _our_titan_rows(sizes: Sizes, path: Path, workers: int) -> Iterator[Iterator[float]]:
    from harness.integrations.torchtitan import HarnessDataLoader

    config = HarnessDataLoader.Config(
        dataset_path=str(path),
        global_batch_size=sizes.global_batch,
        num_workers=workers,
        prefetch_factor=_PREFETCH,
    )
    loader = HarnessDataLoader(config, dp_world_size=1, dp_rank=0, seq_len=sizes.pack_size, local_batch_size=1)
    reader = open_dataset(path)
    # Its rows are padded to one length; a sequence of L stored tokens has L - 1 that count.
    mean = float((reader.sequence_lengths[:] - 1).sum()) / len(reader)
    try:
        yield (mean for _row in loader)
    finally:
        loader.close()


@contextmanager
def _titan_rows(sizes: Sizes, path: Path, workers: int) -> Iterator[Iterator[int]]:
    import datasets
    from torchtitan.hf_datasets import DatasetConfig
    from torchtitan.hf_datasets.text_datasets import DATASETS, HuggingFaceTextDataLoader

    name = "harness_bench"
    DATASETS[name] = DatasetConfig(
        path=str(path), loader=datasets.load_from_disk, sample_processor=lambda row: row["input_ids"]
    )
    tokens_as_they_are = SimpleNamespace(encode=lambda ids, **_options: ids)
    config = HuggingFaceTextDataLoader.Config(dataset=name, num_workers=workers, prefetch_factor=_PREFETCH)
    try:
        loader = HuggingFaceTextDataLoader(
            config,
            dp_world_size=1,
            dp_rank=0,
            tokenizer=tokens_as_they_are,
            seq_len=sizes.pack_size,
            local_batch_size=1,
        )
        yield (inputs["input"].numel() for inputs, _labels in loader)
    finally:
        with suppress(KeyError):
            del DATASETS[name]


def _write_arrow(path: Path, rows: Iterator[dict[str, Any]], columns: dict[str, Any]) -> None:
    """Write rows as a mapped, uncompressed `datasets.Dataset`, unless an earlier run did."""
    import datasets

    if path.exists():
        return
    datasets.disable_progress_bars()
    made: dict[str, list[Any]] = {name: [] for name in columns}
    for row in rows:
        for name in columns:
            made[name].append(row[name])
    datasets.Dataset.from_dict(made, features=datasets.Features(columns)).save_to_disk(str(path))
