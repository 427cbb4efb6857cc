"""Reports as pages of Markdown."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from harness.bench.figures import BenchReport, Figure, show_number

_VERDICTS = {None: "", True: "met", False: "**missed**"}
TABLE_HEAD = ["| measured | figure | range | target | |", "|---|--:|--:|---|---|"]


def count_targets(reports: Iterable[BenchReport]) -> str:
    """Return how many targets are met and missed, in words."""
    met = [figure.met for report in reports for figure in report.figures if figure.met is not None]
    return f"{sum(met)} targets met, {len(met) - sum(met)} missed"


def figure_row(figure: Figure) -> str:
    """Return the row of a figure in a table, with the range of its samples; a ratio below one is marked as slower."""
    ends = (show_number(min(figure.samples)), show_number(max(figure.samples))) if len(figure.samples) > 1 else ()
    shown = f"{show_number(figure.value)} {figure.unit}".rstrip()
    is_slower = figure.met is None and figure.of and figure.unit == "x" and figure.value < 1
    verdict = "slower" if is_slower else _VERDICTS[figure.met]
    name = figure.name.replace("|", "\\|")
    return f"| {name} | {shown} | {' – '.join(ends)} | {figure.target} | {verdict} |"  # noqa: RUF001


def figure_table(figures: Sequence[Figure]) -> list[str]:
    """Return the lines of a table of figures; [] for no figures."""
    return [*TABLE_HEAD, *map(figure_row, figures)] if figures else []


def claims_of(report: BenchReport) -> list[Figure]:
    """Return the figures with a target, and ratios."""
    return [figure for figure in report.figures if figure.met is not None or figure.unit == "x"]
