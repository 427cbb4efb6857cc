"""Many reports read together: the nights of one matrix as a history, the nodes of one night as one report."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path

from harness.errors import ConfigError, FormatError
from harness.parity.result import REPORT_FILE, CellResult, ParityReport, read_report

# Nights that a band is made from; from fewer it would be chance.
_FEWEST, _MOST = 3, 14


@dataclass(frozen=True)
class Night:
    """One value of a metric.

    Attributes:
        created: ISO 8601, UTC, of the report that it is from.
        value: None where that night's run has none.
        low, high: the band that the value should be in, both ends included; None while there are too few nights.
        source: path of that report.
    """

    created: str
    value: float | None
    low: float | None = None
    high: float | None = None
    source: str = ""

    @property
    def left_band(self) -> bool:
        """True for a value outside of its band, and for a missing value where there is a band."""
        if self.low is None or self.high is None:
            return False
        return self.value is None or not self.low <= self.value <= self.high


@dataclass(frozen=True)
class Metric:
    """One metric of one cell over the nights.

    Attributes:
        name: such as `loss at step 40`.
        cell: of the matrix.
        unit: of the values; empty for plain numbers, `x` for a ratio.
        nights: in the order of time.
        band: description of its band.
    """

    name: str
    cell: str
    unit: str
    nights: list[Night]
    band: str = ""


@dataclass(frozen=True)
class History:
    """All metrics over the nights.

    Attributes:
        title: what was compared every night.
        metrics: in the order in which they are shown.
    """

    title: str
    metrics: list[Metric]

    @property
    def left(self) -> list[tuple[Metric, Night]]:
        """Return every value outside of its band, the newest first."""
        left = [(metric, night) for metric in self.metrics for night in metric.nights if night.left_band]
        return sorted(left, key=lambda pair: pair[1].created, reverse=True)

    @property
    def left_now(self) -> list[tuple[Metric, Night]]:
        """Return the metrics whose newest night is outside of its band; parts of a night may be separate reports."""
        newest = ((metric, metric.nights[-1]) for metric in self.metrics if metric.nights)
        return [(metric, night) for metric, night in newest if night.left_band]


# Metrics of a cell by name: the unit, the share of a value that the band allows, and the value at a step, given the
# cell, its reference and the step.
_METRICS: dict[str, tuple[str, float, Callable[[CellResult, CellResult | None, int], float | None]]] = {
    "loss at step {}": ("nats", 1e-3, lambda cell, _, step: dict(_losses(cell)).get(step)),
    "tokens/s, to the reference's": ("x", 0.2, lambda cell, reference, _: _rate(cell, reference)),
    "peak memory": ("MB", 0.1, lambda cell, *_: cell.peak_memory_bytes and cell.peak_memory_bytes / 1e6),
}


def _losses(cell: CellResult) -> Iterator[tuple[int, float]]:
    return zip(cell.series.step, cell.series.loss, strict=True)


def _rate(cell: CellResult, reference: CellResult | None) -> float | None:
    if reference is None or not cell.tokens_per_s or not reference.tokens_per_s:
        return None
    return cell.tokens_per_s / reference.tokens_per_s


def read_history(folder: Path, *, step: int | None = None) -> History:
    """Read the reports below `folder`, night by night, for every cell that ran.

    The metrics are the loss at a step, tokens/s as a ratio to the reference cell of the same night, and peak memory.
    A band is the median of up to 14 earlier nights, plus or minus a share of it or four times the nights' own spread,
    whichever is more.

    Args:
        step: of the loss; None for the last step that every night made.

    Raises:
        FormatError: there is no report below `folder`, or one is damaged.
    """
    paths = find_reports(folder)
    if not paths:
        raise FormatError("there is no report", where=f"{folder}/**/{REPORT_FILE}", fix="keep each night's folder here")
    nights = sorted(((read_report(path), path) for path in paths), key=lambda night: night[0].created)
    names = list(dict.fromkeys(cell.name for report, _ in nights for cell in report.cells))
    metrics = []
    for name in names:
        # A night without the cell counts as one without a value, if its report is of a matrix that has the cell.
        titles = {report.title for report, _ in nights if any(cell.name == name for cell in report.cells)}
        by_name = [{cell.name: cell for cell in report.cells} for report, _ in nights]
        cells = [(*night, named) for night, named in zip(nights, by_name, strict=True) if night[0].title in titles]
        at = step or min(
            (cell.series.step[-1] for *_, by in cells if (cell := by.get(name)) and cell.series.step), default=0
        )
        for metric, (unit, share, read) in _METRICS.items():
            values = []
            for report, path, named in cells:
                cell = named.get(name)
                value = read(cell, named.get(cell.reference or ""), at) if cell is not None else None
                values.append(Night(report.created, value, source=str(path)))
            if any(night.value is not None for night in values):
                band = f"the median of up to {_MOST} earlier nights, ± {share:.1%} or four times their median deviation"
                metrics.append(Metric(metric.format(at), name, unit, _with_bands(values, share), band))
    titles = {report.title for report, _ in nights}
    return History(titles.pop() if len(titles) == 1 else f"{len(titles)} matrices", metrics)


def _with_bands(nights: Sequence[Night], share: float) -> list[Night]:
    banded: list[Night] = []
    for night in nights:
        # A night that left its band does not widen the next band.
        before = [past.value for past in banded if past.value is not None and not past.left_band][-_MOST:]
        if len(before) >= _FEWEST:
            middle = statistics.median(before)
            half = max(share * abs(middle), 4 * statistics.median([abs(value - middle) for value in before]))
            night = replace(night, low=middle - half, high=middle + half)  # noqa: PLW2901
        banded.append(night)
    return banded


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
