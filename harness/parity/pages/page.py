"""Render a report, or metrics over the nights, as one HTML file.

It has everything in it: it opens from a disk or an artifact store, and loads nothing else.
"""

from __future__ import annotations

import json
from typing import Any

from harness.errors import ConfigError
from harness.parity.history import History, Metric
from harness.parity.pages import words
from harness.parity.pages.curves import AXIS, FLOOR, TRANSPARENT, Chart, Pool, draw_charts, finite, plain, styles_of
from harness.parity.pages.matrix import costs, group_cells
from harness.parity.result import STATUSES, ParityReport
from harness.printing import printable

# Older values are in the JSON of each night.
_MOST_LISTED = 50
_LINE, _BAND, _LEFT = "#0b78b8", "rgba(124,140,160,0.22)", "#d03b2f"


def render_page(report: ParityReport) -> str:
    """Render `report.html`.

    Raises:
        ConfigError: Jinja or Plotly is not installed.
    """
    pool = Pool()
    charts = draw_charts(report, pool)
    styles = styles_of(report)
    axis, spent = costs(report)
    counts = {status: sum(cell.status == status for cell in report.cells) for status in STATUSES}
    return render(
        "report.html.j2",
        charts,
        pool,
        report=report,
        problem=words.first_problem(report),
        groups=group_cells(report),
        counts={status: count for status, count in reversed(counts.items()) if count},
        drawn=[(cell, styles[cell.name]) for cell in report.cells if cell.name in styles],
        numbers={cell.name: number for number, cell in enumerate(report.cells)},
        cost_axis=axis,
        costs=spent,
        fastest=max((cost.tokens_per_s or 0 for cost in spent), default=0),
        largest=max((cost.memory_bytes or 0 for cost in spent), default=0),
    )


def render(template: str, charts: list[Chart], pool: Pool, **values: Any) -> str:
    """Render a template of this package with Plotly, the charts' data and `values`, whose texts are all escaped.

    Raises:
        ConfigError: Jinja or Plotly is not installed.
    """
    try:
        from jinja2 import Environment, PackageLoader, StrictUndefined
        from markupsafe import Markup
        from plotly.offline import get_plotlyjs
    except ImportError as error:
        raise ConfigError(
            f"a report needs {error.name}", where=template, fix="install the extra `report`: pip install '.[report]'"
        ) from None
    environment = Environment(
        loader=PackageLoader("harness.parity.pages"),
        autoescape=True,
        undefined=StrictUndefined,
        finalize=lambda value: printable(value) if type(value) is str else value,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    data = {"pool": pool.arrays, "charts": [vars(chart) for chart in charts], "floor": FLOOR}
    # A closing tag inside a name must not end the script that carries it.
    text = json.dumps(data, allow_nan=False, separators=(",", ":")).replace("<", "\\u003c")
    return environment.get_template(template).render(
        **values, w=words, charts=charts, data=Markup(text), plotly=Markup(get_plotlyjs())
    )


def render_nights(history: History) -> str:
    """Render `history.html`.

    Raises:
        ConfigError: Jinja or Plotly is not installed.
    """
    pool = Pool()
    charts = [chart for number, metric in enumerate(history.metrics) if (chart := _draw(number, metric, pool))]
    newest = max((night.created for metric in history.metrics for night in metric.nights), default="")
    latest = history.left_now
    return render(
        "history.html.j2",
        charts,
        pool,
        history=history,
        newest=newest,
        latest=latest,
        left=history.left[:_MOST_LISTED],
        more=max(0, len(history.left) - _MOST_LISTED),
        nights=len({night.created for metric in history.metrics for night in metric.nights}),
        value_of=_value_of,
    )


def _draw(number: int, metric: Metric, pool: Pool) -> Chart | None:
    nights = sorted(metric.nights, key=lambda night: night.created)
    values = [finite(night.value) for night in nights]
    if all(value is None for value in values):
        return None
    when = pool.add([night.created for night in nights])
    banded = [finite(night.low) is not None and finite(night.high) is not None for night in nights]
    low, high = (
        pool.add([finite(getattr(night, end)) if there else None for night, there in zip(nights, banded, strict=True)])
        for end in ("low", "high")
    )
    # A night without a value is marked on the edge of its band.
    marks = [
        (night.low if value is None else value) if night.left_band else None
        for night, value in zip(nights, values, strict=True)
    ]
    edge: dict[str, Any] = {"x": when, "mode": "lines", "line": {"width": 0}, "hoverinfo": "skip", "connectgaps": False}
    line: dict[str, Any] = {"x": when, "mode": "lines+markers", "line": {"color": _LINE, "width": 1.6}}
    left: dict[str, Any] = {"symbol": "x", "size": 11, "color": _LEFT, "line": {"width": 1, "color": _LEFT}}
    cross = {"name": "left its band", "x": when, "mode": "markers", "marker": left, "hoverinfo": "skip"}
    traces: list[dict[str, Any]] = [
        {"name": "band, low", "y": low, **edge},
        {"name": "band, high", "y": high, **edge, "fill": "tonexty", "fillcolor": _BAND},
        {"name": plain(metric.name), "y": pool.add(values), **line, "marker": {"size": 5}},
    ]
    if any(mark is not None for mark in marks):
        traces.append(cross | {"y": pool.add(marks)})
    outside = sum(night.left_band for night in nights)
    summary = f"Outside its band on {outside} of {len(nights)} nights. " if outside else "Never outside its band. "
    # Without a band nothing was compared.
    note = (summary if any(banded) else "No band yet. ") + metric.band
    layout = {
        "xaxis": AXIS | {"type": "date"},
        "yaxis": AXIS | {"title": {"text": plain(metric.unit), "standoff": 6}},
        "hovermode": "x",
        "showlegend": False,
        **TRANSPARENT,
    }
    return Chart(f"metric-{number}", f"{metric.name}, {metric.cell}", note, traces, layout)


def _value_of(metric: Metric, value: float | None) -> str:
    return "none" if value is None else f"{value:,.6g} {metric.unit}".rstrip()
