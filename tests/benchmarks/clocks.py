"""Sides of a comparison that count the time of a work: units a second, and milliseconds."""

from __future__ import annotations

import time
from collections.abc import Callable

from harness.bench.figures import Side


def rate(work: Side, clock: Callable[[], float] = time.perf_counter) -> Side:
    """Return a side of the units a second of a work, which returns the units that it did."""

    def side(number: int) -> float:
        start = clock()
        units = work(number)
        # The clock may not have moved for work that takes no time.
        return units / max(clock() - start, 1e-9)

    return side


def milliseconds(work: Callable[[int], object], clock: Callable[[], float] = time.perf_counter) -> Side:
    """Return a side of the milliseconds of a work."""

    def side(number: int) -> float:
        start = clock()
        work(number)
        return 1e3 * (clock() - start)

    return side
