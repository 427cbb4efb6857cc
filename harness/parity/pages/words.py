"""Wording and tables of the pages: outcomes, numbers and places, the matrix of axes, the checks of every cell."""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from harness.parity.result import STATUSES, CellResult, Check, Difference, ParityReport
from harness.printing import count_of
from harness.tables import Row, Table, TableCell

# A wider or emptier table is harder to read than a list.
_MOST_COLUMNS = 12


@dataclass(frozen=True)
class Group:
    """The cells of one check.

    Attributes:
        settled: text with the axes that have the same value in every cell.
        reasons: pairs of the comparisons that share a reason for their tolerance, and this reason.
    """

    name: str
    matrix: Table
    settled: str
    checks: Table
    reasons: list[tuple[str, str]]


def group_cells(report: ParityReport) -> list[Group]:
    """Return the cells by check, in the order of the report."""
    links, groups = {cell.name: f"#cell-{number}" for number, cell in enumerate(report.cells)}, []
    for name in dict.fromkeys(cell.check for cell in report.cells):
        cells = [cell for cell in report.cells if cell.check == name]
        checks = [check for cell in cells for check in cell.checks]
        columns = list(dict.fromkeys(check.name for check in checks))
        head = ["largest relative difference", ""]
        reasons: dict[str, dict[str, None]] = {}
        for column in columns:
            tolerances = {check.tolerance for check in checks if check.name == column}
            head.append(f"{_spaced(column)}, {limit(tolerances.pop()) if len(tolerances) == 1 else 'see cell'}")
            for check in checks:
                if check.name == column and check.reason:
                    reasons.setdefault(check.reason, {})[column] = None
        rows = [
            (TableCell(cell.name, link=links[cell.name]), _status(cell), *(_check(cell, column) for column in columns))
            for cell in cells
        ]
        shared = [(", ".join(named), reason) for reason, named in reasons.items()]
        groups.append(Group(name, *arrange(cells, links), Table(head, rows), shared))
    return groups


def _status(cell: CellResult) -> TableCell:
    return TableCell(mark(cell), mark(cell), hover=cell.name)


def _check(cell: CellResult, name: str) -> TableCell:
    check: Check | None = next((check for check in cell.checks if check.name == name), None)
    if check is None:
        return TableCell("–")  # noqa: RUF001
    hover = check.difference.message if check.difference else limit(check.tolerance)
    return TableCell(size_of(check), "same" if check.passed else "different", hover=hover)


def arrange(cells: Sequence[CellResult], links: Mapping[str, str]) -> tuple[Table, str]:
    """Return a table with the first axis that varies as rows and the others as columns; a long list stays a list.

    The returned text contains the axes that have the same value in every cell.
    """
    names = list(dict.fromkeys(name for cell in cells for name in cell.axes))
    values = {name: list(dict.fromkeys(cell.axes.get(name, "") for cell in cells)) for name in names}
    varying = [name for name in names if len(values[name]) > 1]
    settled = ", ".join(f"{name} {values[name][0]}" for name in names if name not in varying)
    if not varying:
        return Table((), [("", _tiles(cells, links))]), settled
    row_axis, column_axes = varying[0], varying[1:]

    def column_of(cell: CellResult) -> str:
        return " · ".join(cell.axes.get(name, "") or "none" for name in column_axes)

    rows, columns = values[row_axis], list(dict.fromkeys(map(column_of, cells)))
    if len(columns) > _MOST_COLUMNS or 2 * len(cells) < len(rows) * len(columns):
        column_axes, columns = [], [""]

    at: dict[tuple[str, str], list[CellResult]] = defaultdict(list)
    for cell in cells:
        at[cell.axes.get(row_axis, ""), column_of(cell)].append(cell)
    placed: list[Row] = [(row or "none", *(_tiles(at[row, column], links) for column in columns)) for row in rows]
    corner = f"{row_axis} by {' · '.join(column_axes)}" if column_axes else row_axis
    return Table((_spaced(corner), *columns), placed), settled


def _tiles(cells: Sequence[CellResult], links: Mapping[str, str]) -> list[TableCell]:
    return [replace(_status(cell), link=links.get(cell.name, "")) for cell in cells]


def _spaced(name: str) -> str:
    return name.replace("_", " ")


def verdict(report: ParityReport) -> str:
    """Return the verdict in a few words; `Failed` if runs failed and none differs."""
    if report.verdict == "different" and all(cell.status != "different" for cell in report.cells):
        return "Failed"
    return {"same": "Same", "different": "Different", "failed": "Nothing was compared"}[report.verdict]


def mark(cell: CellResult) -> str:
    """Return the key of `SIGNS` for a cell: its status, or `reference` for a reference that completed."""
    return "reference" if cell.is_reference and cell.status == "same" else cell.status


def summary(report: ParityReport) -> str:
    """Return the counts behind the verdict in one sentence."""
    compared = [cell for cell in report.cells if not cell.is_reference]
    counts = Counter(cell.status for cell in compared)
    if not report.cells:
        return "The report has no cells."
    if not compared:
        return f"{count_of(len(report.cells), 'cell')} ran, but none was compared."
    ran = len(compared) - counts["skipped"]
    parts = [f"{counts['same']:,} of {count_of(ran, 'compared cell')} {'agrees' if ran == 1 else 'agree'}"]
    parts += [f"{counts[status]:,} {status}" for status in STATUSES if status != "same" and counts[status]]
    broken = sum(cell.is_reference and cell.status in ("failed", "different") for cell in report.cells)
    if broken:
        parts.append(f"{count_of(broken, 'reference')} failed")
    return ", ".join(parts) + "."


def first_problem(report: ParityReport) -> CellResult | None:
    """Return the first cell that differs, else the first that failed, else None."""
    bad = [cell for cell in report.cells if cell.status in ("different", "failed")]
    return min(bad, key=lambda cell: cell.status, default=None)  # "different" sorts before "failed"


def trouble(cell: CellResult) -> str:
    """Return the reason why a cell is not the same as its reference; empty if it is the same."""
    if cell.status == "same":
        return ""
    if cell.status == "different" and cell.first_difference is not None:
        return cell.first_difference.message
    failed = [check.name for check in cell.checks if not check.passed]
    found = f"{', '.join(failed)} differ" if failed else f"{cell.status}, without a reason in the report"
    return cell.reason or found


def places(difference: Difference) -> list[tuple[str, str]]:
    """Return the known parts of a difference's place as (name, value): step, microbatch, rank, ..."""
    known = {name: value for name, value in vars(difference).items() if name != "message" and value is not None}
    # With every digit, so that one can search for the value.
    numbers = {name: f"{value:,}" if isinstance(value, int) else repr(value) for name, value in known.items()}
    return [(name, value if isinstance(value, str) else numbers[name]) for name, value in known.items()]


def size_of(check: Check) -> str:
    """Return the largest relative difference of a check in short form; `equal` or `differs` if it has none."""
    if check.largest is None:
        return "equal" if check.passed else "differs"
    if check.largest == 0:
        return "0"
    return f"{check.largest:.1e}" if math.isfinite(check.largest) else "infinite"


def limit(tolerance: float) -> str:
    """Describe a tolerance."""
    return "must be identical" if tolerance == 0 else f"at most {tolerance:g}"


def rate(value: float | None) -> str:
    """Format tokens per second."""
    return "not measured" if value is None else f"{value:,.0f}"


def size(value: float | None) -> str:
    """Format bytes as GB or MB."""
    if value is None:
        return "not measured"
    return f"{value / 1e9:.2f} GB" if value >= 1e9 else f"{value / 1e6:,.0f} MB"
