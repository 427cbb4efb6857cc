"""Arrange the cells of a report as tables: the matrix of axes, the checks of every cell, speed and memory by format."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from harness.parity.pages import words
from harness.parity.result import CellResult, Check, ParityReport
from harness.tables import Row, Table, TableCell

# A wider or emptier table is harder to read than a list.
_MOST_COLUMNS = 12


@dataclass(frozen=True)
class Group:
    """The cells of one check.

    Attributes:
        settled: text with the axes that have the same value in every cell.
        reasons: comparisons that share a reason for their tolerance, and the reason.
    """

    name: str
    matrix: Table
    settled: str
    checks: Table
    reasons: list[tuple[str, str]]


def group_cells(report: ParityReport) -> list[Group]:
    """Return the cells by check, in the order of the report."""
    links = {cell.name: f"#cell-{number}" for number, cell in enumerate(report.cells)}
    names = dict.fromkeys(cell.check for cell in report.cells)
    return [_group(name, [cell for cell in report.cells if cell.check == name], links) for name in names]


def _group(name: str, cells: list[CellResult], links: Mapping[str, str]) -> Group:
    checks = [check for cell in cells for check in cell.checks]
    columns = list(dict.fromkeys(check.name for check in checks))
    head = ["largest relative difference", ""]
    reasons: dict[str, dict[str, None]] = {}
    for column in columns:
        tolerances = {check.tolerance for check in checks if check.name == column}
        limit = words.limit(tolerances.pop()) if len(tolerances) == 1 else "see cell"
        head.append(f"{_spaced(column)}, {limit}")
        for check in checks:
            if check.name == column and check.reason:
                reasons.setdefault(check.reason, {})[column] = None
    rows = [
        (TableCell(cell.name, link=links[cell.name]), _status(cell), *(_check(cell, column) for column in columns))
        for cell in cells
    ]
    shared = [(", ".join(named), reason) for reason, named in reasons.items()]
    return Group(name, *arrange(cells, links), Table(head, rows), shared)


def _status(cell: CellResult) -> TableCell:
    return TableCell(words.mark(cell), words.mark(cell), hover=cell.name)


def _check(cell: CellResult, name: str) -> TableCell:
    check: Check | None = next((check for check in cell.checks if check.name == name), None)
    if check is None:
        return TableCell("–")  # noqa: RUF001
    hover = check.difference.message if check.difference else words.limit(check.tolerance)
    return TableCell(words.size_of(check), "same" if check.passed else "different", hover=hover)


def arrange(cells: Sequence[CellResult], links: Mapping[str, str]) -> tuple[Table, str]:
    """Make rows of the first axis that varies and columns of the others; a long list stays a list.

    The text next to the table has the axes that have the same value in every cell.
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

    def at(row: str, column: str) -> list[CellResult]:
        in_row = [cell for cell in cells if cell.axes.get(row_axis, "") == row]
        return [cell for cell in in_row if not column_axes or column_of(cell) == column]

    placed: list[Row] = [(row or "none", *(_tiles(at(row, column), links) for column in columns)) for row in rows]
    corner = f"{row_axis} by {' · '.join(column_axes)}" if column_axes else row_axis
    return Table((_spaced(corner), *columns), placed), settled


def _tiles(cells: Sequence[CellResult], links: Mapping[str, str]) -> list[TableCell]:
    return [replace(_status(cell), link=links.get(cell.name, "")) for cell in cells]


def _spaced(name: str) -> str:
    return name.replace("_", " ")
