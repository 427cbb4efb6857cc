"""Tokenised sequences on disk, between tokenising and packing: memory does not grow with the data."""

from __future__ import annotations

from array import array
from pathlib import Path
from typing import BinaryIO

import numpy as np
import numpy.typing as npt

from harness.records import Int32Array, Int64Array, Pack, UInt8Array

_IDS, _MASK = "input_ids.bin", "loss_mask.bin"


class SpoolWriter:
    """Appends sequences to two files in a folder; holds 4 bytes a sequence in memory."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir(parents=True)
        self._folder = folder
        self._ids: BinaryIO = (folder / _IDS).open("wb")
        self._mask: BinaryIO = (folder / _MASK).open("wb")
        self._lengths = array("i")
        self._trained_tokens = 0

    def append(self, input_ids: Int32Array, loss_mask: UInt8Array, lengths: Int32Array) -> None:
        """Add sequences that lie end to end.

        Args:
            input_ids: int32 [n].
            loss_mask: uint8 [n].
            lengths: int32 [sequences], which add up to n.
        """
        self._ids.write(np.ascontiguousarray(input_ids).data)
        self._mask.write(np.ascontiguousarray(loss_mask).data)
        self._lengths.frombytes(lengths.astype(np.intc).tobytes())
        self._trained_tokens += int(loss_mask.sum())

    def close(self) -> None:
        self._ids.close()
        self._mask.close()

    def finish(self) -> Spool:
        """What was written, for reading."""
        self.close()
        return Spool(self._folder, np.array(self._lengths, np.int32), self._trained_tokens)


class Spool:
    """Reads sequences back, by number.

    Attributes:
        lengths: int32 [sequences].
        num_trained_tokens: ones in the loss mask.
    """

    def __init__(self, folder: Path, lengths: Int32Array, num_trained_tokens: int) -> None:
        self.lengths = lengths
        self.num_trained_tokens = num_trained_tokens
        self._offsets = np.concatenate([np.zeros(1, np.int64), np.cumsum(lengths, dtype=np.int64)])
        # An empty file cannot be mapped.
        empty = len(lengths) == 0
        self._ids = np.empty(0, np.int32) if empty else np.memmap(folder / _IDS, np.int32, "r")
        self._mask = np.empty(0, np.uint8) if empty else np.memmap(folder / _MASK, np.uint8, "r")

    def __len__(self) -> int:
        return len(self.lengths)

    @property
    def num_tokens(self) -> int:
        return int(self._offsets[-1])

    def pack(self, sequence_ids: Int64Array) -> Pack:
        """The sequences end to end in the order given."""
        spans = [slice(self._offsets[i], self._offsets[i + 1]) for i in sequence_ids.tolist()]
        lengths = self.lengths[sequence_ids]
        starts: npt.NDArray[np.int32] = np.cumsum(lengths, dtype=np.int32) - lengths
        return Pack(
            input_ids=np.concatenate([self._ids[span] for span in spans]),
            loss_mask=np.concatenate([self._mask[span] for span in spans]),
            seq_start_id=starts,
        )
