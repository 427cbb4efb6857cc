"""Read a dataset lazily, from any process, and check every pack."""

from __future__ import annotations

import bisect
import operator
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Generic, TypeVar

import numpy as np

from harness.errors import ConfigError, FormatError
from harness.formats.base import Format, PackPart, ShardReader
from harness.formats.index import KeptFingerprint, PackIndex, content_digest, dataset_fingerprint, pack_digest
from harness.formats.manifest import Manifest
from harness.formats.media import find_rows, fold_media, media_tokens, read_data
from harness.records import MEDIA_KINDS, Int32Array, Int64Array, Medium, Pack, moved
from harness.storage import Place, stamp_of
from harness.storage.inputs import ByteSource, open_source

MAX_OPEN_FILES = 64
# Number of packs that iteration reads at once.
_CHUNK = 64


T = TypeVar("T", bound=ShardReader | ByteSource)
# Name, identity, size and time of each file of a shard.
ShardStamp = tuple[tuple[object, ...], ...]


class HandleCache(Generic[T]):
    """A cache of at most `capacity` open handles, which closes the least recently used one first.

    Handles belong to the process that opened them: after a fork the child opens its own, because two processes that
    share a file position or a lock get each other's bytes.
    """

    def __init__(self, capacity: int) -> None:
        self._capacity = max(1, capacity)
        self._pid = os.getpid()
        self._handles: dict[int, T] = {}  # the most recently used last

    def get(self, key: int, open_handle: Callable[[int], T]) -> T:
        if self._pid != os.getpid():
            # Dropped, not closed: closing could flush or unlock files that the parent process uses.
            self._handles, self._pid = {}, os.getpid()
        handle = self._handles.pop(key, None)
        handle = self._handles[key] = open_handle(key) if handle is None else handle
        if len(self._handles) > self._capacity:
            self._handles.pop(next(iter(self._handles))).close()
        return handle

    def close(self) -> None:
        """Close all handles; a later `get` opens a new one."""
        handles, self._handles = self._handles, {}
        if self._pid == os.getpid():
            for handle in handles.values():
                handle.close()

    def __reduce__(self) -> tuple[object, ...]:
        return HandleCache, (self._capacity,)


class PackReader:
    """A stored dataset as a sequence of packs.

    Opens files on first use, in each process anew; pickles before and after use. One reader serves one thread at a
    time. `shards` has for each its file, or the common prefix of its files' names, and the packs that it must hold;
    `stamps`, for packs without checksums, shows whether files were replaced since.

    Attributes:
        path: as it was given to `open_dataset`.
        pack_size: tokens that no pack exceeds; for files without a manifest the longest pack.
        manifest: None for files without one.
        max_weight: largest entry of a loss mask: 1, or 100 in a dataset whose masks are weights in hundredths.
    """

    def __init__(
        self,
        *,
        path: str,
        format: Format,
        index: PackIndex,
        shards: Sequence[tuple[Place, int]],
        pack_size: int,
        manifest: Manifest | None,
        load_index: Callable[[], PackIndex] | None = None,
        kept_fingerprint: KeptFingerprint | None = None,
        stamps: Sequence[ShardStamp] | None = None,
    ) -> None:
        self.path = path
        self.format = format.name
        self.pack_size = pack_size
        self.manifest = manifest
        self.max_weight = manifest.provenance.max_weight if manifest is not None else 1
        self._format = format
        self._index = index
        self._load_index = load_index
        self._places = [place for place, _ in shards]
        self._starts = [0, *np.cumsum([num_packs for _, num_packs in shards]).tolist()]
        self._num_packs = int(self._starts[-1])
        self._fingerprint = manifest.fingerprint or None if manifest is not None else None
        self._kept_fingerprint = kept_fingerprint
        self._stamps = stamps
        self._handles: HandleCache[ShardReader] = HandleCache(MAX_OPEN_FILES // format.files_per_shard)
        self._media_files: HandleCache[ByteSource] = HandleCache(MAX_OPEN_FILES)

    def __len__(self) -> int:
        return self._num_packs

    @property
    def pack_offsets(self) -> Int64Array:
        """int64 [packs + 1]; pack p holds sequences pack_offsets[p] to pack_offsets[p + 1]. Read-only."""
        return self._index.pack_offsets

    @property
    def sequence_lengths(self) -> Int32Array:
        """int32 [sequences]: stored tokens of each sequence, in dataset order. Read-only."""
        return self._index.sequence_lengths

    @property
    def has_media(self) -> bool:
        return self._index.media is not None

    def count_media(self) -> dict[str, int]:
        """Return the number of media of each kind in the dataset."""
        if self._index.media is None:
            return {}
        counts = np.bincount(self._index.media["kind"]).tolist()
        return {kind: count for kind, count in zip(MEDIA_KINDS, counts, strict=False) if count}

    @property
    def fingerprint(self) -> str:
        """Digest of the ordered content, equal across formats.

        If the manifest does not contain it, all packs are read once; for a plan, the result is saved next to the plan.
        """
        if self._fingerprint is None:
            kept = self._kept_fingerprint
            self._fingerprint = self.digest_packs() if kept is None else kept.take(self.digest_packs)
        return self._fingerprint

    def digest_packs(self, progress: Callable[[int, int], None] | None = None) -> str:
        """Compute the fingerprint from all packs; `progress` is called with packs read and packs in total."""
        # Eight bytes per pack; a list of digests would take about a hundred.
        digests = np.zeros(len(self), np.uint64)
        for number, pack in enumerate(self):
            digests[number] = pack_digest(pack)
            if progress is not None and ((number + 1) % _CHUNK == 0 or number + 1 == len(self)):
                progress(number + 1, len(self))
        return dataset_fingerprint([digests])

    def __getitem__(self, index: int) -> Pack:
        """Read the pack at `index`, counted from the end if negative; IndexError past either end.

        FormatError if the stored pack differs from what was written, or cannot be read.
        """
        return self.read((index,))[0]

    def read(self, ids: Sequence[int] | Int64Array) -> list[Pack]:
        """Read packs in the given order, duplicates allowed; reads each part of a file once if possible.

        Raises: as `reader[i]`.
        """
        packs = self.read_tokens(ids)
        if self._index.media is None:
            return packs
        return [self._with_media(pack, int(index)) for pack, index in zip(packs, ids, strict=True)]

    def read_tokens(self, ids: Sequence[int] | Int64Array) -> list[Pack]:
        """Read packs as `read` does, without their media."""
        return self.read_parts(ids, None)

    def read_parts(self, ids: Sequence[int] | Int64Array, spans: Sequence[Int64Array] | None) -> list[Pack]:
        """Read packs, or at least the needed tokens of each, without their media.

        `spans` contains for each pack an int64 [n, 2] array with the start and end of each needed span; None reads all
        tokens. If the format can skip the other tokens, their ids are -1.
        """
        pack_ids = [operator.index(index) for index in ids]
        by_shard: dict[int, list[int]] = {}
        for position, index in enumerate(pack_ids):
            pack_id = index + self._num_packs if index < 0 else index
            if not 0 <= pack_id < self._num_packs:
                raise IndexError(f"pack {index} of {self._num_packs} in {self.path}")
            pack_ids[position] = pack_id
            by_shard.setdefault(bisect.bisect_right(self._starts, pack_id) - 1, []).append(position)
        packs: dict[int, Pack] = {}
        for shard, positions in sorted(by_shard.items()):
            start = self._starts[shard]
            rows = [pack_ids[position] - start for position in positions]
            handle = self._handles.get(shard, self._open)
            parts = () if spans is None else [self._part(pack_ids[position], spans[position]) for position in positions]
            try:
                read = handle.read(rows, parts)
            except (OSError, MemoryError, FormatError) as error:
                raise explained(error, self._places[shard]) from error
            for position, row, (pack, ids_digest) in zip(positions, rows, read, strict=True):
                self._check_pack(pack, start + row, ids_digest)
                packs[position] = pack
        return [packs[position] for position in range(len(pack_ids))]

    def read_media(self, sequence_ids: Iterable[int] | Int64Array) -> list[tuple[Medium, ...]]:
        """Read the media of sequences, given by their indices in the dataset; positions are relative to the sequence.

        IndexError past either end; FormatError if the bytes of a medium differ from those written, or cannot be read.
        """
        numbers, rows = [operator.index(number) for number in sequence_ids], self._index.media
        for number in numbers:
            if not 0 <= number < self.sequence_lengths.shape[0]:
                raise IndexError(f"sequence {number} of {self.sequence_lengths.shape[0]} in {self.path}")
        if rows is None:
            return [()] * len(numbers)
        wanted = [find_rows(rows, number, number + 1) for number in numbers]
        data = read_data(rows, (row for some in wanted for row in some), self._open_media)

        def medium(number: int) -> Medium:
            row = rows[number]
            return Medium(MEDIA_KINDS[row["kind"]], int(row["start"]), int(row["tokens"]), data[number])

        return [tuple(map(medium, some)) for some in wanted]

    def media_tokens(self, sequence_ids: Int64Array) -> tuple[Int64Array, Int64Array]:
        """Return for each medium the position of its sequence in `sequence_ids` and its tokens, from the index."""
        return media_tokens(self._index.media, sequence_ids)

    def iterate(self, start: int, stop: int) -> Iterator[Pack]:
        """Yield packs from `start` to `stop`; tokens are read all at once, media one pack at a time."""
        for index, pack in enumerate(self.read_tokens(range(start, stop)), start):
            yield self._with_media(pack, index)

    def __iter__(self) -> Iterator[Pack]:
        for start in range(0, self._num_packs, _CHUNK):
            yield from self.iterate(start, min(start + _CHUNK, self._num_packs))

    def where(self, pack_id: int) -> str:
        """Return the file and position of a pack, for error messages."""
        shard = bisect.bisect_right(self._starts, pack_id) - 1
        handle = self._handles.get(shard, self._open)
        of_copy = "" if handle.entry is None else f" (the copy of {self._places[shard]})"
        return handle.where(pack_id - self._starts[shard]) + of_copy

    def files(self) -> list[Place]:
        """Return the files and folders that hold the packs, in order."""
        return self._places.copy()

    def close(self) -> None:
        """Close all files; reading opens them again."""
        self._handles.close()
        self._media_files.close()

    def adopt(self, shard: int, handle: ShardReader) -> None:
        """Use a shard that is already open in this process; raise FormatError if its files changed since opening."""
        self._check_stamp(shard)
        self._handles.get(shard, lambda _: handle)

    def __getstate__(self) -> dict[str, object]:
        state = dict(self.__dict__)
        if self._load_index is not None:
            # Memory-mapped arrays would be pickled by value; each worker maps the files itself.
            del state["_index"]
        return state

    def __setstate__(self, state: dict[str, object]) -> None:
        self.__dict__.update(state)
        if self._load_index is not None:
            self._index = self._load_index()

    def _open(self, shard: int) -> ShardReader:
        place, num_packs = self._places[shard], self._starts[shard + 1] - self._starts[shard]
        try:
            handle = self._format.open_shard(place, self.pack_size)
        except (OSError, MemoryError, FormatError) as error:
            raise explained(error, place) from error
        if handle.num_packs != num_packs:
            handle.close()
            raise FormatError(f"contains {handle.num_packs:,} packs, expected {num_packs:,}", where=str(place))
        self._check_stamp(shard)
        return handle

    def _with_media(self, pack: Pack, pack_id: int) -> Pack:
        """Return a pack with its media; a negative `pack_id` counts from the end."""
        if self._index.media is None:
            return pack
        first, last = self.pack_offsets[pack_id % self._num_packs :][:2].tolist()
        of_each = zip(self.read_media(range(first, last)), pack.seq_start_id.tolist(), strict=True)
        return replace(pack, media=tuple(one for media, start in of_each for one in moved(media, start)))

    def _open_media(self, shard: int) -> tuple[ByteSource, Place]:
        """Return the open media file of a shard (for a plan, a shard of its store) and its place."""
        own = 0 if self._index.checksums is None else shard
        place = self._handles.get(own, self._open).media_place(self._places[own], shard)
        return self._media_files.get(shard, lambda _: open_source(place)), place

    def _check_stamp(self, shard: int) -> None:
        """Raise FormatError if the files of a shard may have changed since the dataset was opened."""
        if self._stamps is not None and stamp_shard(self._format, self._places[shard]) != self._stamps[shard]:
            what = "the file was replaced or changed since the dataset was opened"
            raise FormatError(what, where=str(self._places[shard]), fix="open the dataset again")

    def _part(self, pack_id: int, spans: Int64Array) -> PackPart:
        """Return the part of a pack to read: the whole pack if the dataset has no checksums, otherwise `spans`."""
        first, last = self.pack_offsets[pack_id : pack_id + 2].tolist()
        num_tokens = int(self.sequence_lengths[first:last].sum(dtype=np.int64))
        return PackPart(num_tokens, np.array([[0, num_tokens]]) if self._index.checksums is None else spans)

    def _check_pack(self, pack: Pack, pack_id: int, ids_digest: int | None = None) -> None:
        """Raise FormatError if a pack differs from the one written; `ids_digest` is used if some ids are missing."""
        checksums = self._index.checksums
        if checksums is None:
            problem = pack.problem(self.pack_size, max_weight=self.max_weight)
            if problem is None:
                first, last = self.pack_offsets[pack_id : pack_id + 2].tolist()
                if np.array_equal(self.sequence_lengths[first:last], pack.sequence_lengths):
                    return
                problem = "contains sequences of other lengths than when the file was opened"
        else:
            digest = content_digest(pack.input_ids, pack.loss_mask, pack.seq_start_id, ids_digest)
            if (media := self._index.media) is not None:
                first, last = self.pack_offsets[pack_id : pack_id + 2].tolist()
                rows = media[[*find_rows(media, first, last)]]  # a copy
                rows["sequence"] -= first
                lengths = self.sequence_lengths[first:last]
                digest = fold_media(digest, rows, np.cumsum(lengths, dtype=np.int32) - lengths)
            if digest == checksums[pack_id]:
                return
            problem = "does not match its checksum"
        raise FormatError(f"pack {pack_id:,} {problem}", where=self.where(pack_id))


def refuse_media(data: Any, reader_of_packs: str) -> None:
    """Raise ConfigError for an open dataset with media, whose placeholders alone `reader_of_packs` would train on."""
    if data.has_media:
        what = f"the dataset has images or sounds, which {reader_of_packs} does not read"
        raise ConfigError(what, where=data.path, fix="train it with `harness train`, or prepare its text alone")


def require_plain(data: Any, reader_of_packs: str) -> None:
    """Raise ConfigError for an open dataset with media, or with weights, which `reader_of_packs` reads as a mask."""
    refuse_media(data, reader_of_packs)
    if data.max_weight > 1:
        what = f"the dataset has token weights, which {reader_of_packs} does not read"
        raise ConfigError(what, where=data.path, fix="prepare it again without tokenizer.train_on=weighted")


def stamp_shard(format: Format, place: Place) -> ShardStamp:
    """Return a stamp that changes when a file is replaced, reading no file; raise OSError or FormatError."""
    if not isinstance(place, Path):
        return ((str(place), stamp_of(place)),)
    files = sorted(place.glob("*.npy")) if place.is_dir() else [Path(f"{place}{end}") for end in format.shard_files]
    stats = [(file.name, file.stat()) for file in files if file.exists()]
    return tuple((name, stat.st_ino, stat.st_size, stat.st_mtime_ns) for name, stat in stats)


def explained(error: OSError | MemoryError | FormatError, place: Place | str) -> FormatError:
    """Return a FormatError with the place, for a system error or a FormatError without one."""
    if isinstance(error, MemoryError):
        return FormatError("requires more memory than is available: damaged or too large", where=str(place))
    if isinstance(error, OSError):
        fix = "check permissions, mounts and limits of open files"
        return FormatError(f"reading failed: {error.strerror or error}", where=str(error.filename or place), fix=fix)
    return error if error.where else FormatError(error.what, where=str(place), fix=error.fix)
