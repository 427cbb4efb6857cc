"""Optimizers whose moments are bfloat16, or whose state is in the memory of the host."""

from __future__ import annotations

from typing import Any

import torch

from harness.megatron import compat
from harness.plan import OptimizerConfig


def moment_settings(optimizer: OptimizerConfig, device: torch.device) -> dict[str, Any]:
    """Return Megatron's settings for moments in bfloat16 or an optimizer on the host; raise ConfigError without them.

    Both take the path of Megatron on which its inner optimizer has the float32 weights. They are whole: what is beyond
    the bfloat16 weights alone would need those to be rounded otherwise than by every other optimizer.
    """
    if optimizer.moments_dtype == "float32" and not optimizer.offload:
        return {}
    moments = getattr(torch, optimizer.moments_dtype)
    if moments != torch.float32:
        compat.require_moments()
    pinned = device.type == "cuda"
    return {
        "use_precision_aware_optimizer": True,
        "store_param_remainders": False,
        "exp_avg_dtype": moments,
        "exp_avg_sq_dtype": moments,
        "optimizer_cpu_offload": optimizer.offload > 0,
        "optimizer_offload_fraction": optimizer.offload,
        # One weight's gradient and result are copied while the CPU updates another.
        "overlap_cpu_optimizer_d2h_h2d": True,
        "pin_cpu_grads": pinned,
        "pin_cpu_params": pinned,
    }
