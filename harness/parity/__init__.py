"""Proof that runs train the same: a matrix of runs, what differs first, reports and baselines.

A matrix is a list of cells (`plan_check`): a reference and the runs to compare with it, each a run of `recipes.sft` in
processes of its own (`run_cells`). Runs record digests of every global batch and their losses; `cell_result` compares
them and names the first difference down to the position. A `ParityReport` holds the results, and `harness.parity.pages`
renders it. `record`, `against` and `update` keep one run as a baseline for later ones. `check_isolation` shows that
documents of a packed row do not see each other, and `train_reference` trains a run's conversations by plain
transformers.

Read `cells`, `compare` and `result` first.
"""

from __future__ import annotations

from harness.parity.assemble import command_line
from harness.parity.baselines import against, record, update
from harness.parity.compare import Tolerances
from harness.parity.result import ParityReport

__all__ = ["ParityReport", "Tolerances", "against", "command_line", "record", "update"]
