"""Every difference between the supported versions of Megatron-Core (0.16 to 0.19), in one place."""

from __future__ import annotations

import dataclasses
import inspect
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import megatron.core
import torch
from megatron.core.packed_seq_params import PackedSeqParams

MEGATRON_VERSION: str = megatron.core.__version__


def packed_seq_params(
    *,
    cu_seqlens: torch.Tensor,
    cu_seqlens_padded: torch.Tensor | None,
    max_seqlen: int,
    total_tokens: int,
) -> PackedSeqParams:
    """PackedSeqParams of one row whose queries and keys are the same tokens.

    Args:
        cu_seqlens: int32 [S + 1], real tokens.
        cu_seqlens_padded: int32 [S + 1], padded ones, or None where nothing is padded.
        max_seqlen: the longest padded sequence.
        total_tokens: padded tokens of the row; newer versions carry it.
    """
    values: dict[str, Any] = {
        "qkv_format": "thd",
        "cu_seqlens_q": cu_seqlens,
        "cu_seqlens_kv": cu_seqlens,
        "cu_seqlens_q_padded": cu_seqlens_padded,
        "cu_seqlens_kv_padded": cu_seqlens_padded,
        "max_seqlen_q": max_seqlen,
        "max_seqlen_kv": max_seqlen,
    }
    if any(field.name == "total_tokens" for field in dataclasses.fields(PackedSeqParams)):
        values["total_tokens"] = total_tokens
    return PackedSeqParams(**values)


def accepts(function: Any, name: str) -> bool:
    """True where `function` (or a class's constructor) takes an argument called `name`."""
    return name in inspect.signature(function).parameters


@contextmanager
def main_module_hidden() -> Iterator[None]:
    """Keep processes that are spawned meanwhile from importing the main module.

    Megatron's checkpoint writer spawns one that needs nothing of it. Importing it costs seconds with PyTorch in it, and
    a script without an `if __name__ == "__main__"` guard would start itself over and hang.
    """
    main = sys.modules["__main__"]
    hidden = {name: getattr(main, name) for name in ("__spec__", "__file__") if hasattr(main, name)}
    main.__spec__ = None
    if "__file__" in hidden:
        del main.__file__
    try:
        yield
    finally:
        for name, value in hidden.items():
            setattr(main, name, value)
