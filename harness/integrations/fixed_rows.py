"""Rows one at a time, the same number in every step: for trainers that fix the number of microbatches beforehand."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np

from harness.errors import CheckpointError, ConfigError, LoaderError, ScheduleError
from harness.integrations.stream import RankStream
from harness.loader import RankBatch, RankLayout
from harness.records import Int64Array
from harness.schedule import ScheduleConfig
from harness.thd import ThdBatch, pad_row, padded_lengths, zero_loss_row


class FixedRows:
    """Yields this rank's rows of a stream one by one, `rows_per_step` of every global batch.

    A global batch at the end of an epoch may have fewer packs: rows that train nothing fill it up, so that all ranks
    run the same number of microbatches.

    Args:
        stream: with the schedule `as_packed` and a global batch of at most rows_per_step * dp_size packs.
        rows_per_step: microbatches of a step on this rank.
        pad_rows_to: pad every row to this many tokens; None leaves each at its length.
        one_epoch: end with the epoch of the stream's position; otherwise there is no end.
    """

    def __init__(
        self, stream: RankStream, *, rows_per_step: int, pad_rows_to: int | None = None, one_epoch: bool = False
    ) -> None:
        self.rows_per_step, self._pad_rows_to = rows_per_step, pad_rows_to
        self._stream, self._one_epoch = stream, one_epoch
        self._batches: Iterator[RankBatch] | None = None
        self._rows: deque[ThdBatch] = deque()
        self._position = stream.state  # before the step of these rows

    @property
    def starts_step(self) -> bool:
        """True where the next row is the first one of a step."""
        return not self._rows

    def __iter__(self) -> Iterator[ThdBatch]:
        return self

    def __next__(self) -> ThdBatch:
        if not self._rows:
            self._position = self._stream.state
            self._rows.extend(self._read())
        return self._rows.popleft()

    def position(self) -> dict[str, int | str]:
        """Return the position after the last step whose rows were all taken: the same on every rank."""
        return asdict(self._position if self._rows else self._stream.state)

    def state_dict(self) -> dict[str, int | str]:
        """Return the position after the steps so far; raise LoaderError if only some rows of a step were taken."""
        if self._rows:
            what = f"the position was requested within a step: {self.rows_per_step - len(self._rows)} of its "
            what += f"{self.rows_per_step} rows were read"
            fix = "save between steps; the data and the trainer must use the same global batch size"
            raise LoaderError(what, where="state_dict", fix=fix)
        return self._stream.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Move to a position that `state_dict` returned, on any number of ranks; see `RankStream.load_state_dict`."""
        self.close()
        self._stream.load_state_dict(state)

    def close(self) -> None:
        """End the workers; reading again continues after the last step whose rows were all taken."""
        if self._rows:
            self._stream.state = self._position
        self._rows.clear()
        self._batches = None
        self._stream.close()

    def _read(self) -> list[ThdBatch]:
        if self._batches is None:
            self._batches = self._stream.one_epoch() if self._one_epoch else iter(self._stream)
        batch = next(self._batches)
        if len(batch.rows) > self.rows_per_step:
            what = f"a global batch contains {len(batch.rows)} microbatches, but the trainer runs {self.rows_per_step}"
            fix = "open the data with the global batch size of the trainer"
            raise ScheduleError(what, where=f"epoch {batch.epoch}, step {batch.step_in_epoch}", fix=fix)
        missing = self.rows_per_step - len(batch.rows)
        rows = [*batch.rows, *(zero_loss_row(self._stream.layout.pad_to_multiple) for _ in range(missing))]
        return rows if self._pad_rows_to is None else [pad_row(row, self._pad_rows_to) for row in rows]


def require_as_packed(schedule: str, *, trainer: str, setting: str) -> None:
    """Raise ConfigError for a schedule whose number of microbatches changes from step to step."""
    if schedule == "as_packed":
        return
    what = f"{trainer} fixes the number of microbatches before it reads a step, and the schedule is {schedule}"
    raise ConfigError(what, where=setting, fix="choose as_packed, which trains every stored pack as one row")


def as_packed_rows(
    pack_offsets: Int64Array, sequence_lengths: Any, layout: RankLayout, *, pad_rows_to: int | None, setting: str
) -> ScheduleConfig:
    """Return the settings of `as_packed` with rows that hold every pack of a dataset.

    Args:
        pack_offsets, sequence_lengths: of the dataset.
        pad_rows_to: tokens that a row is padded to; None for rows as long as their pack.
        setting: name of `pad_rows_to` for errors.

    Raises:
        ConfigError: `pad_rows_to` cannot be cut as the layout cuts rows, or a pack has more tokens.
    """
    if pad_rows_to is not None and pad_rows_to % layout.pad_to_multiple:
        what = f"{setting} is {pad_rows_to:,}, but this layout pads to multiples of {layout.pad_to_multiple}"
        where = f"tensor parallelism {layout.tp_size}, context parallelism {layout.cp_size}"
        raise ConfigError(what, where=where, fix=f"set it to a multiple of {layout.pad_to_multiple}")
    tokens = np.add.reduceat(padded_lengths(sequence_lengths, layout.pad_to_multiple), pack_offsets[:-1])
    longest = int(tokens.max())
    if pad_rows_to is not None and longest > pad_rows_to:
        larger = int(np.count_nonzero(tokens > pad_rows_to))
        what = f"pack {int(np.argmax(tokens)):,} of the dataset requires {longest:,} tokens, but a row holds "
        what += f"{pad_rows_to:,}; {larger:,} of {tokens.shape[0]:,} packs do not fit"
        enough = -(-longest // layout.pad_to_multiple) * layout.pad_to_multiple
        raise ConfigError(what, where=setting, fix=f"set it to {enough:,} or more, or prepare smaller packs")
    return ScheduleConfig(name="as_packed", max_tokens_per_rank=-(-(pad_rows_to or longest) // layout.cp_size))


def saved_position(folders: Sequence[str], step: int, *, where: str, fix: str) -> dict[str, Any]:
    """Return the position in the data that Megatron-LM or Megatron-Bridge saved with the checkpoint of a step.

    Of `folders`, the first that has one counts; `where` are their settings. CheckpointError if none can be read.
    """
    import torch

    files = (Path(folder, f"iter_{step:07d}").rglob("train_dataloader_dprank*.pt") for folder in folders)
    # The position is the same on every rank: any file will do.
    found = next((path for some in files for path in sorted(some)), None)
    if found is None:
        what = f"training continues after step {step}, but its position in the data is missing"
        raise CheckpointError(what, where=", ".join(folders) or where, fix=fix)
    try:
        return dict(torch.load(found, weights_only=True)["dataloader_state_dict"])
    except Exception as error:
        what = f"the position in the data cannot be read: {error!r}"
        raise CheckpointError(what, where=str(found), fix=f"resume from another checkpoint, or {fix}") from error
