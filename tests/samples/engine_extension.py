"""Transformer Engine from its wheels, with a stand-in for the extension between its Python code and its library.

The extension takes minutes to build; this one has the enumerations of the headers, and hands the arguments of the one
function that chooses attention to the library. Adam's kernel is PyTorch operations of the same arithmetic. Everything
else is a name: a function that raises NotImplementedError.
Import this module before `transformer_engine.pytorch`; `ENGINE_OPENER` names the library made of `engine_gpu.c`.
"""

from __future__ import annotations

import contextlib
import ctypes
import enum
import os
import re
import sys
import sysconfig
import types
from typing import Any

import torch  # the library needs those that it opens

_CDLL = ctypes.CDLL


class _LazilyOpened(_CDLL):
    """A library; that of Transformer Engine is opened although the installed cuBLAS lacks some of its functions."""

    def __init__(self, name: Any, *arguments: Any, **options: Any) -> None:
        if "libtransformer_engine" in str(name):
            opener = _CDLL(os.environ["ENGINE_OPENER"]).open_lazily
            opener.restype, opener.argtypes = ctypes.c_void_p, [ctypes.c_char_p]
            options["handle"] = opener(str(name).encode())
        super().__init__(name, *arguments, **options)


ctypes.CDLL = _LazilyOpened
os.environ["CUDA_HOME"] = f"{sysconfig.get_path('purelib')}/nvidia/cu13"  # older versions do not look there
with contextlib.redirect_stdout(sys.stderr):
    from transformer_engine import common

LIBRARY = common._TE_LIB_CTYPES
ROOT = types.SimpleNamespace(
    headers=common.Path(common.__file__).parent / "include/transformer_engine",
    constants=common.Path(common.__file__).parents[1] / "pytorch/constants.py",
)


def _enumerations() -> dict[str, dict[str, int]]:
    found: dict[str, dict[str, int]] = {}
    for header in ROOT.headers.glob("*.h"):
        text = re.sub(r"/\*.*?\*/|//[^\n]*", "", header.read_text(), flags=re.S)
        for name, body in re.findall(r"enum (?:class )?(\w+)\s*(?::\s*\w+\s*)?\{(.*?)\}", text, flags=re.S):
            values: dict[str, int] = {}
            following = 0
            for part in filter(None, map(str.strip, body.split(","))):
                key, _, value = (piece.strip() for piece in part.partition("="))
                following = int(value, 0) if value.lstrip("-").isdigit() else following
                values[key] = following
                following += 1
            found[name] = values
    return found


class _AnyName(type):
    """A class that has every name, each a number of its own."""

    def __getattr__(cls, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        value = cls(len(vars(cls)))
        setattr(cls, name, value)
        return value


_FUNCTIONS = ("get_cudnn_version", "get_cublasLt_version", "get_num_cublas_streams", "get_fused_attn_backend")


class _Extension(types.ModuleType):
    """The module `transformer_engine_torch`, with few functions that do something."""

    def __init__(self) -> None:
        super().__init__("transformer_engine_torch")
        self.__file__ = __file__
        self._headers = _enumerations()
        for name in _FUNCTIONS:  # `from transformer_engine_torch import *` takes what lies in the module itself
            setattr(self, name, getattr(self, name))

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        value = self._make(name)
        setattr(self, name, value)
        return value

    def _make(self, name: str) -> Any:
        if name == "DType":
            names = self._headers["NVTEDType"]
            known = {key.replace("kNVTE", "k"): number for key, number in names.items()}
            # Newer versions compare the names with those that the extension has, which are fewer.
            text = re.search(r"class DType\(.*?\n(.*?)\n    def ", ROOT.constants.read_text(), flags=re.S)
            wanted = re.findall(r"^    (k\w+) =", text[1], flags=re.M) if text else known
            return enum.IntEnum(name, {key: known[key] for key in wanted})
        if name in self._headers:
            return enum.IntEnum(name, self._headers[name])
        if name[0].isupper():
            return _AnyName(name, (int,), {})

        def refuse(*arguments: Any, **options: Any) -> Any:
            raise NotImplementedError(f"kernel {name}")

        return refuse

    def get_cudnn_version(self) -> int:
        function = ctypes.CDLL("libcudnn.so.9").cudnnGetVersion
        function.restype = ctypes.c_size_t
        return int(function())

    def get_cublasLt_version(self) -> int:  # noqa: N802 - its name
        return 130100

    def get_num_cublas_streams(self) -> int:
        return 4

    def multi_tensor_adam(
        self,
        chunk_size: int,
        overflow: torch.Tensor,
        tensors: list[list[torch.Tensor]],
        rate: float,
        beta1: float,
        beta2: float,
        eps: float,
        step: int,
        is_adamw: int,
        is_corrected: int,
        decay: float,
    ) -> None:
        """Update weights as the kernel does: in float32, whose results are rounded to the dtype of each tensor.

        Args:
            tensors: gradients, weights, first and second moments, and the weights in float32 where there are any.
        """
        assert (is_adamw, is_corrected) == (1, 1)
        for gradient, weight, first, second, *main in zip(*tensors, strict=True):
            whole = (main or [weight])[0].float()
            of_gradient = gradient.float()
            mean = beta1 * first.float() + (1 - beta1) * of_gradient
            square = beta2 * second.float() + (1 - beta2) * of_gradient * of_gradient
            update = (mean / (1 - beta1**step)) / ((square / (1 - beta2**step)).sqrt() + eps)
            whole = whole - rate * (update + decay * whole)
            for kept, value in ((first, mean), (second, square), *((one, whole) for one in (weight, *main))):
                kept.copy_(value)

    def get_fused_attn_backend(self, *arguments: Any) -> Any:
        # Python gives the arguments in the order of the C function, and registers do not tell whole numbers apart.
        values = [ctypes.c_float(one) if isinstance(one, float) else ctypes.c_int64(int(one)) for one in arguments]
        function = LIBRARY.nvte_get_fused_attn_backend
        function.restype = ctypes.c_int
        return self.NVTE_Fused_Attn_Backend(function(*values))


common.load_framework_extension = lambda _: sys.modules.setdefault("transformer_engine_torch", _Extension())
