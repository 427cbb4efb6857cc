"""Arrange the cells of a report as tables: the matrix of axes, the checks of every cell, speed and memory by format."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from harness.parity.result import CellResult, Check, ParityReport

# A wider or emptier table is harder to read than a list.
_MOST_COLUMNS = 12


@dataclass(frozen=True)
class Grid:
    """The cells of one check, by their axes.

    Attributes:
        rows, columns: labels; a single empty one where there is nothing to distinguish.
        cells: the cells of each row and column.
        row_axis, column_axes: names of the axes whose values are the labels.
        settled: text with the axes that have the same value in every cell.
    """

    rows: list[str]
    columns: list[str]
    cells: list[list[list[CellResult]]]
    row_axis: str
    column_axes: str
    settled: str


@dataclass(frozen=True)
class Group:
    """The cells of one check.

    Attributes:
        name: of the check.
        cells: in the report's order.
        grid: the cells by their axes.
        columns: names of comparisons, in the order of their first appearance.
        limits: the tolerance of each comparison, None where cells have different ones.
        reasons: comparisons that share a reason for their tolerance, and the reason.
    """

    name: str
    cells: list[CellResult]
    grid: Grid
    columns: list[str]
    limits: dict[str, float | None]
    reasons: list[tuple[str, str]]

    @property
    def compared(self) -> list[CellResult]:
        return [cell for cell in self.cells if cell.checks]

    def check(self, cell: CellResult, name: str) -> Check | None:
        """Return a cell's comparison of that name."""
        return next((check for check in cell.checks if check.name == name), None)


@dataclass(frozen=True)
class Cost:
    """Speed and memory of the cells that share one value of an axis; None where nothing was measured."""

    value: str
    cells: int
    tokens_per_s: float | None
    slowest: float | None
    fastest: float | None
    memory_bytes: int | None
    seconds: float


def group_cells(report: ParityReport) -> list[Group]:
    """Return the cells by check, in the order of the report."""
    names = dict.fromkeys(cell.check for cell in report.cells)
    return [_group(name, [cell for cell in report.cells if cell.check == name]) for name in names]


def _group(name: str, cells: list[CellResult]) -> Group:
    checks = [check for cell in cells for check in cell.checks]
    columns = list(dict.fromkeys(check.name for check in checks))
    limits: dict[str, float | None] = {}
    for column in columns:
        tolerances = {check.tolerance for check in checks if check.name == column}
        limits[column] = tolerances.pop() if len(tolerances) == 1 else None
    reasons: dict[str, dict[str, None]] = {}
    for column in columns:
        for check in checks:
            if check.name == column and check.reason:
                reasons.setdefault(check.reason, {})[column] = None
    shared = [(", ".join(named), reason) for reason, named in reasons.items()]
    return Group(name, cells, arrange(cells), columns, limits, shared)


def arrange(cells: Sequence[CellResult]) -> Grid:
    """Make rows of the first axis that varies and columns of the others; a long list stays a list."""
    names = list(dict.fromkeys(name for cell in cells for name in cell.axes))
    values = {name: list(dict.fromkeys(cell.axes.get(name, "") for cell in cells)) for name in names}
    varying = [name for name in names if len(values[name]) > 1]
    settled = ", ".join(f"{name} {values[name][0]}" for name in names if name not in varying)
    if not varying:
        return Grid([""], [""], [[list(cells)]], "", "", settled)
    row_axis, column_axes = varying[0], varying[1:]

    def column_of(cell: CellResult) -> str:
        return " · ".join(cell.axes.get(name, "") or "none" for name in column_axes)

    rows, columns = values[row_axis], list(dict.fromkeys(map(column_of, cells)))
    if len(columns) > _MOST_COLUMNS or 2 * len(cells) < len(rows) * len(columns):
        column_axes, columns = [], [""]

    def at(row: str, column: str) -> list[CellResult]:
        in_row = [cell for cell in cells if cell.axes.get(row_axis, "") == row]
        return [cell for cell in in_row if not column_axes or column_of(cell) == column]

    placed = [[at(row, column) for column in columns] for row in rows]
    return Grid([row or "none" for row in rows], columns, placed, row_axis, " · ".join(column_axes), settled)


def costs(report: ParityReport) -> tuple[str, list[Cost]]:
    """Summarize speed and memory by format, or by the first axis where no cell has a format.

    Returns:
        the axis, and the cost of each of its values.
    """
    ran = [cell for cell in report.cells if cell.series.step and cell.axes]
    if not ran:
        return "", []
    axis = "format" if any("format" in cell.axes for cell in ran) else next(iter(ran[0].axes))
    summaries = []
    for value in dict.fromkeys(cell.axes[axis] for cell in ran if axis in cell.axes):
        cells = [cell for cell in ran if cell.axes.get(axis) == value]
        rates = [cell.tokens_per_s for cell in cells if cell.tokens_per_s is not None]
        memory = [cell.peak_memory_bytes for cell in cells if cell.peak_memory_bytes is not None]
        rate = statistics.median(rates) if rates else None
        slowest, fastest = min(rates, default=None), max(rates, default=None)
        seconds = statistics.median(cell.seconds for cell in cells)
        summaries.append(Cost(value, len(cells), rate, slowest, fastest, max(memory, default=None), seconds))
    return axis, summaries
