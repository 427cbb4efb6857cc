"""The matrix in a terminal: a live table while it runs (lines in a log), and the results when it has."""

from __future__ import annotations

from collections.abc import Sequence
from types import TracebackType

from rich.console import Console
from rich.live import Live
from rich.table import Table
from rich.text import Text

from harness.parity.cells import Cell
from harness.parity.result import CellResult, ParityReport
from harness.parity.running import Progress

_STYLES = {"same": "green", "different": "bold red", "failed": "bold red", "skipped": "yellow"}
_SIZES = ("loss", "validation_loss", "grad_norm")


class LiveTable:
    """Shows the progress of cells; a context manager, whose `update` takes each state."""

    def __init__(self, cells: Sequence[Cell], console: Console) -> None:
        self._cells = cells
        self._console = console
        self._printed: set[str] = set()
        self._live = Live(console=console, transient=True, auto_refresh=False) if console.is_terminal else None

    def __enter__(self) -> LiveTable:
        if self._live is not None:
            self._live.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._live is not None:
            self._live.stop()

    def update(self, progress: Progress) -> None:
        if self._live is not None:
            self._live.update(self._table(progress), refresh=True)
            return
        for name, finished in progress.finished.items():
            if name not in self._printed:
                self._printed.add(name)
                outcome = finished.reason or ("kept from before" if finished.was_kept else f"{finished.seconds:.0f} s")
                self._console.print(f"{name}: {outcome}", soft_wrap=True, highlight=False, markup=False)

    def _table(self, progress: Progress) -> Table:
        done = sum(cell.name in progress.finished for cell in self._cells)
        table = Table(title=f"{done} of {len(self._cells)} cells", title_justify="left", box=None)
        table.add_column("cell")
        table.add_column("steps", justify="right")
        table.add_column("state")
        for cell in self._cells:
            finished, made = progress.finished.get(cell.name), progress.steps.get(cell.name)
            if finished is not None:
                state = Text("failed", "bold red") if finished.reason else Text("ran", "green")
                if finished.was_kept:
                    state = Text("kept from before", "green")
                table.add_row(Text(cell.name), str(cell.steps if not finished.reason else ""), state)
            elif made is not None:
                table.add_row(Text(cell.name), f"{made} of {cell.steps}", Text("runs" if made else "starts", "cyan"))
            else:
                table.add_row(Text(cell.name), "", Text("waits", "dim"))
        return table


def show(report: ParityReport, console: Console) -> None:
    """Print the matrix with its largest relative differences, the first differences below it, and the verdict."""
    table = Table(box=None, title=report.title, title_justify="left")
    for name, justify in (
        ("cell", "left"),
        ("steps", "right"),
        ("data", "left"),
        *((size, "right") for size in _SIZES),
    ):
        table.add_column(name.replace("_", " "), justify="right" if justify == "right" else "left", no_wrap=True)
    table.add_column("")
    for cell in report.cells:
        checks = {check.name: check for check in cell.checks}
        data = checks.get("data")
        equal = "" if data is None else "equal" if data.passed else "DIFFERENT"
        sizes = [_size(checks[name].largest) if name in checks else "" for name in _SIZES]
        status = "reference" if cell.is_reference and cell.status == "same" else cell.status
        shown = Text(status.upper() if status in ("different", "failed") else status, _STYLES.get(status, ""))
        table.add_row(Text(cell.name), str(len(cell.series.step) or ""), equal, *sizes, shown)
    console.print(table)
    for cell in report.cells:
        for problem in problems(cell):
            console.print(f"{cell.name}: {problem}", soft_wrap=True, highlight=False, markup=False)
    compared = [cell for cell in report.cells if not cell.is_reference]
    same = sum(cell.status == "same" for cell in compared)
    console.print(
        f"{same} of {len(compared)} compared cells are the same: {report.verdict.upper()}",
        soft_wrap=True,
        highlight=False,
    )


def problems(cell: CellResult) -> list[str]:
    """Return what is wrong with a cell, the most telling difference first; empty for one that is the same."""
    if cell.status in ("failed", "skipped"):
        return [f"{cell.status}: {cell.reason}"]
    return [check.difference.message for check in cell.checks if check.difference is not None]


def _size(value: float | None) -> str:
    return "-" if value is None else f"{value:.1e}" if value else "0"
