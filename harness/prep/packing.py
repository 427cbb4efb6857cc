"""Packing: plan which sequences share a pack, from their lengths alone.

    plan = plan_packs([700, 3000, 90, 4000], pack_size=4096)
    plan.pack(0)                                    # indices of the sequences in pack 0

`plan_packs` plans stored data all at once; `StreamPacker` packs a stream whose next sequence is not known yet.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import defaultdict
from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import chain
from typing import Generic, TypeVar

import numpy as np
import numpy.typing as npt

from harness.checks import NOT_SET, CheckedSettings, Rule, bounded, one_of, require_at_least, require_choice
from harness.errors import ConfigError, PrepError
from harness.records import Int64Array, Pack, SequenceView, moved

Key = TypeVar("Key", bound=Hashable)

# A single token leaves nothing to predict.
MIN_SEQUENCE_TOKENS = 2

OVER_LONG = ("drop", "cut", "split")

# Names of formats; `legacy_npy_pickle` is the name of `npy` in other tools.
PACKED_STORAGE = ("parquet", "memmap", "binidx", "jsonl", "virtual", "npy", "legacy_npy_pickle")

# Keys of the random streams; changing them changes plans.
_STREAM_SEQUENCES, _STREAM_PACKS = 0, 1
_EXPAND_ITEMS = 1 << 20


@dataclass
class PackingConfig(CheckedSettings, section="data"):
    """Packing and storage of sequences.

    Attributes:
        path: output folder, on a disk or in a bucket (`s3://BUCKET/KEY`). Its subfolders `train`, `validation` and
            `test` are the datasets.
        pack_size: maximum number of tokens in a pack.
        algorithm: packing algorithm: `best_fit_decreasing`, `first_fit_decreasing`, `first_fit` or `next_fit`.
        seed: seed of the order of packs, and of the choice between sequences of equal length.
        over_long: handling of conversations of more than `pack_size` tokens: `drop`, `cut` at `pack_size`, or `split`
            at turn boundaries, repeating the system prompt.
        packed_storage: storage format: `parquet`, `memmap`, `binidx`, `jsonl`, `virtual` (sequences stored once, with
            packs planned over them) or `npy` (pickled lists, for older tools).
        validation_fraction: fraction of conversations, selected by their hash, for `validation`. Adding or removing
            conversations does not move others between splits.
        test_fraction: fraction of conversations for `test`, selected in the same way.
        drop_duplicates: drop conversations that equal an earlier one, by a 64-bit hash.
        num_workers: number of tokenization processes. 0 uses the main process with the threads of the tokenizers
            library; -1 starts one process per core if the source is large enough to benefit.
        overwrite: replace a dataset that was prepared with other settings or other media files.
    """

    path: str = "data/pydoc"
    pack_size: int = bounded(4096, lowest=MIN_SEQUENCE_TOKENS)
    algorithm: str = "best_fit_decreasing"
    seed: int = bounded(0, highest=2**63 - 1)
    over_long: str = one_of("drop", OVER_LONG)
    packed_storage: str = one_of("parquet", PACKED_STORAGE)
    validation_fraction: float = bounded(0.02, lowest=0, below=1)
    test_fraction: float = bounded(0.0, lowest=0, below=1)
    drop_duplicates: bool = False
    num_workers: int = bounded(-1, lowest=-1, highest=1024)
    overwrite: bool = False

    rules = (Rule({"data.path": NOT_SET}, "no output folder is set", "data.path=DIR"),)

    def __post_init__(self) -> None:
        super().__post_init__()
        require_choice(self.algorithm, PACKERS, setting="data.algorithm")
        if self.validation_fraction + self.test_fraction >= 1:
            what = "nothing is left for training"
            fix = "make their sum less than 1"
            raise ConfigError(what, where="data.validation_fraction and data.test_fraction", fix=fix)


@dataclass(frozen=True, eq=False, slots=True)
class PackPlan:
    """The sequences of each pack, in order.

    `pack_offsets` is int64 [packs + 1]; `sequence_ids` is int64 [sequences], with each index into the lengths once.
    Pack p contains `sequence_ids[pack_offsets[p]:pack_offsets[p + 1]]`.
    """

    pack_offsets: Int64Array
    sequence_ids: Int64Array

    @property
    def num_packs(self) -> int:
        return len(self.pack_offsets) - 1

    def pack(self, index: int) -> Int64Array:
        """Return the sequences of a pack, int64 [sequences of the pack]."""
        return self.sequence_ids[self.pack_offsets[index] : self.pack_offsets[index + 1]]


def plan_packs(
    lengths: npt.ArrayLike, *, pack_size: int, algorithm: str = "best_fit_decreasing", seed: int = 0
) -> PackPlan:
    """Plan packs of at most `pack_size` tokens.

    The same lengths, settings and seed give the same plan on every machine, Python and numpy version: permutations are
    stable sorts of the raw output of the Philox generator.

    Args:
        lengths: integers [sequences], number of tokens in each sequence, from 2 to `pack_size`.
        algorithm: a name in `PACKERS`; `next_fit` keeps the order and does not use the seed.
        seed: determines which of equally long sequences share a pack, the order in which `first_fit` takes sequences,
            and the order of packs.

    Raises:
        PrepError: a length is out of range; the message names the first one.
        ConfigError: a setting is invalid.
    """
    require_choice(algorithm, PACKERS, setting="data.algorithm")
    require_at_least(pack_size, MIN_SEQUENCE_TOKENS, setting="data.pack_size")
    require_at_least(seed, 0, setting="data.seed")
    array = np.asarray(lengths)
    if array.size == 0:
        array = np.empty(0, np.int64)
    if array.ndim != 1 or not np.issubdtype(array.dtype, np.integer):
        what = f"lengths are {array.dtype} of {array.ndim} dimensions, expected a list of whole numbers"
        raise PrepError(what, where="lengths", fix="pass one number of tokens per sequence")
    over, under = array > pack_size, array < MIN_SEQUENCE_TOKENS
    for bad, problem, fix in (
        (over, f"are longer than pack_size {pack_size:,}", "increase data.pack_size, or drop or cut them first"),
        (under, f"have fewer than {MIN_SEQUENCE_TOKENS} tokens", "omit them: they contain no next token to predict"),
    ):
        if bad.any():
            counts, first = f"{np.count_nonzero(bad):,} of {len(array):,}", int(np.argmax(bad))
            what = f"{counts} sequences {problem}; sequence {first:,} has {int(array[first]):,}"
            raise PrepError(what, where="data.pack_size", fix=fix)
    return PACKERS[algorithm](array.astype(np.int64, copy=False), pack_size, seed)


def shuffled(count: int, *, seed: int, stream: int) -> Int64Array:
    """Return a permutation of `count` indices, int64 [count], the same on every machine and numpy version.

    It sorts random 16-bit keys, so about one pair in 65,536 has equal keys and keeps its order; a second pass for such
    pairs would double the time of a whole plan.
    """
    generator = np.random.Philox(key=np.array([seed % 2**64, stream], np.uint64))
    keys = generator.random_raw((count + 3) // 4).astype("<u8").view("<u2")[:count]
    return np.argsort(keys, kind="stable")


def _by_length(lengths: Int64Array, pack_size: int, order: Int64Array) -> Int64Array:
    """Return the sequences by decreasing length; sequences of equal length keep the given order."""
    # numpy radix-sorts 16-bit integers, several times faster than wider ones.
    narrow = np.uint16 if pack_size < 2**16 else np.int64
    return order[np.argsort((pack_size - lengths).astype(narrow)[order], kind="stable")]


def _best_fit_decreasing(lengths: Int64Array, pack_size: int, seed: int) -> PackPlan:
    order = shuffled(len(lengths), seed=seed, stream=_STREAM_SEQUENCES)
    counts = np.bincount(lengths)
    sizes = np.flatnonzero(counts)[::-1]
    columns, num_packs = _place(sizes, counts[sizes], pack_size)
    first_bin, num_bins, per_bin, _ = columns
    change = np.zeros(num_packs + 1, np.int64)
    np.add.at(change, first_bin, per_bin)
    np.subtract.at(change, first_bin + num_bins, per_bin)
    pack_of_place = shuffled(num_packs, seed=seed, stream=_STREAM_PACKS)
    offsets = np.concatenate([np.zeros(1, np.int64), np.cumsum(np.cumsum(change[:-1])[pack_of_place])])
    bin_starts = np.empty(num_packs, np.int64)
    bin_starts[pack_of_place] = offsets[:-1]
    return PackPlan(offsets, _lay_out(columns, _by_length(lengths, pack_size, order), bin_starts))


def _first_fit(lengths: Int64Array, pack_size: int, seed: int, *, is_decreasing: bool = False) -> PackPlan:
    """Place each sequence, in random or decreasing order, into the first opened pack with room for it.

    Takes a few microseconds per sequence: a tree over the packs stores the largest free room in each subtree.
    """
    random_order = shuffled(len(lengths), seed=seed, stream=_STREAM_SEQUENCES)
    order = _by_length(lengths, pack_size, random_order) if is_decreasing else random_order
    leaves, tree = 1, [pack_size, pack_size]
    places = []
    for length in lengths[order].tolist():
        if tree[1] < length:
            # Every pack is too full: double the tree, with the old one as the left half.
            doubled, width = [pack_size, pack_size], 1
            while width <= leaves:
                doubled += tree[width : 2 * width] + [pack_size] * width
                width *= 2
            tree, leaves = doubled, 2 * leaves
        node = 1
        while node < leaves:
            node *= 2
            if tree[node] < length:
                node += 1
        places.append(node - leaves)
        tree[node] -= length
        while node > 1:
            node //= 2
            left, right = tree[2 * node], tree[2 * node + 1]
            tree[node] = left if left > right else right
    packs = np.array(places, np.int64)
    num_packs = int(packs.max(initial=-1)) + 1
    # Renumbered at random: otherwise the emptiest packs, opened last, would all come last.
    numbers = shuffled(num_packs, seed=seed, stream=_STREAM_PACKS)
    packs = (np.argsort(numbers) if is_decreasing else numbers)[packs]
    offsets = np.concatenate([np.zeros(1, np.int64), np.cumsum(np.bincount(packs, minlength=num_packs))])
    return PackPlan(offsets, order[np.argsort(packs, kind="stable")])


# Items of equal size are interchangeable, so all of one size are placed in one step over *runs*: bins with consecutive
# numbers, the same history and so the same free space. The work grows with the number of distinct sizes; each splits at
# most one run, so runs stay few for any number of items.
def _place(sizes: Int64Array, counts: Int64Array, pack_size: int) -> tuple[Int64Array, int]:
    """Place every item into the fullest bin that has room for it, longest items first.

    Uses exactly as many bins as best-fit decreasing item by item: after an item of length s went into the bin with the
    least sufficient room r, that bin remains the tightest while it has room, so it takes r // s of them. `sizes` are
    decreasing and at most `pack_size`; `counts` are the numbers of items of each size; both are int64 [distinct].

    Returns the columns of the placement, int64 [4, columns], and the number of bins. A column (first_bin, num_bins,
    per_bin, before) puts `per_bin` equal items into each of the bins `first_bin ... first_bin + num_bins - 1`, after
    the `before` items that each of them already contains.
    """
    # Room -> runs (first bin, bins, items already in each) with exactly that room.
    runs: defaultdict[int, list[tuple[int, int, int]]] = defaultdict(list)
    rooms: list[int] = []
    rows: list[tuple[int, int, int, int]] = []
    smallest = int(sizes[-1]) if len(sizes) else 0
    total_bins = 0

    def put(room: int, run: tuple[int, int, int]) -> None:
        if room < smallest:
            return
        if room not in runs:
            insort(rooms, room)
        runs[room].append(run)

    def fill(room: int, size: int, left: int, run: tuple[int, int, int]) -> int:
        """Fill bins of one run with items of one size; returns the number of items left over."""
        first, bins, before = run
        per_bin = room // size
        full = min(bins, left // per_bin)
        if full:
            rows.append((first, full, per_bin, before))
            put(room - per_bin * size, (first, full, before + per_bin))
            left -= full * per_bin
        if full == bins:
            return left
        if left:
            rows.append((first + full, 1, left, before))
            put(room - left * size, (first + full, 1, before + left))
            full += 1
        if full < bins:
            put(room, (first + full, bins - full, before))
        return 0

    for size, count in zip(sizes.tolist(), counts.tolist(), strict=True):
        left = count
        while left:
            tightest = bisect_left(rooms, size)
            if tightest == len(rooms):
                bins = -(-left // (pack_size // size))
                total_bins += bins
                left = fill(pack_size, size, left, (total_bins - bins, bins, 0))
                continue
            room = rooms.pop(tightest)
            waiting = runs.pop(room)
            while waiting and left:
                left = fill(room, size, left, waiting.pop())
            for run in waiting:
                put(room, run)
    return np.ascontiguousarray(np.array(rows, np.int64).reshape(-1, 4).T), total_bins


def _lay_out(columns: Int64Array, items: Int64Array, bin_starts: Int64Array) -> Int64Array:
    """Lay out items (int64 [n], by decreasing length) bin by bin, each bin from its `bin_starts` (int64 [bins])."""
    placed = np.empty_like(items)
    ends = np.cumsum(columns[1] * columns[2])
    column = done = 0
    while column < len(ends):
        # About a million items at a time keep temporaries in the cache and memory small.
        stop = max(int(np.searchsorted(ends, done + _EXPAND_ITEMS, side="right")), column + 1)
        first_bin, num_bins, per_bin, before = columns[:, column:stop]
        positions = bin_starts[np.repeat(first_bin, num_bins) + _ramps(num_bins)] + np.repeat(before, num_bins)
        if per_bin.max() > 1:
            repeats = np.repeat(per_bin, num_bins)
            positions = np.repeat(positions, repeats) + _ramps(repeats)
        end = int(ends[stop - 1])
        placed[positions] = items[done:end]
        column, done = stop, end
    return placed


def _ramps(counts: Int64Array) -> Int64Array:
    """Return 0, 1, ... counts[0] - 1, 0, 1, ... counts[1] - 1, ... as int64 [sum of counts]."""
    ends = np.cumsum(counts)
    return np.asarray(np.arange(ends[-1]) - np.repeat(ends - counts, counts))


def _next_fit(lengths: Int64Array, pack_size: int, _: int) -> PackPlan:
    """Start a new pack wherever the next sequence does not fit."""
    ends = np.cumsum(lengths)
    # For every sequence, the first later one that does not fit into a pack starting with it.
    nexts = np.searchsorted(ends, ends - lengths + pack_size, side="right").tolist()
    offsets = [0]
    at = 0
    while at < len(nexts):
        at = nexts[at]
        offsets.append(at)
    return PackPlan(np.array(offsets, np.int64), np.arange(len(lengths)))


PACKERS: dict[str, Callable[[Int64Array, int, int], PackPlan]] = {
    "best_fit_decreasing": _best_fit_decreasing,
    "first_fit_decreasing": partial(_first_fit, is_decreasing=True),
    "first_fit": _first_fit,
    "next_fit": _next_fit,
}


@dataclass(frozen=True, eq=False, slots=True)
class Member(Generic[Key]):
    """A sequence to pack, and the room it takes: its number of stored tokens, or more if it is padded for training."""

    key: Key
    sequence: SequenceView
    size: int


class StreamPacker(Generic[Key]):
    """Packer of a stream: puts each sequence where it leaves the least room, completing at most one pack each time.

    The sizes in a pack add up to at most `pack_size`. A sequence that fits nowhere opens a new pack; if more than
    `max_open` are then open, the oldest is completed. (Completing the fullest instead would fill packs of 4,096 better
    by 0.1 percent for lognormal lengths of median 400, but some sequences would wait 10 times as long, for thousands.)
    """

    def __init__(self, pack_size: int, *, max_open: int) -> None:
        self._pack_size = pack_size
        self._max_open = max_open
        # Room left and members of each open pack, oldest first.
        self._open: list[tuple[int, list[Member[Key]]]] = []

    @property
    def open_keys(self) -> list[list[Key]]:
        """Keys of the members of every open pack, the oldest pack first."""
        return [[member.key for member in members] for _, members in self._open]

    def add(self, member: Member[Key]) -> list[Member[Key]] | None:
        """Place a member of at most `pack_size`; return the members of the pack that this completes, if any."""
        fitting = [(free, place) for place, (free, _) in enumerate(self._open) if free >= member.size]
        place = min(fitting)[1] if fitting else len(self._open)
        if self._put(place, member) < MIN_SEQUENCE_TOKENS:
            return self._open.pop(place)[1]
        return self.flush() if len(self._open) > self._max_open else None

    def flush(self) -> list[Member[Key]] | None:
        """Remove the oldest open pack and return its members; None if no pack is open."""
        return self._open.pop(0)[1] if self._open else None

    def restore(self, packs: Iterable[Sequence[Member[Key]]]) -> None:
        """Reopen packs saved as `open_keys`; a pack that is too large with the current sizes becomes several."""
        for members in packs:
            place, free = len(self._open), self._pack_size
            for member in members:
                place = place if member.size <= free else len(self._open)
                free = self._put(place, member)

    def _put(self, place: int, member: Member[Key]) -> int:
        """Add a member to an open pack, or to a new one after the last; return the room left."""
        free, members = self._open[place] if place < len(self._open) else (self._pack_size, [])
        members.append(member)
        self._open[place : place + 1] = [(free - member.size, members)]
        return free - member.size


def pack_of(members: Sequence[Member[Key]]) -> Pack:
    return join([member.sequence for member in members])


def join(sequences: Sequence[SequenceView]) -> Pack:
    """Join sequences end to end."""
    starts = np.cumsum([0, *map(len, sequences[:-1])], dtype=np.int32)
    media = (moved(one.media, start) for one, start in zip(sequences, starts.tolist(), strict=True))
    return Pack(
        np.concatenate([one.input_ids for one in sequences]),
        np.concatenate([one.loss_mask for one in sequences]),
        starts,
        tuple(chain.from_iterable(media)),
    )
