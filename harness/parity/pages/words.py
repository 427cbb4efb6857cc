"""How a report says things: numbers, sizes, what became of a cell, where the first difference is."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import fields

from harness.parity.result import STATUSES, CellResult, Check, Difference, ParityReport

# A word and a sign, so that nothing depends on telling colours apart.
SIGNS = {"same": "✓", "different": "✗", "failed": "!", "skipped": "○", "reference": "◆"}
_GIGA, _MEGA = 1e9, 1e6


def verdict(report: ParityReport) -> str:
    """The verdict in a word or two; a matrix in which runs broke and none differs is not called different."""
    if report.verdict == "different" and all(cell.status != "different" for cell in report.cells):
        return "Failed"
    return {"same": "Same", "different": "Different", "failed": "Nothing was compared"}[report.verdict]


def mark(cell: CellResult) -> str:
    """The key of `SIGNS` that stands for a cell: its status, `reference` for a reference that ran."""
    return "reference" if cell.reference is None and cell.status == "same" else cell.status


def summary(report: ParityReport) -> str:
    """The verdict's numbers in one sentence."""
    compared = [cell for cell in report.cells if cell.reference is not None]
    counts = Counter(cell.status for cell in compared)
    if not report.cells:
        return "The report has no cells."
    if not compared:
        return f"{count_of(len(report.cells), 'cell')} ran, and none was held against another."
    ran = len(compared) - counts["skipped"]
    parts = [f"{counts['same']:,} of {count_of(ran, 'compared cell')} {'agrees' if ran == 1 else 'agree'}"]
    parts += [f"{counts[status]:,} {status}" for status in STATUSES if status != "same" and counts[status]]
    broken = sum(cell.reference is None and cell.status in ("failed", "different") for cell in report.cells)
    if broken:
        parts.append(f"{count_of(broken, 'reference')} failed")
    return ", ".join(parts) + "."


def first_problem(report: ParityReport) -> CellResult | None:
    """The cell whose trouble is told first: the first that differs, else the first that failed, else None."""
    for status in ("different", "failed"):
        for cell in report.cells:
            if cell.status == status:
                return cell
    return None


def trouble(cell: CellResult) -> str:
    """Why a cell is not the same, in a sentence; empty for one that is."""
    if cell.status == "same":
        return ""
    if cell.status == "different" and cell.first_difference is not None:
        return cell.first_difference.message
    failed = [check.name for check in cell.checks if not check.passed]
    return cell.reason or (
        f"{', '.join(failed)} differ" if failed else f"{cell.status}, and the report does not say why"
    )


def places(difference: Difference) -> list[tuple[str, str]]:
    """What is known of the place, name and value, in the order of the search for it: step, microbatch, rank, ..."""
    found = []
    for field in fields(difference):
        value = getattr(difference, field.name)
        if field.name != "message" and value is not None:
            found.append((field.name, value if isinstance(value, str) else number(value)))
    return found


def size_of(check: Check) -> str:
    """The largest relative difference of a check, as short as it can be; `differs` where it has no size."""
    if check.largest is None:
        return "equal" if check.passed else "differs"
    return ratio(check.largest)


def ratio(value: float) -> str:
    """A relative difference with two digits; `0` for none, `infinite` where a value is missing."""
    if value == 0:
        return "0"
    return f"{value:.1e}" if math.isfinite(value) else "infinite"


def number(value: float) -> str:
    """Every digit of a value: it is to be found again."""
    return f"{value:,}" if isinstance(value, int) else repr(value)


def limit(tolerance: float) -> str:
    """What a tolerance allows."""
    return "must be identical" if tolerance == 0 else f"at most {tolerance:g}"


def rate(value: float | None) -> str:
    """Tokens a second."""
    return "not measured" if value is None else f"{value:,.0f}"


def size(value: float | None) -> str:
    """Bytes in GB or MB."""
    if value is None:
        return "not measured"
    return f"{value / _GIGA:.2f} GB" if value >= _GIGA else f"{value / _MEGA:,.0f} MB"


def duration(seconds: float) -> str:
    """`12 s` or `3 min 5 s`."""
    whole = round(seconds)
    return f"{whole} s" if whole < 60 else f"{whole // 60:,} min {whole % 60} s"


def count_of(count: int, noun: str) -> str:
    """`1 cell`, `2 cells`."""
    return f"{count:,} {noun}{'' if count == 1 else 's'}"


def names_of(values: Sequence[str], most: int) -> str:
    """The first names and how many more there are."""
    shown = ", ".join(values[:most])
    return shown if len(values) <= most else f"{shown} and {len(values) - most:,} more"
