"""Many reports read together: the nights of one matrix as a history, the nodes of one night as one report."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path

from harness.errors import ConfigError, FormatError
from harness.parity.history import History, Metric, Night
from harness.parity.result import REPORT_FILE, CellResult, ParityReport, read_report

# A band is made from so many nights before; from fewer it would be drawn from chance.
_FEWEST, _MOST = 3, 14


@dataclass(frozen=True)
class _Followed:
    """A metric: how its band is made, and how it is read from a cell and its reference."""

    name: str
    unit: str
    share: float
    read: Callable[[CellResult, CellResult | None], float | None]


def read_history(folder: Path, *, step: int | None = None) -> History:
    """What the reports below `folder` say, night by night, of every cell that ran.

    Followed are the loss at a step, tokens/s as a ratio to the reference cell's of the same night, and peak memory.
    A band is the middle of up to 14 nights before, give or take a share of it or four times the nights' own spread,
    whichever is more.

    Args:
        step: of the loss; None for the last step that every night made.

    Raises:
        FormatError: there is no report below `folder`, or one is damaged.
    """
    paths = find_reports(folder)
    if not paths:
        raise FormatError("there is no report", where=f"{folder}/**/{REPORT_FILE}", fix="keep each night's folder here")
    nights = sorted(((read_report(path), path) for path in paths), key=lambda one: one[0].created)
    names = list(dict.fromkeys(cell.name for report, _ in nights for cell in report.cells))
    metrics = []
    for name in names:
        # A night without the cell counts as one without a value, where its report is of a matrix that has the cell.
        titles = {report.title for report, _ in nights if any(cell.name == name for cell in report.cells)}
        cells = [
            (report, path, {cell.name: cell for cell in report.cells})
            for report, path in nights
            if report.title in titles
        ]
        at = step or min(
            (cell.series.step[-1] for *_, by in cells if (cell := by.get(name)) and cell.series.step), default=0
        )
        for followed in _followed(at):
            values = []
            for report, path, by_name in cells:
                cell = by_name.get(name)
                reference = by_name.get(cell.reference) if cell is not None and cell.reference else None
                value = followed.read(cell, reference) if cell is not None else None
                values.append(Night(report.created, value, source=str(path)))
            if any(night.value is not None for night in values):
                metrics.append(
                    Metric(followed.name, name, followed.unit, _banded(values, followed.share), _told(followed.share))
                )
    titles = {report.title for report, _ in nights}
    return History(titles.pop() if len(titles) == 1 else f"{len(titles)} matrices", metrics)


def _followed(step: int) -> Sequence[_Followed]:
    return (
        _Followed(f"loss at step {step}", "nats", 1e-3, lambda cell, _: _loss_at(cell, step)),
        _Followed("tokens/s, to the reference's", "x", 0.2, _rate),
        _Followed("peak memory", "MB", 0.1, lambda cell, _: _megabytes(cell)),
    )


def _loss_at(cell: CellResult, step: int) -> float | None:
    return dict(zip(cell.series.step, cell.series.loss, strict=True)).get(step)


def _rate(cell: CellResult, reference: CellResult | None) -> float | None:
    if reference is None or not cell.tokens_per_s or not reference.tokens_per_s:
        return None
    return cell.tokens_per_s / reference.tokens_per_s


def _megabytes(cell: CellResult) -> float | None:
    return None if cell.peak_memory_bytes is None else cell.peak_memory_bytes / 1e6


def _banded(nights: Sequence[Night], share: float) -> list[Night]:
    found: list[Night] = []
    for night in nights:
        # A night that left its band does not widen the next one's.
        before = [one.value for one in found if one.value is not None and not one.left_band][-_MOST:]
        if len(before) < _FEWEST:
            found.append(night)
            continue
        middle = statistics.median(before)
        spread = statistics.median([abs(value - middle) for value in before])
        half = max(share * abs(middle), 4 * spread)
        found.append(replace(night, low=middle - half, high=middle + half))
    return found


def _told(share: float) -> str:
    return f"the middle of up to {_MOST} nights before, ± {share:.1%} or four times their median deviation"


def find_reports(folder: Path) -> list[Path]:
    """Every `report.json` in `folder` and below."""
    return sorted(folder.rglob(REPORT_FILE)) if folder.is_dir() else []


def summarise(folders: Sequence[Path], *, command: str) -> ParityReport:
    """The reports of many nodes as one; cells carry the node's name, and a node without a report is a failed cell.

    Args:
        folders: one a node, with one or more reports in it or below.

    Raises:
        ConfigError: no folder is named.
    """
    if not folders:
        raise ConfigError("there is nothing to summarise", where="DIR...", fix="name the folders of the nodes' reports")
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
    """`name`, with a number where it is taken, so that cells keep names of their own."""
    found, number = name, 2
    while found in taken:
        found, number = f"{name} ({number})", number + 1
    taken[found] = {}
    return found


def _lost(node: str, reason: str) -> CellResult:
    return CellResult(f"{node}: report", "report", {"node": node}, None, "failed", "", reason=reason)


def _common(facts: dict[str, dict[str, str]]) -> dict[str, str]:
    """What all nodes have in common once; what differs by node."""
    told: dict[str, str] = {}
    for key in dict.fromkeys(key for one in facts.values() for key in one):
        values = {node: one[key] for node, one in facts.items() if key in one}
        if len(set(values.values())) == 1:
            told[key] = next(iter(values.values()))
        else:
            told[key] = "; ".join(f"{node}: {value}" for node, value in values.items())
    return told
