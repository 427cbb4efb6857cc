"""Settings of a run, and what the run would take: memory, microbatches, work and time, from numbers alone.

Everything here runs without torch, Megatron-Core and Hydra. Read `settings.py` for the dataclasses that a recipe is
composed into, then `run_plan.py`, which is `harness plan`; `memory.py` and `work.py` have its formulas.
"""

from __future__ import annotations

from harness.plan.families import FAMILIES, ExpertNames
from harness.plan.hf_config import MTP_SETTINGS, check_model, find_weights, read_hf_config, to_hf_config
from harness.plan.layout import (
    DIVIDED_BY_COLUMNS,
    LORA_TARGETS,
    ON_EVERY_RANK,
    ParallelConfig,
    fp8_row_multiple,
    padded_vocab_size,
)
from harness.plan.memory import ROOM, plan_memory, plan_stage_memory
from harness.plan.model import ModelConfig, sequence_cost
from harness.plan.run_plan import AssumedPacks, check_memory, plan_run
from harness.plan.search import search_layouts
from harness.plan.settings import OptimizerConfig, PretrainConfig, RunConfig, SftConfig, TrainerConfig
from harness.plan.work import Machine

__all__ = [
    "DIVIDED_BY_COLUMNS",
    "FAMILIES",
    "LORA_TARGETS",
    "MTP_SETTINGS",
    "ON_EVERY_RANK",
    "ROOM",
    "AssumedPacks",
    "ExpertNames",
    "Machine",
    "ModelConfig",
    "OptimizerConfig",
    "ParallelConfig",
    "PretrainConfig",
    "RunConfig",
    "SftConfig",
    "TrainerConfig",
    "check_memory",
    "check_model",
    "find_weights",
    "fp8_row_multiple",
    "padded_vocab_size",
    "plan_memory",
    "plan_run",
    "plan_stage_memory",
    "read_hf_config",
    "search_layouts",
    "sequence_cost",
    "to_hf_config",
]
