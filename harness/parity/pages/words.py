"""Wording of the pages: numbers, sizes, the outcome of a cell, the place of the first difference."""

from __future__ import annotations

import math
from collections import Counter

from harness.parity.result import STATUSES, CellResult, Check, Difference, ParityReport
from harness.printing import count_of


def verdict(report: ParityReport) -> str:
    """Return the verdict in a word or two; a matrix where runs failed and none differs is `Failed`."""
    if report.verdict == "different" and all(cell.status != "different" for cell in report.cells):
        return "Failed"
    return {"same": "Same", "different": "Different", "failed": "Nothing was compared"}[report.verdict]


def mark(cell: CellResult) -> str:
    """Return the key of `SIGNS` for a cell: its status, `reference` for a reference that ran."""
    return "reference" if cell.is_reference and cell.status == "same" else cell.status


def summary(report: ParityReport) -> str:
    """Return the numbers of the verdict in one sentence."""
    compared = [cell for cell in report.cells if not cell.is_reference]
    counts = Counter(cell.status for cell in compared)
    if not report.cells:
        return "The report has no cells."
    if not compared:
        return f"{count_of(len(report.cells), 'cell')} ran, but none was compared."
    ran = len(compared) - counts["skipped"]
    parts = [f"{counts['same']:,} of {count_of(ran, 'compared cell')} {'agrees' if ran == 1 else 'agree'}"]
    parts += [f"{counts[status]:,} {status}" for status in STATUSES if status != "same" and counts[status]]
    broken = sum(cell.is_reference and cell.status in ("failed", "different") for cell in report.cells)
    if broken:
        parts.append(f"{count_of(broken, 'reference')} failed")
    return ", ".join(parts) + "."


def first_problem(report: ParityReport) -> CellResult | None:
    """Return the first cell that differs, else the first that failed, else None."""
    bad = [cell for cell in report.cells if cell.status in ("different", "failed")]
    return min(bad, key=lambda cell: cell.status, default=None)  # "different" sorts before "failed"


def trouble(cell: CellResult) -> str:
    """Return why a cell is not the same, in a sentence; empty for one that is."""
    if cell.status == "same":
        return ""
    if cell.status == "different" and cell.first_difference is not None:
        return cell.first_difference.message
    failed = [check.name for check in cell.checks if not check.passed]
    found = f"{', '.join(failed)} differ" if failed else f"{cell.status}, without a reason in the report"
    return cell.reason or found


def places(difference: Difference) -> list[tuple[str, str]]:
    """Return the known parts of a difference's place as (name, value): step, microbatch, rank, ..."""
    known = {name: value for name, value in vars(difference).items() if name != "message" and value is not None}
    # With every digit, so that it can be searched for.
    numbers = {name: f"{value:,}" if isinstance(value, int) else repr(value) for name, value in known.items()}
    return [(name, value if isinstance(value, str) else numbers[name]) for name, value in known.items()]


def size_of(check: Check) -> str:
    """Return the largest relative difference of a check, short; `differs` where it has no size."""
    if check.largest is None:
        return "equal" if check.passed else "differs"
    if check.largest == 0:
        return "0"
    return f"{check.largest:.1e}" if math.isfinite(check.largest) else "infinite"


def limit(tolerance: float) -> str:
    """Describe what a tolerance allows."""
    return "must be identical" if tolerance == 0 else f"at most {tolerance:g}"


def rate(value: float | None) -> str:
    """Format tokens a second."""
    return "not measured" if value is None else f"{value:,.0f}"


def size(value: float | None) -> str:
    """Format bytes as GB or MB."""
    if value is None:
        return "not measured"
    return f"{value / 1e9:.2f} GB" if value >= 1e9 else f"{value / 1e6:,.0f} MB"
