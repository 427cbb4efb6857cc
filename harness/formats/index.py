"""The index of a dataset: where each pack's sequences are, how long they are, and each pack's checksum."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from harness.errors import FormatError
from harness.formats.digest import UInt64Array, dataset_fingerprint
from harness.formats.manifest import Manifest
from harness.records import Int32Array, Int64Array
from harness.storage import NpyStream, file_digest, map_npy

INDEX_FOLDER = "index"
PACK_OFFSETS = "pack_offsets.npy"
SEQUENCE_LENGTHS = "sequence_lengths.npy"
PACK_CHECKSUMS = "pack_checksums.npy"
INDEX_NAMES = (PACK_OFFSETS, SEQUENCE_LENGTHS, PACK_CHECKSUMS)

# Entries handled at a time when an index is written: bounds memory at any number of sequences.
_BLOCK = 1 << 18
_COPY_AGAIN = "copy the dataset again; its index is damaged"


@dataclass(frozen=True, eq=False)
class PackIndex:
    """Lengths of a dataset's sequences, as read-only arrays (memory-mapped where they come from an index folder).

    Attributes:
        pack_offsets: int64 [packs + 1]; pack p holds sequences pack_offsets[p] to pack_offsets[p + 1].
        sequence_lengths: int32 [sequences], stored tokens.
        checksums: uint64 [packs], `content_digest` of each pack; None for files without a manifest, and for plans.
    """

    pack_offsets: Int64Array
    sequence_lengths: Int32Array
    checksums: UInt64Array | None

    def lengths_of(self, pack_id: int) -> Int32Array:
        """int32 [k]: stored tokens of the sequences of one pack; raises FormatError where the index is damaged."""
        start, end = int(self.pack_offsets[pack_id]), int(self.pack_offsets[pack_id + 1])
        if not 0 <= start < end <= self.sequence_lengths.shape[0]:
            raise FormatError(
                f"pack {pack_id:,} has sequences {start:,} to {end:,} of {self.sequence_lengths.shape[0]:,}"
            )
        return self.sequence_lengths[start:end]


def build_index(sequence_counts: Sequence[Int64Array], sequence_lengths: Sequence[Int32Array]) -> PackIndex:
    """An index in memory, for files without a manifest: one entry of each argument per file, in order."""
    counts = np.concatenate(sequence_counts) if sequence_counts else np.zeros(0, np.int64)
    offsets = np.zeros(counts.shape[0] + 1, np.int64)
    np.cumsum(counts, out=offsets[1:])
    lengths = np.concatenate(sequence_lengths) if sequence_lengths else np.zeros(0, np.int32)
    lengths = lengths.astype(np.int32, copy=False)
    offsets.flags.writeable = False
    lengths.flags.writeable = False
    return PackIndex(offsets, lengths, None)


def lengths_from_starts(
    num_tokens: Int64Array, starts: npt.NDArray[Any], offsets: npt.NDArray[Any], *, where: str, first_row: int = 0
) -> Int32Array:
    """Sequence lengths of packs that store where their sequences start.

    Args:
        num_tokens: int64 [packs], tokens of each pack.
        starts: start positions of the sequences of all packs, end to end.
        offsets: integers [packs + 1]; pack p has starts[offsets[p]:offsets[p + 1]].
        where: file, for errors.
        first_row: number of the first pack, for errors.

    Returns:
        int32 [sequences].

    Raises:
        FormatError: a pack has no sequences, or its starts are not 0 and strictly rising below its tokens.
    """
    counts = np.diff(offsets.astype(np.int64))
    if counts.shape[0] == 0:
        return np.zeros(0, np.int32)
    if (counts <= 0).any() or not 0 <= offsets[0] <= offsets[-1] <= starts.shape[0]:
        row = first_row + int(np.argmax(counts <= 0))
        raise FormatError(f"pack {row:,} has no sequences, or more than are stored", where=where)
    begins = starts[int(offsets[0]) : int(offsets[-1])].astype(np.int64)
    lasts = np.cumsum(counts) - 1
    ends = np.append(begins[1:], 0)
    ends[lasts] = num_tokens
    lengths = ends - begins
    bad = (lengths <= 0) | (lengths > np.iinfo(np.int32).max)
    firsts = lasts - counts + 1
    bad[firsts] |= begins[firsts] != 0
    if bad.any():
        row = first_row + int(np.searchsorted(lasts, int(np.argmax(bad))))
        raise FormatError(
            f"pack {row:,} has seq_start_id that do not start at 0 and rise strictly below its tokens", where=where
        )
    return lengths.astype(np.int32)


def index_names(manifest: Manifest) -> tuple[str, ...]:
    """Files of a dataset's index. A plan over other sequences has no checksums of packs: nobody has read them yet."""
    return INDEX_NAMES if manifest.fingerprint else (PACK_OFFSETS, SEQUENCE_LENGTHS)


def load_index(folder: Path, manifest: Manifest) -> PackIndex:
    """Map the index of a dataset folder, after a look at each of its bytes.

    Every batch is planned from these lengths, and no pack could tell that they are wrong: so they are compared with
    the manifest's hashes here, once a process. Measured: 30 ms for 13 million sequences in 2 million packs.

    Raises:
        FormatError: a file of the index is not what was written.
    """
    index = folder / INDEX_FOLDER
    for stored in manifest.index:
        path = folder / stored.path
        try:
            found = file_digest(path)
        except OSError as error:
            raise FormatError(
                f"a file of the index that the manifest names cannot be read: {error.strerror}",
                where=str(path),
                fix=_COPY_AGAIN,
            ) from error
        if found != stored.xxh3:
            raise FormatError(
                f"the file has the hash {found}, the manifest says {stored.xxh3}", where=str(path), fix=_COPY_AGAIN
            )
    offsets = map_npy(index / PACK_OFFSETS, np.dtype(np.int64), (manifest.num_packs + 1,))
    lengths = map_npy(index / SEQUENCE_LENGTHS, np.dtype(np.int32), (manifest.num_sequences,))
    checksums = None
    if PACK_CHECKSUMS in index_names(manifest):
        checksums = map_npy(index / PACK_CHECKSUMS, np.dtype(np.uint64), (manifest.num_packs,))
    if offsets[0] != 0 or offsets[-1] != manifest.num_sequences:
        raise FormatError(
            f"the index runs from sequence {int(offsets[0]):,} to {int(offsets[-1]):,}, "
            f"the manifest counts {manifest.num_sequences:,}",
            where=str(index / PACK_OFFSETS),
            fix=_COPY_AGAIN,
        )
    return PackIndex(offsets, lengths, checksums)


@dataclass(frozen=True, eq=False)
class IndexPart:
    """The index entries of one shard: sequences per pack int32, sequence lengths int32, checksums uint64."""

    sequence_counts: Int32Array
    sequence_lengths: Int32Array
    checksums: UInt64Array


def write_index(
    folder: Path, load_parts: Callable[[], Iterator[IndexPart]], *, num_packs: int, num_sequences: int
) -> str:
    """Write the three index files from parts, which are read three times and held one at a time.

    Returns:
        the dataset's fingerprint.
    """

    def offsets() -> Iterator[npt.NDArray[Any]]:
        yield np.zeros(1, np.int64)
        last = 0
        for part in load_parts():
            ends = last + np.cumsum(part.sequence_counts, dtype=np.int64)
            last = int(ends[-1])
            yield ends

    (folder / INDEX_FOLDER).mkdir(exist_ok=True)
    index = folder / INDEX_FOLDER
    write_npy(index / PACK_OFFSETS, np.dtype("<i8"), num_packs + 1, offsets())
    write_npy(
        index / SEQUENCE_LENGTHS, np.dtype("<i4"), num_sequences, (part.sequence_lengths for part in load_parts())
    )
    write_npy(index / PACK_CHECKSUMS, np.dtype("<u8"), num_packs, (part.checksums for part in load_parts()))
    return dataset_fingerprint(part.checksums for part in load_parts())


def write_npy(path: Path, dtype: np.dtype[Any], count: int, pieces: Iterator[npt.NDArray[Any]]) -> None:
    """Write arrays of `count` numbers in all as one `.npy` file, a block at a time."""
    file = NpyStream(path, dtype)
    try:
        for piece in pieces:
            for start in range(0, piece.shape[0], _BLOCK):
                file.write(piece[start : start + _BLOCK])
        assert file.num_rows == count
        file.finish()
    except BaseException:
        file.abort()
        raise
