"""Reports of the nodes of one night, joined as one."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path

from harness.errors import ConfigError, FormatError
from harness.parity.result import REPORT_FILE, CellResult, ParityReport, read_report


def find_reports(folder: Path) -> list[Path]:
    """Return every `report.json` in `folder` and below."""
    return sorted(folder.rglob(REPORT_FILE)) if folder.is_dir() else []


def summarize(folders: Sequence[Path], *, command: str) -> ParityReport:
    """Join the reports of many nodes; cells carry the node's name, and a node without a report is a failed cell.

    Args:
        folders: a folder for each node, with one or more reports in it or below.

    Raises:
        ConfigError: no folder is named.
    """
    if not folders:
        raise ConfigError("there is nothing to summarize", where="DIR...", fix="name the folders of the nodes' reports")
    cells: list[CellResult] = []
    facts: dict[str, dict[str, str]] = {}
    for folder in folders:
        paths = find_reports(folder)
        if not paths:
            cells.append(_lost(_node(folder.name, facts), f"there is no {REPORT_FILE} in {folder} or below"))
        for path in paths:
            try:
                report = read_report(path)
            except FormatError as error:
                cells.append(_lost(_node(folder.name, facts), f"{error.what} ({error.where})"))
                continue
            host = report.environment.get("machine", "").split(",")[0]
            node = _node(host or path.parent.name, facts)
            facts[node] = report.environment
            cells += [
                replace(
                    cell,
                    name=f"{node}: {cell.name}",
                    reference=f"{node}: {cell.reference}" if cell.reference else None,
                    axes={"node": node, **cell.axes},
                )
                for cell in report.cells
            ]
    return ParityReport(
        title=f"{len(folders)} nodes",
        created=datetime.now(UTC).isoformat(timespec="seconds"),
        command=command,
        environment=_common(facts),
        cells=cells,
    )


def _node(name: str, taken: dict[str, dict[str, str]]) -> str:
    """Return `name`, with a number where it is taken, so that names of cells stay unique."""
    node, number = name, 2
    while node in taken:
        node, number = f"{name} ({number})", number + 1
    taken[node] = {}
    return node


def _lost(node: str, reason: str) -> CellResult:
    return CellResult(f"{node}: report", "report", {"node": node}, None, "failed", "", reason=reason)


def _common(facts: dict[str, dict[str, str]]) -> dict[str, str]:
    """Return the facts that all nodes share once, and the others for each node."""
    common: dict[str, str] = {}
    for key in dict.fromkeys(key for node_facts in facts.values() for key in node_facts):
        values = {node: node_facts[key] for node, node_facts in facts.items() if key in node_facts}
        shared = set(values.values())
        each = "; ".join(f"{node}: {value}" for node, value in values.items())
        common[key] = shared.pop() if len(shared) == 1 else each
    return common
