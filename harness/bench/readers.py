"""Readers to compare with: Megatron-Bridge's Parquet, Hugging Face's Arrow, and ours without its checks."""

from __future__ import annotations

import importlib
from bisect import bisect_right
from collections.abc import Iterable, Mapping
from itertools import accumulate, islice
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.parquet as pq

from harness.formats import PackReader, ShardReader, open_dataset
from harness.records import Int64Array, Pack

ROWS_PER_GROUP = 500
_BRIDGE_TYPES = {"input_ids": pa.int64(), "seq_start_id": pa.int64(), "loss_mask": pa.int8()}
_ARROW_TYPES = {"input_ids": pa.int32(), "loss_mask": pa.uint8(), "seq_start_id": pa.int32()}


def _table(packs: Iterable[Pack], types: Mapping[str, Any]) -> Any:
    """Return an Arrow table of one row a pack, with the columns and element types of `types`."""
    rows = list(packs)
    columns = []
    for name, kind in types.items():
        arrays = [getattr(pack, name) for pack in rows]
        offsets = np.cumsum([0, *(array.shape[0] for array in arrays)]).astype(np.int32)
        columns.append(pa.ListArray.from_arrays(pa.array(offsets), pa.array(np.concatenate(arrays)).cast(kind)))
    return pa.table(columns, names=list(types))


def write_bridge_file(path: Path, packs: Iterable[Pack]) -> None:
    """Write packs with the types, row groups and compression of Megatron-Bridge."""
    schema = pa.schema([(name, pa.list_(kind)) for name, kind in _BRIDGE_TYPES.items()])
    with pq.ParquetWriter(path, schema) as writer:
        rest = iter(packs)
        while group := list(islice(rest, ROWS_PER_GROUP)):
            writer.write_table(_table(group, _BRIDGE_TYPES).cast(schema), row_group_size=ROWS_PER_GROUP)


class BridgeReader:
    """Random access to one file the way Megatron-Bridge reads packed Parquet, a row group at a time.

    Written for the bench from what `GPTSFTPackedParquetDataset` of NVIDIA-NeMo/Megatron-Bridge does: files of 500-row
    groups as pyarrow writes them by default, of int64 ids and starts and an int8 mask; the last row group read is kept
    as an Arrow table; a row becomes Python lists, and those become arrays when a batch is collated.
    """

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
        """Return input_ids int64 [n], seq_start_id int64 [k] and loss_mask int8 [n] of one pack."""
        group = bisect_right(self._starts, index) - 1
        if group != self._group:
            self._table = self._file.read_row_group(group, columns=list(_BRIDGE_TYPES))
            self._group = group
        row = index - self._starts[group]
        ids, starts, mask = (self._table.column(name)[row].as_py() for name in _BRIDGE_TYPES)
        return np.array(ids, np.int64), np.array(starts, np.int64), np.array(mask, np.int8)


def open_arrow(path: Path, packs: Iterable[Pack]) -> Any | None:
    """Return a `datasets.Dataset` of these packs in mapped, uncompressed Arrow files, written to `path` if missing.

    Returns:
        None where `datasets` is not installed; else `dataset[i]` is a dict of numpy arrays.
    """
    try:
        datasets = importlib.import_module("datasets")
    except ImportError:
        return None
    datasets.disable_progress_bars()
    if not path.exists():
        datasets.Dataset(_table(packs, _ARROW_TYPES)).save_to_disk(str(path))
    return datasets.load_from_disk(str(path)).with_format("numpy")


class UncheckedReader(PackReader):
    """Reads without comparing checksums, neither of packs nor of Parquet's pages. Never train from it."""

    def _check_pack(self, handle: ShardReader, row: int, pack: Pack, pack_id: int) -> None:
        return None

    def _open(self, shard: int) -> ShardReader:
        handle = super()._open(shard)
        if self.format != "parquet":
            return handle
        handle.close()
        parquet_shard: Any = type(handle)
        unchecked: ShardReader = parquet_shard(self.files()[shard], self.pack_size, check_pages=False)
        return unchecked


def open_unchecked(path: Path) -> PackReader:
    """Open a dataset folder for reading without checksums, to measure what checking costs; sizes are still checked."""
    reader = open_dataset(path)
    reader.__class__ = UncheckedReader
    return reader
