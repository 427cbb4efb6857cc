"""Name ranks that are slower than the others, and why, from the times of every rank in each step."""

from __future__ import annotations

import os
from collections import Counter, deque
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from harness.records import Float64Array

# Nodes that the batch script could not leave out because the partition has too few others.
KEPT_FILE = "kept_nodes"
# What a slow rank does longer than the others.
CAUSES = {
    "data": "it waits for its data (disk, network storage or loader workers)",
    "core": "other processes run on its cores",
    "compute": "it computes more slowly (a throttled GPU or core, or more work than the others)",
    "stopped": "it is suspended for part of the time (by a signal, or blocked in the kernel)",
    "network": "the ranks exchange data more slowly than before",
}
# The time in which a rank with that cause is slow, in the order in which they are looked at.
_PARTS = {"data": "data_s", "core": "queued_s", "compute": "running_s"}
# A rank that is slower by less than this share of a step holds nobody up.
_LEAST_SHARE = 0.1
# Exchanges vary with the data and with other jobs of the network; a link that fell back to TCP takes many times longer.
_NETWORK_RATIO = 3.0
# Caches, kernels that are compiled and connections that are made: the first steps of a run are slow.
_WARMUP_STEPS = 2


@dataclass(frozen=True)
class RankTimes:
    """Seconds of one rank in one step."""

    compute_s: float  # without its loader, and without waiting for other ranks
    data_s: float  # of its loader, the same
    wait_s: float  # in exchanges with other ranks
    running_s: float  # of the main thread on a core
    queued_s: float  # of the main thread ready to run while other processes had the core
    media_bytes: float = 0  # that were read for its rows, no time

    @property
    def busy_s(self) -> float:
        return self.compute_s + self.data_s

    @property
    def step_s(self) -> float:
        return self.busy_s + self.wait_s


@dataclass(frozen=True)
class Straggler:
    """A rank that holds the others up, or the network of all of them, without a rank and a node."""

    cause: str
    ratio: float  # its time without waiting over the median of the others; of a network, exchanges now over before
    rank: int | None = None
    node: str = ""
    is_node: bool = False  # all ranks of the node are slow, and there are several

    def describe(self, steps: int) -> str:
        """Return a sentence about so many slow steps."""
        if self.rank is None:
            return f"for {steps} steps {CAUSES[self.cause]}: {self.ratio:.1f} times as long, although no rank is slow"
        who = f"node {self.node} (all of its ranks, such as rank {self.rank})" if self.is_node else ""
        who = who or f"rank {self.rank} on {self.node}"
        return f"{who} has taken {self.ratio:.1f} times as long as the others for {steps} steps: {CAUSES[self.cause]}"


class StragglerWatch:
    """Watches the times of all ranks; the same calls give the same answers on every rank.

    Args:
        stages: pipeline stage of each rank. Those of one stage have the same work, and one alone is not compared.
        ratio: of a slow rank's time over that of the others.
        on_gpu: a core that idles says nothing about the rank.
    """

    def __init__(
        self, nodes: Sequence[str], stages: Sequence[int], *, ratio: float, steps: int, on_gpu: bool = False
    ) -> None:
        self._nodes, self._stages = nodes, stages
        self._ratio, self._steps, self._on_gpu = ratio, steps, on_gpu
        self._window: deque[Sequence[RankTimes]] = deque(maxlen=steps)
        self._seen = 0
        self._least_exchange_s = float("inf")

    def step(self, times: Sequence[RankTimes]) -> list[Straggler]:
        """Add the times of every rank in one step, and return the ranks that are slow now."""
        self._seen += 1
        if self._seen <= _WARMUP_STEPS or len(times) < 2:
            return []
        self._window.append(times)
        if len(self._window) < self._steps:
            return []
        names = ("busy_s", "step_s", "wait_s", *_PARTS.values())
        seconds = {name: np.array([[getattr(one, name) for one in step] for step in self._window]) for name in names}
        slow: dict[int, tuple[str, float]] = {}
        for stage in set(self._stages):
            ranks = [rank for rank, of in enumerate(self._stages) if of == stage]
            if len(ranks) < 2:
                continue
            excess = {name: of[:, ranks] - _medians_of_others(of[:, ranks]) for name, of in seconds.items()}
            busy_s, over_s = seconds["busy_s"][:, ranks], excess["busy_s"]
            ratios = busy_s / np.maximum(1e-9, busy_s - over_s)
            is_slow = (ratios > self._ratio) & (over_s > _LEAST_SHARE * seconds["step_s"][:, ranks])
            for place in np.flatnonzero(is_slow.all(axis=0)).tolist():
                longer = {name: of[:, place].sum() for name, of in excess.items()}
                causes = (cause for cause, name in _PARTS.items() if longer[name] > longer["busy_s"] / 2)
                cause = next(causes, "compute" if self._on_gpu else "stopped")
                slow[ranks[place]] = cause, float(np.median(ratios[:, place]))
        if not slow:
            return self._slow_network(seconds["wait_s"], seconds["step_s"])
        on_node, all_on_node = Counter(self._nodes[rank] for rank in slow), Counter(self._nodes)
        return [
            Straggler(cause, ratio, rank, node, on_node[node] == all_on_node[node] > 1)
            for rank, (cause, ratio) in sorted(slow.items())
            for node in [self._nodes[rank]]
        ]

    def _slow_network(self, wait_s: Float64Array, step_s: Float64Array) -> list[Straggler]:
        """Compare exchanges, on every rank at least as long as on the one that others wait for, with the fastest."""
        # A network that was slow from the first step on is a matter of the preflight.
        exchanges = wait_s.min(axis=1)
        before, self._least_exchange_s = self._least_exchange_s, min(self._least_exchange_s, float(exchanges.max()))
        least_s = np.maximum(_NETWORK_RATIO * before, _LEAST_SHARE * step_s.max(axis=1))
        ratio = float(np.median(exchanges)) / max(1e-9, before)
        return [Straggler("network", ratio)] if (exchanges > least_s).all() else []


def _medians_of_others(values: Float64Array) -> Float64Array:
    """Return the median of a row without each of its numbers, float64 [steps, ranks]."""
    places, row = values.argsort(axis=1).argsort(axis=1), np.sort(values, axis=1)
    middle = ((values.shape[1] - 2) // 2, (values.shape[1] - 1) // 2)
    first, second = (np.take_along_axis(row, at + (at >= places), axis=1) for at in middle)
    return (first + second) / 2


def write_slow_nodes(folder: Path, stragglers: Sequence[Straggler], steps: int) -> list[str]:
    """Write the nodes of stragglers and the reasons for the batch script of `harness submit` in a run's folder.

    Return their names; none if the script keeps them all, or there is no such script.
    """
    job, logs, kept = os.environ.get("SLURM_JOB_ID"), folder / "logs", set[str]()
    if not job or not logs.is_dir():
        return []
    with suppress(OSError):
        kept = {line.partition(" ")[0] for line in (folder / KEPT_FILE).read_text().splitlines()}
    nodes = {straggler.node: straggler.describe(steps) for straggler in stragglers if straggler.rank is not None}
    nodes = {node: reason for node, reason in nodes.items() if node not in kept}
    if nodes:
        lines = [f"{node} {reason}\n" for node, reason in nodes.items()]
        (logs / f"straggler-{job}.failed").write_text("".join(lines))
    return list(nodes)
