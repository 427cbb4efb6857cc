"""Trainer, independent of a framework: the training loop, and the files in a run's folder.

Read `loop.py` first, then `folder.py`. Nothing here imports torch or Megatron-Core.
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
