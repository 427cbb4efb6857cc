"""The index of a dataset: where each pack's sequences are, how long they are, and each pack's checksum."""

from __future__ import annotations

import mmap
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from harness.errors import FormatError
from harness.formats.digest import UInt64Array, dataset_fingerprint
from harness.formats.files import AtomicFile
from harness.formats.manifest import Manifest
from harness.records import Int32Array, Int64Array

INDEX_FOLDER = "index"
PACK_OFFSETS = "pack_offsets.npy"
SEQUENCE_LENGTHS = "sequence_lengths.npy"
PACK_CHECKSUMS = "pack_checksums.npy"
INDEX_NAMES = (PACK_OFFSETS, SEQUENCE_LENGTHS, PACK_CHECKSUMS)

# Entries handled at a time when an index is written: bounds memory at any number of sequences.
_BLOCK = 1 << 18
_MAX_HEADER_BYTES = 4096
_HEADER = re.compile(
    rb"\{'descr': '([<>|](?:[iu][1248]|f[248]|b1|O8?))', 'fortran_order': (True|False), "
    rb"'shape': \(((?: *\d{1,19}L?,?)*)\), *\} *\n?"
)


@dataclass(frozen=True, eq=False)
class PackIndex:
    """Lengths of a dataset's sequences, as read-only arrays (memory-mapped where they come from an index folder).

    Attributes:
        pack_offsets: int64 [packs + 1]; pack p holds sequences pack_offsets[p] to pack_offsets[p + 1].
        sequence_lengths: int32 [sequences], stored tokens.
        checksums: uint64 [packs], `content_digest` of each pack; None for files without a manifest.
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


def load_index(folder: Path, manifest: Manifest) -> PackIndex:
    """Map the index of a dataset folder. Nothing but headers and the ends of the arrays is read."""
    index = folder / INDEX_FOLDER
    offsets = map_npy(index / PACK_OFFSETS, np.dtype(np.int64), (manifest.num_packs + 1,))
    lengths = map_npy(index / SEQUENCE_LENGTHS, np.dtype(np.int32), (manifest.num_sequences,))
    checksums = map_npy(index / PACK_CHECKSUMS, np.dtype(np.uint64), (manifest.num_packs,))
    if offsets[0] != 0 or offsets[-1] != manifest.num_sequences:
        raise FormatError(
            f"the index runs from sequence {int(offsets[0]):,} to {int(offsets[-1]):,}, "
            f"the manifest counts {manifest.num_sequences:,}",
            where=str(index / PACK_OFFSETS),
            fix="copy the dataset again; its index is damaged",
        )
    return PackIndex(offsets, lengths, checksums)


def read_npy_header(path: Path, file: Any) -> tuple[tuple[int, ...], bool, np.dtype[Any]]:
    """Shape, whether in Fortran order, and dtype of an open `.npy` file, which is left at its first data byte."""
    start = file.read(8)
    width = {b"\x93NUMPY\x01\x00": 2, b"\x93NUMPY\x02\x00": 4}.get(start)
    if width is None:
        raise FormatError("not a .npy file of version 1 or 2", where=str(path))
    num_bytes = int.from_bytes(file.read(width), "little")
    text = file.read(num_bytes) if num_bytes <= _MAX_HEADER_BYTES else b""
    # numpy's own parser evaluates the header as Python, and fails in many ways on a damaged one.
    header = _HEADER.fullmatch(text)
    if header is None or len(text) != num_bytes:
        raise FormatError("the .npy header is damaged, or describes no plain array", where=str(path))
    descr, order, shape = (group.decode("ascii") for group in header.groups())
    sizes = tuple(int(size) for size in re.findall(r"\d+", shape))
    if max(sizes, default=0) >= 1 << 62:
        raise FormatError(f"the .npy header claims the shape {shape[:60]}", where=str(path))
    return sizes, order == "True", np.dtype(descr)


def check_npy(path: Path, file: Any, dtype: np.dtype[Any], shape: tuple[int, ...]) -> int:
    """The offset of an open `.npy` file's data, after its header and size are found as expected."""
    stored_shape, fortran, stored = read_npy_header(path, file)
    if stored != dtype or stored_shape != shape or (fortran and len(shape) > 1):
        raise FormatError(f"holds {stored} {list(stored_shape)[:4]}, expected {dtype} {list(shape)}", where=str(path))
    offset = int(file.tell())
    expected = offset + int(np.prod(shape, dtype=np.int64)) * dtype.itemsize
    num_bytes = int(file.seek(0, 2))
    if num_bytes != expected:
        raise FormatError(
            f"has {num_bytes:,} bytes, expected {expected:,}", where=str(path), fix="copy the dataset again"
        )
    return offset


def map_npy(path: Path, dtype: np.dtype[Any], shape: tuple[int, ...]) -> npt.NDArray[Any]:
    """A read-only memory map of a `.npy` file of exactly this dtype and shape."""
    try:
        with path.open("rb") as file:
            offset = check_npy(path, file, dtype, shape)
            data = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    except OSError as error:
        raise FormatError(f"cannot be read: {error.strerror}", where=str(path), fix="copy the dataset again") from None
    count = int(np.prod(shape, dtype=np.int64))
    # Not np.memmap: its subclass costs a microsecond an access, and it pickles by value.
    return np.frombuffer(data, dtype=dtype, count=count, offset=offset).reshape(shape)


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
    _write_npy(index / PACK_OFFSETS, np.dtype("<i8"), num_packs + 1, offsets())
    _write_npy(
        index / SEQUENCE_LENGTHS, np.dtype("<i4"), num_sequences, (part.sequence_lengths for part in load_parts())
    )
    _write_npy(index / PACK_CHECKSUMS, np.dtype("<u8"), num_packs, (part.checksums for part in load_parts()))
    return dataset_fingerprint(part.checksums for part in load_parts())


def _write_npy(path: Path, dtype: np.dtype[Any], count: int, pieces: Iterator[npt.NDArray[Any]]) -> None:
    file = AtomicFile(path)
    try:
        header = {"descr": np.lib.format.dtype_to_descr(dtype), "fortran_order": False, "shape": (count,)}
        np.lib.format.write_array_header_1_0(file, header)
        for piece in pieces:
            for start in range(0, piece.shape[0], _BLOCK):
                file.write(piece[start : start + _BLOCK].astype(dtype, copy=False).tobytes())
        file.finish()
    except BaseException:
        file.abort()
        raise
