"""Global batches from live chunks: ranks exchange what they have, and train, wait or stop together."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace

import numpy as np

from harness.errors import HarnessError, LoaderError
from harness.loader.live.balance import Placement, Swap, place, send_to_trainers
from harness.loader.live.folder import chunk_name, last_seen
from harness.loader.live.position import LivePosition
from harness.loader.live.rank import BatchPlan, LivePack, Offer, RankStream
from harness.loader.plan import RankBatch
from harness.loader.state import LoaderState
from harness.records import Schedule
from harness.schedule import measure_imbalance
from harness.thd import build_thd_batch, padded_lengths, zero_loss_row

ORDER = "live chunks"
# The longest sleep between two looks for a chunk. All ranks look together, so none spends long in a collective.
_POLL_S = 0.5
# A wait is logged when it reaches the first, and again each time it has doubled, at least every minute.
_FIRST_LOG_S, _LOG_EVERY_S = 2.0, 60.0

Exchange = Callable[[Offer | None], list[Offer]]
Rows = list[LivePack | None]
Share = Callable[[Rows | None], Rows]


class LiveLoader:
    """Yields one `RankBatch` per global batch until the stream ends.

    Args:
        stream: reader of this rank; None where it gets its rows from another rank.
        plan: the division of a step into rows.
        exchange: gives the offers of all reading ranks, by data-parallel rank, to every rank; all call it together.
        share: hands the rows of a step to the ranks that train the same; all of these call it together.
        swap: sends tokens between the ranks that read, which call it together; only for schedules that balance.
        state: position to resume from, or the state of a new run, whose `live` is empty.
        timeout_s: the longest wait for a chunk.
        log: called with lines for the log.
        report: called at each look with position and offers, for `harness live status` and for the producer.

    Attributes:
        while_waiting: called at each look that misses a chunk, on all ranks together. A reason to stop that it
            returns, the same on all of them, ends the iteration.

    Raises:
        LoaderError: while iterating, on all ranks together: a chunk does not come, is damaged, or rows are missing.
    """

    def __init__(
        self,
        stream: RankStream | None,
        plan: BatchPlan,
        *,
        exchange: Exchange,
        share: Share,
        swap: Swap = lambda outgoing, expected: outgoing,
        state: LoaderState,
        timeout_s: float,
        log: Callable[[str], None] = lambda line: None,
        report: Callable[[LivePosition, Sequence[Offer]], None] = lambda position, offers: None,
    ) -> None:
        self._stream = stream
        self._plan = plan
        self._exchange, self._share, self._swap = exchange, share, swap
        self._state = state
        self._position = LivePosition.from_json(state.live) if state.live else LivePosition()
        self._timeout_s = timeout_s
        self._log, self._report = log, report
        self.while_waiting: Callable[[], str | None] = lambda: None
        self._left_out: Counter[str] = Counter()
        self._reading = ThreadPoolExecutor(max_workers=1, thread_name_prefix="live-chunks")

    def __iter__(self) -> Iterator[RankBatch]:
        ahead = self._read()
        log_at_s = _FIRST_LOG_S
        while True:
            offers = self._exchange(ahead.result() if ahead is not None else None)
            self._raise_together(offers)
            for offer in offers:
                for index, num_rows, name in offer.opened:
                    self._log(f"Rank {offer.dp_rank}: Loaded chunk {index} ({num_rows} samples from {name})")
            after = self._position.after([offer.position for offer in offers])
            # The steps whose batches were handed out, not the one that is read.
            self._report(replace(after, steps=self._position.steps), offers)
            waits = [(offer.waiting.waited_s, offer.dp_rank, offer.waiting) for offer in offers if offer.waiting]
            if waits:
                waited_s, dp_rank, waiting = max(waits, key=lambda wait: wait[0])
                chunk = f"{chunk_name(waiting.chunk, '')}; its producer was {last_seen(waiting.producer_seen_s)}"
                chunk += f"; {waiting.hint}" if waiting.hint else ""
                if waited_s > self._timeout_s:
                    raise _shared(
                        f"data-parallel rank {dp_rank} waited {waited_s:.0f} s for {chunk}",
                        where="data.live",
                        fix="check the producer (`harness live status` shows it), then continue with resume=true; "
                        "data.live.timeout_s is the longest wait",
                    )
                if waited_s >= log_at_s:
                    self._log(f"data-parallel rank {dp_rank} has waited {waited_s:.0f} s for {chunk}")
                    log_at_s = min(2 * log_at_s, log_at_s + _LOG_EVERY_S)
                if self.while_waiting() is not None:
                    return
                time.sleep(min(_POLL_S, 0.01 + waited_s / 4))
                ahead = self._read()
                continue
            log_at_s = _FIRST_LOG_S
            for offer in offers:
                self._left_out.update(offer.left_out)
            if not any(offer.lengths for offer in offers):
                self._check_end(after, offers)
                return
            mine = self._stream.take(done_below=after.done_below) if self._stream is not None else None
            ahead = self._read()
            placement = self._place(offers)
            rows: Rows | None = None
            if mine is not None:
                rows = [*mine]
                if self._plan.schedule != "as_packed":
                    rows = send_to_trainers(mine, placement, self._plan.layout.dp_rank, self._swap)
                rows += [None] * (placement.placed.num_microbatches - len(rows))
            yield self._batch(self._share(rows), placement, offers, after)

    @property
    def steps(self) -> int:
        """Number of global batches that were handed out, those before a resume included."""
        return self._position.steps

    def close(self) -> None:
        self._reading.shutdown()
        if self._stream is not None:
            self._stream.close()

    def _read(self) -> Future[Offer] | None:
        """Start to read this rank's part of the next step, while the step before is trained."""
        return None if self._stream is None else self._reading.submit(self._stream.offer)

    def _raise_together(self, offers: Sequence[Offer]) -> None:
        for offer in offers:
            error = offer.error
            if error is None:
                continue
            if offer.dp_rank == self._plan.layout.dp_rank and self._stream is not None:
                raise error
            what = f"data-parallel rank {offer.dp_rank}: {error.what}"
            raise _shared(what, where=error.where, fix=error.fix, kind=type(error))
        streams = sorted({offer.stream for offer in offers if offer.stream})
        if len(streams) > 1:
            raise _shared(
                f"chunks of one folder belong to several streams: {', '.join(streams)}",
                fix="let one producer write to a folder, and never copy chunks from another one",
            )

    def _check_end(self, after: LivePosition, offers: Sequence[Offer]) -> None:
        counts = ", ".join(f"{count:,} {reason}" for reason, count in sorted(self._left_out.items()))
        left_out = f"; left out: {counts}" if counts else ""
        left_out += f"; {after.lost:,} chunks were deleted before all of their rows were trained" if after.lost else ""
        expected = next((offer.rows_expected for offer in offers if offer.rows_expected is not None), None)
        if after.steps == 1:
            raise _shared(
                f"the stream ended without a row to train on{left_out}",
                where="data.live",
                fix="check the input of its producer, and data.live.pack_size",
            )
        if expected is not None and after.rows != expected and not after.lost:
            raise _shared(
                f"the stream ended after {expected:,} rows, and {after.rows:,} were read",
                where="data.live",
                fix="chunks were changed while they were read, or the run was resumed on other ones",
            )
        self._log(f"the stream ended: {after.rows:,} rows in {after.done_below:,} chunks{left_out}")

    def _place(self, offers: Sequence[Offer]) -> Placement:
        """Return where the sequences of a step train: with `as_packed` in the packs of the rank that has read them."""
        if self._plan.schedule != "as_packed":
            return place(offers, self._plan)
        group = self._plan.layout.group_size
        num_microbatches = -(-max(len(offer.lengths) for offer in offers) // group) * group
        nothing = np.zeros(0, np.int64)
        rows = [
            (offer.dp_rank, offer.lengths[row], offer.sequence_ids[row])
            if row < len(offer.lengths)
            else (offer.dp_rank, nothing, nothing)
            for row in range(num_microbatches)
            for offer in offers
        ]
        lengths = np.concatenate([lengths for _, lengths, _ in rows])
        bounds = np.cumsum([0, *(lengths.shape[0] for _, lengths, _ in rows)], dtype=np.int64)
        readers = np.repeat(np.array([rank for rank, _, _ in rows], np.int64), np.diff(bounds))
        placed = Schedule(len(offers), np.arange(lengths.shape[0], dtype=np.int64), bounds)
        return Placement(placed, np.concatenate([ids for _, _, ids in rows]), lengths, readers, readers)

    def _batch(self, rows: Rows, placement: Placement, offers: Sequence[Offer], after: LivePosition) -> RankBatch:
        layout, lengths = self._plan.layout, placement.lengths
        most = max(len(offer.lengths) for offer in offers)
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
            rows=[
                zero_loss_row(layout.pad_to_multiple)
                if live is None
                else build_thd_batch(live.pack.sequences(), pad_to_multiple=layout.pad_to_multiple)
                for live in rows
            ],
            sequence_ids=[np.zeros(0, np.int64) if live is None else live.sequence_ids for live in rows],
            num_sequences=int(lengths.shape[0]),
            num_tokens=int((lengths - 1).sum()),
            imbalance=measure_imbalance(
                placement.placed,
                padded_lengths(lengths, layout.pad_to_multiple),
                max_tokens_per_row=self._plan.max_tokens_per_row,
                cost=self._plan.cost,
            ),
            state=self._state,
        )


def _shared(what: str, *, where: str = "", fix: str = "", kind: type[HarnessError] = LoaderError) -> HarnessError:
    """Return an error that every rank raises alike, so that only one prints it."""
    error = kind(what, where=where, fix=fix)
    error.is_shared = True
    return error
