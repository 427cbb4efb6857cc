"""Proof that runs train the same: a matrix of runs, what differs first, reports and baselines.

A matrix is a list of cells (`plan_check`): a reference and the runs to compare with it, each a run of `recipes.sft` in
processes of its own (`run_cells`). Runs record digests of every global batch and their losses; `cell_result` compares
them and names the first difference down to the position. A `ParityReport` holds the results, and `harness.parity.pages`
renders it. `record`, `against` and `update` keep one run as a baseline for later ones, and `summarize` joins the
reports of many nodes. `check_isolation` shows that documents of a packed row do not see each other, and
`train_reference` trains a run's conversations by plain transformers.

Read `cells`, `compare` and `result` first.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from harness.doors import names_on_first_use
from harness.parity.assemble import cell_result, command_line, environment, skipped
from harness.parity.baselines import against, record, update
from harness.parity.cells import (
    FORMAT,
    ISOLATION,
    ISOLATION_TURNS,
    KIND,
    REFERENCE,
    VERSION,
    Cell,
    CheckPlan,
    parse_case,
    plan_check,
)
from harness.parity.compare import IDENTICAL, OTHER_KERNELS, Tolerances
from harness.parity.joined import summarize
from harness.parity.result import REPORT_FILE, CellResult, ParityReport, write_report
from harness.parity.running import default_slots, end_with_parent, run_cells
from harness.parity.table import live_table

if TYPE_CHECKING:
    from harness.parity.isolation import IsolationCheck, check_isolation, sample_documents
    from harness.parity.planted import planted_defects
    from harness.parity.reference import make_model, train_reference

__all__ = [
    "FORMAT",
    "IDENTICAL",
    "ISOLATION",
    "ISOLATION_TURNS",
    "KIND",
    "OTHER_KERNELS",
    "REFERENCE",
    "REPORT_FILE",
    "VERSION",
    "Cell",
    "CellResult",
    "CheckPlan",
    "IsolationCheck",
    "ParityReport",
    "Tolerances",
    "against",
    "cell_result",
    "check_isolation",
    "command_line",
    "default_slots",
    "end_with_parent",
    "environment",
    "live_table",
    "make_model",
    "parse_case",
    "plan_check",
    "planted_defects",
    "record",
    "run_cells",
    "sample_documents",
    "skipped",
    "summarize",
    "train_reference",
    "update",
    "write_report",
]

# They import Megatron-Core or torch, which the rest of the package does without.
__getattr__ = names_on_first_use(
    __name__,
    {
        "IsolationCheck": "isolation",
        "check_isolation": "isolation",
        "make_model": "reference",
        "planted_defects": "planted",
        "sample_documents": "isolation",
        "train_reference": "reference",
    },
)
