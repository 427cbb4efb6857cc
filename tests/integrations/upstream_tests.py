"""Run tests of another project on a CPU: `upstream_tests.py PROJECT TESTS...`, with its package first on PYTHONPATH."""

from __future__ import annotations

import os
import sys
from types import ModuleType, SimpleNamespace
from typing import Any

import cuda_stand_ins


class _Numbers(type):
    """A class that has every name, each a number of its own."""

    def __getattr__(cls, name: str) -> Any:
        if name == "__members__":
            return {key: value for key, value in vars(cls).items() if not key.startswith("_")}
        if name.startswith("__"):
            raise AttributeError(name)
        value = cls(len(vars(cls)))
        setattr(cls, name, value)
        return value


class _Extension(ModuleType):
    """Names of Transformer Engine's extension, which is not installed: enumerations, and functions of 92000."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        value: Any = _Numbers(name, (int,), {}) if name[0].isupper() else lambda *_, **__: 92000
        setattr(self, name, value)
        return value


def import_transformer_engine() -> None:
    """Import the Python code of Transformer Engine, for which this machine has an H100 that nothing runs on."""
    import torch
    import triton  # noqa: F401 - it finds no GPU

    os.environ["NVTE_PROJECT_BUILDING"] = "1"  # no library is loaded
    cuda_stand_ins.install("onnx", "onnx_ir", "onnxscript")
    from transformer_engine import common

    extension = _Extension("transformer_engine_torch")
    assert extension.get_cudnn_version()  # from now on a name of the module: `import *` takes those
    common.load_framework_extension = lambda framework: sys.modules.setdefault(extension.__name__, extension)
    torch.cuda.is_available = lambda: True
    torch.cuda.current_device = lambda: 0
    torch.cuda.is_current_stream_capturing = lambda: False
    torch.cuda.get_device_capability = lambda device=None: (9, 0)
    torch.cuda.get_device_properties = lambda device=None: SimpleNamespace(major=9, minor=0, multi_processor_count=132)


if __name__ == "__main__":
    project, *tests = sys.argv[1:]
    if project == "transformer_engine":
        import_transformer_engine()
    elif project == "megatron_bridge":
        cuda_stand_ins.install(after=cuda_stand_ins.MEGATRON_CORE)
    import pytest

    # Without the settings and plugins of this repository.
    sys.exit(
        pytest.main(["-q", "-c", os.devnull, "--rootdir", ".", "-p", "no:cacheprovider", "-p", "no:xdist", *tests])
    )
