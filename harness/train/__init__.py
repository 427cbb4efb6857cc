"""The trainer without a framework: the loop, and the files of a run's folder.

Read `loop.py` first. `folder.py` chooses and locks the run's folder, `checkpoints.py` finds and checks its
checkpoints, `local.py` the parts of those on the nodes' own disks, `metrics.py` and `digests.py` record each step in
the files of `lines.py`, `trackers.py` feeds services from the metrics, `attempts.py` records how a run ended and
decides about a restart, `progress.py` shows the run in a terminal, `stragglers.py` names slow ranks, `status.py`
summarizes a folder and `verify.py` checks it. Nothing here imports torch or Megatron-Core.
"""

from __future__ import annotations

from harness.train.attempts import (
    EXIT_STOPPED,
    Stop,
    decide,
    describe_attempt,
    note_lost,
    read_attempts,
    record_resume,
    write_stop,
)
from harness.train.checkpoints import (
    CHECKPOINT_FIX,
    CHECKPOINTS,
    RUN_FILE,
    Progress,
    UnreadableError,
    list_checkpoints,
    read_checkpoint,
    read_progress,
    unreadable,
    whole_checkpoints,
    write_run_file,
)
from harness.train.digests import (
    FIELDS,
    DigestWriter,
    RowDigests,
    StepDigests,
    content_digest,
    from_json,
    kept_sequence,
    merge_ranks,
    rank_rows,
    read_digests,
    sequence_digests,
    to_json,
)
from harness.train.folder import (
    SAMPLES_FILE,
    alone_in,
    choose_run_folder,
    has_run,
    leave_early_stop,
    leave_refusal,
    open_run_folder,
)
from harness.train.lines import LineFile, keep_lines_before, whole_lines
from harness.train.local import (
    LOCAL_RECORD,
    MANIFEST,
    DiskPart,
    LocalRecord,
    begin_local_attempt,
    copy_verified,
    prune_local,
    read_disk,
    read_local_record,
    write_local_record,
)
from harness.train.loop import OWN_VALIDATION, Evaluation, ExpertMetrics, StepRecord, StepResult, is_due, train
from harness.train.metrics import (
    METRICS_FILE,
    MetricsWriter,
    StepMetrics,
    plot_experts,
    plot_loss,
    read_metrics,
    step_metrics,
    write_report,
)
from harness.train.progress import RunProgress
from harness.train.status import RunStatus, read_status
from harness.train.stragglers import RankTimes, Straggler, StragglerWatch, find_slow_nodes_file, write_slow_nodes
from harness.train.trackers import check_trackers
from harness.train.verify import describe_run_checks, find_run_check, verify_run

__all__ = [
    "CHECKPOINTS",
    "CHECKPOINT_FIX",
    "EXIT_STOPPED",
    "FIELDS",
    "LOCAL_RECORD",
    "MANIFEST",
    "METRICS_FILE",
    "OWN_VALIDATION",
    "RUN_FILE",
    "SAMPLES_FILE",
    "DigestWriter",
    "DiskPart",
    "Evaluation",
    "ExpertMetrics",
    "LineFile",
    "LocalRecord",
    "MetricsWriter",
    "Progress",
    "RankTimes",
    "RowDigests",
    "RunProgress",
    "RunStatus",
    "StepDigests",
    "StepMetrics",
    "StepRecord",
    "StepResult",
    "Stop",
    "Straggler",
    "StragglerWatch",
    "UnreadableError",
    "alone_in",
    "begin_local_attempt",
    "check_trackers",
    "choose_run_folder",
    "content_digest",
    "copy_verified",
    "decide",
    "describe_attempt",
    "describe_run_checks",
    "find_run_check",
    "find_slow_nodes_file",
    "from_json",
    "has_run",
    "is_due",
    "keep_lines_before",
    "kept_sequence",
    "leave_early_stop",
    "leave_refusal",
    "list_checkpoints",
    "merge_ranks",
    "note_lost",
    "open_run_folder",
    "plot_experts",
    "plot_loss",
    "prune_local",
    "rank_rows",
    "read_attempts",
    "read_checkpoint",
    "read_digests",
    "read_disk",
    "read_local_record",
    "read_metrics",
    "read_progress",
    "read_status",
    "record_resume",
    "sequence_digests",
    "step_metrics",
    "to_json",
    "train",
    "unreadable",
    "verify_run",
    "whole_checkpoints",
    "whole_lines",
    "write_local_record",
    "write_report",
    "write_run_file",
    "write_slow_nodes",
    "write_stop",
]
