"""Exchange of sequences between ranks until they cost the same."""

from __future__ import annotations

import numpy as np

from harness.records import Float64Array, Int64Array, Schedule
from harness.schedule.batch import GlobalBatch

# Where the goal can be reached at all, a few exchanges a rank are enough.
_EXCHANGES_A_RANK, _EXCHANGES = 3, 40
# Weight of the wait that an exchange adds to a microbatch, over the cost that it takes off the busier rank. It falls
# to 0 with the number of exchanges, because the last improvements often cost a wait.
_WAIT_WEIGHT = 2.0
# Number of least busy ranks that the busiest one tries to exchange with.
_PARTNERS = 3


def exchange_sequences(
    position: Int64Array, costs: Float64Array, batch: GlobalBatch, num_microbatches: int, goal: float
) -> Schedule:
    """Move or swap single sequences from the busiest rank to the least busy ones, as far as rows have room.

    An exchange is scored by the cost that it takes off the busier of the two ranks, less the wait that it adds for the
    slowest row of a microbatch.

    Args:
        position: int64 [sequences], the row of each; row m * dp_size + d is rank d's in microbatch m.
        costs: float64 [sequences].
        batch: lengths, and the tokens that a row holds.
        num_microbatches: rows of each rank.
        goal: stop when the busiest rank costs this many times the mean.
    """
    state = _Placement(position, costs, batch, num_microbatches)
    most = _EXCHANGES_A_RANK * batch.dp_size + _EXCHANGES
    for number in range(most):
        busiest = int(np.argmax(state.rank_costs))
        if state.rank_costs[busiest] <= goal * state.mean:
            break
        weight = _WAIT_WEIGHT * (1 - number / most)
        for partner in np.argsort(state.rank_costs, kind="stable")[:_PARTNERS]:
            if state.exchange(busiest, int(partner), weight):
                break
        else:
            break
    row_of = state.rows()
    offsets = np.zeros(num_microbatches * batch.dp_size + 1, dtype=np.int64)
    np.cumsum(np.bincount(row_of, minlength=offsets.shape[0] - 1), out=offsets[1:])
    return Schedule(batch.dp_size, np.argsort(row_of, kind="stable"), offsets)


class _Placement:
    """Costs and free tokens of rows while sequences change places.

    Sequences are numbered from 1 by rising cost. Number 0 costs nothing and means no sequence: a swap with it is a
    move.
    """

    def __init__(self, position: Int64Array, costs: Float64Array, batch: GlobalBatch, num_microbatches: int) -> None:
        self.dp_size = batch.dp_size
        self.by_cost = np.argsort(costs, kind="stable")
        self.costs = np.concatenate([np.zeros(1), costs[self.by_cost]])
        self.lengths = np.concatenate([np.zeros(1, dtype=np.int64), batch.lengths[self.by_cost]])
        self.row_of = np.concatenate([np.zeros(1, dtype=np.int64), position[self.by_cost]])
        self.rank_of = (self.row_of % batch.dp_size).astype(np.int32)
        num_rows = num_microbatches * batch.dp_size
        self.row_costs = np.bincount(self.row_of, weights=self.costs, minlength=num_rows)
        tokens = np.bincount(self.row_of, weights=self.lengths, minlength=num_rows)
        self.free = batch.row_tokens - np.rint(tokens).astype(np.int64)
        by_microbatch = self.row_costs.reshape(num_microbatches, batch.dp_size)
        # Cost that a row can gain before its microbatch takes longer.
        self.slack = (by_microbatch.max(axis=1, keepdims=True) - by_microbatch).reshape(-1)
        self.rank_costs = by_microbatch.sum(axis=0)
        self.mean = float(self.rank_costs.mean())

    def rows(self) -> Int64Array:
        """Return the row of each sequence, in the order of the batch, int64 [sequences]."""
        row_of = np.empty(self.by_cost.shape[0], dtype=np.int64)
        row_of[self.by_cost] = self.row_of[1:]
        return row_of

    def exchange(self, busy: int, idle: int, wait_weight: float) -> bool:
        """Make the best exchange between two ranks; return False where none is possible."""
        gap = float(self.rank_costs[busy] - self.rank_costs[idle])
        # The change that brings one of the two to the mean.
        wanted = min(float(self.rank_costs[busy]) - self.mean, self.mean - float(self.rank_costs[idle]))
        if wanted <= 0:
            return False
        self.rank_of[0] = -1
        givers = (self.rank_of == busy).nonzero()[0]
        self.rank_of[0] = idle
        self.row_of[0] = idle + self.dp_size * int(np.argmax(self.free[idle :: self.dp_size]))
        takers = (self.rank_of == idle).nonzero()[0]

        # For every giver, the takers whose cost differs from its own by about that.
        near = np.searchsorted(self.costs[takers], self.costs[givers] - wanted)
        near = np.clip(near[:, None] + np.arange(-2, 2), 0, takers.shape[0] - 1).reshape(-1)
        given, taken = np.repeat(givers, 4), takers[near]
        change = self.costs[given] - self.costs[taken]
        rows = self.row_of[taken]
        allowed = (self.free[rows] + self.lengths[taken] >= self.lengths[given]) & (change > 0) & (change < gap)
        score = np.abs(change - wanted) + wait_weight * np.maximum(0.0, change - self.slack[rows])
        score[~allowed] = np.inf
        best = int(np.argmin(score)) if score.shape[0] else 0
        if not score.shape[0] or score[best] == np.inf:
            return False
        self._swap(int(given[best]), int(taken[best]))
        self.rank_costs[busy] -= change[best]
        self.rank_costs[idle] += change[best]
        return True

    def _swap(self, given: int, taken: int) -> None:
        rows = int(self.row_of[given]), int(self.row_of[taken])
        cost = self.costs[given] - self.costs[taken]
        length = self.lengths[given] - self.lengths[taken]
        for row, sign in zip(rows, (-1, 1), strict=True):
            self.row_costs[row] += sign * cost
            self.free[row] -= sign * length
            first = row - row % self.dp_size
            costs = self.row_costs[first : first + self.dp_size]
            self.slack[first : first + self.dp_size] = costs.max() - costs
        self.row_of[given], self.row_of[taken] = rows[1], rows[0]
        self.rank_of[given], self.rank_of[taken] = rows[1] % self.dp_size, rows[0] % self.dp_size
