"""Reader of one data-parallel rank, which reads its own chunks as packs for the next step."""

from __future__ import annotations

import struct
import time
from collections import Counter, deque
from contextlib import closing
from dataclasses import dataclass, field
from functools import partial
from itertools import chain, groupby, product
from operator import itemgetter
from typing import NamedTuple

import numpy as np

from harness.errors import ConfigError, FormatError, HarnessError, LoaderError, ScheduleError
from harness.loader.config import RankLayout
from harness.loader.datasets import LiveConfig
from harness.loader.live.folder import (
    CHAT,
    MEDIA_READER,
    PACKS,
    SUFFIXES,
    LiveChunk,
    LiveFolder,
    chunk_name,
    open_chunk,
)
from harness.loader.live.position import LivePosition, Place
from harness.loader.plan import Features, row_media
from harness.prep import ChatTokenizer, Member, StreamPacker, pack_of
from harness.prep.chat import BadReason, RecordReader
from harness.prep.chat.records import BadRecord, Conversation
from harness.prep.fitting import fit_conversation
from harness.printing import count_of
from harness.records import Float64Array, Int64Array, Pack
from harness.schedule import SequenceCost
from harness.thd import RowMedia, padded_lengths

# Header of a serialized medium: index of its kind, position, tokens, and number of bytes that follow.
MEDIUM = struct.Struct("<4q")
# Limits of conversations, and of bytes of media, that are tokenized together.
_BLOCK_ROWS, _BLOCK_BYTES = 64, 16 << 20
# Chunk, row and sequence form an id of 63 bits.
_ROW_BITS, _SEQUENCE_BITS = 22, 18


@dataclass(frozen=True)
class BatchPlan:
    """Parameters of how a step is divided into rows."""

    layout: RankLayout
    global_batch_size: int
    max_tokens_per_row: int
    cost: SequenceCost
    # `as_packed` trains packs on the rank that reads them. Other schedules place the sequences of all ranks, and tokens
    # are sent to the ranks that train them.
    schedule: str = "as_packed"
    window_sequences: int | None = None  # sequences of a step, read individually instead of packs
    weights: tuple[float, ...] = (1.0,)  # weights of the folders

    @property
    def size(self) -> int:
        """Number of packs of a step, or of sequences with `window_sequences`."""
        return self.window_sequences or self.global_batch_size

    @property
    def is_balanced(self) -> bool:
        return self.schedule != "as_packed"


@dataclass(frozen=True, eq=False, slots=True)
class LivePack:
    """A pack to train on, or a sequence of a window; ids, int64 [sequences], are independent of the reading rank."""

    pack: Pack
    sequence_ids: Int64Array
    media: RowMedia | None = None  # decoded media, if the pack is a row


class ReadPack(NamedTuple):
    """A pack that a rank offers for a step; arrays are [sequences], int64, and float64 for the cost of media.

    `number` is the index among the rank's packs of all folders. Lengths are stored tokens; bytes of media are those of
    their serialized form.
    """

    number: int
    dp_rank: int
    sequence_ids: Int64Array
    lengths: Int64Array
    media_bytes: Int64Array
    media_cost: Float64Array


@dataclass(frozen=True, slots=True)
class Waiting:
    """A missing chunk: folder, index, time waited, time since its producer was active, and a hint."""

    folder: str
    chunk: int
    waited_s: float
    producer_seen_s: float | None
    hint: str


@dataclass(frozen=True, eq=False, slots=True)
class Offer:
    """Message of one rank to the others before a step: its packs of one folder, or why it has none."""

    dp_rank: int
    source: int  # index of the folder
    packs: list[ReadPack]
    position: LivePosition  # position after these packs: own chunks, and rows read since the previous step
    waiting: Waiting | None  # the missing chunk, if packs are missing; None at the end of the stream
    error: HarnessError | None  # error that ended the rank's reading
    stream: str  # stream name; empty before the first chunk, and without records
    reading: int | None  # the open chunk; None between chunks
    ended: bool  # more packs were requested than the stream has for this rank
    rows_expected: int | None  # rows of the whole stream, once its end was read, if recorded
    left_out: Counter[str] = field(default_factory=Counter)  # conversations left out since the previous step, by reason
    # Index, rows and file name of each chunk opened since the last offer.
    opened: list[tuple[int, int, str]] = field(default_factory=list)


def describe_pack(live: LivePack, number: int, dp_rank: int, cost: SequenceCost) -> ReadPack:
    """Return the offer of a pack that a rank has read."""
    pack = live.pack
    owners = np.searchsorted(pack.seq_start_id, [one.start for one in pack.media], side="right") - 1
    tokens = np.array([one.tokens for one in pack.media], np.float64)
    work = tokens * 0 if cost.encode is None else cost.encode(tokens)
    sizes = [MEDIUM.size + len(one.data) for one in pack.media]
    num_bytes, costs = (np.bincount(owners, values, pack.num_sequences) for values in (sizes, work))
    media = num_bytes.astype(np.int64), costs.astype(np.float64)
    return ReadPack(number, dp_rank, live.sequence_ids, pack.sequence_lengths.astype(np.int64), *media)


class FolderReader:
    """Reads the chunks of one folder whose index modulo `dp_size` is `dp_rank`, regardless of which ranks read before.

    `stream` is the name of the stream that the resumed position belongs to; empty accepts any.
    """

    def __init__(
        self,
        config: LiveConfig,
        plan: BatchPlan,
        *,
        source: int = 0,
        tokenizer: ChatTokenizer | None = None,
        position: LivePosition | None = None,
        stream: str = "",
        features: Features | None = None,
    ) -> None:
        self._features = features
        self._config = config
        self._source, self._num_sources = source, len(config.folders)
        self._folder = LiveFolder(config.folders[source])
        self._plan = plan
        self._dp_rank, self._dp_size = plan.layout.dp_rank, plan.layout.dp_size
        self._pad_to_multiple = plan.layout.pad_to_multiple
        self._tokenizer = tokenizer
        reader = RecordReader() if tokenizer is None or tokenizer.media_rules is None else MEDIA_READER
        self._open_chunk = partial(open_chunk, self._folder, require_ready=config.require_ready, reader=reader)
        self._left_out: Counter[str] = Counter()
        self._opened: list[tuple[int, int, str]] = []
        start = position or LivePosition()
        self._done_below = start.done_below
        self._finished = {chunk for chunk in start.finished if self._is_mine(chunk)}
        self._taken = {chunk: rows for chunk, rows in start.taken.items() if self._is_mine(chunk)}
        self._begun = {chunk: sequences for chunk, sequences in start.begun.items() if self._is_mine(chunk)}
        # An open pack belongs to the reader of its first conversation's chunk; with the same ranks, the same reader.
        self._to_restore = [pack for pack in start.open_packs if self._is_mine(pack[0][0])]
        self._packer: StreamPacker[Place] = StreamPacker(config.pack_size, max_open=config.open_packs)
        self._stream = stream
        self._chunk: LiveChunk | None = None
        self._index = 0
        self._block: deque[list[Member[Place]]] = deque()
        self._packs: list[LivePack] = []
        self._rows = 0
        self._waits_since: float | None = None
        self._rows_expected: int | None = None
        self._ended = False

    def offer(self, share: int) -> Offer:
        """Read until there are `share` packs for a step, a chunk is missing, or the stream ends; never wait or raise.

        `share` counts packs, or sequences of a window, including those of earlier offers for the step.
        """
        waiting, error = None, None
        try:
            self._restore()
            waiting = self._fill(share)
        except HarnessError as raised:
            error = raised
        except OSError as raised:
            what, fix = f"chunks cannot be read: {raised}", "check permissions and mounts"
            error = LoaderError(what, where=self._folder.where, fix=fix)
        # Every offer reaches all ranks, so each opened chunk is reported once.
        opened, self._opened = self._opened, []
        return Offer(
            dp_rank=self._dp_rank,
            source=self._source,
            packs=[describe_pack(live, i, self._dp_rank, self._plan.cost) for i, live in enumerate(self._packs)],
            position=LivePosition(
                finished=frozenset(self._finished),
                taken=dict(self._taken),
                begun=dict(self._begun),
                open_packs=tuple(tuple(keys) for keys in self._packer.open_keys),
                rows=self._rows,
            ),
            waiting=waiting,
            error=error,
            stream=self._stream,
            reading=self._index if self._chunk is not None else None,
            ended=self._ended,
            rows_expected=self._rows_expected,
            left_out=self._left_out.copy(),
            opened=opened,
        )

    def take(self, *, done_below: int) -> list[LivePack]:
        """Return the packs of the last offer, once all ranks train them."""
        taken, self._packs = self._packs, []
        self._rows = 0
        self._left_out.clear()
        self._done_below = max(self._done_below, done_below)
        self._finished = {chunk for chunk in self._finished if chunk >= self._done_below}
        return taken

    def close(self) -> None:
        if self._chunk is not None:
            self._chunk.close()
            self._chunk = None

    def _is_mine(self, chunk: int) -> bool:
        return chunk % self._dp_size == self._dp_rank

    def _fill(self, share: int) -> Waiting | None:
        while len(self._packs) < share:
            if self._chunk is not None or self._open_next():
                self._waits_since = None
                self._read_sequence()
            elif (end := self._folder.end()) is None or self._index < end.chunks:
                self._waits_since = self._waits_since or time.monotonic()
                hint = self._hint(self._index, None if end is None else end.chunks)
                waited_s = time.monotonic() - self._waits_since
                return Waiting(self._folder.where, self._index, waited_s, self._folder.seen_s(), hint)
            else:
                self._rows_expected = end.rows
                if (members := self._packer.flush()) is None:
                    self._ended = True
                    return None
                self._packs.append(self._live_pack(members))
        self._waits_since = None
        return None

    def _open_next(self) -> bool:
        """Open the next chunk of this rank; return False if it is missing."""
        index = self._done_below + (self._dp_rank - self._done_below) % self._dp_size
        while index in self._finished:
            index += self._dp_size
        self._index = index
        chunk = self._chunk = self._open_chunk(index, settle_s=self._config.settle_s)
        if chunk is None:
            return False
        self._block.clear()
        if self._stream and chunk.stream not in ("", self._stream):
            what = f"the chunk belongs to the stream {chunk.stream}, but this run was trained on {self._stream}"
            fix = "specify the folder that the run started with, start a new run, or set loader.allow_other_data=true"
            fix += " to continue after the same chunk numbers of this one"
            raise LoaderError(what, where=chunk.place, fix=fix)
        self._stream = self._stream or chunk.stream
        taken = self._taken.get(index, 0)
        if chunk.num_rows < taken or chunk.num_rows >= 1 << _ROW_BITS:
            what = f"the chunk has {count_of(chunk.num_rows, 'row')}, but {taken:,} were read before"
            fix = f"chunks must not change, and must have fewer than {1 << _ROW_BITS:,} rows"
            raise LoaderError(what, where=chunk.place, fix=fix)
        self._opened.append((index, chunk.num_rows, chunk.path.name))
        return True

    def _read_sequence(self) -> None:
        """Read the next sequence of the open chunk, completing at most one pack; close the chunk at its end."""
        chunk, index = self._chunk, self._index
        assert chunk is not None
        row = self._taken.get(index, 0)
        if row < chunk.num_rows:
            if chunk.kind == PACKS and self._plan.window_sequences is None:
                # A run with windows may have trained the first sequences.
                members = self._stored_members(chunk, index, row)[self._begun.pop(index, 0) :]
                self._packs.append(self._live_pack(members))
            elif not self._read_member(chunk, index, row):
                return
            row = self._taken[index] = row + 1
            self._rows += 1
        if row == chunk.num_rows:
            self.close()
            self._taken.pop(index, None)
            self._finished.add(index)

    def _read_member(self, chunk: LiveChunk, index: int, row: int) -> bool:
        """Add the next sequence of a row, if any, to a pack or window; return True if the row is done."""
        if not self._block:
            rows = range(row, min(row + _BLOCK_ROWS, chunk.num_rows))
            self._block.extend(
                (self._stored_members(chunk, index, one) for one in rows)
                if chunk.kind == PACKS
                else self._members(chunk, index, rows)
            )
        members, done = self._block[0], self._begun.pop(index, 0)
        if done < len(members):
            is_single = self._plan.window_sequences is not None
            full = [members[done]] if is_single else self._packer.add(members[done])
            if full is not None:
                self._packs.append(self._live_pack(full))
        if done + 1 < len(members):
            self._begun[index] = done + 1
            return False
        self._block.popleft()
        return True

    def _stored_members(self, chunk: LiveChunk, index: int, row: int) -> list[Member[Place]]:
        """Return the sequences of a stored pack; raise if they do not fit into a row."""
        pack = chunk.pack(row)
        lengths = pack.sequence_lengths
        if lengths.min() < 2:
            what = "the pack contains a sequence of one token; training requires two"
            raise FormatError(what, where=chunk.where(row), fix="omit such sequences when packs are made")
        padded = padded_lengths(lengths, self._pad_to_multiple)
        is_whole = not self._plan.is_balanced
        tokens = int(padded.sum() if is_whole else padded.max())
        if tokens > self._plan.max_tokens_per_row:
            what = f"{'the pack' if is_whole else 'a sequence of the pack'} has {tokens:,} tokens after padding to a "
            what += f"multiple of {self._pad_to_multiple}, but a row holds {self._plan.max_tokens_per_row:,}"
            fix = "increase schedule.max_tokens_per_rank, or make smaller packs"
            raise ScheduleError(what, where=chunk.where(row), fix=fix)
        return [Member((index, row, number), view, len(view)) for number, view in enumerate(pack.sequences())]

    def _members(self, chunk: LiveChunk, index: int, rows: range) -> list[list[Member[Place]]]:
        """Tokenize the conversations of these rows, or fewer if media are large; empty lists for those left out."""
        if self._tokenizer is None:
            what = "the chunk contains conversations, but no tokenizer is set"
            fix = "set data.live.tokenizer.name to a tokenizer folder or a hub id"
            raise ConfigError(what, where=chunk.place, fix=fix)
        parsed: dict[int, Conversation | BadRecord] = {}
        num_bytes = 0
        for row in rows:
            if (item := chunk.conversation(row)) is not None:
                parsed[row] = item
            num_bytes += sum(len(part.data) for part in item.media) if isinstance(item, Conversation) else 0
            if num_bytes > _BLOCK_BYTES:
                rows = range(rows.start, row + 1)
                break
        members: dict[int, list[Member[Place]]] = {row: [] for row in rows}
        encoded = self._tokenizer.encode_each([*parsed.values()])
        for (row, item), result in zip(parsed.items(), encoded, strict=True):
            if isinstance(result, BadRecord):
                self._leave_out(result)
            elif isinstance(item, Conversation):
                # Padding of rows counts toward the pack size.
                multiple, limit = self._pad_to_multiple, self._config.over_long
                room = self._config.pack_size // multiple * multiple
                fitted = fit_conversation(item, result, self._tokenizer, pack_size=room, over_long=limit)
                if not fitted.pieces:
                    self._left_out[fitted.reason] += 1
                sizes = padded_lengths(np.array([len(piece) for piece in fitted.pieces], np.int64), multiple).tolist()
                members[row] = [
                    Member((index, row, number), piece, max(len(piece), size))
                    for number, (piece, size) in enumerate(zip(fitted.pieces, sizes, strict=True))
                ]
        return [*members.values()]

    def _leave_out(self, record: BadRecord) -> None:
        """Count a bad record, or refuse it."""
        if self._config.on_bad == "refuse":
            fix = "fix the producer of conversations, or skip invalid conversations with data.live.on_bad=skip"
            if record.reason is BadReason.MEDIA:
                fix += "; `harness live produce` with source.drop_media=true writes chunks with text only"
            raise FormatError(f"invalid conversation ({record.reason}): {record.detail}", where=record.where, fix=fix)
        self._left_out[str(record.reason)] += 1

    def _restore(self) -> None:
        """Read the conversations of open packs again."""
        members: dict[Place, Member[Place]] = {}
        for index, places in groupby(sorted(chain(*self._to_restore)), key=itemgetter(0)):
            rows = sorted({row for _, row, _ in places})
            chunk = self._open_chunk(index, settle_s=0.0)
            if chunk is None or chunk.kind != CHAT or rows[-1] >= chunk.num_rows:
                what = f"{chunk_name(index)} does not have all of the conversations that wait to be trained"
                fix = "restore the original chunk, or start a new run; producers delete only chunks marked as completed"
                raise LoaderError(what, where=self._folder.where, fix=fix)
            with closing(chunk):
                for row in rows:
                    (found,) = self._members(chunk, index, range(row, row + 1))
                    members |= {member.key: member for member in found}
        packs = [[members[place] for place in pack if place in members] for pack in self._to_restore]
        self._to_restore = []
        if self._plan.window_sequences is None:
            self._packer.restore(packs)
        else:
            # Sequences of open packs of a run without windows enlarge the first window.
            self._packs += [self._live_pack([member]) for pack in packs for member in pack]

    def _hint(self, index: int, end: int | None) -> str:
        """Return a hint from the folder's contents about a missing chunk."""
        contents = self._folder.look()
        if index in contents.chunks:
            if self._config.require_ready and not contents.ready:
                return "it exists without a ready record; data.live.require_ready=false accepts such chunks"
            return "it exists, but is not marked as ready"
        for width, suffix in product(range(1, 8), SUFFIXES):
            name = f"chunk_{index:0{width}d}{suffix}"
            if name != chunk_name(index, suffix) and self._folder.files.find(name) is not None:
                return f"{name} exists, but names must have five digits"
        if later := [other for other in contents.chunks if other > index]:
            return f"the numbering has a gap: {chunk_name(min(later))} exists"
        if end is not None:
            return f"the numbering has a gap: the stream ended after {end:,} chunks"
        if not self._folder.files.exists():
            return "the folder is missing"
        if contents.next_index or self._folder.seen_s() is not None:
            return ""
        return f"{self._folder.where} is empty: check its name, and that its producer is running"

    def _live_pack(self, members: list[Member[Place]]) -> LivePack:
        # Interleave the chunk numbers of several folders.
        places = [(key[0] * self._num_sources + self._source, *key[1:]) for key in (member.key for member in members)]
        ids = [(chunk << _ROW_BITS | row) << _SEQUENCE_BITS | sequence for chunk, row, sequence in places]
        of_sequences = [member.sequence.media for member in members]
        if any(of_sequences) and self._features is None:
            what = "the chunk has audio or images, and the model has no encoder for them"
            fix = "a model.init_from that reads them, or chunks of text alone (`harness live produce` with "
            raise ConfigError(what, where=self._folder.where, fix=f"{fix}source.drop_media=true)")
        # With balancing schedules, the rank that trains a sequence decodes its media.
        features = None if self._plan.is_balanced else self._features
        return LivePack(pack_of(members), np.array(ids, np.int64), features and row_media(of_sequences, features))
