"""What the nights of a parity run have in common: metrics over time, each with the band that it kept to."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Night:
    """One value of a metric.

    Attributes:
        created: ISO 8601, UTC, of the report that it is from.
        value: None where that night's run has none.
        low, high: the band that the value is held against, both ends in it; None where there is none yet.
        source: where that report is.
    """

    created: str
    value: float | None
    low: float | None = None
    high: float | None = None
    source: str = ""

    @property
    def left_band(self) -> bool:
        """Whether the value is outside of its band; a missing value is, where there is a band."""
        if self.low is None or self.high is None:
            return False
        return self.value is None or not self.low <= self.value <= self.high


@dataclass(frozen=True)
class Metric:
    """One metric of one cell over the nights.

    Attributes:
        name: such as `loss at step 40`.
        cell: of the matrix.
        unit: of the values; empty for plain numbers, `x` for a ratio.
        nights: in the order of time.
        band: how its band is made, in words.
    """

    name: str
    cell: str
    unit: str
    nights: list[Night]
    band: str = ""


@dataclass(frozen=True)
class History:
    """Everything that is followed.

    Attributes:
        title: what was compared every night.
        metrics: in the order in which they are shown.
    """

    title: str
    metrics: list[Metric]

    @property
    def left(self) -> list[tuple[Metric, Night]]:
        """Every value outside of its band, the newest first."""
        found = [(metric, night) for metric in self.metrics for night in metric.nights if night.left_band]
        return sorted(found, key=lambda one: one[1].created, reverse=True)

    @property
    def left_now(self) -> list[tuple[Metric, Night]]:
        """Metrics whose own newest night is outside of its band; parts of a night can be reports of their own."""
        newest = ((metric, metric.nights[-1]) for metric in self.metrics if metric.nights)
        return [(metric, night) for metric, night in newest if night.left_band]
