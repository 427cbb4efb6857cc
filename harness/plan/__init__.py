"""Settings of a run, and plans of its memory, microbatches, work and time from numbers alone.

Everything here runs without torch, Megatron-Core and Hydra. Read `settings.py` for the dataclasses that a recipe is
composed into, then `run_plan.py`, which implements `harness plan`; `memory.py` and `work.py` contain its formulas.
"""

from __future__ import annotations

from harness.plan.families import FAMILIES
from harness.plan.hf_config import read_hf_config
from harness.plan.layout import ParallelConfig
from harness.plan.memory import plan_memory
from harness.plan.model import ModelConfig
from harness.plan.settings import OptimizerConfig, PretrainConfig, RunConfig, SftConfig, TrainerConfig
from harness.plan.work import sequence_cost

__all__ = [
    "FAMILIES",
    "ModelConfig",
    "OptimizerConfig",
    "ParallelConfig",
    "PretrainConfig",
    "RunConfig",
    "SftConfig",
    "TrainerConfig",
    "plan_memory",
    "read_hf_config",
    "sequence_cost",
]
