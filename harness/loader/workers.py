"""The loader's worker processes: what runs in them, how they end, and what is said when one is lost."""

from __future__ import annotations

import multiprocessing
import multiprocessing.connection
import os
import re
import signal
import threading
from collections.abc import Iterable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any, Protocol, TypeVar

from torch.utils.data import Dataset, Sampler

from harness.errors import HarnessError, LoaderError
from harness.loader.order import BatchRange

Read_co = TypeVar("Read_co", covariant=True)
T = TypeVar("T")


class ReadsBatches(Protocol[Read_co]):
    """What is sent to workers; it must be picklable."""

    def read(self, step: BatchRange) -> Read_co: ...


class BatchDataset(Dataset[T | HarnessError]):
    """Reads a step. Errors are returned, because torch would raise them as another kind with its own traceback."""

    def __init__(self, reader: ReadsBatches[T]) -> None:
        self._reader = reader

    def __getitem__(self, step: BatchRange) -> T | HarnessError:
        try:
            return self._reader.read(step)
        except HarnessError as error:
            return error
        except MemoryError as error:
            return LoaderError(
                f"process {os.getpid()} ran out of memory while it read a step: {error or 'nothing more is known'}",
                where=f"epoch {step.epoch}, step {step.index}",
                fix="lower loader.num_workers, loader.prefetch_factor or loader.global_batch_size, or raise the "
                "memory limit of the job",
            )
        except OSError as error:
            return LoaderError(
                f"reading failed: {error}",
                where=f"epoch {step.epoch}, step {step.index}",
                fix="check that the dataset is still there and readable",
            )


class BatchSampler(Sampler[BatchRange]):
    """The steps that are to be read next; set before each pass."""

    def __init__(self) -> None:
        self.steps: Iterable[BatchRange] = ()

    def __iter__(self) -> Iterator[BatchRange]:
        return iter(self.steps)


def warm_up(start_method: str | None) -> None:
    """Let forkserver's server import what every worker needs, PyTorch above all, once for all of them.

    Has no effect once the server runs.
    """
    if (start_method or multiprocessing.get_start_method()) == "forkserver":
        multiprocessing.get_context("forkserver").set_forkserver_preload(["harness.loader.loader"])


def leave_the_end_to_the_parent(worker_id: int) -> None:
    """In a worker: end it at once where the training process dies, and not before.

    A scheduler's signal to stop reaches every process of a job; the training process needs its workers for the step
    that it saves after.

    Torch's workers look at their parent's id, which is the server's with forkserver; and the server lives as long as
    a worker of it does. Seen: both stayed for good.
    """
    for number in (signal.SIGTERM, signal.SIGUSR2):
        signal.signal(number, signal.SIG_IGN)
    parent = multiprocessing.parent_process()
    if parent is None:
        return
    sentinel = parent.sentinel

    def watch() -> None:
        multiprocessing.connection.wait([sentinel])
        os._exit(1)

    threading.Thread(target=watch, name="ends with the training process", daemon=True).start()


def as_it_is(item: Any) -> Any:
    """In place of torch's collate, which would turn arrays into tensors in shared memory, a file each."""
    return item


def kill(workers: Iterable[Any]) -> None:
    """End processes that may not listen, and wait for them."""
    found = list(workers)
    # Torch's SIGCHLD handler raises in the main thread, once for a loader, when the first of its workers dies.
    for _ in range(2):
        with suppress(RuntimeError):
            for worker in found:
                worker.kill()
            for worker in found:
                worker.join()


def is_stopped(pid: int) -> bool:
    """Whether a process is stopped, as by SIGSTOP or a debugger; False where this system does not tell."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] in "Tt"
    except OSError:
        return False


def is_about_workers(error: RuntimeError) -> bool:
    return "DataLoader worker" in str(error) or "DataLoader timed out" in str(error)


def lost_worker(
    error: RuntimeError, alive: list[int], owing: int | None, *, timeout_s: float, where: str
) -> LoaderError:
    """What torch says of a dead or silent worker, with what to do about it.

    Args:
        error: of torch, one that `is_about_workers`.
        alive: process ids of the living workers.
        owing: of the worker that owes the next batch.
        timeout_s, where: for the message.
    """
    if "timed out" in str(error):
        return LoaderError(
            f"no data came for {timeout_s:g} s from the loader's worker with process id {owing} "
            f"(alive are {', '.join(map(str, alive)) or 'none'})",
            where=where,
            fix=f"look at what it waits for (py-spy dump --pid {owing}), at the file system, "
            "or raise loader.timeout_s for slow storage",
        )
    pids = ", ".join(dict.fromkeys(re.findall(r"\d+", str(error).split("by signal")[0]))) or "unknown"
    reason = re.search(r"by signal: ([A-Za-z ]+)", str(error))
    return LoaderError(
        f"loader worker with process id {pids} died" + (f" ({reason[1].strip()})" if reason else ""),
        where=where,
        fix="a killed worker is mostly one that ran out of memory: see dmesg, lower loader.num_workers or "
        "loader.prefetch_factor; loader.num_workers=0 shows an error of reading itself; then resume",
    )
