"""A global batch as the schedule of a run places it, and a plot of it."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

import numpy as np

from harness.records import Float64Array, Int64Array, Schedule
from harness.schedule import SequenceCost
from harness.schedule.batch import row_costs

# Resolution of the plot: moments of a step, and ranks.
_WIDTH, _HEIGHT = 1600, 512


@dataclass(frozen=True, eq=False)
class PlacedBatch:
    """Sequences drawn from the data of a run, placed on its ranks.

    Attributes:
        lengths: int64 [sequences], model tokens.
    """

    name: str
    lengths: Int64Array
    placed: Schedule
    cost: SequenceCost

    def waves(self, width: int = _WIDTH) -> Float64Array:
        """Return log2 of the number of ranks that share each rank's row at each moment, NaN while a rank waits.

        In every microbatch, ranks wait for the costliest row, as in pipelines. The array is float64 [dp_size, width].
        """
        work, shared = row_costs(self.placed, self.lengths, cost=self.cost), self.placed.shared_by
        sizes = np.log2(np.ones_like(work) if shared is None else shared.reshape(work.shape))
        longest = work.max(axis=1)
        ends = np.cumsum(longest)
        times = (np.arange(width) + 0.5) / width * ends[-1]
        number = np.searchsorted(ends, times)
        is_busy = times - (ends - longest)[number] < work[number].T
        return np.where(is_busy, sizes[number].T, np.nan)

    def draw(self, path: Path | BinaryIO) -> None:
        """Write a PNG of `waves` and of the work of each rank."""
        from matplotlib import colormaps
        from matplotlib.figure import Figure

        work = row_costs(self.placed, self.lengths, cost=self.cost)
        (number, dp_size), mean = work.shape, work.sum() / work.shape[1]
        ranks = np.unique(np.linspace(0, dp_size - 1, _HEIGHT).astype(np.int64))
        shown = self.waves()
        most = int(np.nanmax(shown))
        figure = Figure(figsize=(11, 5), dpi=120, layout="constrained")
        waves, load = figure.subplots(1, 2, width_ratios=[5, 1], sharey=True)
        extent, colors = (0, work.max(axis=1).sum() / mean, dp_size - 0.5, -0.5), colormaps["viridis_r"]
        image = waves.imshow(shown[ranks], aspect="auto", interpolation="nearest", extent=extent)
        image.set(cmap=colors.resampled(most + 1), clim=(-0.5, most + 0.5))
        waves.set_title(f"{self.name}: {number:,} microbatches of {len(self.lengths):,} sequences", fontsize=10)
        waves.set_xlabel("time, relative to the mean work of a rank")
        waves.set_ylabel("data-parallel rank")
        waves.yaxis.get_major_locator().set_params(integer=True)
        bar = figure.colorbar(image, ax=waves, ticks=range(most + 1), label="ranks that share a row")
        bar.ax.set_yticklabels([f"{2**power:,}" for power in range(most + 1)])
        load.barh(ranks, (work.sum(axis=0) / mean)[ranks], height=dp_size / len(ranks), color="tab:blue")
        load.axvline(1, color="black", linewidth=0.8)
        load.set_xlabel("work / mean")
        figure.savefig(path, format="png")
