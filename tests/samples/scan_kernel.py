"""Stand-ins for what a GPU has of mamba-ssm: the fused scan and the norm after it, on a CPU.

They keep for the backward pass what the kernels keep, and compute with the reference. A call of the scan is checked
against the published signature and is recorded.

Source: `mamba_split_conv1d_scan_combined`, `MambaSplitConv1dScanCombinedFn` (`mamba_ssm/ops/triton/ssd_combined.py`),
`LayerNormFn` (`mamba_ssm/ops/triton/layernorm_gated.py`) of state-spaces/mamba; `causal_conv1d_fwd`
(`csrc/causal_conv1d.cpp`) of Dao-AILab/causal-conv1d.
"""

from __future__ import annotations

from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

from harness.megatron.model import scan_reference
from harness.megatron.model.scan_reference import GroupedRMSNorm, mamba_split_conv1d_scan_combined

# Names of the arguments in their order; the first seven have no default.
SIGNATURE = (
    *("zxbcdt", "conv1d_weight", "conv1d_bias", "dt_bias", "A", "D", "chunk_size"),
    *("initial_states", "seq_idx", "dt_limit", "return_final_states", "activation"),
    *("rmsnorm_weight", "rmsnorm_eps", "outproj_weight", "outproj_bias", "headdim", "ngroups", "norm_before_gate"),
)
_TENSORS = 6
_reference_norm = GroupedRMSNorm.forward


def _gradients(grad: torch.Tensor, compute: Any, inputs: list[torch.Tensor]) -> tuple[torch.Tensor, ...]:
    """Compute again, which keeps nothing that is counted, and return the gradients of inputs."""
    with torch.autograd.graph.saved_tensors_hooks(lambda tensor: tensor, lambda tensor: tensor), torch.enable_grad():
        leaves = [one.detach().requires_grad_() for one in inputs]
        return torch.autograd.grad(compute(*leaves), leaves, grad)


class _Scan(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, seq_idx: Any, options: dict[str, Any], *tensors: torch.Tensor) -> torch.Tensor:
        ctx.options = {**options, "seq_idx": seq_idx}
        scanned = mamba_split_conv1d_scan_combined(*tensors, **ctx.options)
        # What is scanned before its gate, as large as what comes after it.
        ctx.save_for_backward(*tensors, seq_idx, torch.empty_like(scanned))
        return scanned

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        inputs = list(ctx.saved_tensors[:_TENSORS])
        return None, None, *_gradients(grads[0], partial(mamba_split_conv1d_scan_combined, **ctx.options), inputs)


class _Norm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, norm: GroupedRMSNorm, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        ctx.sizes = {"eps": norm.eps, "group_size": norm.group_size}
        groups = x.shape[-1] // norm.group_size
        ctx.save_for_backward(x, weight, torch.empty(groups * x[..., 0].numel(), dtype=torch.float32))
        return _reference_norm(norm, x)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        def compute(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
            return _reference_norm(SimpleNamespace(weight=weight, **ctx.sizes), x)

        return None, *_gradients(grads[0], compute, list(ctx.saved_tensors[:2]))


def _norm(self: GroupedRMSNorm, x: torch.Tensor) -> torch.Tensor:
    return _Norm.apply(self, x, self.weight)


class Kernel:
    """Stands for `mamba_split_conv1d_scan_combined`.

    Attributes:
        calls: the arguments of each call by name: of a tensor its type, shape and strides.
        values: the arguments themselves, of the last call.
    """

    def __init__(self) -> None:
        self.calls: list[dict[str, Any]] = []
        self.values: dict[str, Any] = {}

    def __call__(self, *args: Any, **options: Any) -> torch.Tensor:
        given = dict(zip(SIGNATURE, args, strict=False))
        assert not set(options) & set(given)
        given |= options
        assert set(SIGNATURE[: _TENSORS + 1]) <= set(given) <= set(SIGNATURE)
        self.values = given
        self.calls.append({name: _described(value) for name, value in given.items()})
        tensors = [given[name] for name in SIGNATURE[:_TENSORS]]
        others = {name: given[name] for name in SIGNATURE[_TENSORS:] if name in given and name != "seq_idx"}
        return _Scan.apply(given.get("seq_idx"), others, *tensors)


def _described(value: Any) -> Any:
    if not isinstance(value, torch.Tensor):
        return value
    return [str(value.dtype).removeprefix("torch."), list(value.shape), list(value.stride())]


def install(monkeypatch: Any) -> Kernel:
    """Let layers that are made after this scan and norm with the stand-ins; return that of the scan."""
    kernel = Kernel()
    monkeypatch.setattr(scan_reference, "mamba_split_conv1d_scan_combined", kernel)
    monkeypatch.setattr(GroupedRMSNorm, "forward", _norm)
    return kernel


def write_packages(folder: Path) -> None:
    """Write packages of the names of mamba-ssm and causal-conv1d, with what Megatron's mixer imports."""
    for name, text in _FILES.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)


_FILES = {
    "mamba_ssm/__init__.py": "__version__ = '2.2.4'\n",
    "mamba_ssm/ops/__init__.py": "",
    "mamba_ssm/ops/triton/__init__.py": "",
    "mamba_ssm/ops/triton/selective_state_update.py": "selective_state_update = None\n",
    "mamba_ssm/ops/triton/layernorm_gated.py": (
        "from harness.megatron.model.scan_reference import GroupedRMSNorm as RMSNorm\n"
    ),
    "mamba_ssm/ops/triton/ssd_combined.py": (
        "from tests.samples.scan_kernel import Kernel\n\n"
        "mamba_split_conv1d_scan_combined = Kernel()\n\n\ndef mamba_chunk_scan_combined(): ...\n"
    ),
    "causal_conv1d/__init__.py": "__version__ = '1.5.0'\ncausal_conv1d_fn = causal_conv1d_update = None\n",
    "causal_conv1d/causal_conv1d_varlen.py": "causal_conv1d_varlen_states = None\n",
}
