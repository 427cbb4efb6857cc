"""Index of a dataset: pack offsets, sequence lengths, and pack checksums.

Digests of packs and datasets are equal in all formats.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import xxhash

from harness.errors import FormatError
from harness.formats.manifest import Manifest, Totals, file_problems
from harness.formats.media import INDEX, MEDIA_DTYPE, MediaRows, check_rows, fold_media, media_rows
from harness.records import Int32Array, Int64Array, Pack, UInt8Array, UInt64Array
from harness.storage import BucketFolder, Folder, LocalCache, LocalFolder, write_atomically
from harness.storage.arrays import map_npy, npy_header

INDEX_FOLDER = "index"
PACK_OFFSETS = f"{INDEX_FOLDER}/pack_offsets.npy"
SEQUENCE_LENGTHS = f"{INDEX_FOLDER}/sequence_lengths.npy"
PACK_CHECKSUMS = f"{INDEX_FOLDER}/pack_checksums.npy"
INDEX_NAMES = (PACK_OFFSETS, SEQUENCE_LENGTHS, PACK_CHECKSUMS)

FINGERPRINT_NAME = "fingerprint.json"  # next to the manifest of a plan

# Entries processed at a time, which bounds memory for any number of sequences.
_BLOCK = 1 << 18

# Typed loosely, because type checkers treat numpy arrays as buffers only from Python 3.12 on.
_xxh3: Callable[..., int] = xxhash.xxh3_64_intdigest


def content_digest(
    input_ids: Int32Array, loss_mask: UInt8Array, seq_start_id: Int32Array, ids_digest: int | None = None
) -> int:
    """Return the digest of a pack: xxh3_64 of each array's little-endian bytes, seeded with the previous digest.

    The order is input_ids int32 (seed 0), loss_mask uint8, seq_start_id int32; arrays must be contiguous. Measured:
    half the time of one incremental digest. `ids_digest` replaces the digest of incomplete ids.
    """
    return _xxh3(seq_start_id, _xxh3(loss_mask, _xxh3(input_ids) if ids_digest is None else ids_digest))


def sequence_digest(input_ids: Int32Array, loss_mask: UInt8Array) -> int:
    """Return the digest of a sequence of contiguous arrays: xxh3_64 of loss_mask, seeded with that of input_ids."""
    return _xxh3(loss_mask, _xxh3(input_ids))


def pack_digest(pack: Pack) -> int:
    """Return the digest of a pack, which may have strided arrays and media; see `content_digest`."""
    ids, mask, starts = map(np.ascontiguousarray, (pack.input_ids, pack.loss_mask, pack.seq_start_id))
    digest = content_digest(ids, mask, starts)
    return fold_media(digest, media_rows(pack), pack.seq_start_id) if pack.media else digest


def dataset_fingerprint(digests: Iterable[UInt64Array]) -> str:
    """Return the xxh3_128 hash (hexadecimal) of all pack digests in dataset order, given in any number of pieces."""
    total = xxhash.xxh3_128()
    for piece in digests:
        total.update(np.ascontiguousarray(piece, dtype="<u8").data)
    return str(total.hexdigest())


@dataclass(frozen=True, eq=False)
class PackIndex:
    """Index arrays of a dataset, read-only (memory-mapped if they come from an index folder).

    Attributes:
        pack_offsets: int64 [packs + 1]; pack p contains sequences pack_offsets[p] to pack_offsets[p + 1].
        sequence_lengths: int32 [sequences], stored tokens.
        checksums: uint64 [packs], `pack_digest` of each pack; None for files without a manifest, and for plans.
        media: MEDIA_DTYPE [media]; None for datasets without media.
    """

    pack_offsets: Int64Array
    sequence_lengths: Int32Array
    checksums: UInt64Array | None
    media: MediaRows | None = None


def lengths_from_starts(
    num_tokens: Int64Array, starts: npt.NDArray[Any], offsets: npt.NDArray[Any], *, where: str, first_row: int = 0
) -> Int32Array:
    """Compute sequence lengths, int32 [sequences], from the sequence starts of packs.

    `num_tokens` is int64 [packs]; the starts of pack p are starts[offsets[p]:offsets[p + 1]]; `offsets` is [packs + 1].
    Errors name the file `where` and the pack, counted from `first_row`.
    """
    counts = np.diff(offsets.astype(np.int64))
    if counts.shape[0] == 0:
        return np.zeros(0, np.int32)
    is_bad = (counts <= 0) | (offsets[:-1] < 0) | (offsets[1:] > starts.shape[0])
    if is_bad.any():
        row = first_row + int(np.argmax(is_bad))
        raise FormatError(f"pack {row:,} refers to no sequences, or to more than are stored", where=where)
    own = starts[int(offsets[0]) : int(offsets[-1])]
    zeros = 0
    # Check before allocating memory: a sparse file can claim any number of zeros without using disk space.
    for begin in range(0, own.shape[0], _BLOCK):
        zeros += int(np.count_nonzero(own[begin : begin + _BLOCK] == 0))
        if zeros > counts.shape[0] + _BLOCK:
            what = f"has {zeros:,} sequences that start at 0 in {counts.shape[0]:,} packs"
            raise FormatError(what, where=where)
    begins = own.astype(np.int64)
    lasts = np.cumsum(counts) - 1
    ends = np.append(begins[1:], 0)
    ends[lasts] = num_tokens
    lengths = ends - begins
    bad = (lengths <= 0) | (lengths > np.iinfo(np.int32).max)
    firsts = lasts - counts + 1
    bad[firsts] |= begins[firsts] != 0
    if bad.any():
        row = first_row + int(np.searchsorted(lasts, int(np.argmax(bad))))
        what = f"the seq_start_id of pack {row:,} do not start at 0, do not increase, or exceed its tokens"
        raise FormatError(what, where=where)
    return lengths.astype(np.int32)


def index_names(manifest: Manifest) -> tuple[str, ...]:
    """Return the names of a dataset's index files; a plan is written without reading packs and has no checksums."""
    names = INDEX_NAMES if manifest.fingerprint else (PACK_OFFSETS, SEQUENCE_LENGTHS)
    return (*names, INDEX) if manifest.num_media else names


def check_offsets(offsets: Int64Array, end: int, *, where: object) -> None:
    """Raise FormatError unless offsets increase strictly from 0 to `end`."""
    if offsets.shape[0] < 2 or offsets[0] != 0 or offsets[-1] != end or (offsets[1:] <= offsets[:-1]).any():
        raise FormatError(f"the offsets do not rise from 0 to {end:,}", where=str(where), fix="copy the dataset again")


def load_index(folder: Folder, manifest: Manifest) -> PackIndex:
    """Memory-map the index of a dataset folder or its local copy, after verifying its hashes.

    All batches are planned from these lengths, and no pack would reveal an error in them, so they are compared with the
    manifest's hashes once per process. Measured: 30 ms for 13 million sequences in 2 million packs.
    """
    # Keep the entry until all files are mapped; maps remain valid after eviction.
    entry = folder.fetch(manifest.index)
    root = entry.folder
    for error in file_problems(LocalFolder(root), manifest.index, "file of the index", hashes=True):
        raise error
    offsets = map_npy(root / PACK_OFFSETS, np.dtype(np.int64), (manifest.num_packs + 1,))
    lengths = map_npy(root / SEQUENCE_LENGTHS, np.dtype(np.int32), (manifest.num_sequences,))
    checksums = None
    if PACK_CHECKSUMS in index_names(manifest):
        checksums = map_npy(root / PACK_CHECKSUMS, np.dtype(np.uint64), (manifest.num_packs,))
    check_offsets(offsets, manifest.num_sequences, where=root / PACK_OFFSETS)
    if lengths.min() < 1:
        raise FormatError(f"sequence {int(np.argmin(lengths)):,} has no tokens", where=str(root / SEQUENCE_LENGTHS))
    media = None
    if manifest.num_media:
        media = map_npy(root / INDEX, MEDIA_DTYPE, (manifest.num_media,))
        # Media of a plan refer to shards of its store.
        num_shards = len(manifest.shards) if manifest.fingerprint else np.iinfo(np.int32).max
        check_rows(media, lengths, num_shards, where=str(root / INDEX))
    return PackIndex(offsets, lengths, checksums, media)


@dataclass(frozen=True, eq=False)
class IndexPart:
    """Index entries of one shard.

    Attributes:
        sequence_counts: int32 [packs], or int64 if computed from the shard's files.
        sequence_lengths: int32 [sequences].
        checksums: uint64 [packs]; empty if the files contain no index.
        media: rows with sequences numbered from 0 and shard 0.
        pack_size: pack size stored in the files, if any.
        manifest: manifest stored in the file, if any.
    """

    sequence_counts: Int32Array | Int64Array
    sequence_lengths: Int32Array
    checksums: UInt64Array = field(default_factory=lambda: np.zeros(0, np.uint64))
    media: MediaRows = field(default_factory=lambda: np.zeros(0, MEDIA_DTYPE))
    pack_size: int | None = None
    manifest: Manifest | None = None

    def to_bytes(self) -> bytes:
        arrays = (self.sequence_counts, self.sequence_lengths, self.checksums, self.media)
        return b"".join(array.tobytes() for array in arrays)

    @classmethod
    def from_bytes(cls, data: bytes, num_packs: int, num_sequences: int, num_media: int = 0) -> IndexPart:
        """Parse the result of `to_bytes`; raises ValueError for a wrong number of bytes."""
        ends = np.cumsum([4 * num_packs, 4 * num_sequences, 8 * num_packs, MEDIA_DTYPE.itemsize * num_media])
        if min(num_packs, num_sequences, num_media) < 0 or ends[-1] != len(data):
            raise ValueError(f"{len(data)} bytes for {num_packs} packs of {num_sequences} sequences")
        return cls(
            np.frombuffer(data[: ends[0]], np.int32),
            np.frombuffer(data[ends[0] : ends[1]], np.int32),
            np.frombuffer(data[ends[1] : ends[2]], np.uint64),
            np.frombuffer(data[ends[2] :], MEDIA_DTYPE),
        )


class IndexBuilder:
    def __init__(self) -> None:
        self._counts: list[int] = []
        self._lengths: list[Int32Array] = []
        self._digests: list[int] = []
        self._media: list[MediaRows] = []
        self._num_sequences = self._num_tokens = self._num_trained = self._num_media = 0

    def append(self, pack: Pack, media: MediaRows | None = None) -> None:
        """Add a pack and the rows of its media returned by `MediaWriter`."""
        starts = np.ascontiguousarray(pack.seq_start_id)
        # Takes a fifth of the time of np.diff with `append`.
        lengths = np.empty_like(starts)
        np.subtract(starts[1:], starts[:-1], out=lengths[:-1])
        lengths[-1] = len(pack) - starts[-1]
        self._counts.append(lengths.shape[0])
        self._lengths.append(lengths)
        ids, mask = np.ascontiguousarray(pack.input_ids), np.ascontiguousarray(pack.loss_mask)
        digest = content_digest(ids, mask, starts)
        if media is not None:
            digest = fold_media(digest, media, starts)
            media["sequence"] += self._num_sequences
            self._media.append(media)
            self._num_media += media.shape[0]
        self._digests.append(digest)
        self._num_sequences += lengths.shape[0]
        self._num_tokens += len(pack)
        self._num_trained += int(np.count_nonzero(pack.loss_mask))

    def __len__(self) -> int:
        return len(self._counts)

    def totals(self) -> Totals:
        return Totals(len(self._counts), self._num_sequences, self._num_tokens, self._num_trained, self._num_media)

    def build(self) -> IndexPart:
        return IndexPart(
            np.array(self._counts, np.int32),
            np.concatenate(self._lengths).astype(np.int32, copy=False),
            np.array(self._digests, np.uint64),
            np.concatenate([np.zeros(0, MEDIA_DTYPE), *self._media]),
        )


def write_index(folder: Folder, load_parts: Callable[[], Iterator[IndexPart]], totals: Totals) -> str:
    """Write the index files from parts, loaded one at a time for each file; return the dataset's fingerprint."""

    def offsets() -> Iterator[npt.NDArray[Any]]:
        yield np.zeros(1, np.int64)
        last = 0
        for part in load_parts():
            ends = last + np.cumsum(part.sequence_counts, dtype=np.int64)
            last = int(ends[-1])
            yield ends

    def media() -> Iterator[MediaRows]:
        first = 0
        for shard, part in enumerate(load_parts()):
            rows = part.media.copy()
            rows["sequence"] += first
            rows["shard"] = shard
            first += part.sequence_lengths.shape[0]
            yield rows

    write_npy(folder, PACK_OFFSETS, np.dtype("<i8"), totals.num_packs + 1, offsets())
    if totals.num_media:
        write_npy(folder, INDEX, MEDIA_DTYPE, totals.num_media, media())
    lengths = (part.sequence_lengths for part in load_parts())
    write_npy(folder, SEQUENCE_LENGTHS, np.dtype("<i4"), totals.num_sequences, lengths)
    write_npy(folder, PACK_CHECKSUMS, np.dtype("<u8"), totals.num_packs, (part.checksums for part in load_parts()))
    return dataset_fingerprint(part.checksums for part in load_parts())


def write_npy(folder: Folder, name: str, dtype: np.dtype[Any], count: int, pieces: Iterable[npt.NDArray[Any]]) -> None:
    """Write pieces with `count` elements in total as one `.npy` file, one block at a time."""

    def blocks() -> Iterator[bytes | memoryview]:
        written = 0
        yield npy_header(dtype.descr if dtype.names else dtype.str, (count,))
        for piece in pieces:
            written += piece.shape[0]
            for start in range(0, piece.shape[0], _BLOCK):
                yield np.ascontiguousarray(piece[start : start + _BLOCK], dtype).view(np.uint8).data
        assert written == count

    folder.write(name, blocks())


@dataclass(frozen=True)
class KeptFingerprint:
    """Fingerprint of a plan, stored in its folder, or in the local cache if the plan is in object storage.

    It is valid for one manifest, and therefore for one plan over one store.
    """

    folder: Path
    manifest_xxh3: str

    @classmethod
    def of(cls, folder: Folder, manifest: Manifest) -> KeptFingerprint:
        digest = xxhash.xxh3_64_hexdigest(manifest.to_json().encode())
        if isinstance(folder, BucketFolder):
            return cls(LocalCache().folder / "fingerprints" / digest, digest)
        return cls(Path(folder.where()), digest)

    def load(self) -> str | None:
        """Return the stored fingerprint, or None if there is none."""
        try:
            values = json.loads((self.folder / FINGERPRINT_NAME).read_bytes())
            return str(values["fingerprint"]) if values["manifest_xxh3"] == self.manifest_xxh3 else None
        except (OSError, ValueError, KeyError, TypeError, RecursionError):
            return None

    def take(self, compute: Callable[[], str]) -> str:
        """Return the stored fingerprint, or compute and store it.

        If all ranks of a job call this at once, one per node computes and the others wait. If the folder is read-only,
        every call computes.
        """
        with contextlib.ExitStack() as stack:
            # On network file systems without locks, every process computes.
            with contextlib.suppress(OSError):
                self.folder.mkdir(parents=True, exist_ok=True)
                descriptor = os.open(self.folder, os.O_RDONLY)
                stack.callback(os.close, descriptor)
                fcntl.flock(descriptor, fcntl.LOCK_EX)
            known = self.load()
            if known is None:
                known = compute()
                values = {"manifest_xxh3": self.manifest_xxh3, "fingerprint": known}
                with contextlib.suppress(OSError):
                    write_atomically(self.folder / FINGERPRINT_NAME, (json.dumps(values, indent=1) + "\n").encode())
        return known
