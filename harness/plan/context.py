"""Context parallelism by one size for all rows, and by a size for each, for the lengths of a dataset."""

from __future__ import annotations

import numpy as np

from harness.records import Int64Array
from harness.schedule import DYNAMIC, SequenceCost, measure_imbalance, schedule
from harness.schedule.batch import largest_share

# Sequences that are placed, which takes a second.
_MOST_SEQUENCES = 100_000


def compare_context_sizes(
    lengths: Int64Array, *, sequences: int, ranks: int, max_tokens_per_rank: int, cost: SequenceCost
) -> dict[str, float]:
    """Return the cost of a step with each context-parallel size of all rows, and with `dynamic_context`.

    Args:
        lengths: int64 [sequences], model tokens; a global batch is drawn from them.
        sequences: of a global batch.
        ranks: data-parallel times context-parallel ranks.
        max_tokens_per_rank: of one microbatch.
        cost: of training a sequence.

    Returns:
        costs of the busiest rank over that of ranks that divide the whole work evenly and exchange nothing, by the
        size or DYNAMIC. Sizes that do not hold the longest sequence are left out.
    """
    drawn = np.random.default_rng(0).choice(lengths, size=min(sequences, _MOST_SEQUENCES))
    even, longest, found = float(cost.of(drawn).sum()) / ranks, int(lengths.max()), dict[str, float]()
    size = 1
    while size <= largest_share(ranks):
        if longest <= size * max_tokens_per_rank:
            placed = schedule(
                "cost_balanced",
                drawn,
                dp_size=ranks // size,
                cp_size=size,
                max_tokens_per_rank=max_tokens_per_rank,
                cost=cost,
            )
            rows = np.arange(placed.row_offsets.shape[0] - 1)
            group = np.repeat(rows % placed.dp_size, np.diff(placed.row_offsets))
            work = cost.of_rank(drawn, np.full_like(drawn, size))[placed.order]
            found[str(size)] = float(np.bincount(group, weights=work).max()) / even
        size *= 2
    if longest <= largest_share(ranks) * max_tokens_per_rank:
        shared = schedule(DYNAMIC, drawn, dp_size=ranks, max_tokens_per_rank=max_tokens_per_rank, cost=cost)
        measured = measure_imbalance(shared, drawn, max_tokens_per_row=max_tokens_per_rank, cost=cost)
        found[DYNAMIC] = float(measured.rank_cost.max()) / even
    return found
