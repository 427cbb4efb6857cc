"""Show the progress of a run: a line now and then, and in a terminal a live bar below the lines."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress

from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Column

from harness.errors import discard_output
from harness.printing import duration, open_console, print_line, redact
from harness.train.metrics import StepMetrics

# A run prints about this many lines between validations.
LOG_LINES = 12
# Steps between lines of a run whose length is not known.
_LOG_STEPS = 20


class RunProgress:
    """Shows the steps of one run; None steps where only the end of its data ends it. Use as a context manager."""

    def __init__(self, steps: int | None, *, done: int = 0, quiet: bool = False) -> None:
        self._quiet, self._steps, self._done_before = quiet, steps, done
        self._unlogged = ""
        is_terminal = sys.stdout.isatty()
        # Not Rich's own judgment: FORCE_COLOR, which schedulers pass on, would draw a bar into a log file.
        self._console = open_console(force_terminal=is_terminal)
        self._began = time.perf_counter()
        columns = (
            TextColumn("{task.description}", markup=False, table_column=Column(no_wrap=True)),
            BarColumn(bar_width=None, table_column=Column(ratio=1, min_width=8)),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            TextColumn("{task.fields[left]}", markup=False, table_column=Column(no_wrap=True)),
        )
        is_live = is_terminal and not quiet and not self._console.is_dumb_terminal
        self._progress = Progress(*columns, console=self._console, disable=not is_live, expand=True)
        self._task = self._progress.add_task("training", total=steps, completed=done, left="")

    def __enter__(self) -> RunProgress:
        self._progress.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._progress.stop()

    def log(self, line: str) -> None:
        """Print a line that stays."""
        if self._quiet:
            return
        try:
            self._console.print(redact(line), soft_wrap=True)
        except OSError as error:  # of a full or failing disk; the run's metrics have all that is shown
            self._quiet = True
            discard_output()
            with suppress(OSError):
                print_line(f"standard output cannot be written ({error.strerror}); training continues", file=sys.stderr)

    def step(self, metrics: StepMetrics) -> None:
        """Show one more completed step."""
        if self._quiet:
            return
        each = (time.perf_counter() - self._began) / max(1, metrics.step - self._done_before)
        of, every, left = "", _LOG_STEPS, f"{each:.2g} s per step"
        if self._steps is not None:
            of, every = f" of {self._steps}", max(1, self._steps // LOG_LINES)
            left = f"about {duration(each * (self._steps - metrics.step))} left"
        # Short, so that the bar fits into 80 columns; the lines have the other numbers.
        speed = f"{metrics.tokens_per_s:,.0f} tokens/s"
        shown = f"loss {metrics.loss:.4f}, {speed}"
        self._progress.update(self._task, completed=metrics.step, description=shown, left=left)
        numbers = f"lr {metrics.learning_rate:.2e}, grad norm {metrics.grad_norm:.3g}, {speed}, {left}"
        named = {"validation": metrics.validation_loss, **metrics.evaluation_losses}
        validations = "".join(f", {name} loss {loss:.4f}" for name, loss in named.items() if loss is not None)
        total = "" if validations else of
        self._unlogged = f"step {metrics.step}{total}: loss {metrics.loss:.4f}{validations}, {numbers}"
        if validations or metrics.step % every == 0 or metrics.step == 1:
            self.log_last_step()

    def log_last_step(self) -> None:
        """Print the line of the newest step, if it was not printed: a run ends with the line of its last step."""
        if self._unlogged:
            self.log(self._unlogged)
        self._unlogged = ""

    @contextmanager
    def doing(self, activity: str) -> Iterator[None]:
        """Show an activity that holds up the steps while it lasts."""
        before = self._progress.tasks[0].description
        self._progress.update(self._task, description=activity)
        yield
        self._progress.update(self._task, description=before)
