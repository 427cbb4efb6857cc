"""Stand-ins for packages that exist for CUDA alone, so that code which imports them can be imported on a CPU.

`megatron.core` decides by the same imports whether to use these packages itself, so it is imported before.
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import importlib.util
import sys
from abc import ABCMeta
from collections.abc import Sequence
from types import ModuleType
from typing import Any

PACKAGES = (
    *("causal_conv1d", "fla", "mamba_ssm", "megatron.energon", "mlflow", "modelopt", "nvidia_resiliency_ext"),
    *("open_clip", "qwen_vl_utils", "timm", "transformer_engine", "transformer_engine_torch", "triton", "wandb"),
)

MEGATRON_CORE = tuple(
    f"megatron.{name}"
    for name in ("core.models.gpt.gpt_layer_specs", "core.optimizer", "core.transformer.attention", "training")
)


class _StandIn(ABCMeta):
    """A class that can be a base class, a decorator or a function, be subscripted, and has every attribute."""

    def __getattr__(cls, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return _stand_in(name)

    def __getitem__(cls, key: object) -> Any:
        return cls

    def __call__(cls, *arguments: Any, **named: Any) -> Any:
        if "is_stand_in" not in vars(cls):
            return super().__call__(*arguments, **named)
        return arguments[0] if len(arguments) == 1 and callable(arguments[0]) and not named else cls


def _stand_in(name: str) -> _StandIn:
    return _StandIn(name, (), {"is_stand_in": True})


class _Module(ModuleType):
    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return _stand_in(name)


class _Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    def __init__(self, packages: Sequence[str]) -> None:
        self._packages = packages

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if any(name == package or name.startswith(f"{package}.") for package in self._packages):
            return importlib.machinery.ModuleSpec(name, self, is_package=True)
        return None

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType:
        return _Module(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        pass


def install(*packages: str, after: Sequence[str] = ()) -> None:
    """Answer imports of packages that are not installed.

    Args:
        packages: all of PACKAGES if none are given.
        after: modules that are imported before, and find out that the packages are missing.
    """
    for name in after:
        importlib.import_module(name)
    sys.meta_path.append(_Finder(packages or PACKAGES))
