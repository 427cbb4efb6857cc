"""Batches for every rank of a job: read once for ranks that share them, and an error of one is an error of all.

Ranks of one tensor-parallel group train the same rows: the first of them reads, through its loader's workers, and
broadcasts to the others, which open nothing. Stages in the middle of a pipeline need no tokens, only the boundaries of
sequences, and these follow from the schedule: they read nothing either.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from types import TracebackType
from typing import Any, Protocol, TypeVar

import numpy as np
import torch
from megatron.core import parallel_state

from harness.errors import HarnessError
from harness.loader import PackSource, RankBatch, RankLayout
from harness.megatron.job import waiting
from harness.records import Int32Array, Int64Array, Pack

T = TypeVar("T")


def together(function: Callable[[], T], *, device: torch.device) -> T:
    """Run `function` on every rank; where it raises a HarnessError on one, every rank raises.

    A rank that failed raises its own error, the others one of the same kind that names the first of them and what
    happened there. Without this the others would wait in their next collective for a rank that is gone.
    """
    error: HarnessError | None = None
    try:
        result = function()
    except HarnessError as raised:
        error = raised
    if torch.distributed.get_world_size() > 1:
        rank, world_size = torch.distributed.get_rank(), torch.distributed.get_world_size()
        failed = torch.tensor([world_size if error is None else rank], device=device)
        with waiting():
            torch.distributed.all_reduce(failed, op=torch.distributed.ReduceOp.MIN)
        first = int(failed.item())
        if first < world_size:
            told = [error]
            torch.distributed.broadcast_object_list(told, src=first, device=device)
            theirs = told[0]
            assert theirs is not None
            if error is None:
                error = type(theirs)(f"rank {first}: {theirs.what}", where=theirs.where, fix=theirs.fix)
                error.is_shared = True
            elif rank != first:
                error.is_shared = str(error) == str(theirs)  # said once is enough
    if error is not None:
        raise error
    return result


class LengthsOnly:
    """A dataset whose packs have their lengths but no tokens: for ranks that need boundaries alone."""

    def __init__(self, source: PackSource) -> None:
        self._source = source

    @property
    def pack_offsets(self) -> Int64Array:
        return self._source.pack_offsets

    @property
    def sequence_lengths(self) -> Int32Array:
        return self._source.sequence_lengths

    @property
    def fingerprint(self) -> str:
        return self._source.fingerprint

    def __len__(self) -> int:
        return len(self._source)

    def read(self, indices: list[int]) -> list[Pack]:
        """Packs of zeros with the sequences' real lengths."""
        packs = []
        for index in indices:
            lengths = self.sequence_lengths[int(self.pack_offsets[index]) : int(self.pack_offsets[index + 1])]
            starts = np.cumsum(lengths, dtype=np.int32) - lengths
            total = int(lengths.sum(dtype=np.int64))
            packs.append(Pack(np.zeros(total, dtype=np.int32), np.zeros(total, dtype=np.uint8), starts))
        return packs


def readable(source: PackSource, layout: RankLayout) -> PackSource:
    """The dataset as this rank needs it: with its tokens at the ends of a pipeline, without them between."""
    return source if layout.needs_tokens else LengthsOnly(source)


class Batches(Protocol):
    """A loader: gives batches in order, and ends its workers where it is left as a context manager."""

    def __iter__(self) -> Iterator[RankBatch]: ...

    def __enter__(self) -> Any: ...

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None: ...


class Feed:
    """A loader's batches on every rank of the tensor-parallel groups, in step with all other ranks of the job.

    Args:
        make: opens the loader; called where this rank reads.
        layout: where this rank stands.
        device: for the exchange; batches stay numpy arrays.
    """

    def __init__(self, make: Callable[[], Batches], layout: RankLayout, *, device: torch.device) -> None:
        self._device = device
        self._shares = parallel_state.get_tensor_model_parallel_world_size() > 1
        self._reads = layout.tp_rank == 0
        self._loader = together(lambda: make() if self._reads else None, device=device)

    @property
    def reads(self) -> bool:
        """Whether this rank opens the dataset itself."""
        return self._reads

    def __iter__(self) -> Iterator[RankBatch]:
        batches = iter(self._loader) if self._loader is not None else iter(())
        while True:
            batch = self._shared(together(lambda: next(batches, None), device=self._device))
            if batch is None:
                return
            yield batch

    def _shared(self, batch: RankBatch | None) -> RankBatch | None:
        if not self._shares:
            return batch
        group = parallel_state.get_tensor_model_parallel_group()
        carried: list[Any] = [batch]
        source = parallel_state.get_tensor_model_parallel_src_rank()
        torch.distributed.broadcast_object_list(carried, src=source, group=group, device=self._device)
        return carried[0]  # type: ignore[no-any-return]

    def __enter__(self) -> Feed:
        if self._loader is not None:
            self._loader.__enter__()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self._loader is not None:
            self._loader.__exit__(kind, error, traceback)
