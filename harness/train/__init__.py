"""The trainer without a framework: the loop, and the files of a run's folder.

Read `loop.py` first. `folder.py` chooses and locks the run's folder, `checkpoints.py` finds and checks its
checkpoints, `metrics.py` and `digests.py` record each step in the files of `lines.py`, `trackers.py` feeds services
from the metrics, `identity.py` distinguishes a run from its copies, `attempts.py` records how a run ended and decides
about a restart, `progress.py` shows the run in a terminal, `stragglers.py` names slow ranks, `status.py` summarizes a
folder and `verify.py` checks it. Nothing here imports torch or Megatron-Core.
"""

from harness.train.checkpoints import Progress
from harness.train.digests import DigestWriter, merge_ranks
from harness.train.folder import alone_in
from harness.train.loop import Evaluation, StepRecord, StepResult, is_due
from harness.train.metrics import METRICS_FILE, MetricsWriter, StepMetrics, read_metrics
from harness.train.verify import verify_run

__all__ = [
    "METRICS_FILE",
    "DigestWriter",
    "Evaluation",
    "MetricsWriter",
    "Progress",
    "StepMetrics",
    "StepRecord",
    "StepResult",
    "alone_in",
    "is_due",
    "merge_ranks",
    "read_metrics",
    "verify_run",
]
