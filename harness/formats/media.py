"""The images and sounds of a dataset, in every format: files beside its shards, and an index of them.

shard_000003.media    the media of the shard shard_000003, end to end; the same bytes are stored once
index/media.npy       a row of MEDIA_DTYPE for each medium, in the order of sequences and of places in them
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterable
from pathlib import PurePosixPath

import numpy as np
import numpy.typing as npt
import xxhash

from harness.errors import FormatError
from harness.records import MEDIA_KINDS, Int32Array, Int64Array, Pack
from harness.storage import Folder, Place
from harness.storage.inputs import ByteSource, read_ranges

INDEX, SUFFIX = "index/media.npy", ".media"
SHARDS = rf"(shard|chunk)_\d+\{SUFFIX}"  # file names
# Numbers of sequences are those of the dataset, starts are counted in the sequence; the kind is a place in MEDIA_KINDS.
MEDIA_DTYPE = np.dtype(
    {
        "names": ["sequence", "start", "tokens", "kind", "shard", "offset", "num_bytes", "xxh3"],
        "formats": ["<i8", "<i4", "<i4", "|u1", "<i4", "<i8", "<i8", "<u8"],
    }
)
_FIX = "copy the file again; `harness verify` lists all damage"
_CONTENT = np.dtype([("start", "<i4"), ("tokens", "<i4"), ("kind", "|u1"), ("xxh3", "<u8")])
MediaRows = npt.NDArray[np.void]


def media_name(shard: str) -> str:
    return str(PurePosixPath(shard).with_suffix(SUFFIX))


def media_rows(pack: Pack) -> MediaRows:
    """Return the rows of a pack's media, numbered as its only sequences, without their places in a file."""
    rows = np.zeros(len(pack.media), MEDIA_DTYPE)
    starts = np.array([one.start for one in pack.media], np.int64)
    rows["sequence"] = np.searchsorted(pack.seq_start_id, starts, side="right") - 1
    rows["start"] = starts - pack.seq_start_id[rows["sequence"]]
    rows["tokens"] = [one.tokens for one in pack.media]
    rows["kind"] = [MEDIA_KINDS.index(one.kind) for one in pack.media]
    rows["num_bytes"] = [len(one.data) for one in pack.media]
    rows["xxh3"] = [xxhash.xxh3_64_intdigest(one.data) for one in pack.media]
    return rows


def fold_media(digest: int, rows: MediaRows, starts: Int32Array) -> int:
    """Return the digest of a pack with media: xxh3_64 of their starts in it, tokens, kinds and hashes.

    It is seeded with the digest of the pack without them. `starts` are those of the pack's sequences, from which the
    rows are numbered.
    """
    if not rows.shape[0]:
        return digest
    content = np.empty(rows.shape[0], _CONTENT)
    for name in ("start", "tokens", "kind", "xxh3"):
        content[name] = rows[name]
    content["start"] += starts[rows["sequence"]]
    return xxhash.xxh3_64_intdigest(content.tobytes(), digest)


class MediaWriter:
    def __init__(self, folder: Folder, shard: str) -> None:
        self.name = media_name(shard)
        self._file = folder.create_file(self.name)
        self._offsets: dict[bytes, int] = {}
        self._num_bytes = 0

    def append(self, pack: Pack) -> MediaRows:
        """Write the media of a pack that satisfies the invariants; return their rows."""
        rows = media_rows(pack)
        for row, one in zip(rows, pack.media, strict=True):
            digest = xxhash.xxh3_128_digest(one.data)
            if digest not in self._offsets:
                self._offsets[digest] = self._num_bytes
                self._file.write(one.data)
                self._num_bytes += len(one.data)
            row["offset"] = self._offsets[digest]
        return rows

    def finish(self) -> list[str]:
        self._file.finish()
        return [self.name]

    def abort(self) -> None:
        self._file.abort()


def find_rows(rows: MediaRows, first: int, last: int) -> range:
    """Return the numbers of the rows of sequences `first` to `last`, without the last."""
    # np.searchsorted would copy the whole column.
    return range(bisect_left(rows["sequence"], first), bisect_left(rows["sequence"], last))


def media_tokens(rows: MediaRows | None, sequence_ids: Int64Array) -> tuple[Int64Array, Int64Array]:
    """Return for each medium the position of its sequence in the given ones, and its tokens, int64 [media]."""
    numbers, tokens = [np.zeros(0, np.int64)], [np.zeros(0, np.int64)]
    if rows is not None and sequence_ids.shape[0]:
        firsts = np.append(0, np.flatnonzero(np.diff(sequence_ids) != 1) + 1)
        for place, ids in zip(firsts.tolist(), np.split(sequence_ids, firsts[1:]), strict=True):
            found = find_rows(rows, int(ids[0]), int(ids[-1]) + 1)
            own = rows[found.start : found.stop]
            numbers.append(own["sequence"] - ids[0] + place)
            tokens.append(own["tokens"].astype(np.int64))
    return np.concatenate(numbers), np.concatenate(tokens)


def read_data(
    rows: MediaRows, numbers: Iterable[int], open_media: Callable[[int], tuple[ByteSource, Place]]
) -> dict[int, bytes]:
    """Read the files of media, by the numbers of their rows; the same bytes once, and neighbors with one request.

    Raises FormatError for bytes that cannot be read or differ from what was written. `open_media` returns the open file
    of the media of a shard, and its place.
    """
    by_shard: dict[int, list[int]] = {}
    for number in dict.fromkeys(numbers):
        by_shard.setdefault(int(rows["shard"][number]), []).append(number)
    found: dict[int, bytes] = {}
    for shard, inside in sorted(by_shard.items()):
        spans = [(int(row["offset"]), int(row["offset"] + row["num_bytes"])) for row in rows[inside]]
        unique, place = list(dict.fromkeys(spans)), None
        try:
            source, place = open_media(shard)
            if (end := max(end for _, end in unique)) > source.num_bytes:
                raise FormatError(f"the file has {source.num_bytes:,} bytes, but a medium ends at byte {end:,}")
            pieces = dict(zip(unique, map(bytes, read_ranges(source, unique)), strict=True))
        except FormatError as error:
            raise FormatError(error.what, where=error.where or str(place), fix=error.fix or _FIX) from None
        except OSError as error:
            what = f"media cannot be read: {error.strerror or error}"
            raise FormatError(what, where=str(error.filename or place), fix=_FIX) from error
        for number, span in zip(inside, spans, strict=True):
            found[number] = pieces[span]
            if xxhash.xxh3_64_intdigest(found[number]) != rows["xxh3"][number]:
                sequence, kind = int(rows["sequence"][number]), MEDIA_KINDS[rows["kind"][number]]
                place_in = number - find_rows(rows, sequence, sequence + 1).start
                what = f"medium {place_in} of sequence {sequence:,}, {kind}, does not match its checksum"
                raise FormatError(what, where=f"{place}, bytes {span[0]:,} to {span[1]:,}", fix=_FIX)
    return found


def check_rows(rows: MediaRows, lengths: Int32Array, num_shards: int, *, where: str) -> None:
    """Raise FormatError unless each row is of a place in a sequence, after the row before, and of a shard."""
    sequence, start, tokens = (rows[name].astype(np.int64) for name in ("sequence", "start", "tokens"))
    is_bad = (sequence < 0) | (sequence >= lengths.shape[0]) | (start < 0) | (tokens < 1)
    is_bad |= start + tokens > lengths[np.clip(sequence, 0, lengths.shape[0] - 1)]
    is_bad |= (rows["kind"] >= len(MEDIA_KINDS)) | (rows["shard"] < 0) | (rows["shard"] >= num_shards)
    is_bad |= (rows["offset"] < 0) | (rows["num_bytes"] < 0) | (rows["offset"] + rows["num_bytes"] < 0)
    same = sequence[1:] == sequence[:-1]
    is_bad[1:] |= (sequence[1:] < sequence[:-1]) | (same & (start[1:] < (start + tokens)[:-1]))
    if is_bad.any():
        what = f"medium {int(np.argmax(is_bad)):,} of {rows.shape[0]:,} is not part of the sequences and files"
        raise FormatError(what, where=where, fix="copy the dataset again")
