"""Check how a trainer packs, masks, averages, orders and resumes, against references that share no code with it.

A trainer is a target: a class with a method `build`, or a command. The checks feed it small conversations with a model
of two layers, and compare losses, gradient norms and rows with what training one conversation at a time gives:

    harness conformance my_trainer.py
    harness conformance --command 'python train.py --model {model} --data {data} --pack {pack_size}'

`harness conformance --list` explains each check. The trainer's environment needs only numpy and PyTorch.
"""

from __future__ import annotations

from harness.conformance import chat_checks, epoch_checks, loss_checks  # noqa: F401 - each registers its checks
from harness.conformance.kit import CHECKS, OUTCOMES, ConformanceCheck, judge
from harness.conformance.running import ConformanceVerdict, TargetProcess
from harness.conformance.target import Layout, NotSupported, Target, load_target

__all__ = [
    "CHECKS",
    "OUTCOMES",
    "ConformanceCheck",
    "ConformanceVerdict",
    "Layout",
    "NotSupported",
    "Target",
    "TargetProcess",
    "judge",
    "load_target",
]
