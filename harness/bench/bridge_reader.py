"""The way Megatron-Bridge stores and reads packed Parquet, for comparison.

Written for the bench from what `GPTSFTPackedParquetDataset` of NVIDIA-NeMo/Megatron-Bridge does: files of 500-row
groups as pyarrow writes them by default, of int64 ids and starts and an int8 mask; the last row group that was read
is kept as an Arrow table; a row becomes Python lists, and those become arrays when a batch is collated.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable
from itertools import accumulate
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.parquet as pq

from harness.records import Int64Array, Pack

ROWS_PER_GROUP = 500
_COLUMNS = ("input_ids", "seq_start_id", "loss_mask")
_TYPES = {"input_ids": pa.int64(), "seq_start_id": pa.int64(), "loss_mask": pa.int8()}


def write_bridge_file(path: Path, packs: Iterable[Pack]) -> None:
    """Write packs with the types, row groups and compression of Megatron-Bridge."""
    schema = pa.schema([(name, pa.list_(kind)) for name, kind in _TYPES.items()])
    with pq.ParquetWriter(path, schema) as writer:
        waiting: list[Pack] = []
        for pack in packs:
            waiting.append(pack)
            if len(waiting) == ROWS_PER_GROUP:
                writer.write_table(_table(waiting, schema), row_group_size=ROWS_PER_GROUP)
                waiting = []
        if waiting:
            writer.write_table(_table(waiting, schema), row_group_size=ROWS_PER_GROUP)


def _table(packs: list[Pack], schema: Any) -> Any:
    columns = []
    for name, kind in _TYPES.items():
        rows = [getattr(pack, name) for pack in packs]
        offsets = np.cumsum([0, *(row.shape[0] for row in rows)]).astype(np.int32)
        values = pa.array(np.concatenate(rows)).cast(kind)
        columns.append(pa.ListArray.from_arrays(pa.array(offsets), values))
    return pa.Table.from_arrays(columns, schema=schema)


class BridgeReader:
    """Random access to one file, a row group at a time."""

    def __init__(self, path: Path) -> None:
        self._file = pq.ParquetFile(path)
        metadata = self._file.metadata
        sizes = [metadata.row_group(group).num_rows for group in range(metadata.num_row_groups)]
        self._starts: list[int] = list(accumulate(sizes, initial=0))
        self._group = -1
        self._table: Any = None

    def __len__(self) -> int:
        return self._starts[-1]

    def __getitem__(self, index: int) -> tuple[Int64Array, Int64Array, npt.NDArray[np.int8]]:
        """input_ids int64 [n], seq_start_id int64 [k] and loss_mask int8 [n] of one pack."""
        group = bisect_right(self._starts, index) - 1
        if group != self._group:
            self._table = self._file.read_row_group(group, columns=list(_COLUMNS))
            self._group = group
        row = index - self._starts[group]
        ids, starts, mask = (self._table.column(name)[row].as_py() for name in _COLUMNS)
        return np.array(ids, np.int64), np.array(starts, np.int64), np.array(mask, np.int8)
