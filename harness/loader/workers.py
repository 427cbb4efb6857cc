"""The loader's worker processes: batches read ahead of training, in order; never a hang, and no process left behind.

PyTorch is imported when a stream is opened, so that a loader's settings can be checked without it.
"""

from __future__ import annotations

import atexit
import gc
import itertools
import multiprocessing
import multiprocessing.connection
import multiprocessing.queues
import os
import re
import signal
import sys
import threading
import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, Generic, Self, TypeVar

from harness.checks import require_cores
from harness.errors import HarnessError, LoaderError
from harness.loader.config import LoaderConfig
from harness.loader.order import BatchRange
from harness.printing import print_line
from harness.storage import name_bus_errors

T = TypeVar("T")

# Exit code of a worker without memory for the copy of a batch that it sends.
_EXIT_UNSENT = 76
_FIX_MEMORY = (
    "lower loader.num_workers, loader.prefetch_factor or loader.global_batch_size, or raise the memory limit of the job"
)


class BatchStream(Generic[T]):
    """Reads batches in `config.num_workers` processes, ahead of training, and yields them in order.

    Use it as a context manager around the training loop: on exit it ends the workers, and turns the death of a worker
    that reached the loop as torch's RuntimeError into a LoaderError.

    Args:
        read_batch: reads one batch; pickled to workers that are not forked.
        config: the number of workers and how long to wait for them.
        where: this rank, for errors.
        data: the dataset, for errors; empty for one without a path.
    """

    def __init__(
        self, read_batch: Callable[[BatchRange], T], config: LoaderConfig, *, where: str, data: str = ""
    ) -> None:
        import torch
        from torch.utils.data import DataLoader

        self._config = config
        self._where = where
        self._data = data
        self._ranges = _Ranges()
        workers = config.num_workers
        require_cores(workers, setting="loader.num_workers")
        if workers and (config.start_method or multiprocessing.get_start_method()) == "forkserver":
            # The server imports once what every worker needs. Without effect when it already runs.
            multiprocessing.get_context("forkserver").set_forkserver_preload(
                ["torch.utils.data", "harness.loader.loader"]
            )
        self._dataloader: DataLoader[T | HarnessError] = DataLoader(
            _Batches(read_batch),  # type: ignore[arg-type]
            batch_size=None,
            sampler=self._ranges,
            num_workers=workers,
            collate_fn=_identity,
            prefetch_factor=config.prefetch_factor if workers else None,
            persistent_workers=config.persistent_workers and workers > 0,
            multiprocessing_context=config.start_method if workers else None,
            timeout=config.timeout_s if workers else 0,
            worker_init_fn=_begin_worker if workers else None,
            # Without its own generator it draws from torch's global one, and dropout would depend on the workers.
            generator=torch.Generator(),
        )
        self._workers: Any = None
        self._end_at_exit = _EndAtExit(weakref.ref(self))

    def read(self, batches: Iterable[BatchRange]) -> Iterator[T]:
        """Yield what `read_batch` returns for each of `batches`.

        Raises:
            HarnessError: as `read_batch` does; LoaderError where a worker died or was silent for too long.
        """
        if self._config.num_workers == 0 or self._config.persistent_workers:
            yield from self._read(batches)
            return
        for _, of_epoch in itertools.groupby(batches, key=lambda batch: batch.epoch):
            yield from self._read(of_epoch)
            self.close()

    def worker_pids(self) -> list[int]:
        """Return the process ids of the living workers; empty before the first batch and with num_workers 0."""
        workers = [] if self._workers is None else self._workers._workers
        return [worker.pid for worker in workers if worker.is_alive()]

    def close(self) -> None:
        """End the workers and wait for their exit. The stream can be read again."""
        self._end_workers(at_once=False)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        if isinstance(error, RuntimeError) and _is_about_workers(error):
            raise self._lost(error) from error
        self.close()

    def _read(self, batches: Iterable[BatchRange]) -> Iterator[T]:
        self._ranges.batches = batches
        with _no_collection():
            items = iter(self._dataloader)
        if self._config.num_workers:
            self._workers = items
            atexit.register(self._end_at_exit)
        while True:
            try:
                item = next(items)
            except StopIteration:
                return
            except RuntimeError as error:
                if not _is_about_workers(error):
                    raise
                raise self._lost(error) from None
            if isinstance(item, HarnessError):
                self.close()
                raise item
            yield item

    def _end_workers(self, *, at_once: bool) -> None:
        iterator, self._workers = self._workers, None
        atexit.unregister(self._end_at_exit)
        if iterator is None:
            return
        # A persistent DataLoader keeps its iterator, and would continue with workers that have exited.
        self._dataloader._iterator = None
        workers = list(iterator._workers)
        if at_once:
            _kill(workers)
        with suppress(RuntimeError):
            iterator._shutdown_workers()
        # Torch asks politely and leaves a process that does not react: one that is stopped or stuck in a read.
        _kill([worker for worker in workers if worker.is_alive()])

    def _owing_worker(self) -> int | None:
        """Return the process id of the worker that owes the next batch, which torch itself does not report."""
        iterator = self._workers
        owed = None if iterator is None else iterator._task_info.get(iterator._rcvd_idx)
        owing = None if owed is None else iterator._workers[owed[0]].pid
        # Workers share a pipe: one that is stopped while it writes a batch holds up the others.
        stopped = [pid for pid in self.worker_pids() if _is_stopped(pid)]
        return stopped[0] if stopped and owing not in stopped else owing

    def _lost(self, error: RuntimeError) -> LoaderError:
        """Return torch's error about a dead or silent worker as one with a fix, and end the other workers."""
        alive, owing = self.worker_pids(), self._owing_worker()
        exit_codes = {worker.exitcode for worker in getattr(self._workers, "_workers", ())}
        is_unreadable = -signal.SIGBUS in exit_codes
        self._end_workers(at_once=True)
        if "timed out" in str(error):
            return LoaderError(
                f"no data came for {self._config.timeout_s:g} s from the loader's worker with process id {owing} "
                f"(alive are {', '.join(map(str, alive)) or 'none'})",
                where=self._where,
                fix=f"see what it waits for (py-spy dump --pid {owing}), check the file system, "
                "or raise loader.timeout_s for slow storage",
            )
        pids = ", ".join(dict.fromkeys(re.findall(r"\d+", str(error).split("by signal")[0]))) or "unknown"
        reason = re.search(r"by signal: ([A-Za-z ]+)", str(error))
        if is_unreadable or (reason and reason[1].startswith("Bus")):
            return LoaderError(
                f"loader worker with process id {pids} died (Bus error): a mapped file became shorter or unreadable "
                "while it was read",
                where=f"{self._where}{self._data and f', {self._data}'}; the worker's message above has the file",
                fix=f"run `harness verify {self._data or 'DATASET'}`, copy what is damaged again, then resume",
            )
        if _EXIT_UNSENT in exit_codes:
            return LoaderError(
                f"process {pids} ran out of memory while it sent a step", where=self._where, fix=_FIX_MEMORY
            )
        return LoaderError(
            f"loader worker with process id {pids} died" + (f" ({reason[1].strip()})" if reason else ""),
            where=self._where,
            fix="a killed worker has mostly run out of memory: see dmesg, lower loader.num_workers or "
            "loader.prefetch_factor; loader.num_workers=0 shows an error of reading itself; then resume",
        )


class _EndAtExit:
    """Ends the workers of a stream that nobody closed, when Python exits.

    It runs before the handler of multiprocessing, which was registered earlier: that one sends SIGTERM, which workers
    ignore, and waits for them without end. Observed: a script whose rank ended with an error never exited.
    """

    def __init__(self, stream: weakref.ref[BatchStream[Any]]) -> None:
        self._stream = stream

    def __call__(self) -> None:
        if (stream := self._stream()) is not None:
            stream._end_workers(at_once=True)


class _Batches(Generic[T]):
    """The dataset of torch's DataLoader. It returns errors, because torch would raise them as another kind."""

    def __init__(self, read: Callable[[BatchRange], T]) -> None:
        self._read = read

    def __getitem__(self, batch: BatchRange) -> T | HarnessError:
        where = f"epoch {batch.epoch}, step {batch.index}"
        try:
            return self._read(batch)
        except HarnessError as error:
            return error
        except MemoryError as error:
            return LoaderError(
                f"process {os.getpid()} ran out of memory while it read a step: {error or 'no details are known'}",
                where=where,
                fix=_FIX_MEMORY,
            )
        except OSError as error:
            return LoaderError(
                f"reading failed: {error}", where=where, fix="check that the dataset is still there and readable"
            )


class _Ranges:
    """The sampler of torch's DataLoader: the batches to read, set before each pass."""

    def __init__(self) -> None:
        self.batches: Iterable[BatchRange] = ()

    def __iter__(self) -> Iterator[BatchRange]:
        return iter(self.batches)


def _identity(item: Any) -> Any:
    """Replace torch's collate function, which would turn arrays into tensors in shared memory, a file each."""
    return item


@contextmanager
def _no_collection() -> Iterator[None]:
    """Collect no garbage inside the block, nor in processes forked there, which set aside what they inherit.

    A forked worker has the garbage of the training process. Observed: that of an earlier run in the same process held a
    group of gloo, whose end waits for a thread that a fork does not copy: the worker died of a segmentation fault.
    """
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


def _begin_worker(worker_id: int) -> None:
    """In a worker: print which mapped file it died of, end with the training process, and keep what is inherited."""
    gc.freeze()
    gc.enable()
    name_bus_errors(dies=True)
    _end_with_parent()


def _end_with_parent() -> None:
    """In a worker: exit at once when the training process dies, and not before.

    A scheduler's stop signal reaches every process of a job, but the training process still needs its workers for the
    step that it saves after.

    Torch's workers watch their parent's id, which with forkserver is that of the server, and the server lives as long
    as one of its workers. Observed: neither ever exited.
    """
    for number in (signal.SIGTERM, signal.SIGUSR2):
        signal.signal(number, signal.SIG_IGN)
    multiprocessing.queues.Queue._on_queue_feeder_error = staticmethod(_end_unsent)  # type: ignore[attr-defined]
    parent = multiprocessing.parent_process()
    if parent is None:
        return
    sentinel = parent.sentinel

    def watch() -> None:
        multiprocessing.connection.wait([sentinel])
        os._exit(1)

    threading.Thread(target=watch, name="ends with the training process", daemon=True).start()


def _end_unsent(error: BaseException, item: object) -> None:
    """In a worker: exit when a batch that was read cannot be sent, as without memory for its copy.

    Python prints the error and drops the batch; training would wait for it until the timeout and blame storage.
    """
    print_line(f"process {os.getpid()} could not send a batch to training: {error!r}", file=sys.stderr, flush=True)
    os._exit(_EXIT_UNSENT if isinstance(error, MemoryError) else 1)


def _kill(workers: list[Any]) -> None:
    """Kill processes that may not react to a request, and wait for them."""
    # Torch's SIGCHLD handler raises in the main thread, once per loader, when the first of its workers dies.
    for _ in range(2):
        with suppress(RuntimeError):
            for worker in workers:
                worker.kill()
            for worker in workers:
                worker.join()


def _is_stopped(pid: int) -> bool:
    """Return True for a process that is stopped, as by SIGSTOP or a debugger; False on systems without /proc."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] in "Tt"
    except OSError:
        return False


def _is_about_workers(error: RuntimeError) -> bool:
    return "DataLoader worker" in str(error) or "DataLoader timed out" in str(error)
