"""Curves of a parity report as Plotly traces: few enough points to open at once, with every extreme kept."""

from __future__ import annotations

import html
import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from itertools import chain
from typing import Any

from harness.parity.compare import relative_difference
from harness.parity.result import CellResult, ParityReport, Series
from harness.printing import printable
from harness.tables import shorten

# Points of all curves of a chart together: with a hundred cells a page stays under 10 MB, Plotly's 5 MB included.
POINTS = 20_000
# Medium lightness, distinct to most eyes, legible on white and on black (after Okabe and Ito).
_COLORS = ("#0b78b8", "#d9820c", "#0f9d76", "#c4619b", "#7a63c4", "#c8521b", "#3fa3d4", "#9a8a12")
_DASHES = ("solid", "dash", "dot", "dashdot")
_REFERENCE, _QUIET = "#8b919b", "#9aa3ad"
# With more cells than this, only those that differ get their own colors.
_MOST_COLORED = len(_DASHES) * len(_COLORS)
# With more than this, hovering shows only the nearest cell.
_MOST_TOGETHER = 10
# Where a logarithmic axis shows zero: below the relative spacing of doubles, 2.2e-16.
FLOOR = 1e-17
_LONGEST_NAME = 48

# Common to all axes and charts; their colors are those of the page.
AXIS: dict[str, Any] = {"automargin": True, "zeroline": False, "showline": False, "fixedrange": False}
TRANSPARENT: dict[str, Any] = {
    "margin": {"l": 8, "r": 8, "t": 8, "b": 8},
    "paper_bgcolor": "rgba(0,0,0,0)",
    "plot_bgcolor": "rgba(0,0,0,0)",
    "hoverlabel": {"namelength": -1},
}

Values = Sequence[float | None]
# Plotly's style of a line: color, dash and width.
Style = dict[str, Any]


@dataclass(frozen=True)
class Chart:
    """One chart.

    Attributes:
        traces: Plotly traces, with x and y as indices of arrays in the pool.
        is_log: the page labels zero, which a logarithmic axis does not have.
    """

    name: str
    title: str
    note: str
    traces: list[dict[str, Any]]
    layout: dict[str, Any]
    is_log: bool = False


@dataclass
class Pool:
    """Arrays that traces share: curves with equal values are stored once."""

    arrays: list[list[float | str | None]] = field(default_factory=list)
    _known: dict[tuple[float | str | None, ...], int] = field(default_factory=dict)

    def add(self, values: Sequence[float | str | None]) -> int:
        """Return the index of an array with these values."""
        key = tuple(values)
        if key not in self._known:
            self._known[key] = len(self.arrays)
            self.arrays.append(list(key))
        return self._known[key]


def styles_of(report: ParityReport) -> dict[str, Style]:
    """Return a style for every cell that made a step, by name: references are thick and gray, below the others."""
    drawn = [cell for cell in report.cells if cell.series.step]
    compared = [cell for cell in drawn if cell.reference is not None]
    colored = compared if len(compared) <= _MOST_COLORED else [cell for cell in compared if cell.status != "same"]
    numbers = {cell.name: number for number, cell in enumerate(colored)}
    styles: dict[str, Style] = {}
    for cell in drawn:
        color, dash, width = (_REFERENCE, "solid", 5.0) if cell.reference is None else (_QUIET, "solid", 1.0)
        if cell.name in numbers:
            row, column = divmod(numbers[cell.name], len(_COLORS))
            color, dash, width = _COLORS[column], _DASHES[row % len(_DASHES)], 1.6
        styles[cell.name] = {"color": color, "dash": dash, "width": width}
    return styles


def thin(steps: Sequence[int], values: Values, points: int) -> tuple[list[int], list[float | None]]:
    """Reduce a curve to about `points` points: the lowest and the highest value of each stretch of steps.

    A single outlier is always kept. Values that are not finite become None, which leaves a gap.
    """
    pairs = list(zip(steps, map(finite, values), strict=False))
    if len(pairs) > points:
        stretch = -(-2 * len(pairs) // max(points, 2))
        kept = []
        for start in range(0, len(pairs), stretch):
            part = pairs[start : start + stretch]
            there = [(value, step) for step, value in part if value is not None]
            # A stretch without any value stays a gap.
            ends = sorted({min(there)[1], max(there)[1]}) if there else [part[0][0]]
            kept += [pair for pair in part if pair[0] in ends]
        pairs = kept
    # Hovering shows nine digits; more would double the file.
    return [step for step, _ in pairs], [None if value is None else float(f"{value:.9g}") for _, value in pairs]


def differences(reference: Series, run: Series, column: str) -> tuple[list[int], list[float | None]]:
    """Return relative differences of a column at the steps that both runs made; None for values that are not finite."""
    expected = dict(zip(reference.step, getattr(reference, column), strict=False))
    steps, values = [], []
    for step, value in zip(run.step, getattr(run, column), strict=False):
        if step in expected:
            steps.append(step)
            pair = finite(expected[step]), finite(value)
            values.append(None if None in pair else relative_difference(*pair))
    return steps, values


class _Traces:
    """Draws the cells of a report that made a step, each in its style and at no more points than a page can hold."""

    def __init__(self, report: ParityReport, pool: Pool) -> None:
        self._pool, self._styles = pool, styles_of(report)
        self._cells = {cell.name: cell for cell in report.cells}
        # What differs lies above what does not.
        cells = [self._cells[name] for name in self._styles]
        self.drawn = sorted(cells, key=lambda cell: (cell.reference is not None, cell.status != "same"))
        self.points = max(100, POINTS // max(1, len(self.drawn)))

    def _trace(self, cell: CellResult, steps: Sequence[int], values: Values) -> list[dict[str, Any]]:
        """Return the trace of one cell; none if it has no value to show."""
        kept_steps, kept = thin(steps, values, self.points)
        if all(value is None for value in kept):
            return []
        trace: dict[str, Any] = {
            "name": plain(cell.name),
            "x": self._pool.add(kept_steps),
            "y": self._pool.add(kept),
            "mode": "lines+markers" if len(kept) == 1 else "lines",
            "line": self._styles[cell.name],
            "opacity": 0.5 if cell.reference is None else 1,
            "meta": cell.name,
        }
        return [trace]

    def column(self, name: str, label: str = "", *, as_marks: bool = False) -> list[dict[str, Any]]:
        """Return a column of every cell as lines; those with a label are dotted, or diamonds."""
        traces = [self._trace(cell, cell.series.step, getattr(cell.series, name)) for cell in self.drawn]
        for trace in chain.from_iterable(traces if label else ()):
            line = trace["line"]
            dotted = {"line": line | {"dash": "dot"}}
            marks = {"mode": "markers", "marker": {"symbol": "diamond-open", "size": 8, "color": line["color"]}}
            trace.update(marks if as_marks else dotted, name=f"{trace['name']}, {label}")
        return [*chain.from_iterable(traces)]

    def apart(self, name: str) -> list[dict[str, Any]]:
        """Return the differences of cells from their references."""
        traces = []
        for cell in self.drawn:
            other = self._cells.get(cell.reference or "")
            if other is not None:
                steps, values = differences(other.series, cell.series, name)
                floored = [None if value is None else max(value, FLOOR) for value in values]
                traces += self._trace(cell, steps, floored)
        return traces


def draw_charts(report: ParityReport, pool: Pool) -> list[Chart]:
    """Return every chart that has something to show."""
    traces = _Traces(report, pool)
    made = [step for cell in traces.drawn for step in cell.series.step]
    ends = (min(made, default=0), max(made, default=0))
    hover = "x unified" if len(traces.drawn) <= _MOST_TOGETHER else "closest"
    points, longest = traces.points, max((len(cell.series.step) for cell in traces.drawn), default=0)
    thinned = f" Of every {-(-2 * longest // points)} steps the lowest and the highest are drawn." * (longest > points)

    def chart(name: str, title: str, note: str, traces: list[dict[str, Any]], y_title: str, y_format: str) -> Chart:
        return Chart(name, title, note + thinned, traces, _layout(y_title, y_format, hover, ends))

    validation = traces.column("validation_loss", "validation", as_marks=True)
    note = "Mean of a trained token, nats; references are thick and gray, diamonds are validation."
    charts = [chart("loss", "Loss", note, traces.column("loss") + validation, "loss", ".6f")]
    for name, title in (("loss", "Loss"), ("grad_norm", "Gradient norm")):
        note = "Relative, on a logarithmic scale; 0 is bit-identical, dashed lines are tolerances."
        title = f"{title}: difference from the reference"  # noqa: PLW2901
        linear = chart(f"{name}-difference", title, note, traces.apart(name), "", "")
        charts.append(replace(linear, layout=linear.layout | _log_axis(report, name), is_log=True))
    note = "Share of the rows that holds tokens, per step."
    charts.append(chart("fill", "Fill", note, traces.column("fill"), "fill", ".2%"))
    note = "Busiest data-parallel rank over the mean, per step; 1 is even. Lines are attention cost, dots are tokens."
    both = traces.column("imbalance_cost") + traces.column("imbalance_tokens", "tokens")
    charts.append(chart("imbalance", "Imbalance", note, both, "busiest / mean", ".4f"))
    note = "Seconds on the clock; dots are the wait for data within them. Cells that ran side by side share a machine."
    both = traces.column("step_s") + traces.column("data_wait_s", "waiting")
    charts.append(chart("time", "Time of a step", note, both, "seconds", ".3f"))
    return [drawn_chart for drawn_chart in charts if drawn_chart.traces]


def _layout(y_title: str, y_format: str, hover: str, steps: tuple[int, int]) -> dict[str, Any]:
    # The same range on every chart, so that charts line up.
    pad = max(0.5, 0.015 * (steps[1] - steps[0]))
    ends = [steps[0] - pad, steps[1] + pad]
    steps_axis = {"title": {"text": "step", "standoff": 6}, "hoverformat": ",d", "tickformat": ",d", "range": ends}
    spike = {"spikethickness": 1, "spikecolor": _REFERENCE, "spikedash": "solid"}
    return {
        "xaxis": AXIS | steps_axis | spike,
        "yaxis": AXIS | {"title": {"text": y_title, "standoff": 6}, "hoverformat": y_format},
        "hovermode": hover,
        "showlegend": False,
        **TRANSPARENT,
    }


def _log_axis(report: ParityReport, column: str) -> dict[str, Any]:
    checks = [check for cell in report.cells for check in cell.checks if check.name == column]
    tolerances = sorted({check.tolerance for check in checks if check.tolerance > 0})
    line = {"type": "line", "xref": "paper", "x0": 0, "x1": 1, "line": {"dash": "dash", "width": 1.2}}
    powers = range(-15, 4, 3)
    axis = {
        "type": "log",
        "title": {"text": "relative difference", "standoff": 6},
        "tickvals": [FLOOR, *(10.0**power for power in powers)],
        "ticktext": ["0", *(f"1e{power}" if power else "1" for power in powers)],
        "range": [math.log10(FLOOR) - 0.7, 0.5],
    }
    return {"yaxis": AXIS | axis, "shapes": [line | {"y0": tolerance, "y1": tolerance} for tolerance in tolerances]}


def finite(value: float | None) -> float | None:
    """Return the value, or None where it is not a finite number."""
    return value if value is not None and math.isfinite(value) else None


def plain(name: str) -> str:
    """Return a name for Plotly, which reads names as its own kind of HTML."""
    return html.escape(printable(shorten(name, _LONGEST_NAME)), quote=False)
