"""Render a report as one HTML file.

It has everything in it: it opens from a disk or an artifact store, and loads nothing else.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from harness.errors import ConfigError
from harness.parity.pages import words
from harness.parity.pages.curves import FLOOR, Chart, Pool, draw_charts, styles_of
from harness.parity.pages.matrix import group_cells, tabulate_costs
from harness.parity.result import STATUSES, ParityReport
from harness.tables import SIGNS, open_templates


def render_page(report: ParityReport) -> str:
    """Render `report.html`.

    Raises:
        ConfigError: Jinja or Plotly is not installed.
    """
    pool = Pool()
    charts = draw_charts(report, pool)
    styles = styles_of(report)
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
        costs=tabulate_costs(report),
    )


def render(template: str, charts: list[Chart], pool: Pool, **values: Any) -> str:
    """Render a template of this package with Plotly, the charts' data and `values`, whose texts are all escaped.

    Raises:
        ConfigError: Jinja or Plotly is not installed.
    """
    try:
        from markupsafe import Markup
        from plotly.offline import get_plotlyjs

        templates = open_templates(Path(__file__).parent / "templates", trim_blocks=True, lstrip_blocks=True)
    except ImportError as error:
        raise ConfigError(
            f"a report needs {error.name}", where=template, fix="install the extra `report`: pip install '.[report]'"
        ) from None
    data = {"pool": pool.arrays, "charts": [vars(chart) for chart in charts], "floor": FLOOR}
    # A closing tag inside a name must not end the script that carries it.
    text = json.dumps(data, allow_nan=False, separators=(",", ":")).replace("<", "\\u003c")
    return templates.get_template(template).render(
        **values, w=words, signs=SIGNS, charts=charts, data=Markup(text), plotly=Markup(get_plotlyjs())
    )
