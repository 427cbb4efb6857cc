"""Show the progress of a run: a live bar in a terminal, a line now and then in a log."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from harness.train.metrics import StepMetrics

# A log gets about this many lines of a run.
LOG_LINES = 12


class RunProgress:
    """Shows the steps of one run. Use as a context manager.

    Args:
        steps: of the whole run.
        done: steps that an earlier part of the run has completed.
        quiet: print nothing (ranks other than 0).
    """

    def __init__(self, steps: int, *, done: int = 0, quiet: bool = False) -> None:
        self._quiet, self._steps, self._done_before = quiet, steps, done
        self._console = Console()
        self._live = self._console.is_terminal and not quiet
        self._began = time.perf_counter()
        columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TextColumn("elapsed"))
        remaining = (TimeElapsedColumn(), TextColumn("left"), TimeRemainingColumn())
        self._progress = Progress(*columns, *remaining, console=self._console, disable=not self._live)
        self._task = self._progress.add_task("training", total=steps, completed=done)

    def __enter__(self) -> RunProgress:
        self._progress.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._progress.stop()

    def log(self, line: str) -> None:
        """Print a line that stays."""
        if not self._quiet:
            self._console.print(line, soft_wrap=True, highlight=False)

    def step(self, metrics: StepMetrics) -> None:
        """Show one more completed step."""
        if self._quiet:
            return
        loss = f"loss {metrics.loss:.4f}, {metrics.tokens_per_s:,.0f} tokens/s"
        self._progress.update(self._task, completed=metrics.step, description=f"training: {loss}")
        if metrics.validation_loss is not None:
            further = "".join(f", {name} loss {loss:.4f}" for name, loss in metrics.evaluation_losses.items())
            self.log(
                f"step {metrics.step}: loss {metrics.loss:.4f}, validation loss {metrics.validation_loss:.4f}{further}"
            )
        elif not self._live and (metrics.step % max(1, self._steps // LOG_LINES) == 0 or metrics.step == 1):
            each = (time.perf_counter() - self._began) / (metrics.step - self._done_before)
            left = each * (self._steps - metrics.step)
            self.log(f"step {metrics.step} of {self._steps}: {loss}, about {left:.0f} s left")

    @contextmanager
    def doing(self, activity: str) -> Iterator[None]:
        """Show an activity that holds up the steps while it lasts."""
        before = self._progress.tasks[0].description
        self._progress.update(self._task, description=activity)
        yield
        self._progress.update(self._task, description=before)
