"""Live chunks on every rank of a job: one rank of each copy of the model reads, all of them go on together.

Ranks talk over gloo, on GPUs too: a look for a chunk that is not there yet is one short exchange, and no collective of
the training is under way while it goes on.
"""

from __future__ import annotations

import json
import os
import socket
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from datetime import timedelta
from types import TracebackType
from typing import Any, TypeVar, cast

import torch

from harness.errors import ConfigError, FormatError, HarnessError, LoaderError
from harness.loader import LoaderState, RankBatch
from harness.loader.live.config import LiveConfig
from harness.loader.live.consumer import ORDER, BatchPlan, LiveLoader
from harness.loader.live.folder import CONSUMER_FILE, LiveFolder, chunk_name
from harness.loader.live.offer import Offer
from harness.loader.live.position import LivePosition
from harness.loader.live.rank import RankStream
from harness.megatron.job import runtime
from harness.prep import ChatTokenizer
from harness.storage import Marker

T = TypeVar("T")
_TELL_EVERY_S = 1.0
_RATE_OVER_S = 30.0


class LiveFeed:
    """The batches of a stream of live chunks, in step with all other ranks of the job.

    Args:
        config: names the folder.
        rows: how a step is divided; its layout is this rank's.
        tokenizer: of chunks of conversations.
        state: go on from here; None begins with the first chunk.
        allow_other_data: go on although the stream or the tokenizer is not the one of the checkpoint.
        timeout_s: how long a rank waits for one that does not answer at all.

    Raises:
        HarnessError: on every rank: a pack would not fit a row, another run trains on the chunks, or `state` belongs to
            other data.
    """

    def __init__(
        self,
        config: LiveConfig,
        rows: BatchPlan,
        *,
        tokenizer: ChatTokenizer | None,
        state: LoaderState | None,
        seed: int = 0,
        allow_other_data: bool = False,
        timeout_s: float = 600.0,
    ) -> None:
        if tokenizer is not None and config.pack_size > rows.row_tokens:
            raise ConfigError(
                f"packs of {config.pack_size:,} tokens do not fit the {rows.row_tokens:,} of a row",
                where="data.live.pack_size",
                fix=f"{rows.row_tokens:,} or less, or raise schedule.max_tokens_per_rank",
            )
        self._folder = LiveFolder(config.path)
        self._is_rank_0 = torch.distributed.get_rank() == 0
        stream = "" if state is None or allow_other_data else state.fingerprint
        hash_now = tokenizer.tokenizer_hash if tokenizer is not None else ""
        fresh = LoaderState(seed, fingerprint=stream, order=ORDER, tokenizer=hash_now)
        if state is not None:
            # Of the stream itself each rank makes sure when it opens a chunk.
            started = replace(fresh, seed=state.seed, fingerprint=state.fingerprint)
            went_on = state.resumed(started, num_packs=None, allow_other_data=allow_other_data)
            state = replace(went_on, live=state.live)
        self._mark = Marker(self._folder.path / CONSUMER_FILE)
        position = LivePosition.from_json(state.live) if state is not None else None
        runtime.on_rank_0(lambda: self._lock(position))
        self._everyone, copy, reader = _groups(rows.layout.dp_rank, timeout_s)
        reads = reader == torch.distributed.get_rank()
        self._loader = LiveLoader(
            RankStream(
                config,
                dp_rank=rows.layout.dp_rank,
                dp_size=rows.layout.dp_size,
                row_tokens=rows.row_tokens,
                pad_to_multiple=rows.layout.pad_to_multiple,
                tokenizer=tokenizer,
                position=position,
                stream=stream,
            )
            if reads
            else None,
            rows,
            exchange=self._exchange,
            share=lambda packs: cast(Any, packs) if copy is None else _broadcast(packs, reader, copy),
            state=state,
            fresh=fresh,
            timeout_s=config.timeout_s,
            # A wait is told of while it lasts, in a log too.
            say=lambda line: print(line, flush=True) if self._is_rank_0 else None,
            tell=self._tell if self._is_rank_0 else lambda position, offers: None,
        )
        self._trained: deque[tuple[float, int, int]] = deque([(time.monotonic(), 0, 0)])
        self._told: dict[str, Any] = {}
        self._told_at, self._told_waits = 0.0, [-1]

    def __iter__(self) -> Iterator[RankBatch]:
        return iter(self._loader)

    def call_while_waiting(self, call: Callable[[], str | None]) -> None:
        """Let `call` be called at each look for a chunk that is not there (`LiveLoader.while_waiting`)."""
        self._loader.while_waiting = call

    def trained(self, state: LoaderState) -> None:
        """Mark the chunks of which a whole checkpoint with this state holds every row; rank 0 does it."""
        if self._is_rank_0 and state.live:
            chunks = self._folder.look().chunks
            self._folder.complete(LivePosition.from_json(state.live).trained_chunks(chunks))

    def __enter__(self) -> LiveFeed:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._loader.close()
        if error is None and self._is_rank_0:
            self._note({**self._told, "state": "ended"})
        self._mark.release(remove=False)

    def _lock(self, position: LivePosition | None) -> None:
        # Training may be started before the producer.
        self._folder.path.mkdir(parents=True, exist_ok=True)
        try:
            self._mark.acquire()
        except FormatError:
            raise LoaderError(
                "another run trains on these chunks",
                where=str(self._folder.path),
                fix="wait for it or end it; each run takes a folder of its own",
            ) from None
        try:
            self._require_chunks(position or LivePosition())
        except HarnessError:
            self._mark.release(remove=False)
            raise

    def _require_chunks(self, position: LivePosition) -> None:
        """The chunk to begin with is there, or may still come: one of before others that were made may not."""
        first = position.first_unread
        contents, end = self._folder.look(), self._folder.end()
        is_past = max((*contents.ready, *contents.completed), default=-1) > first or (end and end.chunks > first)
        if is_past and first not in contents.chunks:
            raise LoaderError(
                f"{chunk_name(first, '')} is not there any more, and others after it were made",
                where=str(self._folder.path),
                fix="it was trained and deleted: go on with that run (run_dir=... resume=true), or make the chunks "
                "anew in another folder",
            )

    def _exchange(self, offer: Offer | None) -> list[Offer]:
        offers = [one for one in _gather(offer, self._everyone) if one is not None]
        return sorted(offers, key=lambda one: one.dp_rank)

    def _tell(self, position: LivePosition, offers: Sequence[Offer]) -> None:
        now = time.monotonic()
        waits = [offer.waiting.chunk for offer in offers if offer.waiting is not None]
        if not waits:
            _, packs, tokens = self._trained[-1]
            packs += sum(len(offer.lengths) for offer in offers)
            tokens += sum(int(lengths.sum()) for offer in offers for lengths in offer.lengths)
            self._trained.append((now, packs, tokens))
        while len(self._trained) > 2 and now - self._trained[0][0] > _RATE_OVER_S:
            self._trained.popleft()
        (began, packs_then, tokens_then), (_, packs, tokens) = self._trained[0], self._trained[-1]
        seconds = max(now - began, 1e-9)
        self._told = {
            "host": socket.gethostname(),
            "pid": os.getpid(),
            "steps": position.steps,
            "rows": position.rows,
            "read_below": position.done_below,
            "read": sorted(position.finished),
            "waiting_for": waits,
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
            ],
        }
        if now - self._told_at >= _TELL_EVERY_S or waits != self._told_waits:
            self._told_at, self._told_waits = now, waits
            self._note(self._told)

    def _note(self, told: dict[str, Any]) -> None:
        with suppress(OSError):  # a full disk is the producer's to tell of
            self._mark.write(json.dumps(told).encode())


def _groups(dp_rank: int, timeout_s: float) -> tuple[Any, Any, int]:
    """A gloo group of all ranks, one of those that train the same rows (None where that is this rank alone), and
    which of these reads."""
    if torch.distributed.get_world_size() == 1:
        return None, None, 0
    timeout = timedelta(seconds=timeout_s)
    everyone = torch.distributed.new_group(backend="gloo", timeout=timeout)
    places = _gather(dp_rank, everyone)
    copies = {place: [rank for rank, one in enumerate(places) if one == place] for place in sorted(set(places))}
    if len(copies[dp_rank]) == 1:
        return everyone, None, copies[dp_rank][0]
    # Every rank takes part in making every group.
    groups = {place: torch.distributed.new_group(ranks, timeout, "gloo") for place, ranks in copies.items()}
    return everyone, groups[dp_rank], copies[dp_rank][0]


def _gather(value: T, group: Any) -> list[T]:
    if group is None:
        return [value]
    gathered: list[Any] = [None] * group.size()
    torch.distributed.all_gather_object(gathered, value, group=group)
    return gathered


def _broadcast(value: Any, source: int, group: Any) -> Any:
    carried = [value]
    torch.distributed.broadcast_object_list(carried, src=source, group=group)
    return carried[0]
