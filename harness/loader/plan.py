"""The data of one training step on one rank: planned from lengths, read from packs, laid out as THD rows."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol, cast

import numpy as np
import numpy.typing as npt
import xxhash

from harness.errors import ConfigError, LoaderError
from harness.loader.blend import Blend, BlendOrder
from harness.loader.config import LoaderConfig, RankLayout
from harness.loader.order import BatchRange
from harness.loader.state import LoaderState
from harness.records import Int32Array, Int64Array, Medium, Pack, Schedule, UInt8Array
from harness.schedule import DYNAMIC, Imbalance, ScheduleConfig, SequenceCost, measure_imbalance, schedule
from harness.schedule.batch import check_lengths
from harness.thd import (
    RowMedia,
    ThdBatch,
    needed_spans,
    padded_lengths,
    rows_from_arrays,
    rows_from_model_tokens,
    shared_multiple,
)

# Returns the encoder inputs for some media: arrays [media, ...] by name.
Features = Callable[[Sequence[Medium]], dict[str, npt.NDArray[Any]]]
# Tokens of the rows that are laid out together: twice as fast as single rows of 4,096, and still within the cache.
_TOKENS_AT_ONCE = 32_768
# Packs up to this size are read whole, which needs fewer requests.
_READ_WHOLE_TOKENS = 8192


class PackSource(Protocol):
    """Interface of a dataset that a loader reads, which every reader of `harness.formats` implements. Picklable."""

    @property
    def pack_offsets(self) -> Int64Array: ...

    @property
    def sequence_lengths(self) -> Int32Array: ...

    @property
    def fingerprint(self) -> str: ...

    def __len__(self) -> int: ...

    def read(self, indices: list[int]) -> list[Pack]: ...


@dataclass(frozen=True, eq=False, slots=True)
class RankBatch:
    """The data of one step on one rank, and statistics of the global batch that are equal on every rank.

    Attributes:
        epoch, step_in_epoch: from 0.
        pack_ids: int64 [packs], the global batch in training order.
        rows: the rows of this rank, one per microbatch.
        sequence_ids: int64, one array per microbatch: ids of the row's sequences in the dataset; sequence i of pack p
            has id pack_offsets[p] + i. Empty for a zero-loss row.
        num_sequences: number of sequences in the global batch.
        num_tokens: model tokens of the global batch, without padding.
        imbalance: imbalance of the global batch over the ranks.
        state: state of the loader after this step.
    """

    epoch: int
    step_in_epoch: int
    pack_ids: Int64Array
    rows: list[ThdBatch]
    sequence_ids: list[Int64Array]
    num_sequences: int
    num_tokens: int
    imbalance: Imbalance
    state: LoaderState

    @property
    def num_microbatches(self) -> int:
        return len(self.rows)

    @property
    def media_bytes(self) -> int:
        """Bytes of the images and sounds in this rank's rows."""
        return sum(row.media.num_bytes for row in self.rows if row.media is not None)


@dataclass(frozen=True, eq=False, slots=True)
class RawBatch:
    """Message of a worker, with tokens as stored: finished rows would take 29 bytes per token.

    `tokens` contains this rank's rows end to end, arrays [n]: either `input_ids` and `loss_mask` as stored (5 bytes per
    token), or `tokens`, `labels`, `loss_mask` and `position_ids` of the model (13 bytes).
    """

    step: BatchRange
    pack_ids: Int64Array
    tokens: dict[str, npt.NDArray[Any]]
    row_lengths: list[Int64Array]  # int64, one array per row: tokens of each sequence; empty for a zero-loss row
    sequence_ids: list[Int64Array]
    num_sequences: int
    num_tokens: int
    imbalance: Imbalance
    shared_by: tuple[int, ...] = ()  # data-parallel ranks that share each row; empty if none is shared
    media: tuple[RowMedia | None, ...] = ()  # media of each row; empty if no row has any


class BatchReader:
    """Plans a step for all ranks and reads the part of this rank. Sent to every worker; holds no batch."""

    def __init__(
        self,
        source: PackSource,
        config: LoaderConfig,
        *,
        schedule: ScheduleConfig,
        layout: RankLayout,
        cost: SequenceCost | None = None,
        blend: Blend | None = None,
        features: Features | None = None,
    ) -> None:
        self._source, self._features = source, features
        # Custom readers, and readers of lengths alone, may lack the attribute.
        self._has_media = bool(getattr(source, "has_media", False))
        if self._has_media and features is None and layout.is_first_stage:
            what = "the dataset has audio or images, and this trainer or model has no encoder for them"
            fix = "train a model that reads them, or prepare the text alone with source.drop_media=true"
            raise ConfigError(what, where=str(getattr(source, "path", "the dataset")), fix=fix)
        self._schedule = schedule
        self._layout = layout
        self._cost = cost or SequenceCost()
        if schedule.name == DYNAMIC and not layout.shares_rows:
            what = f"this trainer does not run rows that data-parallel ranks share, as {DYNAMIC} makes them"
            raise ConfigError(what, where="schedule.name", fix="schedule.name=cost_balanced")
        self._order = BlendOrder(config, blend or Blend.of_one(len(source)))

    def check(self) -> None:
        """Raise ScheduleError if a sequence (or, with as_packed, a pack) of the dataset can never be placed."""
        lengths = padded_lengths(self._source.sequence_lengths, self._layout.pad_to_multiple)
        check_lengths(
            lengths,
            self._source.pack_offsets,
            self._schedule.name,
            self._schedule.max_tokens_per_rank,
            dp_size=self._layout.dp_size,
            cp_size=self._layout.cp_size,
            most_ranks=self._cost.most_ranks,
            pad_to_multiple=self._layout.pad_to_multiple,
            of=" of the dataset",
        )

    def plan(self, step: BatchRange) -> tuple[Int64Array, Int64Array, Schedule, Imbalance]:
        """Return the pack ids, sequence ids, schedule and imbalance of a step, which are equal on every rank."""
        packs = self._order.packs(step)
        starts = self._source.pack_offsets[packs]
        counts = self._source.pack_offsets[packs + 1] - starts
        offsets = np.concatenate([[0], np.cumsum(counts)])
        sequences = np.arange(offsets[-1], dtype=np.int64) + np.repeat(starts - offsets[:-1], counts)
        lengths = padded_lengths(self._source.sequence_lengths[sequences], self._layout.pad_to_multiple)
        costs: dict[str, Any] = {"cost": self._cost, "media_cost": None}
        if self._has_media and self._cost.encode is not None:
            source: Any = self._source
            numbers, tokens = source.media_tokens(sequences)
            encoding = self._cost.encode(tokens.astype(np.float64))
            costs["media_cost"] = np.bincount(numbers, encoding, sequences.shape[0]).astype(np.float64, copy=False)
        placed = schedule(
            self._schedule.name,
            lengths,
            dp_size=self._layout.dp_size,
            cp_size=self._layout.cp_size,
            max_tokens_per_rank=self._schedule.max_tokens_per_rank,
            group_size=self._layout.group_size,
            pack_offsets=offsets,
            pad_to_multiple=self._layout.pad_to_multiple,
            **costs,
        )
        row_tokens = self._schedule.max_tokens_per_rank * self._layout.cp_size
        return packs, sequences, placed, measure_imbalance(placed, lengths, max_tokens_per_row=row_tokens, **costs)

    def read(self, step: BatchRange) -> RawBatch:
        """Plan `step` and read this rank's sequences, only from the packs that contain them.

        Raise HarnessError if the reader does, and LoaderError if a pack differs from the dataset's index.
        """
        pack_ids, sequences, placed, imbalance = self.plan(step)
        rank, numbers = self._layout.dp_rank, range(placed.num_microbatches)
        rows = [sequences[placed.row(microbatch, rank)] for microbatch in numbers]
        mine = np.concatenate(rows)
        stored = self._source.sequence_lengths[mine].astype(np.int64)
        shared = numbers if placed.shared_by is not None else ()
        shared_by = tuple(placed.ranks_of_row(microbatch, rank) for microbatch in shared)
        ranks = np.repeat(shared_by or [1] * len(rows), [len(row) for row in rows])
        parts = list(self._parts(mine, ranks))
        media: tuple[RowMedia | None, ...] = ()
        if self._has_media and self._features is not None:
            source: Any = self._source
            media = tuple(row_media(source.read_media(row), self._features) if len(row) else None for row in rows)
        return RawBatch(
            step=step,
            pack_ids=pack_ids,
            tokens={
                "input_ids": np.concatenate([np.zeros(0, np.int32), *(ids for ids, _ in parts)]),
                "loss_mask": np.concatenate([np.zeros(0, np.uint8), *(mask for _, mask in parts)]),
            },
            row_lengths=np.split(stored, np.cumsum([row.shape[0] for row in rows])[:-1]),
            sequence_ids=rows,
            num_sequences=int(sequences.shape[0]),
            num_tokens=int(self._source.sequence_lengths[sequences].sum(dtype=np.int64)) - int(sequences.shape[0]),
            imbalance=imbalance,
            shared_by=shared_by,
            media=media,
        )

    def _parts(self, sequences: Int64Array, shared_by: Int64Array) -> Iterator[tuple[Int32Array, UInt8Array]]:
        """Yield tokens and masks of runs of adjacent sequences; `shared_by`, int64 [n], ranks share each sequence."""
        if sequences.shape[0] == 0:
            return
        offsets = self._source.pack_offsets
        pack_of = np.searchsorted(offsets, sequences, side="right") - 1
        needed = np.unique(pack_of)
        spans, source = self._spans(sequences, shared_by, pack_of, needed), cast(Any, self._source)
        if spans is not None:
            read = source.read_parts(needed.tolist(), spans)
        else:
            read = (source.read_tokens if self._has_media else source.read)(needed.tolist())
        packs: dict[int, Pack] = dict(zip(needed.tolist(), read, strict=True))
        for index, pack in packs.items():
            expected = self._source.sequence_lengths[int(offsets[index]) : int(offsets[index + 1])]
            if not np.array_equal(pack.sequence_lengths, expected):
                raise LoaderError(
                    f"pack {index} holds {pack.num_sequences} sequences of {len(pack):,} tokens, "
                    f"but {expected.shape[0]} of {int(expected.sum()):,} in its dataset's index",
                    where="the dataset",
                    fix="the index belongs to other data; prepare or convert the dataset again",
                )
        runs = np.flatnonzero((np.diff(sequences) != 1) | (np.diff(pack_of) != 0)) + 1
        firsts = [0, *runs.tolist()]
        for first, stop in zip(firsts, [*runs.tolist(), sequences.shape[0]], strict=True):
            pack = packs[int(pack_of[first])]
            inside = int(sequences[first] - offsets[pack_of[first]])
            start = int(pack.seq_start_id[inside])
            after = inside + stop - first
            end = int(pack.seq_start_id[after]) if after < pack.num_sequences else len(pack)
            yield pack.input_ids[start:end], pack.loss_mask[start:end]

    def _spans(
        self, sequences: Int64Array, shared_by: Int64Array, pack_of: Int64Array, needed: Int64Array
    ) -> list[Int64Array] | None:
        """Return the spans of tokens that this rank needs of each pack; None to read short packs whole."""
        source, layout = cast(Any, self._source), self._layout
        # Some sources have no fixed pack size, or cannot read parts.
        if not hasattr(source, "read_parts") or source.pack_size <= _READ_WHOLE_TOKENS:
            return None
        stored = source.sequence_lengths[sequences].astype(np.int64)
        if layout.reads_ahead is None:
            spans = np.stack([np.zeros_like(stored), stored], axis=1)[:, None]
        else:
            own = layout.cp_rank + layout.dp_rank % shared_by  # one of them is 0
            multiples = np.array([shared_multiple(layout.pad_to_multiple, ranks) for ranks in shared_by.tolist()])
            sizes = layout.cp_size * shared_by
            spans = needed_spans(stored, multiples, cp_size=sizes, cp_rank=own, ahead=layout.reads_ahead)
        found, order = [], np.argsort(pack_of, kind="stable")
        of_packs = np.split(order, np.flatnonzero(np.diff(pack_of[order])) + 1)
        for index, mine in zip(needed.tolist(), of_packs, strict=True):
            first, last = source.pack_offsets[index : index + 2].tolist()
            ends = np.cumsum(source.sequence_lengths[first:last], dtype=np.int64)
            inside = sequences[mine] - first
            places = (spans[mine] + (ends - source.sequence_lengths[first:last])[inside][:, None, None]).reshape(-1, 2)
            found.append(places[places[:, 0] < places[:, 1]])
        return found


def row_media(of_sequences: Sequence[tuple[Medium, ...]], features: Features) -> RowMedia | None:
    """Return the media of a row, given the media of each of its sequences; None if there are none."""
    found = [(number, one) for number, media in enumerate(of_sequences) for one in media]
    if not found:
        return None
    numbers = [(number, one.start, one.tokens) for number, one in found]
    sequences, starts, tokens = (np.asarray(values, np.int64) for values in zip(*numbers, strict=True))
    digests = np.asarray([xxhash.xxh3_64_intdigest(one.data) for _, one in found], np.uint64)
    num_bytes = sum(dict(zip(digests.tolist(), (len(one.data) for _, one in found), strict=True)).values())
    return RowMedia(sequences, starts, tokens, digests, features([one for _, one in found]), num_bytes)


def build_batch(raw: RawBatch, *, layout: RankLayout, before: LoaderState, num_packs: int | None) -> RankBatch:
    """Build the rows of a worker's message.

    `before` is any state of the run; its position is replaced. `num_packs` is the size of an epoch, None if endless.
    """
    build = rows_from_arrays if "input_ids" in raw.tokens else rows_from_model_tokens
    ends = np.cumsum([0, *(lengths.sum() for lengths in raw.row_lengths)])
    shared_by = np.asarray(raw.shared_by or [1] * len(raw.row_lengths))
    is_next = (np.diff(ends[1:] // _TOKENS_AT_ONCE) != 0) | (np.diff(shared_by) != 0)
    cuts = [0, *np.flatnonzero(is_next) + 1, len(raw.row_lengths)]
    rows: list[ThdBatch] = []
    for first, last in itertools.pairwise(cuts):
        tokens = {name: values[ends[first] : ends[last]] for name, values in raw.tokens.items()}
        ranks = int(shared_by[first])
        multiple = shared_multiple(layout.pad_to_multiple, ranks)
        made = build(**tokens, row_lengths=raw.row_lengths[first:last], pad_to_multiple=multiple)
        rows += made if ranks == 1 else [replace(row, shared_by=ranks) for row in made]
    if any(raw.media):
        rows = [replace(row, media=media) for row, media in zip(rows, raw.media, strict=True)]
    position = replace(before, epoch=raw.step.epoch, packs_consumed=raw.step.start)
    return RankBatch(
        epoch=raw.step.epoch,
        step_in_epoch=raw.step.index,
        pack_ids=raw.pack_ids,
        rows=rows,
        sequence_ids=raw.sequence_ids,
        num_sequences=raw.num_sequences,
        num_tokens=raw.num_tokens,
        imbalance=raw.imbalance,
        state=position.advance(raw.step.stop - raw.step.start, of=num_packs),
    )
