"""Shows the stages of a preparation: a bar while one is at work, a line when it is done."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeElapsedColumn, TimeRemainingColumn


class Stage:
    """One stage at work.

    Attributes:
        said: words for the line at its end.
    """

    def __init__(self, advance: Callable[[float], None]) -> None:
        self.advance = advance
        self.said = ""


class Stages:
    """Runs stages one after another and keeps their times.

    Attributes:
        seconds: by stage, as each ends.
    """

    def __init__(self, console: Console) -> None:
        self._console = console
        self.seconds: dict[str, float] = {}

    @contextmanager
    def stage(self, name: str, doing: str, *, total: float | None = None) -> Iterator[Stage]:
        """Show `doing` with a bar (a moving one where `total` is not known), then a line with the time it took."""
        progress = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            TaskProgressColumn(),
            TimeElapsedColumn(),
            TextColumn("left"),
            TimeRemainingColumn(),
            console=self._console,
            transient=True,
            disable=not self._console.is_terminal,
        )
        began = time.perf_counter()
        with progress:
            task = progress.add_task(doing, total=total)
            stage = Stage(lambda step: progress.advance(task, step))
            yield stage
        self.seconds[name] = round(time.perf_counter() - began, 3)
        self._console.print(f"{name:<10}{self.seconds[name]:7.1f} s  {stage.said}", highlight=False, soft_wrap=True)

    def say(self, text: str) -> None:
        """A line that stays."""
        self._console.print(text, highlight=False, soft_wrap=True)
