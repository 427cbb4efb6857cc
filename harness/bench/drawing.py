"""Bar charts of what each rank has to do, for a terminal and as a picture."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from harness.errors import ConfigError
from harness.schedule.batch import Float64Array

_BAR_CELLS = 48
_MOST_BARS = 16
_PARTS = " ▏▎▍▌▋▊▉█"


@dataclass(frozen=True, eq=False)
class Drawing:
    """Cost of every rank over the mean, float64 [dp_size], of each scheduler."""

    title: str
    ranks: Mapping[str, Float64Array]


def render_bars(drawing: Drawing) -> RenderableType:
    """A bar for each rank, or for the busiest of neighbours where there are more than fit a screen."""
    longest = max(float(costs.max()) for costs in drawing.ranks.values())
    parts: list[RenderableType] = [Text(drawing.title, style="bold")]
    for name, costs in drawing.ranks.items():
        busiest = int(np.argmax(costs))
        parts.append(Text(f"\n{name}: rank {busiest} is the busiest, {costs[busiest]:.3f} x mean", style="cyan"))
        table = Table(box=None, show_header=False, pad_edge=False)
        for label, cost in _bars(costs):
            style = "red" if cost > 1.1 else "yellow" if cost > 1.02 else "green"
            table.add_row(label, Text(_bar(cost / longest), style=style), f"{cost:.3f}")
        parts.append(table)
    return Group(*parts)


def _bars(costs: Float64Array) -> list[tuple[str, float]]:
    together = -(-costs.shape[0] // _MOST_BARS)
    if together == 1:
        return [(f"rank {rank}", float(cost)) for rank, cost in enumerate(costs)]
    groups = range(0, costs.shape[0], together)
    return [
        (f"ranks {first}-{min(first + together, costs.shape[0]) - 1}", float(costs[first : first + together].max()))
        for first in groups
    ]


def _bar(share: float) -> str:
    eighths = round(share * _BAR_CELLS * 8)
    return (_PARTS[8] * (eighths // 8) + _PARTS[eighths % 8]).rstrip()


def save_picture(drawing: Drawing, path: Path) -> None:
    """The same bars as a picture, all ranks of them.

    Raises:
        ConfigError: matplotlib is not installed, or the picture cannot be written.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError:
        raise ConfigError("a picture needs matplotlib", where="--png", fix="pip install matplotlib") from None
    figure = Figure(figsize=(9, 2.2 * len(drawing.ranks)), layout="constrained")
    axes = figure.subplots(len(drawing.ranks), 1, sharex=True, sharey=True, squeeze=False)[:, 0]
    figure.suptitle(drawing.title)
    for axis, (name, costs) in zip(axes, drawing.ranks.items(), strict=True):
        axis.bar(np.arange(costs.shape[0]), costs)
        axis.axhline(1.0, color="black", linewidth=0.8)
        axis.set_title(f"{name}: busiest {costs.max():.3f} x mean", fontsize="medium")
    axes[-1].set_xlabel("data-parallel rank")
    try:
        figure.savefig(path)
    except (OSError, ValueError) as error:
        raise ConfigError(f"the picture cannot be written: {error}", where=str(path), fix="name another") from error
