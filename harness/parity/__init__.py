"""Prove that runs train identically: a matrix of runs, their first difference, reports and baselines.

A matrix is a list of cells (`plan_check`): a reference and the runs to compare with it, each a run of `recipes.sft` in
its own processes (`run_cells`). Runs record their losses and digests of every global batch; `cell_result` compares them
and locates the first difference down to the position. A `ParityReport` contains the results, and `harness.parity.pages`
renders it. `record`, `against` and `update` keep a run as a baseline for later runs. `check_isolation` proves that the
documents of a packed row do not affect each other, and `train_reference` trains a run's conversations with plain
transformers.

Read `cells`, `compare` and `result` first.
"""

from __future__ import annotations

from harness.parity.assemble import command_line
from harness.parity.baselines import against, record, update
from harness.parity.compare import Tolerances
from harness.parity.result import ParityReport

__all__ = ["ParityReport", "Tolerances", "against", "command_line", "record", "update"]
