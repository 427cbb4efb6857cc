"""All differences between the supported versions of Megatron-Core (0.16 to 0.19)."""

from __future__ import annotations

import dataclasses
import inspect
import os
import pickle
import queue
import tempfile
from typing import Any

import megatron.core
import torch
from megatron.core.datasets.gpt_dataset import GPTDatasetConfig
from megatron.core.dist_checkpointing.strategies import filesystem_async
from megatron.core.packed_seq_params import PackedSeqParams

from harness.errors import ConfigError

MEGATRON_VERSION: str = megatron.core.__version__


def packed_seq_params(
    *, cu_seqlens: torch.Tensor, cu_seqlens_padded: torch.Tensor | None, max_seqlen: int, total_tokens: int
) -> PackedSeqParams:
    """Return the PackedSeqParams of one row whose queries and keys are the same tokens.

    Args:
        cu_seqlens: int32 [S + 1], real tokens.
        cu_seqlens_padded: int32 [S + 1], padded tokens; None if nothing is padded.
        max_seqlen: the longest padded sequence.
        total_tokens: padded tokens of the row, a field of newer versions.
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
    """Return True if `function` (or the constructor of a class) has a parameter `name`."""
    return name in inspect.signature(function).parameters


def gpt_dataset_config(values: dict[str, Any]) -> GPTDatasetConfig:
    """Return Megatron's settings of a pretraining dataset; raise ConfigError if this version lacks one."""
    known = {field.name for field in dataclasses.fields(GPTDatasetConfig) if field.init}
    unknown = sorted(set(values) - known)
    if unknown:
        raise ConfigError(
            f"megatron-core {MEGATRON_VERSION} has no {', '.join(unknown)}",
            where=f"data.{unknown[0]}",
            fix="leave it out, or install a version that supports it",
        )
    return GPTDatasetConfig(**values)


def async_checkpoint_arguments(save: Any) -> dict[str, Any]:
    """Return the argument that selects Megatron's own background writer, which is not the default of 0.19."""
    return {"async_strategy": "mcore"} if accepts(save, "async_strategy") else {}


def keep_checkpoint_results_in_a_file() -> None:
    """Return the results of checkpoint writers through a file, not through the process that Megatron starts for that.

    That process takes seconds to start and outlives a killed run. A SIGTERM that Slurm sends to every process of a job
    kills it, and the checkpoint that the signal requested is lost.
    """
    if hasattr(filesystem_async, "_results_queue") and filesystem_async._results_queue is None:
        filesystem_async._results_queue = _ResultFile()


class _ResultFile:
    """The two queue methods that Megatron calls, for one result at a time, shared with forked processes."""

    def __init__(self) -> None:
        self._file = tempfile.TemporaryFile(buffering=0)  # noqa: SIM115 - open until the process ends

    def put(self, result: Any) -> None:
        rest = memoryview(pickle.dumps(result))
        at = 0
        while at < len(rest):
            at += os.pwrite(self._file.fileno(), rest[at:], at)

    def get_nowait(self) -> Any:
        data = os.pread(self._file.fileno(), os.fstat(self._file.fileno()).st_size, 0)
        if not data:
            raise queue.Empty
        self._file.truncate(0)
        return pickle.loads(data)
