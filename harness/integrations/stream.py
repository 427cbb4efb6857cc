"""A resumable stream of this rank's batches: what every adapter is made of."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping
from dataclasses import asdict, replace
from typing import Any, Self

from harness.errors import LoaderError
from harness.formats import PackReader, open_dataset
from harness.formats.reader import require_plain
from harness.loader import Blend, JoinedReader, Loader, LoaderConfig, LoaderState, RankBatch, RankLayout, RunData
from harness.printing import count_of
from harness.schedule import ScheduleConfig, SequenceCost


class RankStream:
    """Yields this rank's `RankBatch` of every step, and keeps the position after the batch that it yielded last.

    The position is plain integers and strings, equal on every rank, and is loaded on any number of ranks and workers,
    with any global batch size. A batch counts as consumed once it is yielded: save after its optimizer step.

    Attributes:
        config, layout: as given.
        state: the position after the batch that was yielded last.
        num_steps_per_epoch: global batches of one epoch; None for a blend with weights, which has no end.

    Args:
        data: an open dataset, its path (as `open_dataset` takes it), or the data of a run (`open_datasets`), with its
            blend and tokenizer.
        config: see LoaderConfig.
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
        self._settings: dict[str, Any] = {
            "reader": reader,
            "config": config,
            "schedule": schedule,
            "layout": layout and replace(layout, shares_rows=False),
            "cost": cost,
            "tokenizer": tokenizer,
            "blend": blend,
        }
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

        LoaderError if it is no such position, or of another dataset, seed, order or tokenizer.
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
        """End the workers; the position stays, and the stream can be read again."""
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
