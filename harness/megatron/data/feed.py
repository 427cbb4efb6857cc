"""Batches for every rank of a job, read once for ranks that share them; an error on one rank is raised on all.

Ranks of one tensor-parallel group train the same rows: the first one reads, through its loader's workers, and
broadcasts to the others, which open no files. Middle stages of a pipeline need only the bounds of sequences, which
follow from the schedule, so they do not read tokens. Live chunks are read once per copy of the model (`live_feed`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, Self, TypeVar

import numpy as np
import torch
from megatron.core import parallel_state

from harness.errors import HarnessError
from harness.loader import RankBatch, RankLayout
from harness.loader.live.rank import Waiting
from harness.loader.plan import PackSource
from harness.megatron.job.watchdog import waiting
from harness.records import Pack

T = TypeVar("T")


def together(function: Callable[[], T], *, device: torch.device) -> T:
    """Run `function` on every rank; if it raises a HarnessError on one, every rank raises.

    A failed rank raises its own error; the others raise one of the same kind that names the first failed rank and its
    error. Otherwise they would wait in their next collective for a rank that has exited.
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
            errors = [error]
            torch.distributed.broadcast_object_list(errors, src=first, device=device)
            theirs = errors[0]
            assert theirs is not None
            if error is None:
                error = type(theirs)(f"rank {first}: {theirs.what}", where=theirs.where, fix=theirs.fix)
                error.is_shared, error.rank = True, first
            elif rank == first:
                error.is_shared, error.rank = rank > 0, rank  # rank 0 prints its copy, which names the rank
            else:
                error.is_shared = str(error) == str(theirs)  # print it only once
    if error is not None:
        raise error
    return result


class LengthsOnly:
    """A dataset whose packs have lengths but no tokens, for ranks that need only the bounds of sequences."""

    # Properties, so that workers look the arrays up: mapped files would be pickled with their whole content.
    pack_offsets = property(lambda self: self._source.pack_offsets)
    sequence_lengths = property(lambda self: self._source.sequence_lengths)
    fingerprint = property(lambda self: self._source.fingerprint)
    path = property(lambda self: getattr(self._source, "path", ""))
    max_weight = property(lambda self: getattr(self._source, "max_weight", 1))
    # Positions depend on the grids of images, and every stage needs them.
    has_media = property(lambda self: getattr(self._source, "has_media", False))
    read_media = property(lambda self: self._source.read_media)
    media_tokens = property(lambda self: self._source.media_tokens)
    read_tokens = property(lambda self: self.read)

    def __init__(self, source: PackSource) -> None:
        self._source = source

    def __len__(self) -> int:
        return len(self._source)

    def read(self, indices: list[int]) -> list[Pack]:
        """Return packs of zeros with the real lengths of their sequences."""
        packs = []
        for index in indices:
            lengths = self.sequence_lengths[int(self.pack_offsets[index]) : int(self.pack_offsets[index + 1])]
            starts = np.cumsum(lengths, dtype=np.int32) - lengths
            total = int(lengths.sum(dtype=np.int64))
            packs.append(Pack(np.zeros(total, dtype=np.int32), np.zeros(total, dtype=np.uint8), starts))
        return packs


def readable(source: PackSource, layout: RankLayout) -> PackSource:
    """Return the dataset as this rank needs it: with tokens on the first and last pipeline stage, otherwise without."""
    return source if layout.needs_tokens else LengthsOnly(source)


class Feed:
    """Batches of a loader on every rank that trains the same rows, in step with all ranks of the job.

    Args:
        device: device of the exchange between all ranks; batches stay numpy arrays.
        copy: the rank that reads for this one, and the gloo group that receives its batches (None for one rank); omit
            for the first rank and the group of tensor parallelism.

    Attributes:
        while_waiting: called on all ranks together at each check for data that is not ready yet. If it returns a
            reason to stop, the same on all ranks, the iteration ends.
    """

    def __init__(self, make: Callable[[], Any], *, device: torch.device, copy: tuple[int, Any] | None = None) -> None:
        self._device, self._carrier = device, device if copy is None else torch.device("cpu")
        if copy is None:
            group = parallel_state.get_tensor_model_parallel_group()
            copy = parallel_state.get_tensor_model_parallel_src_rank(), group
        self._source, self._group = copy
        self.while_waiting: Callable[[], str | None] = lambda: None
        reads = self._source == torch.distributed.get_rank()
        self._loader: Any = together(lambda: make() if reads else None, device=device)

    def __iter__(self) -> Iterator[RankBatch]:
        batches = iter(self._loader) if self._loader is not None else iter(())
        while True:
            carried = [together(lambda: next(batches, None), device=self._device)]
            if self._group is not None and self._group.size() > 1:
                torch.distributed.broadcast_object_list(
                    carried, src=self._source, group=self._group, device=self._carrier
                )
            if isinstance(carried[0], Waiting):
                if self.while_waiting() is not None:
                    return
            elif carried[0] is None:
                return
            else:
                yield carried[0]

    def __enter__(self) -> Self:
        if self._loader is not None:
            self._loader.__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        if self._loader is not None:
            self._loader.__exit__(*error)
