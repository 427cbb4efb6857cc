"""The matrix in a terminal: a live table while it runs (lines in a log), and the results when it has."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from rich.console import Console, Group
from rich.live import Live

from harness.parity.cells import Cell
from harness.parity.result import CellResult, ParityReport
from harness.parity.running import MatrixProgress
from harness.printing import indented, one_line
from harness.tables import Row, Table, TableCell

_SIZES = ("loss", "validation_loss", "grad_norm")


@contextmanager
def live_table(cells: Sequence[Cell], console: Console) -> Iterator[Callable[[MatrixProgress], None]]:
    """Show the progress of `cells`; yields a function that takes each state."""
    if console.is_terminal:
        with Live(console=console, transient=True, auto_refresh=False) as live:
            yield lambda progress: live.update(_draw(cells, progress), refresh=True)
        return
    printed: set[str] = set()

    def log(progress: MatrixProgress) -> None:
        for name, finished in progress.finished.items():
            if name not in printed:
                printed.add(name)
                outcome = finished.reason or ("kept from before" if finished.was_kept else f"{finished.seconds:.0f} s")
                console.print(indented(f"{one_line(name)}: {outcome}"), soft_wrap=True)

    yield log


def _draw(cells: Sequence[Cell], progress: MatrixProgress) -> Group:
    done = sum(cell.name in progress.finished for cell in cells)
    rows = []
    for cell in cells:
        finished, made = progress.finished.get(cell.name), progress.steps.get(cell.name)
        steps, state = "", TableCell("waits", "waiting")
        if finished is not None and finished.reason:
            state = TableCell("failed", "failed")
        elif finished is not None:
            steps, state = str(cell.steps), TableCell("kept from before" if finished.was_kept else "ran", "same")
        elif made is not None:
            steps, state = f"{made} of {cell.steps}", TableCell("runs" if made else "starts", "running")
        rows.append((cell.name, steps, state))
    return Group(f"{done} of {len(cells)} cells", Table(("cell", "steps", "state"), rows, "lrl").to_terminal())


def show(report: ParityReport, console: Console) -> None:
    """Print the matrix with its largest relative differences, the first differences below it, and the verdict."""
    rows: list[Row] = []
    for cell in report.cells:
        checks = {check.name: check for check in cell.checks}
        data = checks.get("data")
        equal = "" if data is None else "equal" if data.passed else "DIFFERENT"
        sizes = [_size(checks[name].largest) if name in checks else "" for name in _SIZES]
        status = "reference" if cell.is_reference and cell.status == "same" else cell.status
        shown = TableCell(status.upper() if status in ("different", "failed") else status, status)
        rows.append((cell.name, str(len(cell.series.step) or ""), equal, *sizes, shown))
    head = ("cell", "steps", "data", *(size.replace("_", " ") for size in _SIZES), "")
    console.print(one_line(report.title), soft_wrap=True)
    console.print(Table(head, rows, "lrlrrrl").to_terminal())
    for cell in report.cells:
        for problem in problems(cell):
            console.print(indented(f"{one_line(cell.name)}: {problem}"), soft_wrap=True)
    compared = [cell for cell in report.cells if not cell.is_reference]
    same = sum(cell.status == "same" for cell in compared)
    verdict = f"{same} of {len(compared)} compared cells are the same: {report.verdict.upper()}"
    console.print(verdict, soft_wrap=True)


def problems(cell: CellResult) -> list[str]:
    """Return what is wrong with a cell, the most telling difference first; empty for one that is the same."""
    if cell.status in ("failed", "skipped"):
        return [f"{cell.status}: {cell.reason}"]
    return [check.difference.message for check in cell.checks if check.difference is not None]


def _size(value: float | None) -> str:
    return "-" if value is None else f"{value:.1e}" if value else "0"
