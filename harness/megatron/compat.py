"""All differences between the supported versions of Megatron-Core (0.16 to 0.19)."""

from __future__ import annotations

import dataclasses
import inspect
import io
import json
import os
import pickle
import queue
import tempfile
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import megatron.core
import torch
import xxhash
from megatron.core.datasets.gpt_dataset import GPTDatasetConfig
from megatron.core.dist_checkpointing import serialization
from megatron.core.dist_checkpointing.strategies import filesystem_async
from megatron.core.dist_checkpointing.strategies import torch as torch_format
from megatron.core.packed_seq_params import PackedSeqParams
from torch.distributed.checkpoint.filesystem import FileSystemReader

from harness.errors import ConfigError
from harness.storage import StoredFile

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


@contextmanager
def checkpoints_read_by(reader: Callable[[str], FileSystemReader]) -> Iterator[None]:
    """Let Megatron's loader open checkpoints with `reader` inside the block.

    Megatron 0.16 opens one in its strategy of torch's format, 0.19 in its entry points too, for values that 0.16 keeps
    in `common.pt`.
    """
    assert hasattr(torch_format, "_get_filesystem_reader"), (
        "this version would unpickle checkpoints without restriction"
    )
    with ExitStack() as stack:
        for module in (torch_format, serialization):
            if hasattr(module, "_get_filesystem_reader"):
                replaced = mock.patch.object(module, "_get_filesystem_reader", lambda path, *_, **__: reader(str(path)))
                stack.enter_context(replaced)
        yield


def keep_checkpoint_results_in_a_file() -> None:
    """Return the results of checkpoint writers through a file, not through the process that Megatron starts for that.

    That process takes seconds to start and outlives a killed run. A SIGTERM that Slurm sends to every process of a job
    kills it, and the checkpoint that the signal requested is lost.
    """
    if hasattr(filesystem_async, "_results_queue") and filesystem_async._results_queue is None:
        filesystem_async._results_queue = _ResultFile()


class WrittenHashes:
    """Hashes of checkpoint files, taken from the bytes on their way to the disk.

    Megatron's writers open their files by the name `open` in their module. They run in a forked process, and only there
    is the name given another meaning; the hashes come back through a pipe. Storage that Megatron reaches without
    `open`, through the package multistorageclient, is not covered.
    """

    def __init__(self) -> None:
        # Some hundred bytes a file, one or two files a rank: a pipe holds hundreds of them.
        self._reading, self._writing = os.pipe()
        os.set_blocking(self._reading, False)

    def of_files_written_by(self, request: Any) -> Any:
        """Return the request of a checkpoint, whose writers take hashes; for a rank that writes nothing, the same."""
        if request.async_fn is None:
            return request
        return request._replace(async_fn=partial(_hash_and_write, request.async_fn, self._writing))

    def take(self) -> list[StoredFile]:
        """Return the files written since the last call."""
        data = b""
        with suppress(BlockingIOError):
            while block := os.read(self._reading, 1 << 16):
                data += block
        return [StoredFile(*json.loads(line)) for line in data.splitlines()]

    def __del__(self) -> None:
        for descriptor in (self._reading, self._writing):
            os.close(descriptor)


def _hash_and_write(write: Any, pipe: int, *arguments: Any, **options: Any) -> Any:
    # In a process forked for this call: the name in the training process is not touched.
    def open_hashed(path: str, mode: str) -> io.BufferedWriter:
        return io.BufferedWriter(_HashedFile(path, mode, pipe))

    with mock.patch.object(filesystem_async, "open", open_hashed, create=True):
        return write(*arguments, **options)


class _HashedFile(io.FileIO):
    """A file written front to back, whose size and hash go into a pipe when it is closed."""

    def __init__(self, path: str, mode: str, pipe: int) -> None:
        super().__init__(path, mode)
        self._pipe, self._num_bytes, self._hash = pipe, 0, xxhash.xxh3_64()

    def write(self, data: Any) -> int:
        written = super().write(data) or 0
        self._hash.update(memoryview(data).cast("B")[:written])
        self._num_bytes += written
        return written

    def close(self) -> None:
        if not self.closed:
            super().close()
            facts = [Path(str(self.name)).name, self._num_bytes, self._hash.hexdigest()]
            os.write(self._pipe, (json.dumps(facts) + "\n").encode())


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
