"""Pages of a parity report: one HTML file, a chat message and JUnit XML, all made from `ParityReport`.

`publish` writes `report.html` (opens offline), `report.md` (at most 3,800 characters, for a chat) and `junit.xml`
(a test case for every comparison of every cell) next to `report.json`, which `report.schema.json` in this folder
describes. Pages need the extra `report` (Jinja and Plotly); they only render, and compute nothing that the report does
not hold. Read `page` first.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from harness.errors import ConfigError, os_errors_as
from harness.parity.pages import words
from harness.parity.pages.junit import render_junit
from harness.parity.pages.matrix import group_cells
from harness.parity.pages.message import render_message
from harness.parity.pages.page import render_page
from harness.parity.result import REPORT_FILE, ParityReport, to_json
from harness.printing import indented, one_line
from harness.storage import write_atomically

if TYPE_CHECKING:
    from rich.console import Console

__all__ = ["HTML_FILE", "publish", "render_all"]

HTML_FILE, MESSAGE_FILE, JUNIT_FILE = "report.html", "report.md", "junit.xml"


def publish(report: ParityReport, console: Console, folder: Path | None) -> None:
    """Print the report, and write it with its pages to `folder`; None writes nothing.

    Raises:
        ConfigError: Jinja or Plotly is not installed, or the folder cannot be written to.
    """
    console.print(one_line(report.title), soft_wrap=True)
    for group in group_cells(report):
        console.print(group.checks.to_terminal())
    for cell in report.cells:
        found = [check.difference.message for check in cell.checks if check.difference is not None]
        for trouble in found or filter(None, [words.trouble(cell)]):
            console.print(indented(f"{one_line(cell.name)}: {trouble}"), soft_wrap=True)
    compared = [cell for cell in report.cells if not cell.is_reference]
    same = sum(cell.status == "same" for cell in compared)
    verdict = f"{same} of {len(compared)} compared cells are the same: {report.verdict.upper()}"
    console.print(verdict, soft_wrap=True)
    if folder is not None:
        _write_files({REPORT_FILE: to_json(report)}, folder)
        render_all(report, folder)
        console.print(f"report {folder / HTML_FILE}", soft_wrap=True)


def render_all(report: ParityReport, folder: Path) -> None:
    """Write `report.html`, `report.md` and `junit.xml` to `folder`, made if missing.

    Raises:
        ConfigError: Jinja or Plotly is not installed, or the folder cannot be written to.
    """
    files = {MESSAGE_FILE: render_message(report), JUNIT_FILE: render_junit(report), HTML_FILE: render_page(report)}
    _write_files(files, folder)


def _write_files(files: dict[str, str], folder: Path) -> None:
    with os_errors_as(
        ConfigError, "the report cannot be written", where=folder, fix="name another folder, such as with out=DIR"
    ):
        folder.mkdir(parents=True, exist_ok=True)
        for name, text in files.items():
            # Names of runs and errors can hold halves of surrogate pairs, which UTF-8 has no bytes for.
            write_atomically(folder / name, text.encode(errors="replace"))
