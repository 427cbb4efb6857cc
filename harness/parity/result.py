"""The report of a parity run, which is stored as `report.json`; all pages are rendered from it.

`pages/report.schema.json`, its JSON Schema, describes every field of the classes here. Within one `schema` number,
fields are only added: ignore unknown fields, and refuse a larger number. Numbers that are not finite are null. The
verdict is not stored, because it follows from the cells (`ParityReport.verdict`). To list the differences:

    jq -r '.cells[] | select(.status != "same") | [.name, .status, (.checks[].difference.message // empty)] | @tsv' \\
        report.json
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field
from typing import Any

from harness.printing import redact_all

SCHEMA = 1
REPORT_FILE = "report.json"
# Statuses of a cell, worst first: the run did not complete, it differs, it could not run here, it agrees.
STATUSES = ("failed", "different", "skipped", "same")


@dataclass(frozen=True)
class Difference:
    """The first place where a cell differs from its reference; parts that do not apply are None."""

    message: str
    step: int | None = None
    microbatch: int | None = None
    rank: int | None = None
    sequence: int | None = None
    field: str | None = None
    position: int | None = None
    expected: float | int | str | None = None
    found: float | int | str | None = None


@dataclass(frozen=True)
class Check:
    """One comparison of a cell with its reference, or with itself; a tolerance of 0 requires identical bits."""

    name: str
    passed: bool
    tolerance: float
    largest: float | None
    reason: str = ""
    difference: Difference | None = None


@dataclass(frozen=True)
class Series:
    """Values of one run, one per step; all lists have the same length."""

    step: list[int] = field(default_factory=list)
    loss: list[float] = field(default_factory=list)
    validation_loss: list[float | None] = field(default_factory=list)
    grad_norm: list[float] = field(default_factory=list)
    fill: list[float] = field(default_factory=list)
    imbalance_tokens: list[float] = field(default_factory=list)
    imbalance_cost: list[float] = field(default_factory=list)
    step_s: list[float] = field(default_factory=list)
    data_wait_s: list[float] = field(default_factory=list)


@dataclass(frozen=True)
class CellResult:
    """One run of the matrix; `status` is one of STATUSES, `command` runs only it, `placement` has its shared rows."""

    name: str
    check: str
    axes: dict[str, str]
    reference: str | None
    status: str
    command: str
    checks: list[Check] = field(default_factory=list)
    series: Series = field(default_factory=Series)
    reason: str = ""
    seconds: float = 0.0
    tokens_per_s: float | None = None
    peak_memory_bytes: int | None = None
    placement: dict[str, Any] | None = None

    @property
    def first_difference(self) -> Difference | None:
        """Return the most informative difference: the first in the order of `checks`, data before losses."""
        return next((check.difference for check in self.checks if check.difference is not None), None)

    @property
    def is_reference(self) -> bool:
        """True for a cell that was not compared with anything, because others are compared with it."""
        return self.reference is None and not self.checks


@dataclass(frozen=True)
class ParityReport:
    """Results of one parity run; references come before the cells that are compared with them."""

    title: str
    created: str
    command: str
    environment: dict[str, str]
    cells: list[CellResult]
    schema: int = SCHEMA

    @property
    def verdict(self) -> str:
        """`same` if every cell that ran agrees and none failed, otherwise `different`.

        `failed` if nothing was compared: references prove nothing if all other cells are skipped.
        """
        if {cell.status for cell in self.cells} & {"failed", "different"}:
            return "different"
        compared = [cell for cell in self.cells if not cell.is_reference and cell.status != "skipped"]
        return "same" if compared else "failed"


def to_json(report: ParityReport) -> str:
    """Return `report` as JSON; numbers that are not finite become null."""
    values = json.loads(json.dumps(asdict(report)), parse_constant=lambda _: None)
    return json.dumps(redact_all(values), indent=1) + "\n"
