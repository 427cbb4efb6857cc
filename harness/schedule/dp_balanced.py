"""Rows filled in order, then split until every rank has the same number."""

from __future__ import annotations

import numpy as np

from harness.records import Schedule
from harness.schedule.batch import GlobalBatch, row_offsets


def place_dp_balanced(batch: GlobalBatch) -> Schedule:
    """Fill rows in order, then move sequences of the last rows to rows of their own.

    While the number of rows is not a multiple of dp_size * group_size, move the last sequence of the last row with
    several sequences to a new row at the end. If no row is left to split, append empty rows.

    Source: the placement of `DpBalancedScheduler` in Megatron-LM's `megatron/core/datasets/data_schedule.py`, which
    stops with "Not enough samples to move" where this one adds empty rows.
    """
    num_sequences = batch.lengths.shape[0]
    ends = np.cumsum(batch.lengths)
    # For a row that starts at each sequence: the first sequence that does not fit.
    stops = np.searchsorted(ends, ends - batch.lengths + batch.max_tokens_per_row, side="right").data
    starts: list[int] = []
    stop = 0
    while stop < num_sequences:
        starts.append(stop)
        stop = stops[stop]

    counts = np.diff(starts, append=num_sequences).tolist()
    split: list[int] = []
    missing = -len(counts) % batch.rows_per_group
    row = len(counts) - 1
    while missing and row >= 0:
        if counts[row] > 1:
            counts[row] -= 1
            split.append(starts[row] + counts[row])
            missing -= 1
        else:
            row -= 1
    stays = np.ones(num_sequences, dtype=np.bool_)
    stays[split] = False
    order = np.concatenate([np.flatnonzero(stays), np.asarray(split, dtype=np.int64)])
    return Schedule(batch.dp_size, order, row_offsets(counts + [1] * len(split), batch.rows_per_group))
