"""Charts of a parity report: losses of its cells, differences from the references, and rows that ranks share."""

from __future__ import annotations

import base64
import io
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from harness.parity.compare import relative_difference
from harness.parity.result import CellResult, ParityReport, Series
from harness.plan.waves import PlacedBatch
from harness.printing import printable
from harness.records import Schedule
from harness.schedule import SequenceCost
from harness.tables import shorten
from harness.train.metrics import as_png, new_axes

# Position of zero on a logarithmic axis: below the relative spacing of doubles, 2.2e-16.
FLOOR = 1e-17
# Maximum number of cells in the legend, cells that differ first, and maximum length of their names.
_MOST_NAMED, _LONGEST_NAME = 12, 48

Curve = tuple[CellResult, Sequence[int], Sequence[float]]


@dataclass(frozen=True)
class Chart:
    """One chart; `source` is its PNG as a data URI."""

    title: str
    note: str
    source: str


def differences(reference: Series, run: Series, column: str) -> tuple[list[int], list[float]]:
    """Return the relative differences of a column at the common steps of two runs; NaN if they are not finite."""
    expected = dict(zip(reference.step, getattr(reference, column), strict=False))
    pairs = zip(run.step, getattr(run, column), strict=False)
    sizes = {step: finite(relative_difference(expected[step], value)) for step, value in pairs if step in expected}
    return list(sizes), [size if math.isnan(size) else max(size, FLOOR) for size in sizes.values()]


def draw_charts(report: ParityReport) -> list[Chart]:
    cells = {cell.name: cell for cell in report.cells if cell.series.step}
    # Curves that differ are drawn above the others.
    drawn = sorted(cells.values(), key=lambda cell: (cell.reference is not None, cell.status != "same"))
    losses = [(cell, cell.series.step, [finite(value) for value in cell.series.loss]) for cell in drawn]
    note = "Mean per trained token, in nats; thick gray lines are references."
    charts = [_draw("Loss", note, "loss", losses)]
    note = "Relative, on a logarithmic scale; identical values are at 1e-17, dashed lines are tolerances."
    for column, name in (("loss", "Loss"), ("grad_norm", "Gradient norm")):
        others = [(cell, cells[cell.reference].series) for cell in drawn if cell.reference in cells]
        apart = [(cell, *differences(series, cell.series, column)) for cell, series in others]
        checks = [check for cell in report.cells for check in cell.checks if check.name == column]
        tolerances = {check.tolerance for check in checks if check.tolerance > 0}
        charts.append(_draw(f"{name}: difference from the reference", note, "difference", apart, tolerances))
    return [chart for chart in charts if chart is not None]


def draw_waves(report: ParityReport) -> list[Chart]:
    """Return a chart of the ranks that share rows over the time of a step, for each cell with a placement."""
    charts: list[Chart] = []
    for cell, rows in ((cell, cell.placement) for cell in report.cells if cell.placement is not None):
        lengths, offsets, shared_by = (np.asarray(rows[name]) for name in ("lengths", "row_offsets", "shared_by"))
        placed, drawn = Schedule(rows["dp_size"], np.arange(len(lengths)), offsets, shared_by), io.BytesIO()
        PlacedBatch(f"step {rows['step']}", lengths, placed, SequenceCost(**rows["cost"])).draw(drawn)
        charts.append(Chart(cell.name, "", _source(drawn.getvalue())))
    return charts


def _source(png: bytes) -> str:
    return f"data:image/png;base64,{base64.b64encode(png).decode()}"


def _draw(
    title: str, note: str, label: str, curves: Sequence[Curve], tolerances: Iterable[float] | None = None
) -> Chart | None:
    if all(math.isnan(value) for *_, values in curves for value in values):
        return None
    figure, axes = new_axes("", label)
    named = sorted(curves, key=lambda curve: curve[0].status == "same")[:_MOST_NAMED]
    for curve in curves:
        cell, steps, values = curve
        style = {"color": "0.6", "linewidth": 4} if cell.reference is None else {"linewidth": 1.2}
        name = printable(shorten(cell.name, _LONGEST_NAME)) if curve in named else None
        axes.plot(steps, values, label=name, marker="." if len(steps) == 1 else None, **style)
    if tolerances is not None:
        axes.set_yscale("log")
        for tolerance in tolerances:
            axes.axhline(tolerance, color="#a8231b", linestyle="--", linewidth=1)
    return Chart(title, note, _source(as_png(figure, axes)))


def finite(value: float | None) -> float:
    """Return the value, or NaN if it is not a finite number."""
    return value if value is not None and math.isfinite(value) else math.nan
