"""JUnit XML for CI: a test case for every comparison of every cell."""

from __future__ import annotations

import re
from xml.etree import ElementTree

from harness.parity.pages import words
from harness.parity.result import CellResult, ParityReport
from harness.printing import printable

# What XML 1.0 cannot hold, escaped or not.
_NOT_XML = re.compile("[^\t\n\r\x20-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")


def render_junit(report: ParityReport) -> str:
    """Render `junit.xml`: a suite for every check of the matrix.

    It has a failure or an error exactly where the verdict is not `same`.
    """
    root = ElementTree.Element("testsuites", name=_clean(report.title))
    suites: dict[str, ElementTree.Element] = {}
    for cell in report.cells:
        if cell.check not in suites:
            suites[cell.check] = ElementTree.SubElement(
                root, "testsuite", name=_clean(f"parity.{cell.check}"), timestamp=_clean(report.created)
            )
        _add_cell(suites[cell.check], cell)
    if report.verdict == "failed":
        suite = ElementTree.SubElement(root, "testsuite", name="parity", timestamp=_clean(report.created))
        case = ElementTree.SubElement(suite, "testcase", classname="parity", name="something was compared", time="0")
        _add(case, "error", words.summary(report), report.command)
    for element in (*root, root):
        _count(element)
    ElementTree.indent(root)
    return ElementTree.tostring(root, encoding="unicode", xml_declaration=True) + "\n"


def _add_cell(suite: ElementTree.Element, cell: CellResult) -> None:
    classname = _clean(f"parity.{cell.check}.{cell.name}")
    # The run is its own case: it has the time of the cell, and fails where nothing could be compared.
    run = ElementTree.SubElement(suite, "testcase", classname=classname, name="run", time=f"{cell.seconds:.3f}")
    if cell.status == "failed":
        _add(run, "error", words.trouble(cell), cell.command)
    elif cell.status == "skipped":
        _add(run, "skipped", words.trouble(cell), "")
    elif cell.status == "different" and all(check.passed for check in cell.checks):
        _add(run, "failure", words.trouble(cell), cell.command)
    for check in cell.checks:
        case = ElementTree.SubElement(suite, "testcase", classname=classname, name=_clean(check.name), time="0")
        if not check.passed:
            message = check.difference.message if check.difference else f"{check.name} {words.size_of(check)}"
            lines = [f"{check.name}: {words.size_of(check)}, {words.limit(check.tolerance)}"]
            lines += [f"{name}: {value}" for name, value in words.places(check.difference)] if check.difference else []
            _add(case, "failure", message, "\n".join([*lines, f"again: {cell.command}"]))


def _add(case: ElementTree.Element, kind: str, message: str, text: str) -> None:
    ElementTree.SubElement(case, kind, message=_clean(message)).text = _clean(text)


def _count(element: ElementTree.Element) -> None:
    cases = list(element.iter("testcase"))
    element.set("tests", str(len(cases)))
    for kind, name in (("failure", "failures"), ("error", "errors"), ("skipped", "skipped")):
        element.set(name, str(sum(case.find(kind) is not None for case in cases)))
    element.set("time", f"{sum(float(case.get('time', '0')) for case in cases):.3f}")


def _clean(text: str) -> str:
    return _NOT_XML.sub("\ufffd", printable(text))
