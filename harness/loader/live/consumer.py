"""Global batches from live chunks: ranks exchange offers, and train, wait or stop together."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager
from dataclasses import replace

import numpy as np
import numpy.typing as npt

from harness.errors import LoaderError
from harness.loader.blend import Blend
from harness.loader.live.balance import Placement, Swap, packs_in_order, place, send_to_trainers
from harness.loader.live.folder import chunk_name, last_seen
from harness.loader.live.position import LivePosition, positions_from_json, positions_to_json
from harness.loader.live.rank import BatchPlan, FolderReader, LivePack, Offer, ReadPack, Waiting
from harness.loader.plan import Features, RankBatch
from harness.loader.state import LoaderState
from harness.printing import count_of
from harness.thd import build_thd_batch, zero_loss_row

ORDER = "live chunks"
# Maximum time between checks for a chunk. All ranks check together, so none waits long in a collective.
_POLL_S = 0.5
# A wait is logged after the first value, and again whenever it has doubled, but at least every minute.
_FIRST_LOG_S, _LOG_EVERY_S = 2.0, 60.0
# Separates the names of streams.
_BETWEEN = ","

Exchange = Callable[[list[Offer]], list[Offer]]


class StepShares:
    """Number of packs of one step, or sequences of a window, requested from each folder and rank.

    Requests depend only on positions and the contents of the streams, not on time, so every rank computes the same,
    and a resumed run continues identically. Request j of a folder goes to rank j modulo the number of ranks, so ranks
    advance evenly. If a rank has read all of its chunks, other ranks take over (balancing schedules only, which can
    send tokens anywhere); if all have, the other folders do, so that all steps but the last are full. `drawn` and
    `ended` of each folder are as in `LivePosition`, after the step.
    """

    def __init__(self, plan: BatchPlan, positions: Sequence[LivePosition]) -> None:
        self._plan = plan
        self.drawn = [position.drawn for position in positions]
        self.ended = [position.ended for position in positions]
        self.requested = np.zeros((len(positions), plan.layout.dp_size), np.int64)  # [folders, ranks]
        self._draw(plan.size)

    def request_missing(self, offers: Sequence[Offer]) -> bool:
        """Request elsewhere what ranks at the end of a stream did not provide; return True if anything is requested."""
        if not self._plan.is_balanced:
            return False
        given = np.zeros_like(self.requested)
        over = np.zeros(self.requested.shape, bool)
        for offer in offers:
            given[offer.source, offer.dp_rank], over[offer.source, offer.dp_rank] = len(offer.packs), offer.ended
        lacking = np.maximum(self.requested - given, 0).sum(axis=1).tolist()
        if not any(lacking):
            return False
        self.requested = given.copy()
        from_others = 0
        for source, count in enumerate(lacking):
            remaining = np.flatnonzero(~over[source])
            if count and not remaining.size:
                self.ended[source] = True
                self.drawn[source] -= count
                from_others += count
            elif count:
                self.requested[source, remaining] += _counts(0, count, remaining.size)
        self._draw(from_others)
        return bool((self.requested > given).any())

    def _draw(self, count: int) -> None:
        sources = [source for source, ended in enumerate(self.ended) if not ended]
        if not sources or not count:
            return
        weights = tuple(self._plan.weights[source] for source in sources)
        names, ones = tuple(str(source) for source in sources), (1,) * len(sources)
        drawn = [self.drawn[source] for source in sources]
        Blend(names, ones, weights, (None,) * len(sources)).draw(drawn, count)
        for source, end in zip(sources, drawn, strict=True):
            self.requested[source] += _counts(self.drawn[source], end, self._plan.layout.dp_size)
            self.drawn[source] = end


def _counts(start: int, stop: int, ranks: int) -> npt.NDArray[np.int64]:
    """Return how many of the requests start to stop go to each rank, int64 [ranks]."""
    return np.bincount(np.arange(start, stop) % ranks, minlength=ranks).astype(np.int64)


class LiveLoader(AbstractContextManager["LiveLoader"]):
    """Yields one `RankBatch` per global batch until the stream ends, and a `Waiting` per check that misses a chunk.

    Args:
        streams: readers of this rank, one per folder.
        exchange: collective that returns the offers of all ranks, by data-parallel rank and folder.
        swap: collective that sends bytes between ranks; used by balancing schedules.
        features: as in `harness.loader.Loader`; used by balancing schedules.
        state: position to resume from, or the state of a new run, whose `live` is empty.
        timeout_s: maximum time to wait for a chunk.
        report: called at each check with the positions in all folders and the offers, for `harness live status` and
            producers.

    Raises:
        LoaderError: while iterating, on all ranks: a chunk does not appear in time, is damaged, or rows are missing.
    """

    def __init__(
        self,
        streams: Sequence[FolderReader],
        plan: BatchPlan,
        *,
        exchange: Exchange,
        swap: Swap = lambda outgoing, expected: outgoing,
        features: Features | None = None,
        state: LoaderState,
        timeout_s: float,
        folders: Sequence[str] = ("data.live",),
        log: Callable[[str], None] = lambda line: None,
        report: Callable[[Sequence[LivePosition], Sequence[Offer]], None] = lambda positions, offers: None,
    ) -> None:
        self._streams = tuple(streams)
        self._plan = plan
        self._exchange, self._swap, self._features = exchange, swap, features
        self._state = state
        self._positions = positions_from_json(state.live, len(plan.weights))
        self._timeout_s, self._folders = timeout_s, folders
        self._log, self._report = log, report
        self._left_out: list[Counter[str]] = [Counter() for _ in self._positions]
        self._reading = ThreadPoolExecutor(max_workers=1, thread_name_prefix="live-chunks")

    def __iter__(self) -> Iterator[RankBatch | Waiting]:
        shares = StepShares(self._plan, self._positions)
        ahead = self._read(shares)
        log_at_s = _FIRST_LOG_S
        while True:
            offers = self._exchange(ahead.result())
            streams = self._look(offers, shares)
            if any(offer.waiting for offer in offers):
                waiting, log_at_s = self._log_wait(offers, log_at_s)
                yield waiting
                time.sleep(min(_POLL_S, 0.01 + waiting.waited_s / 4))
                ahead = self._read(shares)
                continue
            log_at_s = _FIRST_LOG_S
            if shares.request_missing(offers):
                ahead = self._read(shares)
                continue
            after, packs = self._after(shares, offers), packs_in_order(offers)
            if self._is_over(after, offers, is_last=not packs):
                return
            pairs = zip(self._streams, after, strict=True)
            mine = [live for stream, to in pairs for live in stream.take(done_below=to.done_below)]
            self._positions = after
            self._state = replace(
                self._state,
                packs_consumed=self._state.packs_consumed + len(packs),
                fingerprint=join_streams(streams),
                live=positions_to_json(after),
            )
            shares = StepShares(self._plan, after)
            ahead = self._read(shares)
            batch = [self._batch(mine, place(packs, self._plan), packs)]
            mine.clear()  # release media while the step is trained
            yield batch.pop()

    def _look(self, offers: Sequence[Offer], shares: StepShares) -> list[str]:
        """Raise the first error of any rank, log and report the offers, and return the names of the streams."""
        for offer in offers:
            if (error := offer.error) is None:
                continue
            if offer.dp_rank == self._plan.layout.dp_rank:
                raise error
            what = f"data-parallel rank {offer.dp_rank}: {error.what}"
            raise type(error)(what, where=error.where, fix=error.fix)
        streams = split_streams(self._state.fingerprint, len(self._positions))
        for source, before in enumerate(streams):
            found = sorted({offer.stream for offer in offers if offer.source == source and offer.stream})
            if len(found) > 1:
                what = f"chunks of one folder belong to several streams: {', '.join(found)}"
                fix = "use one producer per folder, and do not copy chunks from another folder"
                raise LoaderError(what, where=self._folders[source], fix=fix)
            streams[source] = found[0] if found else before
        for offer in offers:
            of = f" of {self._folders[offer.source]}" if len(self._folders) > 1 else ""
            for index, rows, name in offer.opened:
                self._log(f"Rank {offer.dp_rank}: Loaded chunk {index} ({count_of(rows, 'sample')} from {name}{of})")
        # `steps` counts batches that were yielded, not the one being read.
        self._report([replace(one, steps=self.steps) for one in self._after(shares, offers)], offers)
        return streams

    def _is_over(self, after: Sequence[LivePosition], offers: Sequence[Offer], *, is_last: bool) -> bool:
        """Return True if all streams have ended and everything was trained; check each stream that ends."""
        for offer in offers:
            self._left_out[offer.source].update(offer.left_out)
        all_ended = is_last or all(position.ended for position in after)
        for source, position in enumerate(after):
            if (position.ended or is_last) and not self._positions[source].ended:
                expected = {offer.rows_expected for offer in offers if offer.source == source} - {None}
                if expected and position.rows not in expected and not position.lost:
                    what = f"the stream ended after {expected.pop():,} rows, but {position.rows:,} were read"
                    fix = "chunks were modified while they were read, or the run was resumed with other chunks"
                    raise LoaderError(what, where=self._folders[source], fix=fix)
                rest = _counts_of(self._left_out[source])
                lost = f"; chunks deleted before all of their rows were trained: {position.lost:,}"
                rest += lost * bool(position.lost) + "; its share now goes to the other folders" * (not all_ended)
                which = "the stream" if len(after) == 1 else f"the stream of {self._folders[source]}"
                if self.steps or any(offer.packs for offer in offers):
                    rows = f"{count_of(position.rows, 'row')} in {count_of(position.done_below, 'chunk')}"
                    self._log(f"{which} ended: {rows}{rest}")
        if is_last and self.steps == 0:
            what = f"the stream ended without any trainable row{_counts_of(sum(self._left_out, Counter[str]()))}"
            raise LoaderError(what, where="data.live", fix="check the input of the producer, and data.live.pack_size")
        return is_last

    def _log_wait(self, offers: Sequence[Offer], log_at_s: float) -> tuple[Waiting, float]:
        """Log the longest wait if it is due; return it and the time of the next log; raise if it exceeds the limit."""
        waits = [(offer.waiting, offer.dp_rank) for offer in offers if offer.waiting is not None]
        waiting, dp_rank = max(waits, key=lambda wait: wait[0].waited_s)
        chunk, hint = chunk_name(waiting.chunk, ""), f"; {waiting.hint}" if waiting.hint else ""
        waited = f"waited {waiting.waited_s:.0f} s for {chunk} of {waiting.folder}"
        waited += f"; its producer was {last_seen(waiting.producer_seen_s)}{hint}"
        if waiting.waited_s > self._timeout_s:
            raise LoaderError(
                f"data-parallel rank {dp_rank} {waited}",
                where=waiting.folder,
                fix="check the producer (`harness live status` shows it), then continue with resume=true; "
                "data.live.timeout_s is the time limit",
            )
        if waiting.waited_s < log_at_s:
            return waiting, log_at_s
        self._log(f"data-parallel rank {dp_rank} has {waited}")
        return waiting, min(2 * log_at_s, log_at_s + _LOG_EVERY_S)

    @property
    def steps(self) -> int:
        """Number of global batches that were yielded, including those before a resume."""
        return self._positions[0].steps

    def __exit__(self, *error: object) -> None:
        self.close()

    def close(self) -> None:
        self._reading.shutdown()
        for stream in self._streams:
            stream.close()

    def _read(self, shares: StepShares) -> Future[list[Offer]]:
        """Start reading this rank's part of the next step while the previous one is trained."""
        mine = shares.requested[:, self._plan.layout.dp_rank].tolist()

        def read() -> list[Offer]:
            return [stream.offer(share) for stream, share in zip(self._streams, mine, strict=True)]

        return self._reading.submit(read)

    def _after(self, shares: StepShares, offers: Sequence[Offer]) -> list[LivePosition]:
        """Return the positions in all folders after the step of these offers."""
        return [
            position.after(
                [offer.position for offer in offers if offer.source == source],
                drawn=shares.drawn[source],
                ended=shares.ended[source],
            )
            for source, position in enumerate(self._positions)
        ]

    def _batch(self, mine: list[LivePack], placement: Placement, packs: Sequence[ReadPack]) -> RankBatch:
        layout, lengths = self._plan.layout, placement.lengths
        rows: list[LivePack | None] = (
            send_to_trainers(mine, placement, layout.dp_rank, self._swap, self._features)
            if self._plan.is_balanced
            else [*mine]
        )
        rows += [None] * (placement.placed.num_microbatches - len(rows))
        return RankBatch(
            epoch=0,
            step_in_epoch=self.steps - 1,
            pack_ids=np.array([pack.sequence_ids[0] for pack in packs], np.int64),
            rows=[
                zero_loss_row(layout.pad_to_multiple)
                if live is None
                else replace(
                    build_thd_batch(live.pack.sequences(), pad_to_multiple=layout.pad_to_multiple), media=live.media
                )
                for live in rows
            ],
            sequence_ids=[np.zeros(0, np.int64) if live is None else live.sequence_ids for live in rows],
            num_sequences=int(lengths.shape[0]),
            num_tokens=int((lengths - 1).sum()),
            imbalance=placement.imbalance,
            state=self._state,
        )


def _counts_of(left_out: Counter[str]) -> str:
    counts = ", ".join(f"{count:,} {reason}" for reason, count in sorted(left_out.items()))
    return f"; left out: {counts}" if counts else ""


def split_streams(fingerprint: str, num_folders: int) -> list[str]:
    """Split a result of `join_streams` into the stream name of each folder, empty if unknown."""
    return [*fingerprint.split(_BETWEEN), *[""] * num_folders][:num_folders]


def join_streams(names: Sequence[str]) -> str:
    return _BETWEEN.join(names) if any(names) else ""
