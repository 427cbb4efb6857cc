"""What a person sees while a run goes on: a live bar in a terminal, a line now and then in a log."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from types import TracebackType

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from harness.loader import RankBatch
from harness.train.metrics import StepMetrics

# A log gets about this many lines a run.
LOG_LINES = 12


class RunProgress:
    """Shows the steps of one run.

    Args:
        steps: of the whole run.
        done: steps that an earlier part of the run has done.
        quiet: show nothing (ranks other than 0).
    """

    def __init__(self, steps: int, *, done: int = 0, quiet: bool = False) -> None:
        self._quiet = quiet
        self._steps = steps
        self._done_before = done
        self._console = Console()
        self._live = self._console.is_terminal and not quiet
        self._began = time.perf_counter()
        self._progress = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("elapsed"),
            TimeElapsedColumn(),
            TextColumn("left"),
            TimeRemainingColumn(),
            console=self._console,
            disable=not self._live,
        )
        self._task = self._progress.add_task("training", total=steps, completed=done)

    def __enter__(self) -> RunProgress:
        if self._live:
            self._progress.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._live:
            self._progress.stop()

    def say(self, text: str) -> None:
        """One line that stays."""
        if not self._quiet:
            self._console.print(text, soft_wrap=True, highlight=False)

    def step(self, metrics: StepMetrics) -> None:
        """One more step is done."""
        if self._quiet:
            return
        told = f"loss {metrics.loss:.4f}, {metrics.tokens_per_s:,.0f} tokens/s"
        if metrics.validation_loss is not None:
            named = "".join(f", {name} loss {loss:.4f}" for name, loss in metrics.evaluation_losses.items())
            self.say(
                f"step {metrics.step}: loss {metrics.loss:.4f}, validation loss {metrics.validation_loss:.4f}{named}"
            )
        self._progress.update(self._task, completed=metrics.step, description=f"training: {told}")
        every = max(1, self._steps // LOG_LINES)
        if not self._live and metrics.validation_loss is None and (metrics.step % every == 0 or metrics.step == 1):
            taken = (time.perf_counter() - self._began) / (metrics.step - self._done_before)
            left = taken * (self._steps - metrics.step)
            self.say(f"step {metrics.step} of {self._steps}: {told}, about {left:.0f} s left")

    @contextmanager
    def doing(self, what: str) -> Iterator[None]:
        """Name something that holds the steps up while it goes on."""
        before = self._progress.tasks[0].description
        self._progress.update(self._task, description=what)
        yield
        self._progress.update(self._task, description=before)

    def doing_each(self, what: str, batches: Iterable[RankBatch]) -> Iterator[RankBatch]:
        """Pass `batches` on while saying what they are for."""
        with self.doing(what):
            yield from batches
