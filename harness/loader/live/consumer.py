"""Global batches from live chunks: ranks tell each other what they have, and train, wait or stop together."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace

import numpy as np

from harness.errors import HarnessError, LoaderError
from harness.loader.layout import RankLayout
from harness.loader.live.folder import ago, chunk_name
from harness.loader.live.offer import LivePack, Offer
from harness.loader.live.position import LivePosition
from harness.loader.live.rank import RankStream
from harness.loader.plan import RankBatch
from harness.loader.state import LoaderState
from harness.records import Int64Array, Schedule
from harness.schedule import SequenceCost, measure_imbalance
from harness.thd import ThdBatch, padded_lengths, thd_from_arrays, zero_loss_row

ORDER = "live chunks"
# The longest between two looks for a chunk; all ranks look together, so none is long in a collective.
_POLL_S = 0.5
# A wait is told of when it is this long, and again each time it has doubled, at least every minute.
_FIRST_TOLD_S, _TOLD_EVERY_S = 2.0, 60.0

Exchange = Callable[[Offer | None], list[Offer]]
Share = Callable[[list[LivePack] | None], list[LivePack]]


@dataclass(frozen=True)
class BatchPlan:
    """How a step is divided.

    Attributes:
        layout: its dp_rank is this rank's.
        global_batch_size: packs of a step; rank r takes one more than another where they do not divide evenly.
        row_tokens: of one row.
        cost: what a sequence costs to train.
    """

    layout: RankLayout
    global_batch_size: int
    row_tokens: int
    cost: SequenceCost

    @property
    def share(self) -> int:
        """Packs that this rank takes for a step."""
        each, more = divmod(self.global_batch_size, self.layout.dp_size)
        return each + (self.layout.dp_rank < more)


class LiveLoader:
    """Yields a `RankBatch` a global batch until the stream ends.

    Args:
        stream: what this rank reads; None where it gets its rows from another one.
        rows: how a step is divided.
        exchange: gives the offers of all reading ranks, by data-parallel rank, to every rank; all call it together.
        share: hands the packs of a step to the ranks that train the same rows; all of these call it together.
        state: go on from here.
        fresh: the state of a new run.
        timeout_s: the longest wait for a chunk.
        say: takes a line for the reader of the log.
        tell: called at each look with what the ranks are doing, for `harness live status` and for the producer.

    Attributes:
        while_waiting: called at each look that finds a chunk missing, on all ranks together; a reason to stop that it
            gives, the same on all of them, ends the iteration.

    Raises:
        LoaderError: while iterating, on all ranks together: a chunk does not come, is damaged, or rows are missing.
    """

    def __init__(
        self,
        stream: RankStream | None,
        rows: BatchPlan,
        *,
        exchange: Exchange,
        share: Share,
        state: LoaderState | None,
        fresh: LoaderState,
        timeout_s: float,
        say: Callable[[str], None] = lambda line: None,
        tell: Callable[[LivePosition, Sequence[Offer]], None] = lambda position, offers: None,
    ) -> None:
        self._stream = stream
        self._rows = rows
        self._exchange, self._share = exchange, share
        self._state = state or fresh
        self._position = LivePosition.from_json(state.live) if state is not None else LivePosition()
        self._timeout_s = timeout_s
        self._say, self._tell = say, tell
        self.while_waiting: Callable[[], str | None] = lambda: None
        self._left_out: dict[str, int] = {}
        self._reading = ThreadPoolExecutor(max_workers=1, thread_name_prefix="live-chunks")

    def __iter__(self) -> Iterator[RankBatch]:
        ahead = self._read()
        told_s = _FIRST_TOLD_S
        while True:
            offers = self._exchange(ahead.result() if ahead is not None else None)
            self._raise_together(offers)
            after = self._position.after(offer.position for offer in offers)
            self._tell(after, offers)
            waits = [(offer.waiting.waited_s, offer) for offer in offers if offer.waiting is not None]
            if waits:
                waited_s, longest = max(waits, key=lambda wait: wait[0])
                if waited_s > self._timeout_s:
                    raise _late(longest)
                if waited_s >= told_s:
                    self._say(_told(longest))
                    told_s = min(2 * told_s, told_s + _TOLD_EVERY_S)
                if self.while_waiting() is not None:
                    return
                time.sleep(min(_POLL_S, 0.01 + waited_s / 4))
                ahead = self._read()
                continue
            told_s = _FIRST_TOLD_S
            if not any(offer.lengths for offer in offers):
                self._check_end(after, offers)
                return
            mine = self._stream.take(done_below=after.done_below) if self._stream is not None else None
            ahead = self._read()
            yield self._batch(self._share(mine), offers, after)

    def close(self) -> None:
        self._reading.shutdown()
        if self._stream is not None:
            self._stream.close()

    def _read(self) -> Future[Offer] | None:
        """Start to read this rank's part of the next step: the step before is trained meanwhile."""
        return None if self._stream is None else self._reading.submit(self._stream.offer, self._rows.share)

    def _raise_together(self, offers: Sequence[Offer]) -> None:
        for offer in offers:
            if offer.error is None:
                continue
            if offer.dp_rank == self._rows.layout.dp_rank and self._stream is not None:
                raise offer.error
            told = offer.error
            raise _shared(
                type(told)(f"data-parallel rank {offer.dp_rank}: {told.what}", where=told.where, fix=told.fix)
            )
        streams = sorted({offer.stream for offer in offers if offer.stream})
        if len(streams) > 1:
            raise _shared(
                LoaderError(
                    f"chunks of one folder belong to several streams: {', '.join(streams)}",
                    fix="let one producer write to a folder, and never copy chunks from another one",
                )
            )

    def _check_end(self, after: LivePosition, offers: Sequence[Offer]) -> None:
        self._count_left_out(offers)
        left_out = ", ".join(f"{count:,} {why}" for why, count in sorted(self._left_out.items()))
        expected = next((offer.rows_expected for offer in offers if offer.rows_expected is not None), None)
        if after.steps == 1:
            raise _shared(
                LoaderError(
                    "the stream ended without a row to train on" + (f"; left out: {left_out}" if left_out else ""),
                    where="data.live",
                    fix="see what its producer was given, and data.live.pack_size",
                )
            )
        if expected is not None and after.rows != expected:
            raise _shared(
                LoaderError(
                    f"the stream ended after {expected:,} rows, and {after.rows:,} were read",
                    where="data.live",
                    fix="chunks were changed while they were read, or the run was resumed on other ones",
                )
            )
        self._say(
            f"the stream ended: {after.rows:,} rows in {after.done_below:,} chunks"
            + (f"; left out: {left_out}" if left_out else "")
        )

    def _count_left_out(self, offers: Sequence[Offer]) -> None:
        for offer in offers:
            for why, count in offer.left_out.items():
                self._left_out[why] = self._left_out.get(why, 0) + count

    def _batch(self, packs: list[LivePack], offers: Sequence[Offer], after: LivePosition) -> RankBatch:
        layout = self._rows.layout
        most = max(len(offer.lengths) for offer in offers)
        num_microbatches = -(-most // layout.group_size) * layout.group_size
        rows = [_row(one, layout.pad_to_multiple) for one in packs]
        ids = [one.sequence_ids for one in packs]
        missing = num_microbatches - len(rows)
        rows += [zero_loss_row(layout.pad_to_multiple) for _ in range(missing)]
        ids += [np.zeros(0, np.int64) for _ in range(missing)]
        self._count_left_out(offers)
        placed, lengths = _schedule(offers, num_microbatches)
        order = [(row, offer) for row in range(most) for offer in offers if row < len(offer.lengths)]
        self._position = after
        self._state = replace(
            self._state,
            packs_consumed=self._state.packs_consumed + len(order),
            fingerprint=next((offer.stream for offer in offers if offer.stream), self._state.fingerprint),
            live=after.to_json(),
        )
        return RankBatch(
            epoch=0,
            step_in_epoch=after.steps - 1,
            pack_ids=np.array([offer.sequence_ids[row][0] for row, offer in order], np.int64),
            rows=rows,
            sequence_ids=ids,
            num_sequences=int(lengths.shape[0]),
            num_tokens=int((lengths - 1).sum()),
            imbalance=measure_imbalance(
                placed,
                padded_lengths(lengths, layout.pad_to_multiple),
                row_tokens=self._rows.row_tokens,
                cost=self._rows.cost,
            ),
            state=self._state,
        )


def _row(one: LivePack, pad_to_multiple: int) -> ThdBatch:
    pack = one.pack
    return thd_from_arrays(
        pack.input_ids, pack.loss_mask, pack.sequence_lengths.astype(np.int64), pad_to_multiple=pad_to_multiple
    )


def _schedule(offers: Sequence[Offer], num_microbatches: int) -> tuple[Schedule, Int64Array]:
    """Where each sequence of the step is, and stored lengths int64 [sequences], row by row."""
    rows = [
        offer.lengths[row] if row < len(offer.lengths) else np.zeros(0, np.int64)
        for row in range(num_microbatches)
        for offer in offers
    ]
    lengths = np.concatenate(rows)
    offsets = np.concatenate([np.zeros(1, np.int64), np.cumsum([row.shape[0] for row in rows])])
    return Schedule(len(offers), np.arange(lengths.shape[0], dtype=np.int64), offsets), lengths


def _shared(error: HarnessError) -> HarnessError:
    """Every rank raises the same: one of them says it."""
    error.is_shared = True
    return error


def _late(offer: Offer) -> HarnessError:
    waited_s = offer.waiting.waited_s if offer.waiting is not None else 0.0
    return _shared(
        LoaderError(
            f"data-parallel rank {offer.dp_rank} waited {waited_s:.0f} s for {_chunk_of(offer)}",
            where="data.live",
            fix="see to the producer (`harness live status` shows it), then go on with resume=true; "
            "data.live.timeout_s is the longest wait",
        )
    )


def _told(offer: Offer) -> str:
    waited_s = offer.waiting.waited_s if offer.waiting is not None else 0.0
    return f"data-parallel rank {offer.dp_rank} has waited {waited_s:.0f} s for {_chunk_of(offer)}"


def _chunk_of(offer: Offer) -> str:
    waiting = offer.waiting
    assert waiting is not None
    hint = f"; {waiting.hint}" if waiting.hint else ""
    return f"{chunk_name(waiting.chunk, '')}; its producer was {ago(waiting.producer_seen_s)}{hint}"
