"""Stand-ins for what exists for CUDA alone, so that code which imports or asks for it runs on a CPU.

`megatron.core` decides by the same imports whether to use these packages itself, so it is imported before.
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import importlib.util
import os
import socket
import sys
from abc import ABCMeta
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from types import ModuleType, SimpleNamespace
from typing import Any
from unittest import mock

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


def become_one_rank() -> None:
    """Make this process a job of one rank, unless it is a rank already."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    alone = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    for name, value in alone.items():
        os.environ.setdefault(name, value)


class Idle:
    """A stream or an event of a device that has nothing to wait for."""

    cuda_stream = 0

    def __init__(self, *_: Any, **__: Any) -> None:
        pass

    def record_event(self, *_: Any) -> Idle:
        return self

    def is_capturing(self) -> bool:
        return False

    synchronize = wait_stream = wait_event = record = record_event


@contextmanager
def like_a_gpu() -> Iterator[None]:
    """Answer what Megatron-LM asks of a GPU, but its streams, its generators and the current device."""
    import torch

    properties = SimpleNamespace(major=8, minor=0, total_memory=1 << 40, name="none")
    answers = {"is_available": True, "device_count": 1, "stream": nullcontext(), "memory_stats": {}}
    answers |= {"get_device_capability": (8, 0), "get_device_properties": properties}
    answers |= dict.fromkeys(("set_device", "set_stream", "reset_peak_memory_stats"))
    answers |= dict.fromkeys(("memory_allocated", "max_memory_allocated", "memory_reserved", "max_memory_reserved"), 0)
    made = {name: mock.Mock(return_value=answer) for name, answer in answers.items()}
    with (
        mock.patch.multiple(torch.cuda, Stream=Idle, Event=Idle, **made),
        mock.patch.object(torch.accelerator, "current_stream", Idle),
    ):
        yield


@contextmanager
def bridge_like_a_gpu() -> Iterator[None]:
    """Answer what Megatron-Bridge asks of a GPU, and give it Megatron's own layers for Transformer Engine's."""
    import torch
    from megatron.bridge.training import eval, initialize, setup, train
    from megatron.core.models.gpt import gpt_layer_specs

    own = gpt_layer_specs.get_gpt_mtp_block_spec
    of_cuda = {"is_available": lambda: True, "device_count": lambda: 1, "set_device": lambda device: None}
    of_cuda |= {"Stream": mock.MagicMock(), "stream": lambda stream: nullcontext()}
    shapes = "get_tensor_shapes_adjust_fn_for_distillation"  # of modelopt, for which a stand-in would answer
    with ExitStack() as patches:
        patches.enter_context(mock.patch.multiple(torch.cuda, **of_cuda))
        for place, name in (
            (torch.optim.Optimizer, "_accelerator_graph_capture_health_check"),
            (initialize, "compile_helpers"),
            (setup, "set_jit_fusion_options"),
            (train, shapes),
            (eval, shapes),
        ):
            patches.enter_context(mock.patch.object(place, name, return_value=None))
        local = lambda made, spec, **named: own(made, spec, **{**named, "use_transformer_engine": False})  # noqa: E731
        patches.enter_context(mock.patch.object(gpt_layer_specs, "get_gpt_mtp_block_spec", local))
        torch.compiler.set_stance("force_eager")  # what Megatron's routers compile
        yield
