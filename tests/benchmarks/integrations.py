"""The rows that TRL's trainer gets here, against its own data path."""

from __future__ import annotations

import itertools
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from harness.bench.figures import BenchReport, Progress, Side
from harness.bench.sizes import Sizes
from harness.bench.workspace import Workspace, make_packs
from harness.errors import ConfigError
from harness.integrations import INTEGRATIONS, HuggingFaceRow, RankStream, missing_packages
from harness.loader import LoaderConfig
from harness.schedule import ScheduleConfig
from harness.thd import build_thd_batch
from tests.benchmarks.links import make_dataset

_PREFETCH = 2
# Yields the tokens of each row, inside a block that ends workers.
Rows = Callable[[int], Any]


def bench_integrations(sizes: Sizes, workspace: Workspace, progress: Progress) -> BenchReport:
    """Measure TRL, or note that it is not installed.

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
    if missing := missing_packages("trl"):
        packages, install = " and ".join(missing), INTEGRATIONS["trl"].install
        report.notes.append(f"trl is left out: {packages} not installed; `{install}` adds it")
        return report
    progress("the integrations: writing the data")
    memmap = make_dataset(workspace, "memmap", packs=sizes.packs, pack_size=sizes.pack_size)
    arrow = write_trl_dataset(workspace.folder / f"trl-{sizes.packs}x{sizes.pack_size}", sizes)
    sides: dict[str, Rows] = {
        "rows of a step": partial(_rows_of_steps, sizes, memmap),
        "its packed dataset": partial(_trl_rows, arrow),
    }
    for workers in sizes.workers:
        progress(f"TRL, {workers} workers")
        works = {f"TRL, {side}, {workers} workers": _rate(of, workers, sizes) for side, of in sides.items()}
        report.compare(f"TRL, ours to theirs, {workers} workers", works, sizes.rounds, "M tok/s")
    return report


def _rows_ahead(sizes: Sizes, workers: int) -> int:
    """Return the rows after which queues of workers are as full as they stay."""
    return sizes.global_batch * (1 + workers * _PREFETCH)


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


@contextmanager
def _rows_of_steps(sizes: Sizes, path: Path, workers: int) -> Iterator[Iterator[int]]:
    """Open the rows that `PackedTraining` of harness.integrations.huggingface and loops of one's own read."""
    from harness.integrations.torch import PackedDataset

    config = LoaderConfig(global_batch_size=sizes.global_batch, num_workers=workers, prefetch_factor=_PREFETCH)
    with RankStream(path, config, schedule=ScheduleConfig("as_packed", sizes.pack_size)) as stream:
        steps = PackedDataset(stream, dialect="huggingface").steps()
        yield (row["input_ids"].numel() for step in steps for row in step.rows)


def write_trl_dataset(path: Path, sizes: Sizes) -> Path:
    """Write the packs as TRL's `pack_dataset` returns them, unless an earlier run did.

    These are mapped, uncompressed files of token ids, labels and the lengths of sequences.
    """
    import datasets

    if path.exists():
        return path
    datasets.disable_progress_bars()
    kinds = {"input_ids": "int32", "labels": "int64", "seq_lengths": "int32"}
    made: dict[str, list[Any]] = {name: [] for name in kinds}
    for pack in make_packs(sizes.packs, sizes.pack_size):
        row = HuggingFaceRow.of(build_thd_batch(pack.sequences()))
        lengths = np.diff(row["cu_seq_lens_q"])
        for name, values in zip(kinds, (row["input_ids"][0], row["labels"][0], lengths), strict=True):
            made[name].append(values)
    features = datasets.Features({name: datasets.List(datasets.Value(kind)) for name, kind in kinds.items()})
    datasets.Dataset.from_dict(made, features=features).save_to_disk(str(path))
    return path


@contextmanager
def _trl_rows(path: Path, workers: int) -> Iterator[Iterator[int]]:
    """Open the DataLoader that TRL's `SFTTrainer` makes for packed data without padding, a pack a batch."""
    import datasets
    from torch.utils.data import DataLoader
    from trl.trainer.sft_trainer import DataCollatorForLanguageModeling

    rows: Any = datasets.load_from_disk(str(path))
    collate = DataCollatorForLanguageModeling(pad_token_id=0, padding_free=True)
    loader = DataLoader(rows, batch_size=1, shuffle=True, collate_fn=collate, num_workers=workers)
    yield (row["input_ids"].numel() for row in loader)
