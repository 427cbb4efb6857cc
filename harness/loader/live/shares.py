"""Division of a step among ranks and folders: by weight, and evenly over ranks."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from harness.loader.blend import Blend
from harness.loader.live.position import LivePosition
from harness.loader.live.rank import BatchPlan, Offer


class StepShares:
    """The packs of one step, or sequences of a window, that are requested of each folder and rank.

    They depend on positions and on what the streams hold, never on time, so every rank computes the same, and a
    resumed run continues alike. Request number j of a folder goes to rank j modulo the ranks, so ranks advance
    evenly in every folder. Where a rank has read all of its chunks, the other ranks take over (schedules that balance
    only: tokens can go anywhere), and where all have, the other folders do, so that all steps but the last are full.

    Args:
        plan: size of a step, and weights.
        positions: of all folders before the step.

    Attributes:
        requested: int64 [folders, ranks].
        drawn, ended: of each folder, as in `LivePosition`, after the step.
    """

    def __init__(self, plan: BatchPlan, positions: Sequence[LivePosition]) -> None:
        self._plan = plan
        self.drawn = [position.drawn for position in positions]
        self.ended = [position.ended for position in positions]
        self.requested = np.zeros((len(positions), plan.layout.dp_size), np.int64)
        self._draw(plan.size)

    def mine(self, dp_rank: int) -> list[int]:
        """Return the share of a rank in each folder."""
        column: list[int] = self.requested[:, dp_rank].tolist()
        return column

    def request_missing(self, offers: Sequence[Offer]) -> bool:
        """Request what ranks at the end of a stream could not give; return whether there is anything to request."""
        if not self._plan.is_balanced:
            return False
        given = np.zeros_like(self.requested)
        over = np.zeros(self.requested.shape, bool)
        for offer in offers:
            given[offer.source, offer.dp_rank], over[offer.source, offer.dp_rank] = len(offer.lengths), offer.ended
        lacking = np.maximum(self.requested - given, 0).sum(axis=1).tolist()
        if not any(lacking):
            return False
        self.requested = given.copy()
        from_others = 0
        for source, count in enumerate(lacking):
            remaining = np.flatnonzero(~over[source])
            if count and not remaining.size:
                self.ended[source] = True
                self.drawn[source] -= count
                from_others += count
            elif count:
                self.requested[source, remaining] += _counts(0, count, remaining.size)
        self._draw(from_others)
        return bool((self.requested > given).any())

    def _draw(self, count: int) -> None:
        sources = [source for source, ended in enumerate(self.ended) if not ended]
        if not sources or not count:
            return
        weights = tuple(self._plan.weights[source] for source in sources)
        names, ones = tuple(str(source) for source in sources), (1,) * len(sources)
        drawn = [self.drawn[source] for source in sources]
        Blend(names, ones, weights, (None,) * len(sources)).draw(drawn, count)
        for source, end in zip(sources, drawn, strict=True):
            self.requested[source] += _counts(self.drawn[source], end, self._plan.layout.dp_size)
            self.drawn[source] = end


def _counts(start: int, stop: int, ranks: int) -> npt.NDArray[np.int64]:
    """Return how many of the numbers from start to stop fall to each rank, int64 [ranks]."""
    return np.bincount(np.arange(start, stop) % ranks, minlength=ranks).astype(np.int64)
