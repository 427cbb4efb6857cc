"""Measure how long a rank waits in exchanges with other ranks, and the CPU time of its main thread."""

from __future__ import annotations

import functools
import threading
import time
from collections.abc import Callable
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

import torch
from torch._C._distributed_c10d import ProcessGroup, Work

# Time these too: if one returns no work, the exchange itself runs on the compute stream.
_EXCHANGES = (
    *("allreduce", "allgather", "_allgather_base", "reduce", "reduce_scatter", "_reduce_scatter_base", "alltoall"),
    *("alltoall_base", "broadcast", "send", "recv", "_end_coalescing"),
)


class Waits:
    """Context manager that sums the seconds that this rank spends in exchanges, including waits for slower ranks.

    On a CPU every exchange blocks in `Work.wait`. On a GPU it blocks the compute stream, where events before and after
    it are timed; exchanges that overlap with computation count only as long as the stream waits for them.
    """

    def __init__(self, device: torch.device) -> None:
        self._is_gpu = device.type == "cuda"
        self._total_s = 0.0
        self._thread = threading.get_ident()
        self._pending: list[tuple[torch.cuda.Event, torch.cuda.Event]] = []
        self._spare: list[tuple[torch.cuda.Event, torch.cuda.Event]] = []
        self._stack = ExitStack()

    def __enter__(self) -> Waits:
        names: list[tuple[type, str]] = [(Work, "wait")]
        if self._is_gpu:
            names += [(ProcessGroup, name) for name in _EXCHANGES if name in vars(ProcessGroup)]
        for owner, name in names:
            # Restore the entry of the class: `getattr` on an extension type returns a function that no longer binds.
            self._stack.callback(setattr, owner, name, vars(owner)[name])
            setattr(owner, name, self._measured(getattr(owner, name)))
        return self

    def __exit__(self, *error: object) -> None:
        self._stack.close()

    def total_s(self) -> float:
        """Return the seconds so far; on a GPU, this waits for the stream."""
        if self._pending:
            torch.cuda.current_stream().synchronize()
            self._total_s += sum(began.elapsed_time(ended) for began, ended in self._pending) / 1e3
            self._spare += self._pending
            self._pending.clear()
        return self._total_s

    def _measured(self, function: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(function)
        def measured(*arguments: Any, **options: Any) -> Any:
            if threading.get_ident() != self._thread:  # a checkpoint is being written in the background
                return function(*arguments, **options)
            if not self._is_gpu:
                start = time.perf_counter()
                try:
                    return function(*arguments, **options)
                finally:
                    self._total_s += time.perf_counter() - start
            began, ended = self._spare.pop() if self._spare else (_event(), _event())
            began.record()
            result = function(*arguments, **options)
            ended.record()
            self._pending.append((began, ended))
            return result

        return measured


def _event() -> torch.cuda.Event:
    return torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]


def thread_times() -> tuple[float, float]:
    """Return the seconds that the calling thread ran on a core, and was ready but waited for one; 0 if unknown."""
    with suppress(OSError, ValueError):
        running, queued, _ = Path("/proc/thread-self/schedstat").read_text().split()
        return int(running) / 1e9, int(queued) / 1e9
    return 0.0, 0.0
