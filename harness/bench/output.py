"""Running benches from a terminal: what is shown meanwhile, and where the figures go."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import typer
from rich.console import Console, RenderableType
from rich.status import Status

from harness.bench.figures import BenchReport, render_report
from harness.bench.page import render_benchmarks
from harness.errors import ConfigError

_LOG_COLUMNS = 110

Say = Callable[[str], None]
Outcome = tuple[BenchReport, RenderableType | None]
# Measures, says meanwhile what it is at, and returns its figures and what there is to see beside them.
Bench = Callable[[Say], Outcome]


@dataclass(frozen=True)
class Output:
    """Where figures go.

    Attributes:
        as_json: printed for programs, and no tables.
        save: file of the same.
        check: a missed target is exit code 1.
        page: file of the page of all benches.
    """

    as_json: bool
    save: Path | None
    check: bool
    page: Path | None = None

    def show(self, benches: Sequence[Bench]) -> None:
        """Run benches, each as it comes shown as a table with what it draws, and all as JSON where asked for.

        Raises:
            ConfigError: the file cannot be written; found out before anything is measured.
            typer.Exit: with code 1 where a target is missed and that is to be told.
        """
        # A log is not wrapped to the 80 columns that are taken where there is no terminal.
        console = Console() if sys.stdout.isatty() else Console(width=_LOG_COLUMNS)
        errors = Console(stderr=True)
        reports = []
        for path in (self.save, self.page):
            if path is not None:
                _check_writable(path)
        for bench in benches:
            began = time.perf_counter()
            with errors.status("measuring") as status:

                def say(text: str, began: float = began, status: Status = status) -> None:
                    status.update(text)
                    if not errors.is_terminal:
                        errors.print(f"[{time.perf_counter() - began:6.1f} s] {text}", highlight=False, markup=False)

                report, drawing = bench(say)
            report.seconds = time.perf_counter() - began
            reports.append(report)
            if not self.as_json:
                console.print(render_report(report))
                if drawing is not None:
                    console.print(drawing)
                console.print()
        self._finish(reports)

    def _finish(self, reports: list[BenchReport]) -> None:
        text = json.dumps({"reports": [report.to_dict() for report in reports]}, indent=2)
        if self.as_json:
            print(text)
        if self.save is not None:
            _write(self.save, text + "\n")
        if self.page is not None:
            _write(self.page, render_benchmarks(reports))
        missed = [f"{report.subject}: {figure.name}" for report in reports for figure in report.missed]
        if missed and self.check:
            print(f"{len(missed)} targets are missed: {'; '.join(missed)}", file=sys.stderr)
            raise typer.Exit(1)


def _check_writable(path: Path) -> None:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        is_new = not path.exists()
        path.open("a").close()
        if is_new:
            path.unlink()
    except OSError as error:
        raise _unwritable(path, error) from error


def _write(path: Path, text: str) -> None:
    try:
        path.write_text(text)
    except OSError as error:
        raise _unwritable(path, error) from error


def _unwritable(path: Path, error: OSError) -> ConfigError:
    return ConfigError(f"the figures cannot be written: {error.strerror}", where=str(path), fix="name another file")
