"""Worker processes of the loader, which read batches ahead of training, in order, without hangs or leftover processes.

Worker i modulo `num_workers` reads batch i. Each worker has its own connection, with up to `prefetch_factor` requested
batches, so that a worker that died or stopped can be identified by its missing answer.
"""

from __future__ import annotations

import gc
import itertools
import multiprocessing
import multiprocessing.connection
import os
import pickle
import queue
import signal
import socket
import struct
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from multiprocessing.util import Finalize
from typing import Any, Generic, Self, TypeVar

from harness.checks import require_cores
from harness.errors import HarnessError, LoaderError, os_errors_as
from harness.loader.config import LoaderConfig
from harness.loader.order import BatchRange
from harness.storage import name_bus_errors

T = TypeVar("T")

# Time for a worker to finish its current read, such as a copy of a shard from a bucket, before it is killed.
_PATIENCE_S = 5.0
_FIX_MEMORY = "lower loader.num_workers, loader.prefetch_factor or loader.global_batch_size, or raise the memory limit"


@dataclass(frozen=True)
class _Worker:
    """A worker process, and the connection to it."""

    process: Any
    connection: Any


class BatchStream(Generic[T]):
    """Reads batches in `config.num_workers` processes, ahead of training, and yields them in order.

    Args:
        read_batch: reads one batch; pickled to workers that are not forked.
        config: the number of workers and how long to wait for them.
        where: description of this rank, for errors.
        data: path of the dataset, for errors; empty if it has none.
    """

    def __init__(
        self, read_batch: Callable[[BatchRange], T], config: LoaderConfig, *, where: str, data: str = ""
    ) -> None:
        require_cores(config.num_workers, setting="loader.num_workers")
        self._read_batch, self._config, self._where, self._data = read_batch, config, where, data
        self._workers: list[_Worker] = []
        # Workers with outstanding batches, in order of the batches.
        self._owing: deque[_Worker] = deque()
        # Runs before multiprocessing waits indefinitely for workers, which ignore its SIGTERM.
        Finalize(self, _end, (self._workers, 0.0), exitpriority=0)

    def read(self, batches: Iterable[BatchRange]) -> Iterator[T]:
        """Yield what `read_batch` returns for each of `batches`.

        Raise HarnessError if `read_batch` does, and LoaderError if a worker died or did not answer in time, or if
        another iteration took over the workers.
        """
        if self._config.num_workers == 0:
            for batch in batches:
                with _explained(batch):
                    item = self._read_batch(batch)
                yield item
        elif self._config.persistent_workers:
            yield from self._read_ahead(iter(batches))
        else:
            for _, of_epoch in itertools.groupby(batches, key=lambda batch: batch.epoch):
                yield from self._read_ahead(of_epoch)
                self.close()

    def worker_pids(self) -> list[int]:
        """Return the process ids of live workers; empty before the first batch and if num_workers is 0."""
        return [worker.process.pid for worker in self._workers if worker.process.is_alive()]

    def close(self) -> None:
        """End the workers and wait for their exit. The stream can be read again."""
        self._owing.clear()
        _end(self._workers, _PATIENCE_S)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def _read_ahead(self, batches: Iterator[BatchRange]) -> Iterator[T]:
        if self._owing:  # an earlier iteration ended before its last batch
            _end(self._workers, _PATIENCE_S)
        if not self._workers:
            fix = "raise the limits of processes and open files (ulimit -u, ulimit -n), or lower loader.num_workers"
            try:
                with os_errors_as(LoaderError, "the loader's workers cannot be started", where=self._where, fix=fix):
                    self._start_workers()
            except LoaderError:
                self.close()  # those that were started
                raise
        turns, owing = itertools.cycle(self._workers), deque[_Worker]()
        self._owing = owing

        def ask() -> None:
            if (batch := next(batches, None)) is not None:
                worker = next(turns)
                owing.append(worker)
                with suppress(OSError):  # a dead worker is reported when its batch is due
                    worker.connection.send(batch)

        for _ in range(self._config.num_workers * self._config.prefetch_factor):
            ask()
        while owing:
            if owing is not self._owing:
                what = "another iteration over this loader has begun, and its workers read for that one"
                raise LoaderError(what, where=self._where, fix="iterate over one loader once at a time, or make two")
            item = self._receive(owing[0])
            owing.popleft()
            if isinstance(item, HarnessError):
                self.close()
                raise item
            ask()
            yield item

    def _start_workers(self) -> None:
        context: Any = multiprocessing.get_context(self._config.start_method)
        timeout = struct.pack("ll", *divmod(int(self._config.timeout_s * 1e6), 10**6))
        # Workers freeze inherited objects before they collect garbage. Observed without: garbage of an earlier run held
        # a gloo group, whose destructor waits for a thread that a fork does not copy, and the worker died of a
        # segmentation fault.
        was_enabled = gc.isenabled()
        gc.disable()
        try:
            for number in range(self._config.num_workers):
                ours, theirs = context.Pipe()
                with socket.socket(fileno=os.dup(ours.fileno())) as end:
                    # A read that receives no byte within the timeout fails with BlockingIOError.
                    end.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, timeout)
                name = f"loader worker {number}"
                process = context.Process(target=_work, args=(self._read_batch, theirs), name=name, daemon=True)
                process.start()
                theirs.close()
                self._workers.append(_Worker(process, ours))
        finally:
            if was_enabled:
                gc.enable()

    def _receive(self, worker: _Worker) -> T | HarnessError:
        """Return the next message of a worker; if it times out or any worker died, end all and raise LoaderError."""
        ends = [each.process.sentinel for each in self._workers]
        ready = multiprocessing.connection.wait([worker.connection, *ends], self._config.timeout_s)
        if worker.connection in ready:
            with suppress(EOFError, OSError):  # it died, perhaps in the middle of a message
                with suppress(BlockingIOError):
                    item: T | HarnessError = worker.connection.recv()
                    return item
                ready = []  # it stopped in the middle of a message
        if not ready:
            alive, pid = self.worker_pids(), worker.process.pid
            _end(self._workers, 0.0)
            raise LoaderError(
                f"no data arrived for {self._config.timeout_s:g} s from the loader's worker with process id {pid} "
                f"(workers alive: {', '.join(map(str, alive)) or 'none'})",
                where=self._where,
                fix=f"inspect what it waits for (py-spy dump --pid {pid}), check the file system, "
                "or increase loader.timeout_s for slow storage",
            )
        # Dead workers have closed their pipes.
        dead = [each.process for each in self._workers if each.process.sentinel in ready] or [worker.process]
        for process in dead:
            process.join(_PATIENCE_S)
        pids = ", ".join(str(process.pid) for process in dead)
        code = min(process.exitcode or 0 for process in dead)
        _end(self._workers, 0.0)
        if code == -signal.SIGBUS:
            raise LoaderError(
                f"loader worker with process id {pids} died (Bus error): a mapped file was truncated or became "
                "unreadable while it was read",
                where=f"{self._where}{self._data and f', {self._data}'}; the worker's message above names the file",
                fix=f"run `harness verify {self._data or 'DATASET'}`, copy the damaged files again, then resume",
            )
        raise LoaderError(
            f"loader worker with process id {pids} died" + (f" ({signal.strsignal(-code)})" if code < 0 else ""),
            where=self._where,
            fix="killed workers are usually out of memory: see dmesg, lower loader.num_workers or "
            "loader.prefetch_factor; loader.num_workers=0 shows errors of the reading code; then resume",
        )


def _end(workers: list[_Worker], patience_s: float) -> None:
    """End workers and wait for them; kill those that do not exit in time."""
    for worker in workers:
        with suppress(OSError):
            worker.connection.send(None)
    deadline = time.monotonic() + patience_s
    for worker in workers:
        worker.process.join(max(0.0, deadline - time.monotonic()))
        worker.process.kill()
        worker.process.join()
        worker.connection.close()
    workers.clear()


@contextmanager
def _explained(batch: BatchRange) -> Iterator[None]:
    """Raise LoaderError if reading a batch fails for lack of memory or because of the file system."""
    where = f"epoch {batch.epoch}, step {batch.index}"
    try:
        yield
    except MemoryError as error:
        what = f"process {os.getpid()} ran out of memory while it read a step: {error or 'no details are known'}"
        raise LoaderError(what, where=where, fix=_FIX_MEMORY) from error
    except OSError as error:
        fix = "check that the dataset exists and is readable"
        raise LoaderError(f"reading failed: {error}", where=where, fix=fix) from error


def _work(read_batch: Callable[[BatchRange], Any], connection: Any) -> None:
    """Run a worker: read requested batches, and send each while the next one is read."""
    gc.freeze()
    gc.enable()
    name_bus_errors(dies=True)
    # A signal that ends the job reaches all its processes, but the training process still needs its workers for the
    # step before its last checkpoint. They exit when it does.
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR2):
        signal.signal(number, signal.SIG_IGN)
    parent: Any = multiprocessing.parent_process()

    def watch() -> None:
        multiprocessing.connection.wait([parent.sentinel])
        os._exit(1)

    threading.Thread(target=watch, name="ends with the training process", daemon=True).start()
    if torch := sys.modules.get("torch"):
        # PyTorch's threads do not survive a fork: work divided among them would never end.
        torch.set_num_threads(1)
    outgoing: queue.SimpleQueue[bytes] = queue.SimpleQueue()

    def send() -> None:
        with suppress(OSError):
            while True:
                connection.send_bytes(outgoing.get())

    threading.Thread(target=send, name="sends batches", daemon=True).start()
    asked: deque[BatchRange] = deque()
    while True:
        while not asked or connection.poll():
            if (batch := connection.recv()) is None:
                return
            asked.append(batch)
        batch = asked.popleft()
        try:
            with _explained(batch):
                message = pickle.dumps(read_batch(batch), pickle.HIGHEST_PROTOCOL)
        except HarnessError as error:
            message = pickle.dumps(error)
        outgoing.put(message)
