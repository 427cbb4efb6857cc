"""Packed rows as PyTorch datasets: an iterable one with an exact position, and a map-style one of stored packs.

`PackedDataset` goes into a plain loop, Lightning's `fit`, or a `DataLoader` with `batch_size=None`. Its rows are read
by workers of its own (`LoaderConfig.num_workers`), and its position is that of `RankStream`. With accelerate, register
it for checkpoints and read it without `prepare`, which is refused: it already yields this rank's part.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from itertools import chain, islice, pairwise
from typing import Any

from harness.integrations.registry import require

require("torch")  # raises a clear error before an import that would fail

import torch
from torch.utils.data import Dataset, IterableDataset, get_worker_info
from torch.utils.data._utils.collate import default_collate_fn_map

from harness.errors import ConfigError, LoaderError
from harness.formats import PackReader, open_dataset
from harness.formats.reader import require_plain
from harness.integrations.dialects import Row, require_dialect
from harness.integrations.stream import RankStream
from harness.loader import LoaderState, RankBatch
from harness.thd import build_thd_batch


def _refuse_batch(rows: list[Row], *, collate_fn_map: Any = None) -> None:
    what = f"a DataLoader collates {len(rows)} rows into a batch, but each row is already a batch"
    raise ConfigError(what, where="DataLoader", fix="use batch_size=None in the DataLoader")


default_collate_fn_map[Row] = _refuse_batch  # documented by `default_collate`


@dataclass(frozen=True, eq=False)
class StepRows:
    """The rows of one optimizer step on this rank.

    Attributes:
        epoch, step_in_epoch: from 0.
        rows: one per microbatch.
        num_trained_tokens: of these rows; their sum over all ranks divides the summed losses of the step.
    """

    epoch: int
    step_in_epoch: int
    rows: list[Row]
    num_trained_tokens: int


class PackedDataset(IterableDataset[Row]):
    """Yields this rank's rows as dicts of tensors, an epoch with each `iter()`, and resumes at any step.

    A step counts as consumed once its last row is yielded; a process that begins at a position in the middle of a step
    repeats the step, whose gradients were lost. A new iterator of the same process continues after the row that was
    yielded last, in a new epoch after a whole one.

    Args:
        dialect: `megatron` or `huggingface`, see `harness.integrations.DIALECTS`.
        device: copy rows there, one row ahead of the one in training; None leaves them on the CPU.
        pin_memory: build rows in pinned memory, so that copies to a GPU overlap with training.
    """

    def __init__(
        self, stream: RankStream, *, dialect: str, device: torch.device | str | None = None, pin_memory: bool = False
    ) -> None:
        super().__init__()
        if not isinstance(stream, RankStream):
            fix = "open it with RankStream(path, LoaderConfig(...), dp_rank=..., dp_size=...)"
            raise ConfigError(f"the data is {str(stream)[:100]!r}, not a stream", where=type(self).__name__, fix=fix)
        self.stream = stream
        self._kind = require_dialect(dialect)
        self._device = None if device is None else torch.device(device)
        self._pin_memory = pin_memory
        self._position = stream.state
        self._rows_yielded = 0  # rows already yielded of the step after the position

    def state_dict(self) -> dict[str, int | str]:
        """Return the position: integers and strings, the same on every rank."""
        _refuse_workers()
        return asdict(self._position)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Move to a position that `state_dict` returned, on any number of ranks; see `RankStream.load_state_dict`."""
        self.stream.load_state_dict(state)
        self._position, self._rows_yielded = self.stream.state, 0

    def __len__(self) -> int:
        """Return the rows of this rank in the epoch of the position; raise TypeError for an endless blend."""
        rows = self.stream.rows_per_step()
        if rows is None:
            raise TypeError("a weighted blend has no length")
        return sum(rows)

    def __iter__(self) -> Iterator[Row]:
        """Yield the rows after the position to the end of its epoch."""
        _refuse_workers()
        accelerate = sys.modules.get("accelerate.state")
        read = getattr(accelerate and accelerate.GradientState().active_dataloader, "dataset", None)
        # On several ranks accelerate may wrap the dataset.
        if self in (read, getattr(read, "dataset", None)):
            what = "a PackedDataset is read by a loader that accelerate prepared, which would divide this rank's rows "
            what += "among all ranks and read them ahead of the position"
            fix = "prepare only model and optimizer, and read the dataset, or a DataLoader with batch_size=None"
            raise LoaderError(what, where="Accelerator.prepare", fix=fix)
        self.stream.seek(self._position)
        steps = self.stream.one_epoch()

        def rows() -> Iterator[Row]:
            for row, after in self._ahead(steps, skip=self._rows_yielded):
                if after is None:
                    self._rows_yielded += 1
                else:
                    self._position, self._rows_yielded = after, 0
                yield row

        return rows()

    def steps(self) -> Iterator[StepRows]:
        """Yield the steps after the position, endlessly across epochs; a partly yielded step is repeated in full."""
        _refuse_workers()
        self._rows_yielded = 0
        self.stream.seek(self._position)
        batches = iter(self.stream)

        def steps() -> Iterator[StepRows]:
            for batch in batches:
                rows = [self._place(self._kind.of(row)) for row in batch.rows]
                self._position = batch.state
                trained = sum(row.num_trained_tokens for row in batch.rows)
                yield StepRows(batch.epoch, batch.step_in_epoch, rows, trained)

        return steps()

    def close(self) -> None:
        """Stop the workers; the position is kept."""
        self.stream.close()

    def _place(self, row: Row) -> Row:
        made = row.tensors(pin=self._pin_memory)
        return made if self._device is None else made.to(self._device, non_blocking=True)

    def _ahead(self, batches: Iterator[RankBatch], *, skip: int) -> Iterator[tuple[Row, LoaderState | None]]:
        """Yield all rows but the first `skip`, the last of a step with the position after it.

        On a device, the copy of the next row has then begun.
        """
        rows = (
            (row, batch.state if number == len(batch.rows) else None)
            for batch in batches
            for number, row in enumerate(batch.rows, start=1)
        )
        placed = ((self._place(self._kind.of(row)), after) for row, after in islice(rows, skip, None))
        yield from placed if self._device is None else (pair for pair, _ in pairwise(chain(placed, [None])) if pair)


class StoredRows(Dataset[Row]):
    """Map-style dataset for loops that choose their own order: item i is stored pack i as one row.

    It has neither epochs nor ranks; with a shuffling sampler the order, and a resume, are the sampler's. The dialect is
    `megatron` or `huggingface`.
    """

    def __init__(self, data: PackReader | str | os.PathLike[str], *, dialect: str) -> None:
        self._reader = open_dataset(data) if isinstance(data, str | os.PathLike) else data
        require_plain(self._reader, "the loop of another trainer")
        self._kind = require_dialect(dialect)

    def __len__(self) -> int:
        return len(self._reader)

    def __getitem__(self, index: int) -> Row:
        return self.__getitems__([index])[0]

    def __getitems__(self, indices: list[int]) -> list[Row]:
        """Return several rows with one read of the dataset."""
        packs = self._reader.read(indices)
        return [self._kind.of(build_thd_batch(pack.sequences())).tensors() for pack in packs]


def _refuse_workers() -> None:
    if (info := get_worker_info()) is not None:
        what = f"a PackedDataset is read in a worker of a DataLoader with {info.num_workers} workers, which would keep "
        what += "the position from the training process"
        fix = "use num_workers=0 and batch_size=None in the DataLoader, and set LoaderConfig.num_workers"
        raise LoaderError(what, where="DataLoader", fix=fix)
