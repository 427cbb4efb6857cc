"""Transformer Engine's user buffers, which overlap tensor-parallel communication with matrix products."""

from __future__ import annotations

import os
from typing import Any

import torch

from harness.errors import ConfigError
from harness.megatron.compat import accepts, has_streams
from harness.megatron.job.runtime import place_in_job
from harness.plan import ModelConfig, ParallelConfig


def open_user_buffers(model: ModelConfig, parallel: ParallelConfig, device: torch.device, *, tokens: int) -> None:
    """Register the buffers of a model's layers for rows of `tokens` tokens; every rank takes part.

    Layers look them up when they first compute. Buffers of an earlier model are freed.
    """
    ranks, here = parallel.tensor_parallel_size, place_in_job("LOCAL_WORLD_SIZE")
    reason = "" if has_streams(device) else f"the device is {device.type}"
    if "LOCAL_WORLD_SIZE" in os.environ and ranks > here:
        reason = f"{ranks} tensor-parallel ranks are on several nodes of {here}, which NVLink does not connect"
    if reason:
        what = f"parallel.overlap_tensor_parallel is true, but {reason}"
        raise ConfigError(what, where="parallel.overlap_tensor_parallel", fix="parallel.overlap_tensor_parallel=false")
    from transformer_engine.pytorch.module import base

    if base._ub_communicators is not None:
        base.destroy_ub()
    options: dict[str, Any] = {"use_fp8": model.fp8 != "off"}
    if accepts(base.initialize_ub, "quantization_modes"):  # since 2.7
        modes = base.UserBufferQuantizationMode
        options = {"quantization_modes": [modes.FP8 if model.fp8 != "off" else modes.NONE]}
    try:
        base.initialize_ub(
            shape=[tokens // parallel.context_parallel_size, model.hidden_size],
            tp_size=ranks,
            dtype=getattr(torch, model.on("cuda").dtype),
            bootstrap_backend="nccl" if device.type == "cuda" else "gloo",
            **options,
        )
    except (AssertionError, RuntimeError, ValueError) as error:
        what = f"Transformer Engine cannot create communication buffers here: {str(error).strip().splitlines()[0]}"
        fix = "parallel.overlap_tensor_parallel=false; where multicast is missing, UB_SKIPMC=1 disables its use"
        raise ConfigError(what, where="parallel.overlap_tensor_parallel", fix=fix) from error
