"""The trainer without a framework: the loop, and the files of a run's folder.

Read `loop.py` first. `folder.py` chooses and locks the run's folder, `checkpoints.py` finds and checks its
checkpoints, `metrics.py` and `digests.py` record each step, `trackers.py` feeds services from the metrics,
`attempts.py` records how a run ended and decides about a restart, `progress.py` shows the run in a terminal, and
`verify.py` checks a run's folder. Nothing here imports torch or Megatron-Core.
"""

from __future__ import annotations

from harness.train.attempts import EXIT_STOPPED, Stop, decide, note_lost, record_resume, write_stop
from harness.train.checkpoints import (
    CHECKPOINT_FIX,
    CHECKPOINTS,
    RUN_FILE,
    Progress,
    list_checkpoints,
    read_checkpoint,
    read_progress,
    whole_checkpoints,
    write_run_file,
)
from harness.train.digests import (
    FIELDS,
    DigestWriter,
    RowDigests,
    StepDigests,
    from_json,
    kept_sequence,
    merge_ranks,
    rank_rows,
    read_digests,
    to_json,
)
from harness.train.folder import (
    choose_run_folder,
    leave_early_stop,
    leave_refusal,
    open_run_folder,
)
from harness.train.loop import OWN_VALIDATION, Evaluation, StepRecord, StepResult, is_due, train
from harness.train.metrics import (
    METRICS_FILE,
    MetricsWriter,
    StepMetrics,
    keep_lines_before,
    plot_loss,
    read_metrics,
    step_metrics,
    whole_lines,
    write_report,
)
from harness.train.progress import RunProgress
from harness.train.trackers import check_trackers
from harness.train.verify import describe_run_checks, find_run_check, verify_run

__all__ = [
    "CHECKPOINTS",
    "CHECKPOINT_FIX",
    "EXIT_STOPPED",
    "FIELDS",
    "METRICS_FILE",
    "OWN_VALIDATION",
    "RUN_FILE",
    "DigestWriter",
    "Evaluation",
    "MetricsWriter",
    "Progress",
    "RowDigests",
    "RunProgress",
    "StepDigests",
    "StepMetrics",
    "StepRecord",
    "StepResult",
    "Stop",
    "check_trackers",
    "choose_run_folder",
    "decide",
    "describe_run_checks",
    "find_run_check",
    "from_json",
    "is_due",
    "keep_lines_before",
    "kept_sequence",
    "leave_early_stop",
    "leave_refusal",
    "list_checkpoints",
    "merge_ranks",
    "note_lost",
    "open_run_folder",
    "plot_loss",
    "rank_rows",
    "read_checkpoint",
    "read_digests",
    "read_metrics",
    "read_progress",
    "record_resume",
    "step_metrics",
    "to_json",
    "train",
    "verify_run",
    "whole_checkpoints",
    "whole_lines",
    "write_report",
    "write_run_file",
    "write_stop",
]
