"""The imbalance of a schedule: in tokens, in cost, and in time spent waiting for the slowest rank."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from harness.records import Float64Array, Int64Array, Schedule
from harness.schedule.batch import SequenceCost


@dataclass(frozen=True, eq=False, slots=True)
class Imbalance:
    """Imbalance of one global batch; a ratio of 1 is perfect.

    Attributes:
        rank_tokens: int64 [dp_size], padded tokens of each rank in the step.
        rank_cost: float64 [dp_size], cost of each rank in the step, in the unit of SequenceCost.
        token_ratio: busiest rank's tokens over the mean.
        cost_ratio: busiest rank's cost over the mean: the time of a step whose ranks synchronize once.
        sync_ratio: sum over microbatches of the busiest rank's cost, over the mean: the time of a step whose ranks
            synchronize in every microbatch, as in pipelines.
        fill: padded tokens over the tokens that the rows could hold.
        num_microbatches: rows of each rank.
    """

    rank_tokens: Int64Array
    rank_cost: Float64Array
    token_ratio: float
    cost_ratio: float
    sync_ratio: float
    fill: float
    num_microbatches: int


def measure_imbalance(
    schedule: Schedule, lengths: npt.NDArray[np.integer], *, max_tokens_per_row: int, cost: SequenceCost | None = None
) -> Imbalance:
    """Measure `schedule` of sequences of these padded lengths, in rows of `max_tokens_per_row` tokens."""
    tokens = _row_sums(schedule, np.asarray(lengths, dtype=np.float64))
    work = _row_sums(schedule, (cost or SequenceCost()).of(lengths))
    rank_tokens = tokens.sum(axis=0)
    rank_cost = work.sum(axis=0)
    return Imbalance(
        rank_tokens=np.rint(rank_tokens).astype(np.int64),
        rank_cost=rank_cost,
        token_ratio=float(rank_tokens.max() / rank_tokens.mean()),
        cost_ratio=float(rank_cost.max() / rank_cost.mean()),
        sync_ratio=float(work.max(axis=1).sum() / rank_cost.mean()),
        fill=float(tokens.sum() / (tokens.size * max_tokens_per_row)),
        num_microbatches=schedule.num_microbatches,
    )


def _row_sums(schedule: Schedule, values: Float64Array) -> Float64Array:
    """Return sums of `values` over the sequences of each row, float64 [microbatches, dp_size]."""
    rows = schedule.row_offsets.shape[0] - 1
    row_of = np.repeat(np.arange(rows), np.diff(schedule.row_offsets))
    sums = np.bincount(row_of, weights=values[schedule.order], minlength=rows).astype(np.float64)
    return sums.reshape(-1, schedule.dp_size)
