"""What one data-parallel rank reads: its own chunks, straight from disk, as packs for the next step."""

from __future__ import annotations

import time
from collections import deque

import numpy as np

from harness.errors import FormatError, HarnessError, LoaderError, ScheduleError
from harness.loader.live.chunk import LiveChunk, open_chunk
from harness.loader.live.config import LiveConfig
from harness.loader.live.conversations import ConversationReader
from harness.loader.live.folder import CHAT, PACKS, LiveFolder, chunk_name
from harness.loader.live.offer import LivePack, Offer, Waiting
from harness.loader.live.position import LivePosition, Place, RankPosition
from harness.prep import ChatTokenizer, Member, StreamPacker, pack_of
from harness.thd import padded_lengths

# Conversations that are tokenised at one time.
_BLOCK_ROWS = 64
# Chunk, row and sequence share an id of 63 bits.
_ROW_BITS, _SEQUENCE_BITS = 22, 18


class RankStream:
    """Reads the chunks whose index, modulo `dp_size`, is `dp_rank`.

    Args:
        dp_rank, dp_size: of data parallelism.
        row_tokens: tokens that a row holds.
        pad_to_multiple: every sequence is padded to a multiple of this many tokens in a row.
        tokenizer: for chunks of conversations.
        position: go on from here; chunks in flight are those of today's ranks, whoever read them before.
        stream: name of the stream that the position belongs to; empty asks nothing.
    """

    def __init__(
        self,
        config: LiveConfig,
        *,
        dp_rank: int,
        dp_size: int,
        row_tokens: int,
        pad_to_multiple: int = 1,
        tokenizer: ChatTokenizer | None = None,
        position: LivePosition | None = None,
        stream: str = "",
    ) -> None:
        self._config = config
        self._folder = LiveFolder(config.path)
        self._dp_rank, self._dp_size = dp_rank, dp_size
        self._row_tokens, self._pad_to_multiple = row_tokens, pad_to_multiple
        self._conversations = ConversationReader(config, tokenizer, pad_to_multiple=pad_to_multiple)
        start = position or LivePosition()
        self._done_below = start.done_below
        self._finished = {chunk for chunk in start.finished if chunk % dp_size == dp_rank}
        self._taken = {chunk: rows for chunk, rows in start.taken.items() if chunk % dp_size == dp_rank}
        # A pack belongs to who reads the chunk of its first conversation: with as many ranks as before, who had it.
        self._to_restore = [pack for pack in start.open_packs if pack[0][0] % dp_size == dp_rank]
        self._packer: StreamPacker[Place] = StreamPacker(config.pack_size, max_open=config.open_packs)
        self._stream = stream
        self._chunk: LiveChunk | None = None
        self._index: int | None = None
        self._block: deque[tuple[int, Member[Place] | None]] = deque()
        self._packs: list[LivePack] = []
        self._rows = 0
        self._waits_since: float | None = None
        self._rows_expected: int | None = None

    def offer(self, want: int) -> Offer:
        """Read until `want` packs are at hand, a chunk is not there, or the stream ends; never waits, never raises."""
        waiting, error = None, None
        try:
            self._restore()
            waiting = self._fill(want)
        except HarnessError as raised:
            error = raised
        except OSError as raised:
            error = LoaderError(f"chunks cannot be read: {raised}", where=self._config.path)
        return Offer(
            dp_rank=self._dp_rank,
            sequence_ids=[one.sequence_ids for one in self._packs],
            lengths=[one.pack.sequence_lengths.astype(np.int64) for one in self._packs],
            position=RankPosition(
                finished=frozenset(self._finished),
                taken=dict(self._taken),
                open_packs=tuple(tuple(keys) for keys in self._packer.open_keys),
                rows=self._rows,
            ),
            waiting=waiting,
            error=error,
            stream=self._stream,
            reading=self._index if self._chunk is not None else None,
            rows_expected=self._rows_expected,
            left_out=dict(self._conversations.left_out),
        )

    def take(self, *, done_below: int) -> list[LivePack]:
        """The packs of the last offer, which every rank has agreed to train."""
        taken, self._packs = self._packs, []
        self._rows = 0
        self._conversations.left_out.clear()
        self._done_below = max(self._done_below, done_below)
        self._finished = {chunk for chunk in self._finished if chunk >= self._done_below}
        return taken

    def close(self) -> None:
        if self._chunk is not None:
            self._chunk.close()
            self._chunk = None

    def _fill(self, want: int) -> Waiting | None:
        while len(self._packs) < want:
            if self._chunk is None and not self._open_next():
                end = self._folder.end()
                assert self._index is not None
                if end is None or self._index < end.chunks:
                    return self._waiting(end.chunks if end is not None else None)
                self._rows_expected = end.rows
                members = self._packer.flush()
                if members is None:
                    return None
                self._packs.append(_live_pack(members))
                continue
            self._waits_since = None
            self._read_row()
        self._waits_since = None
        return None

    def _open_next(self) -> bool:
        """Open the next of this rank's chunks; False where it is not there yet."""
        index = self._done_below + (self._dp_rank - self._done_below) % self._dp_size
        while index in self._finished:
            index += self._dp_size
        self._index = index
        chunk = open_chunk(
            self._folder, index, require_ready=self._config.require_ready, settle_s=self._config.settle_s
        )
        if chunk is None:
            return False
        self._chunk = chunk
        self._check_stream(index, chunk)
        self._block.clear()
        return True

    def _check_stream(self, index: int, chunk: LiveChunk) -> None:
        record = self._folder.record(index)
        stream = record.stream if record is not None else ""
        if self._stream and stream and stream != self._stream:
            raise LoaderError(
                f"the chunk belongs to the stream {stream}, and this run was trained on {self._stream}",
                where=str(chunk.path),
                fix="name the folder that the run was started with, start a new run, or set "
                "loader.allow_other_data=true to go on behind the same chunk numbers of this one",
            )
        self._stream = self._stream or stream
        if chunk.num_rows < self._taken.get(index, 0) or chunk.num_rows >= 1 << _ROW_BITS:
            raise LoaderError(
                f"the chunk has {chunk.num_rows:,} rows, and {self._taken.get(index, 0):,} of it were read before",
                where=str(chunk.path),
                fix=f"chunks do not change once they are there, and have fewer than {1 << _ROW_BITS:,} rows",
            )

    def _read_row(self) -> None:
        """Take the next row of the open chunk, or close it at its end."""
        chunk, index = self._chunk, self._index
        assert chunk is not None
        assert index is not None
        row = self._taken.get(index, 0)
        if row == chunk.num_rows:
            self._finish(index)
            return
        if chunk.kind == PACKS:
            self._packs.append(self._stored_pack(chunk, index, row))
        else:
            if not self._block:
                rows = range(row, min(row + _BLOCK_ROWS, chunk.num_rows))
                self._block.extend(zip(rows, self._conversations.members(chunk, index, rows), strict=True))
            found, member = self._block.popleft()
            assert found == row
            full = None if member is None else self._packer.add(member)
            if full is not None:
                self._packs.append(_live_pack(full))
        self._taken[index] = row + 1
        self._rows += 1
        if row + 1 == chunk.num_rows:
            self._finish(index)

    def _finish(self, index: int) -> None:
        self.close()
        self._taken.pop(index, None)
        self._finished.add(index)

    def _stored_pack(self, chunk: LiveChunk, index: int, row: int) -> LivePack:
        pack = chunk.pack(row)
        lengths = pack.sequence_lengths
        if lengths.min() < 2:
            raise FormatError(
                "the pack has a sequence of a single token; training needs the one after it too",
                where=chunk.where(row),
                fix="leave such sequences out where packs are made",
            )
        tokens = int(padded_lengths(lengths, self._pad_to_multiple).sum())
        if tokens > self._row_tokens:
            raise ScheduleError(
                f"the pack takes {tokens:,} tokens with its sequences padded to {self._pad_to_multiple}, more than the "
                f"{self._row_tokens:,} of a row",
                where=chunk.where(row),
                fix="raise schedule.max_tokens_per_rank, or make smaller packs",
            )
        first = _sequence_id(index, row)
        return LivePack(pack, np.arange(first, first + pack.num_sequences, dtype=np.int64))

    def _restore(self) -> None:
        """Read again the conversations that waited in open packs."""
        packs: list[list[Member[Place]]] = []
        opened: dict[int, LiveChunk] = {}
        try:
            for pack in self._to_restore:
                members = [self._read_again(opened, chunk, row) for chunk, row in pack]
                packs.append([member for member in members if member is not None])
        finally:
            for chunk in opened.values():
                chunk.close()
        self._packer.restore(packs)
        self._to_restore = []

    def _read_again(self, opened: dict[int, LiveChunk], index: int, row: int) -> Member[Place] | None:
        if index not in opened:
            chunk = open_chunk(self._folder, index, require_ready=self._config.require_ready, settle_s=0.0)
            if chunk is None:
                raise LoaderError(
                    f"{chunk_name(index)} is gone, and conversations of it are not trained yet",
                    where=str(self._folder.path),
                    fix="put it back; a producer deletes only chunks that are marked as completed",
                )
            opened[index] = chunk
        chunk = opened[index]
        if chunk.kind != CHAT or row >= chunk.num_rows:
            raise LoaderError(f"row {row:,} is no conversation any more", where=str(chunk.path))
        return self._conversations.members(chunk, index, range(row, row + 1))[0]

    def _waiting(self, end: int | None) -> Waiting:
        now = time.monotonic()
        if self._waits_since is None:
            self._waits_since = now
        assert self._index is not None
        return Waiting(self._index, now - self._waits_since, self._folder.seen_s(), self._hint(self._index, end))

    def _hint(self, index: int, end: int | None) -> str:
        """What the folder says about a chunk that is not there."""
        contents = self._folder.look()
        if index in contents.chunks:
            if self._config.require_ready and not contents.ready:
                return "it is there without a ready record; data.live.require_ready=false takes chunks without"
            return "it is there, and not said to be ready yet"
        plain = [name for name in (f"chunk_{index}.jsonl", f"chunk_{index}.parquet") if f"{index:05d}" not in name]
        if found := next((name for name in plain if (self._folder.path / name).exists()), None):
            return f"{found} is there; names have five digits"
        later = sorted(other for other in contents.chunks if other > index)
        if later:
            return f"the numbering has a gap: {chunk_name(later[0])} is there"
        if end is not None:
            return f"the numbering has a gap: the stream ended after {end:,} chunks"
        return "" if self._folder.path.is_dir() else "the folder is not there"


def _sequence_id(chunk: int, row: int) -> int:
    return (chunk << _ROW_BITS | row) << _SEQUENCE_BITS


def _live_pack(members: list[Member[Place]]) -> LivePack:
    return LivePack(pack_of(members), np.array([_sequence_id(*member.key) for member in members], np.int64))
