"""A resumable stream of this rank's batches, or of its rows one at a time; all adapters are built on it.

Trainers with a fixed number of microbatches read the same number of rows in every step.
"""

from __future__ import annotations

import json
import os
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, Self

import numpy as np

from harness.errors import CheckpointError, ConfigError, LoaderError, ScheduleError
from harness.formats import PackReader, open_dataset
from harness.formats.reader import require_plain
from harness.loader import Blend, JoinedReader, Loader, LoaderConfig, LoaderState, RankBatch, RankLayout, RunData
from harness.printing import count_of
from harness.records import Int64Array
from harness.schedule import ScheduleConfig, SequenceCost
from harness.thd import ThdBatch, pad_row, padded_lengths, zero_loss_row


class RankStream:
    """Yields this rank's `RankBatch` of every step, and keeps the position after the batch that it yielded last.

    The position is plain integers and strings, equal on every rank, and is loaded on any number of ranks and workers,
    with any global batch size. A batch counts as consumed once it is yielded: save after its optimizer step.

    Attributes:
        num_steps_per_epoch: global batches of one epoch; None for a blend with weights, which has no end.

    Args:
        data: an open dataset, its path (as `open_dataset` takes it), or the data of a run (`open_datasets`), with its
            blend and tokenizer.
        schedule: how sequences become rows; None for the defaults of ScheduleConfig.
        layout: the place of this rank; None for data parallelism alone, as `dp_rank` and `dp_size` give it.
        dp_rank, dp_size: rank and number of ranks, without a layout; optional in a job of one rank.
        cost: of training a sequence, for `cost_balanced`.

    Raises:
        HarnessError: as `open_dataset` and `Loader` do.
    """

    def __init__(
        self,
        data: PackReader | JoinedReader | RunData | str | os.PathLike[str],
        config: LoaderConfig,
        *,
        schedule: ScheduleConfig | None = None,
        layout: RankLayout | None = None,
        dp_rank: int | None = None,
        dp_size: int | None = None,
        cost: SequenceCost | None = None,
    ) -> None:
        blend: Blend | None = None
        tokenizer = ""
        if isinstance(data, RunData):
            blend, tokenizer = data.blend, data.tokenizer_hash
            reader = data.train
        else:
            reader = open_dataset(data) if isinstance(data, str | os.PathLike) else data
            if isinstance(reader, PackReader) and reader.manifest is not None:
                tokenizer = reader.manifest.provenance.tokenizer_hash
        require_plain(reader, "the loop of another trainer")
        self.config = config
        self._settings: dict[str, Any] = {"reader": reader, "config": config, "schedule": schedule, "cost": cost}
        self._settings |= {"layout": layout and replace(layout, shares_rows=False), "tokenizer": tokenizer}
        self._settings["blend"] = blend
        self._loader: Loader | None = None
        # Settings and data are checked here, not at the first step.
        first = Loader(**self._settings, dp_rank=dp_rank, dp_size=dp_size)
        self.layout = self._settings["layout"] = first.layout
        self.state: LoaderState = first.state
        self.num_steps_per_epoch = first.num_steps_per_epoch
        self._rows: tuple[int, list[int] | None] | None = None

    def state_dict(self) -> dict[str, int | str]:
        """Return the position: integers and strings, the same on every rank."""
        return asdict(self.state)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Move to a position that `state_dict` returned, on any number of ranks and workers; ends the workers.

        LoaderError if it is not a valid position, or belongs to another dataset, seed, order or tokenizer.
        """
        try:
            text = json.dumps(dict(state))
        except (TypeError, ValueError) as error:
            what = f"the state contains values other than integers and strings: {error}"
            raise LoaderError(what, where="load_state_dict", fix="pass the value that state_dict returned") from error
        self.seek(LoaderState.from_json(text))

    def seek(self, state: LoaderState) -> None:
        """Move to a position and end the workers; raise LoaderError for another dataset, seed, order or tokenizer."""
        state = Loader(**self._settings, state=state).state
        self.close()
        self.state = state

    def rows_per_step(self) -> list[int] | None:
        """Return the rows of this rank in each step of the position's epoch; None for a stream without end.

        Every step of the epoch is planned once, which takes seconds for 10,000 steps.
        """
        if self._rows is None or self._rows[0] != self.state.epoch:
            self._rows = self.state.epoch, Loader(**self._settings).rows_per_step(self.state.epoch)
        return self._rows[1]

    def __iter__(self) -> Iterator[RankBatch]:
        """Yield the batches after the position, across epochs, without end; a new iterator ends an older one."""
        return self._read(num_epochs=None)

    def one_epoch(self) -> Iterator[RankBatch]:
        """Yield the batches after the position to the end of its epoch; a new iterator ends an older one."""
        return self._read(num_epochs=self.state.epoch + 1)

    def close(self) -> None:
        """Stop the workers; the position is kept, and the stream can be read again."""
        loader, self._loader = self._loader, None
        if loader is not None:
            loader.close()

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_loader": None}

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _read(self, *, num_epochs: int | None) -> Iterator[RankBatch]:
        self.close()
        loader = self._loader = Loader(**self._settings, state=self.state, num_epochs=num_epochs)

        def batches() -> Iterator[RankBatch]:
            with loader:
                read = iter(loader)
                while self._loader is loader:
                    batch = next(read, None)
                    if batch is None:
                        return
                    self.state = batch.state
                    yield batch
            what = "this iterator was closed or replaced by another iterator or position"
            where = f"epoch {self.state.epoch}, after {count_of(self.state.packs_consumed, 'pack')}"
            raise LoaderError(what, where=where, fix="read a stream with one iterator at a time")

        return batches()


class FixedRows:
    """Yields this rank's rows of a stream one by one, `rows_per_step` of every global batch.

    A global batch at the end of an epoch may have fewer packs: untrained rows fill it up, so that all ranks
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
        """True if the next row is the first of a step."""
        return not self._rows

    def __iter__(self) -> Iterator[ThdBatch]:
        return self

    def __next__(self) -> ThdBatch:
        if self._rows:
            return self._rows.popleft()
        self._position = self._stream.state
        if self._batches is None:
            self._batches = self._stream.one_epoch() if self._one_epoch else iter(self._stream)
        batch = next(self._batches)
        if len(batch.rows) > self.rows_per_step:
            what = f"a global batch contains {len(batch.rows)} microbatches, but the trainer runs {self.rows_per_step}"
            fix = "open the data with the global batch size of the trainer"
            raise ScheduleError(what, where=f"epoch {batch.epoch}, step {batch.step_in_epoch}", fix=fix)
        missing = self.rows_per_step - len(batch.rows)
        rows = [*batch.rows, *(zero_loss_row(self._stream.layout.pad_to_multiple) for _ in range(missing))]
        self._rows.extend(rows if self._pad_rows_to is None else [pad_row(row, self._pad_rows_to) for row in rows])
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
