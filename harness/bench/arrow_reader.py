"""Random access the way Hugging Face's `datasets` gives it, for comparison: Arrow files, mapped, nothing compressed."""

from __future__ import annotations

import importlib
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from harness.records import Pack

_TYPES = {"input_ids": pa.int32(), "loss_mask": pa.uint8(), "seq_start_id": pa.int32()}


def open_arrow(path: Path, packs: Iterable[Pack]) -> Any | None:
    """A `datasets.Dataset` of these packs at `path`, written where it is not there yet, that gives numpy arrays.

    Returns:
        None where `datasets` is not installed; else `dataset[i]` is a dict of arrays.
    """
    try:
        datasets = importlib.import_module("datasets")
    except ImportError:
        return None
    datasets.disable_progress_bars()
    if not path.exists():
        datasets.Dataset(_table(packs)).save_to_disk(str(path))
    return datasets.load_from_disk(str(path)).with_format("numpy")


def _table(packs: Iterable[Pack]) -> Any:
    everything = list(packs)
    columns = []
    for name, kind in _TYPES.items():
        rows = [getattr(pack, name) for pack in everything]
        offsets = np.cumsum([0, *(row.shape[0] for row in rows)]).astype(np.int32)
        columns.append(pa.ListArray.from_arrays(pa.array(offsets), pa.array(np.concatenate(rows), kind)))
    return pa.table(columns, names=list(_TYPES))
