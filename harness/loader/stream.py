"""What a reader gives for the steps of a run, in order, through worker processes: never a hang, nothing left behind."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator
from contextlib import suppress
from types import TracebackType
from typing import Any, Generic, TypeVar

import torch
from torch.utils.data import DataLoader

from harness.errors import HarnessError, LoaderError
from harness.loader.config import LoaderConfig
from harness.loader.order import BatchRange
from harness.loader.workers import (
    BatchDataset,
    BatchSampler,
    ReadsBatches,
    as_it_is,
    is_about_workers,
    is_stopped,
    kill,
    leave_the_end_to_the_parent,
    lost_worker,
    warm_up,
)

T = TypeVar("T")


class BatchStream(Generic[T]):
    """Reads steps in `config.num_workers` processes, ahead of training, and gives what was read in order.

    Use it as a context manager, around the training loop: leaving it ends the workers, and a worker's death that
    reaches the loop as torch's RuntimeError leaves as a LoaderError.

    Args:
        reader: pickled to workers that are not forked.
        config: numbers of workers and how long to wait for them.
        where: for errors: which rank this is.
    """

    def __init__(self, reader: ReadsBatches[T], config: LoaderConfig, *, where: str) -> None:
        self._config = config
        self._where = where
        self._sampler = BatchSampler()
        workers = config.num_workers
        if workers:
            warm_up(config.start_method)
        self._dataloader: DataLoader[T | HarnessError] = DataLoader(
            BatchDataset(reader),
            batch_size=None,
            sampler=self._sampler,
            num_workers=workers,
            collate_fn=as_it_is,
            prefetch_factor=config.prefetch_factor if workers else None,
            persistent_workers=config.persistent_workers and workers > 0,
            multiprocessing_context=config.start_method if workers else None,
            timeout=config.timeout_s if workers else 0,
            worker_init_fn=leave_the_end_to_the_parent if workers else None,
            # Without one of its own it draws from torch's global generator, and dropout would depend on the workers.
            generator=torch.Generator(),
        )
        self._workers: Any = None

    def read(self, steps: Iterable[BatchRange]) -> Iterator[T]:
        """What the reader gives for each of `steps`.

        Raises:
            HarnessError: of the reader; LoaderError where a worker died or was silent for too long.
        """
        if self._config.num_workers == 0 or self._config.persistent_workers:
            yield from self._read(steps)
            return
        for _, epoch_steps in itertools.groupby(steps, key=lambda step: step.epoch):
            yield from self._read(epoch_steps)
            self.close()

    def worker_pids(self) -> list[int]:
        """Process ids of the living workers; empty before the first step and with num_workers 0."""
        workers = [] if self._workers is None else self._workers._workers
        return [worker.pid for worker in workers if worker.is_alive()]

    def close(self) -> None:
        """End the workers and wait until they are gone. Steps can be read again."""
        self._end_workers(at_once=False)

    def __enter__(self) -> BatchStream[T]:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if isinstance(error, RuntimeError) and is_about_workers(error):
            raise self._lost(error) from error
        self.close()

    def _read(self, steps: Iterable[BatchRange]) -> Iterator[T]:
        self._sampler.steps = steps
        items = iter(self._dataloader)
        if self._config.num_workers:
            self._workers = items
        while True:
            try:
                item = next(items)
            except StopIteration:
                return
            except RuntimeError as error:
                if not is_about_workers(error):
                    raise
                raise self._lost(error) from None
            if isinstance(item, HarnessError):
                self.close()
                raise item
            yield item

    def _end_workers(self, *, at_once: bool) -> None:
        iterator, self._workers = self._workers, None
        if iterator is None:
            return
        # A persistent DataLoader holds its iterator, and would go on with workers that are gone.
        self._dataloader._iterator = None
        workers = list(iterator._workers)
        if at_once:
            kill(workers)
        with suppress(RuntimeError):
            iterator._shutdown_workers()
        # Torch asks politely and leaves a process that does not listen: one that is stopped or stuck in a read.
        kill(worker for worker in workers if worker.is_alive())

    def _owing_worker(self) -> int | None:
        """Process id of the worker that the next step is waited for from; torch itself does not tell."""
        iterator = self._workers
        owed = None if iterator is None else iterator._task_info.get(iterator._rcvd_idx)
        owing = None if owed is None else iterator._workers[owed[0]].pid
        # Workers share a pipe: one that is stopped while it puts a step there holds the others up.
        stopped = [pid for pid in self.worker_pids() if is_stopped(pid)]
        return stopped[0] if stopped and owing not in stopped else owing

    def _lost(self, error: RuntimeError) -> LoaderError:
        """What became of a worker; the others are ended."""
        alive, owing = self.worker_pids(), self._owing_worker()
        self._end_workers(at_once=True)
        return lost_worker(error, alive, owing, timeout_s=self._config.timeout_s, where=self._where)
