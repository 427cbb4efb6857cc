"""Proof that runs train the same: cells, their digests and losses, what differs first, reports and baselines."""

from __future__ import annotations

from harness.parity.assemble import cell_result, command_line, environment, skipped
from harness.parity.baselines import against, record, update
from harness.parity.cells import FORMAT, VERSION, Cell, CheckPlan, parse_case, plan_check
from harness.parity.compare import IDENTICAL, Tolerances
from harness.parity.nights import read_history, summarise
from harness.parity.pages import HTML_FILE, render_all, render_history
from harness.parity.result import REPORT_FILE, CellResult, ParityReport, write_report
from harness.parity.running import default_slots, run_cells
from harness.parity.table import LiveTable, show

__all__ = [
    "FORMAT",
    "HTML_FILE",
    "IDENTICAL",
    "REPORT_FILE",
    "VERSION",
    "Cell",
    "CellResult",
    "CheckPlan",
    "LiveTable",
    "ParityReport",
    "Tolerances",
    "against",
    "cell_result",
    "command_line",
    "default_slots",
    "environment",
    "parse_case",
    "plan_check",
    "read_history",
    "record",
    "render_all",
    "render_history",
    "run_cells",
    "show",
    "skipped",
    "summarise",
    "update",
    "write_report",
]
