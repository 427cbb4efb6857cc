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
    groups: dict[str, list[CellResult]] = {}
    for cell in report.cells:
        groups.setdefault(cell.check, []).append(cell)
    return [_group(name, cells) for name, cells in groups.items()]


def _group(name: str, cells: list[CellResult]) -> Group:
    checks: dict[str, list[Check]] = {}
    for cell in cells:
        for check in cell.checks:
            checks.setdefault(check.name, []).append(check)
    limits = {}
    for column, same_name in checks.items():
        tolerances = {check.tolerance for check in same_name}
        limits[column] = tolerances.pop() if len(tolerances) == 1 else None
    reasons: dict[str, list[str]] = {}
    for column, same_name in checks.items():
        for reason in dict.fromkeys(check.reason for check in same_name if check.reason):
            reasons.setdefault(reason, []).append(column)
    shared = [(", ".join(columns), reason) for reason, columns in reasons.items()]
    return Group(name, cells, arrange(cells), list(checks), limits, shared)


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
    placed = [
        [
            [
                cell
                for cell in cells
                if cell.axes.get(row_axis, "") == row and (not column_axes or column_of(cell) == column)
            ]
            for column in columns
        ]
        for row in rows
    ]
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
        summaries.append(
            Cost(
                value,
                len(cells),
                statistics.median(rates) if rates else None,
                min(rates, default=None),
                max(rates, default=None),
                max(memory, default=None),
                statistics.median(cell.seconds for cell in cells),
            )
        )
    return axis, summaries
