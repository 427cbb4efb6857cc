"""The matrix in a terminal while it runs: a live table, or lines in a log."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from rich.console import Console, Group
from rich.live import Live

from harness.parity.cells import Cell
from harness.parity.running import MatrixProgress
from harness.printing import indented, one_line
from harness.tables import Table, TableCell


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
