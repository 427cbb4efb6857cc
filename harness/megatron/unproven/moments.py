"""Settings for optimizers with bfloat16 moments, or with their state in host memory."""

from __future__ import annotations

from typing import Any

import torch

from harness.megatron import compat
from harness.plan import OptimizerConfig


def moment_settings(optimizer: OptimizerConfig, device: torch.device) -> dict[str, Any]:
    """Return Megatron's settings for bfloat16 moments or an optimizer on the host; raise ConfigError if unsupported.

    Both use the code path of Megatron in which the inner optimizer owns the float32 weights. These are stored whole:
    storing only remainders would require bfloat16 weights that are rounded differently than by all other optimizers.
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
        # Copy one weight's gradient and result while the CPU updates another weight.
        "overlap_cpu_optimizer_d2h_h2d": True,
        "pin_cpu_grads": pinned,
        "pin_cpu_params": pinned,
    }
