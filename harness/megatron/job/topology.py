"""How ranks divide the model and the data: checked before any process group is made."""

from __future__ import annotations

import math

from megatron.core import parallel_state

from harness.loader import RankLayout
from harness.plan import ParallelConfig


def join(config: ParallelConfig, world_size: int, *, timeout_s: float = 1800.0) -> RankLayout:
    """Make Megatron's process groups, whose collectives wait for `timeout_s`, and say where this rank stands."""
    dp_size = config.dp_size(world_size)
    parallel_state.initialize_model_parallel(
        tensor_model_parallel_size=config.tensor_parallel_size,
        pipeline_model_parallel_size=config.pipeline_parallel_size,
        virtual_pipeline_model_parallel_size=config.virtual_pipeline_parallel_size,
        context_parallel_size=config.context_parallel_size,
        distributed_timeout_minutes=math.ceil(timeout_s / 60),
    )
    return RankLayout(
        dp_rank=parallel_state.get_data_parallel_rank(),
        dp_size=dp_size,
        tp_rank=parallel_state.get_tensor_model_parallel_rank(),
        pp_rank=parallel_state.get_pipeline_model_parallel_rank(),
        cp_rank=parallel_state.get_context_parallel_rank(),
        cp_size=config.context_parallel_size,
        tp_size=config.tensor_parallel_size,
        pad_to_multiple=config.pad_to_multiple,
        group_size=config.group_size,
        is_first_stage=parallel_state.is_pipeline_first_stage(ignore_virtual=True),
        is_last_stage=parallel_state.is_pipeline_last_stage(ignore_virtual=True),
    )
