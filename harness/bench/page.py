"""Reports as a page of Markdown: what is met and missed, then a table for each report."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from harness.bench.figures import BenchReport, Figure, show_number

_VERDICTS = {None: "", True: "met", False: "**missed**"}


def count_targets(reports: Iterable[BenchReport]) -> str:
    """Return how many targets are met and missed, in words."""
    met = [figure.met for report in reports for figure in report.figures if figure.met is not None]
    return f"{sum(met)} targets met, {len(met) - sum(met)} missed"


def figure_table(figures: Sequence[Figure]) -> list[str]:
    """Return the lines of a Markdown table of figures with the ranges of their samples; [] for no figures."""
    lines = ["| measured | figure | range | target | |", "|---|--:|--:|---|---|"] if figures else []
    for figure in figures:
        ends = (show_number(min(figure.samples)), show_number(max(figure.samples))) if len(figure.samples) > 1 else ()
        shown = f"{show_number(figure.value)} {figure.unit}".rstrip()
        name = figure.name.replace("|", "\\|")
        cells = (name, shown, " – ".join(ends), figure.target, _VERDICTS[figure.met])  # noqa: RUF001
        lines.append(f"| {' | '.join(cells)} |")
    return lines


def render_section(report: BenchReport, *, claims_only: bool = False) -> list[str]:
    """Return the lines of a report's section: its title, sides, command, figures and notes.

    Args:
        claims_only: leave out figures that are neither ratios nor have a target, where there are others.
    """
    lines = [f"## {report.title}", "", report.about, ""]
    lines += [f"`{report.command}`", ""] if report.command else []
    claims = [figure for figure in report.figures if figure.met is not None or figure.unit == "x"]
    table = figure_table(claims if claims_only and claims else report.figures)
    lines += [*table, ""] if table else []
    lines += [f"- {note}" for note in report.notes]
    if report.seconds:
        load = "" if report.load is None else f"; load when it ended {report.load:.1f}"
        lines.append(f"- took {report.seconds:.0f} s{load}")
    return [*lines, ""] if lines[-1] else lines
