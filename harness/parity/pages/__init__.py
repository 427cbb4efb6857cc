"""Pages of a parity report: one HTML file and JUnit XML, both rendered from `ParityReport`.

`publish` writes `report.html` (works offline and loads nothing) and `junit.xml` (a test case for every comparison of
every cell) next to `report.json`, which `report.schema.json` in this folder describes. Pages require the extra `report`
(Jinja and Matplotlib); they only render the contents of the report.
"""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING
from xml.etree import ElementTree

from harness.errors import ConfigError, os_errors_as
from harness.parity.pages import words
from harness.parity.pages.curves import draw_charts, draw_waves
from harness.parity.result import REPORT_FILE, STATUSES, CellResult, ParityReport, to_json
from harness.printing import duration, indented, one_line, printable, redact_all
from harness.settings import from_plain
from harness.storage import write_atomically
from harness.tables import SIGNS, open_templates

if TYPE_CHECKING:
    from rich.console import Console

HTML_FILE, JUNIT_FILE = "report.html", "junit.xml"
# Characters that XML 1.0 cannot contain, even escaped.
_NOT_XML = re.compile("[^\t\n\r\x20-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")


def publish(report: ParityReport, console: Console, folder: Path | None) -> None:
    """Print the report, and write it with its pages to `folder`, without credentials; None writes nothing.

    Raises ConfigError if Jinja or Matplotlib is not installed, or if the folder cannot be written to.
    """
    report = from_plain(ParityReport, redact_all(asdict(report)))
    console.print(one_line(report.title), soft_wrap=True)
    for group in words.group_cells(report):
        console.print(group.checks.to_terminal())
    for cell in report.cells:
        found = [check.difference.message for check in cell.checks if check.difference is not None]
        for trouble in found or filter(None, [words.trouble(cell)]):
            console.print(indented(f"{one_line(cell.name)}: {trouble}"), soft_wrap=True)
    compared = [cell for cell in report.cells if not cell.is_reference]
    same = sum(cell.status == "same" for cell in compared)
    console.print(f"{same} of {len(compared)} compared cells are the same: {report.verdict.upper()}", soft_wrap=True)
    if folder is not None:
        _write_files({REPORT_FILE: to_json(report)}, folder)
        render_all(report, folder)
        console.print(f"report {folder / HTML_FILE}", soft_wrap=True)


def render_all(report: ParityReport, folder: Path) -> None:
    """Write `report.html` and `junit.xml` to `folder`, which is created if it is missing."""
    _write_files({JUNIT_FILE: render_junit(report), HTML_FILE: render_page(report)}, folder)


def _write_files(files: dict[str, str], folder: Path) -> None:
    fix = "use another folder, such as out=DIR"
    with os_errors_as(ConfigError, "the report cannot be written", where=folder, fix=fix):
        folder.mkdir(parents=True, exist_ok=True)
        for name, text in files.items():
            # Names of runs and errors can contain lone surrogates, which UTF-8 cannot encode.
            write_atomically(folder / name, text.encode(errors="replace"))


def render_page(report: ParityReport) -> str:
    """Render `report.html`; all texts of the report are escaped."""
    try:
        templates = open_templates(Path(__file__).parent / "templates", trim_blocks=True, lstrip_blocks=True)
        charts = draw_charts(report)
    except ImportError as error:
        fix = "pip install 'megatron-sft-harness[report]'"
        raise ConfigError(f"a report requires {error.name}", where=HTML_FILE, fix=fix) from None
    counts = Counter(cell.status for cell in report.cells)
    return templates.get_template("report.html.j2").render(
        report=report,
        problem=words.first_problem(report),
        groups=words.group_cells(report),
        counts={status: counts[status] for status in reversed(STATUSES) if counts[status]},
        numbers={cell.name: number for number, cell in enumerate(report.cells)},
        w=words,
        duration=duration,
        signs=SIGNS,
        charts=charts,
        waves=draw_waves(report),
    )


def render_junit(report: ParityReport) -> str:
    """Render `junit.xml`: a suite for every check of the matrix.

    It contains a failure or an error if and only if the verdict is not `same`.
    """
    root = ElementTree.Element("testsuites", name=_clean(report.title))
    created = _clean(report.created)
    for name in dict.fromkeys(cell.check for cell in report.cells):
        suite = ElementTree.SubElement(root, "testsuite", name=_clean(f"parity.{name}"), timestamp=created)
        for cell in report.cells:
            if cell.check == name:
                _add_cell(suite, cell)
    if report.verdict == "failed":
        suite = ElementTree.SubElement(root, "testsuite", name="parity", timestamp=created)
        case = ElementTree.SubElement(suite, "testcase", classname="parity", name="something was compared", time="0")
        _add(case, "error", words.summary(report), report.command)
    for element in (*root, root):
        cases = list(element.iter("testcase"))
        element.set("tests", str(len(cases)))
        for kind, plural in (("failure", "failures"), ("error", "errors"), ("skipped", "skipped")):
            element.set(plural, str(sum(case.find(kind) is not None for case in cases)))
        element.set("time", f"{sum(float(case.get('time', '0')) for case in cases):.3f}")
    ElementTree.indent(root)
    return ElementTree.tostring(root, encoding="unicode", xml_declaration=True) + "\n"


def _add_cell(suite: ElementTree.Element, cell: CellResult) -> None:
    classname = _clean(f"parity.{cell.check}.{cell.name}")
    # The run is a separate case: it has the time of the cell, and fails if nothing could be compared.
    run = ElementTree.SubElement(suite, "testcase", classname=classname, name="run", time=f"{cell.seconds:.3f}")
    kind = {"failed": "error", "skipped": "skipped", "different": "failure"}.get(cell.status)
    if kind is not None and (kind != "failure" or all(check.passed for check in cell.checks)):
        _add(run, kind, words.trouble(cell), "" if kind == "skipped" else cell.command)
    for check in cell.checks:
        case = ElementTree.SubElement(suite, "testcase", classname=classname, name=_clean(check.name), time="0")
        if not check.passed:
            message = check.difference.message if check.difference else f"{check.name} {words.size_of(check)}"
            lines = [f"{check.name}: {words.size_of(check)}, {words.limit(check.tolerance)}"]
            lines += [f"{name}: {value}" for name, value in words.places(check.difference)] if check.difference else []
            _add(case, "failure", message, "\n".join([*lines, f"again: {cell.command}"]))


def _add(case: ElementTree.Element, kind: str, message: str, text: str) -> None:
    ElementTree.SubElement(case, kind, message=_clean(message)).text = _clean(text)


def _clean(text: str) -> str:
    return _NOT_XML.sub("\ufffd", printable(text))
