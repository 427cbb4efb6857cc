"""Transformer Engine without kernels: with `tests/engine_stub` on PYTHONPATH, Megatron-Core takes it for installed.

The layers below have the weights, the names and the extra states of the real ones, so that specifications construct and
checkpoints are made on a machine without a GPU. Everything else that Megatron imports is a name: a class that cannot be
made, or a function that raises NotImplementedError, as the real package does on a machine without a driver.
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.abc
import importlib.machinery
import sys
import types
from typing import Any

import torch

__version__ = "2.14.0"


class _WithExtraState(torch.nn.Module):
    def get_extra_state(self) -> torch.Tensor:
        return torch.empty(0, dtype=torch.uint8)  # what it is without FP8

    def set_extra_state(self, state: Any) -> None:
        pass

    def forward(self, *arguments: Any, **options: Any) -> Any:
        raise NotImplementedError(f"kernel of {type(self).__name__}")


class Linear(_WithExtraState):
    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        params_dtype: torch.dtype | None = None,
        parallel_mode: str | None = None,
        tp_size: int = 1,
        device: Any = "cuda",
        **options: Any,
    ) -> None:
        super().__init__()
        self.ub_name = options.get("ub_name")
        self.overlaps = {name: value for name, value in options.items() if name.startswith("ub_") and value is True}
        self.parallel_mode, self.use_bias = parallel_mode, bias
        rows = out_features // (tp_size if parallel_mode == "column" else 1)
        columns = in_features // (tp_size if parallel_mode == "row" else 1)
        self.weight = torch.nn.Parameter(torch.zeros(rows, columns, dtype=params_dtype, device=device))
        if bias:
            self.bias = torch.nn.Parameter(torch.zeros(rows, dtype=params_dtype, device=device))


class LayerNormLinear(Linear):
    def __init__(self, in_features: int, out_features: int, **options: Any) -> None:
        super().__init__(in_features, out_features, **options)
        like = self.weight
        self.layer_norm_weight = torch.nn.Parameter(torch.ones(in_features, dtype=like.dtype, device=like.device))


class GroupedLinear(_WithExtraState):
    def __init__(self, num_gemms: int, in_features: int, out_features: int, **options: Any) -> None:
        super().__init__()
        self.num_gemms, self.use_bias = num_gemms, False
        self.fp8 = self.fp8_calibration = False
        self.fp8_meta: dict[str, Any] = {"fp8_checkpoint": False}
        for number in range(num_gemms):
            one = Linear(in_features, out_features, **options)
            setattr(self, f"weight{number}", one.weight)

    def init_fp8_metadata(self, **unused: Any) -> None:
        pass


class RMSNorm(_WithExtraState):
    def __init__(self, hidden_size: int, eps: float = 1e-5, device: Any = None, **unused: Any) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(hidden_size, device=device))


class DotProductAttention(_WithExtraState):
    def __init__(self, *arguments: Any, cp_comm_type: str = "p2p", **options: Any) -> None:
        super().__init__()
        self.cp_comm_type = cp_comm_type


_LAYERS = (Linear, LayerNormLinear, GroupedLinear, RMSNorm, DotProductAttention)


class _Split:
    @staticmethod
    def apply(tensor: torch.Tensor, dim: int, sizes: Any) -> Any:
        return torch.split(tensor, sizes, dim)


class _Names(types.ModuleType):
    """A module that has every name."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        place = f"{self.__name__}.{name}"

        def refuse(*arguments: Any, **options: Any) -> Any:
            raise NotImplementedError(f"{place} needs a GPU")

        value = type(name, (), {"__init__": refuse, "apply": refuse}) if name.lstrip("_")[:1].isupper() else refuse
        setattr(self, name, value)
        return value


class _Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    def find_spec(self, fullname: str, path: Any = None, target: Any = None) -> importlib.machinery.ModuleSpec | None:
        if not fullname.startswith(f"{__name__}."):
            return None
        return importlib.machinery.ModuleSpec(fullname, self, is_package=True)

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> types.ModuleType:
        return _Names(spec.name)

    def exec_module(self, module: types.ModuleType) -> None:
        if module.__name__ == f"{__name__}.pytorch":
            for layer in _LAYERS:
                setattr(module, layer.__name__, layer)
        if module.__name__ == f"{__name__}.pytorch.attention":  # it launches nothing
            module._SplitAlongDim = _Split
        if module.__name__ == f"{__name__}.pytorch.cpu_offload":  # what it is where nothing is offloaded
            module.get_cpu_offload_context = lambda *_, **__: (contextlib.nullcontext(), lambda tensor: tensor)


sys.meta_path.append(_Finder())

# Megatron-Core imports the package, and takes these for there.
for _name in ("common.recipe", "pytorch.distributed", "pytorch.ops"):
    importlib.import_module(f"{__name__}.{_name}")
