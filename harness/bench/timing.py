"""Timing that holds on a shared machine: the sides of a comparison take turns, and medians are compared."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Mapping

# Does its part of a round (-1 is the warm-up, then 0, 1, ...) and returns how many units of work that was.
Work = Callable[[int], float]
# The same, but returns what is to be known of the round.
Side = Callable[[int], float]


def take_turns(sides: Mapping[str, Side], *, rounds: int) -> dict[str, list[float]]:
    """What each side returned in each round.

    All sides run in every round, so that a disturbance hits all of them, and each round starts with another one, so
    that none has always the caches that its neighbour warmed. A warm-up round is not counted.
    """
    names = list(sides)
    samples: dict[str, list[float]] = {name: [] for name in names}
    for number in range(-1, rounds):
        turn = number % len(names)
        for name in names[turn:] + names[:turn]:
            gc.collect()
            sample = sides[name](number)
            if number >= 0:
                samples[name].append(sample)
    return samples


def measure_rates(works: Mapping[str, Work], *, rounds: int, cpu_time: bool = False) -> dict[str, list[float]]:
    """Units a second of each work in each round, in turns.

    Args:
        works: the sides.
        rounds: turns of each.
        cpu_time: count the seconds that this process spends on a processor, whatever else the machine does. Only for
            works of one thread that wait for nothing: there it is the time on a clock of a machine at rest.
    """
    clock = time.process_time if cpu_time else time.perf_counter
    return take_turns({name: _rate_of(work, clock) for name, work in works.items()}, rounds=rounds)


def _rate_of(work: Work, clock: Callable[[], float]) -> Side:
    def side(number: int) -> float:
        began = clock()
        units = work(number)
        # A clock need not have moved for what takes no time.
        return units / max(clock() - began, 1e-9)

    return side
