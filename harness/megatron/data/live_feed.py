"""Live chunks on every rank of a job: one rank of each copy of the model reads, and all continue together.

Ranks exchange data over gloo, on GPUs too. All of them take part in each check for a missing chunk, so that none waits
long in a collective.
"""

from __future__ import annotations

import json
import os
import socket
import time
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from datetime import timedelta
from functools import partial
from typing import Any

import numpy as np
import torch

from harness.errors import ConfigError, FormatError, HarnessError, LoaderError
from harness.loader import LiveConfig, LoaderState, RankBatch
from harness.loader.live.consumer import ORDER, LiveLoader, join_streams, split_streams
from harness.loader.live.folder import CONSUMER_FILE, LiveFolder, chunk_name
from harness.loader.live.position import LivePosition, positions_from_json, positions_to_json
from harness.loader.live.rank import BatchPlan, FolderReader, Offer
from harness.loader.plan import Features
from harness.megatron.data.feed import Feed
from harness.megatron.job import runtime
from harness.prep import ChatTokenizer
from harness.printing import print_line
from harness.records import UInt8Array
from harness.storage import Marker
from harness.storage.claims import Lease

_REPORT_EVERY_S = 1.0
_RATE_OVER_S = 30.0


class LiveFeed(Feed):
    """Batches from a stream of live chunks, in step with all other ranks, which keep making progress during waits.

    Raises:
        HarnessError: a pack would not fit a row, another run trains on the chunks, or `state` belongs to other data;
            raised on every rank.
    """

    def __init__(
        self,
        config: LiveConfig,
        plan: BatchPlan,
        *,
        tokenizer: ChatTokenizer | None,
        features: Features | None = None,
        state: LoaderState | None,
        seed: int = 0,
        allow_other_data: bool = False,
        timeout_s: float = 600.0,
        device: torch.device,
    ) -> None:
        if tokenizer is not None and config.pack_size > (most := plan.max_tokens_per_row):
            what = f"packs of {config.pack_size:,} tokens do not fit the {most:,} of a row"
            fix = f"set it to {most:,} or less, or increase schedule.max_tokens_per_rank"
            raise ConfigError(what, where="data.live.pack_size", fix=fix)
        self._folders = [LiveFolder(path) for path in config.folders]
        self._is_rank_0 = torch.distributed.get_rank() == 0
        count = len(self._folders)
        streams = split_streams("" if state is None or allow_other_data else state.fingerprint, count)
        hash_now = tokenizer.tokenizer_hash if tokenizer is not None else ""
        order = ORDER if count == 1 else f"{ORDER}, weights {', '.join(map(repr, map(float, config.weights)))}"
        fresh = LoaderState(seed, fingerprint=join_streams(streams), order=order, tokenizer=hash_now)
        if state is not None:
            # Each rank checks the stream itself when it opens a chunk.
            started = replace(fresh, seed=state.seed, fingerprint=state.fingerprint)
            state = replace(state.resumed(started, num_packs=None, allow_other_data=allow_other_data), live=state.live)
        self._marks = [folder.files.lock(CONSUMER_FILE) for folder in self._folders]
        self._marks_read = config.completed == "read"
        positions = positions_from_json(state.live if state is not None else "", count)
        if allow_other_data:
            positions = [replace(position, ended=False) for position in positions]
        positions = runtime.on_rank_0(lambda: self._lock(positions, is_new=state is None))
        copy, readers = _groups(plan.layout.dp_rank, timeout_s)

        def loader() -> LiveLoader:
            open_folder = partial(FolderReader, config, plan, tokenizer=tokenizer, features=features)
            places = enumerate(zip(positions, streams, strict=True))
            return LiveLoader(
                [open_folder(source=source, position=at, stream=stream) for source, (at, stream) in places],
                plan,
                exchange=lambda offers: _exchange(offers, readers),
                swap=lambda outgoing, expected: _swap(outgoing, expected, readers),
                features=features,
                state=fresh if state is None else replace(state, live=positions_to_json(positions)),
                timeout_s=config.timeout_s,
                folders=config.folders,
                # `_log` flushes, so that a log file shows a wait while it lasts.
                log=_log if self._is_rank_0 else lambda line: None,
                report=self._report if self._is_rank_0 else lambda positions, offers: None,
            )

        super().__init__(loader, device=device, copy=copy)
        self._trained: deque[tuple[float, int, int]] = deque([(time.monotonic(), 0, 0)])
        self._statuses: list[dict[str, Any]] = [{} for _ in self._folders]
        self._written_at, self._written_waits = 0.0, [(-1, -1)]

    def __iter__(self) -> Iterator[RankBatch]:
        for batch in super().__iter__():
            if self._marks_read:
                self.trained(batch.state)
            yield batch

    def trained(self, state: LoaderState) -> None:
        """On rank 0, mark the chunks whose rows are all covered by a checkpoint with this state."""
        if self._is_rank_0 and state.live:
            positions = positions_from_json(state.live, len(self._folders))
            self._check_marks()
            for folder, position in zip(self._folders, positions, strict=True):
                folder.complete(position.trained_chunks(folder.look().chunks))

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        if error[0] is None and self._is_rank_0:
            self._statuses = [{**status, "steps": self._loader.steps} if status else {} for status in self._statuses]
            self._write_statuses(state="ended")
        for mark in self._marks:
            mark.release(remove=False)

    def _lock(self, positions: Sequence[LivePosition], *, is_new: bool) -> list[LivePosition]:
        """Lock the folders for this run; return the positions without chunks that were deleted."""
        locked: list[Marker | Lease] = []
        found = []
        try:
            for folder, mark, position in zip(self._folders, self._marks, positions, strict=True):
                # Training may start before the producer.
                folder.files.make()
                try:
                    mark.acquire()
                except FormatError:
                    if not mark.holder:  # the folder is not writable, or its store does not respond
                        raise
                    fix = "wait for it or stop it; each run needs its own folder"
                    what = f"another run trains on these chunks: {mark.holder}"
                    raise LoaderError(what, where=folder.where, fix=fix) from None
                locked.append(mark)
                if is_new or not self._marks_read:
                    _require_chunks(folder, position)
                    found.append(position)
                else:
                    found.append(_without_lost(folder, position))
        except HarnessError:
            for mark in locked:
                mark.release(remove=False)
            raise
        return found

    def _report(self, positions: Sequence[LivePosition], offers: Sequence[Offer]) -> None:
        self._check_marks()
        now = time.monotonic()
        waits = [(offer.source, offer.waiting.chunk) for offer in offers if offer.waiting is not None]
        if not waits:
            _, packs, tokens = self._trained[-1]
            packs += sum(len(offer.packs) for offer in offers)
            tokens += sum(int(pack.lengths.sum()) for offer in offers for pack in offer.packs)
            self._trained.append((now, packs, tokens))
        while len(self._trained) > 2 and now - self._trained[0][0] > _RATE_OVER_S:
            self._trained.popleft()
        (began, packs_then, tokens_then), (_, packs, tokens) = self._trained[0], self._trained[-1]
        seconds = max(now - began, 1e-9)
        self._statuses = [
            {
                "host": socket.gethostname(),
                "pid": os.getpid(),
                "steps": position.steps,
                "rows": position.rows,
                "read_below": position.done_below,
                "read": sorted(position.finished),
                "waiting_for": [chunk for waiting, chunk in waits if waiting == source],
                # Rates of all folders together.
                "packs_per_s": (packs - packs_then) / seconds,
                "tokens_per_s": (tokens - tokens_then) / seconds,
                "ranks": [
                    {
                        "rank": offer.dp_rank,
                        "chunk": offer.reading,
                        "row": offer.position.taken.get(offer.reading, 0) if offer.reading is not None else None,
                        "waits_for": None if offer.waiting is None else offer.waiting.chunk,
                        "waits_s": None if offer.waiting is None else offer.waiting.waited_s,
                    }
                    for offer in offers
                    if offer.source == source
                ],
            }
            for source, position in enumerate(positions)
        ]
        if now - self._written_at >= _REPORT_EVERY_S or waits != self._written_waits:
            self._written_at, self._written_waits = now, waits
            self._write_statuses()

    def _check_marks(self) -> None:
        """Raise an error if another run may have locked the folders since."""
        for mark in self._marks:
            mark.check()

    def _write_statuses(self, **changed: str) -> None:
        for mark, status in zip(self._marks, self._statuses, strict=True):
            with suppress(OSError, FormatError):  # the producer reports a full disk, and `check` a lost store
                mark.write(json.dumps({**status, **changed}).encode())


def _without_lost(folder: LiveFolder, position: LivePosition) -> LivePosition:
    """Return the position without chunks that were deleted before a checkpoint covered all of their rows."""
    # Remove the marks first, so that the producer does not delete a chunk that is found here.
    completed = folder.look().completed
    folder.keep_again(set(completed).difference(position.trained_chunks(completed)))
    contents, end = folder.look(), folder.end()
    above = max((*contents.chunks, *contents.ready, *completed, end.chunks if end is not None else 0))
    needed = {place[0] for pack in position.open_packs for place in pack}
    needed |= set(range(position.done_below, above)) - position.finished
    if lost := needed - set(contents.chunks):
        _log(
            f"warning: chunks deleted after the checkpoint: {len(lost):,} ({chunk_name(min(lost), '')} to "
            f"{chunk_name(max(lost), '')}); their rows that are not in the checkpoint are not trained "
            "(data.live.completed=read)"
        )
    return position.without(lost)


def _require_chunks(folder: LiveFolder, position: LivePosition) -> None:
    """Raise LoaderError if the first chunk to read is missing although later ones exist."""
    first = position.first_unread
    contents, end = folder.look(), folder.end()
    is_past = max((*contents.ready, *contents.completed), default=-1) > first or (end and end.chunks > first)
    if is_past and first not in contents.chunks:
        fix = "the chunk was trained: resume that run (run_dir=... resume=true), or write the chunks again to another "
        fix += "folder; a run that marks chunks when they are read continues with data.live.completed=read"
        raise LoaderError(f"{chunk_name(first, '')} was deleted, but later chunks exist", where=folder.where, fix=fix)


def _log(line: str) -> None:
    with suppress(OSError):  # a full disk, which `RunProgress` reports
        print_line(line, flush=True)


def _groups(dp_rank: int, timeout_s: float) -> tuple[tuple[int, Any], Any]:
    """Create gloo groups of the ranks that train the same rows, and of the ranks that read.

    Return (rank that reads for this one, group of the same rows) and the group of reading ranks. A group of one rank is
    None, and so is the second group on a rank that does not read.
    """
    if torch.distributed.get_world_size() == 1:
        return (0, None), None
    timeout = timedelta(seconds=timeout_s)
    places = runtime.gather(dp_rank)
    copies = {place: [rank for rank, other in enumerate(places) if other == place] for place in sorted(set(places))}
    # Every rank takes part in creating every group; every data-parallel rank has the same number of copies.
    reading = [ranks[0] for ranks in copies.values()]
    readers = torch.distributed.new_group(reading, timeout, "gloo") if len(reading) > 1 else None
    mine = copies[dp_rank]
    if len(mine) == 1:
        return (mine[0], None), readers
    groups = {place: torch.distributed.new_group(ranks, timeout, "gloo") for place, ranks in copies.items()}
    return (mine[0], groups[dp_rank]), readers if torch.distributed.get_rank() in reading else None


def _exchange(offers: list[Offer], readers: Any) -> list[Offer]:
    """Return the offers of all reading ranks, sorted by data-parallel rank and folder."""
    if readers is None:
        return offers
    gathered: list[list[Offer]] = [[]] * readers.size()
    torch.distributed.all_gather_object(gathered, offers, group=readers)
    return sorted((offer for some in gathered for offer in some), key=lambda offer: (offer.dp_rank, offer.source))


def _swap(outgoing: list[UInt8Array], expected: list[int], readers: Any) -> list[UInt8Array]:
    """Send `outgoing` to the reading ranks, by data-parallel rank, clear it, and return the bytes that each sent."""
    if readers is None:
        return outgoing
    sizes = [part.shape[0] for part in outgoing]
    sent = torch.from_numpy(np.concatenate(outgoing))
    outgoing.clear()
    arrived = torch.empty(sum(expected), dtype=torch.uint8)
    torch.distributed.all_to_all_single(arrived, sent, expected, sizes, group=readers)
    return np.split(arrived.numpy(), np.cumsum(expected)[:-1])
