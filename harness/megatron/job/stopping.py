"""Signals to stop: a scheduler's signal becomes a checkpoint after the current step."""

from __future__ import annotations

import os
import signal
import time
from contextlib import suppress
from types import FrameType
from typing import Any

import torch
import torch.distributed

# Slurm, torchrun and container engines send SIGTERM; `sbatch --signal` is set to send SIGUSR2 before the time limit.
# SIGUSR1 is not used: NCCL's libraries may catch it.
SIGNALS = (signal.SIGTERM, signal.SIGUSR2)


class StopSignals:
    """Remember a signal to stop instead of being killed by it. Use as a context manager.

    A second signal changes nothing: a scheduler that waits no longer sends SIGKILL.
    """

    def __init__(self) -> None:
        self._seen = 0
        self._before: dict[signal.Signals, Any] = {}
        self._noticed: tuple[str, float] | None = None

    def __enter__(self) -> StopSignals:
        for number in SIGNALS:
            self._before[number] = signal.signal(number, self._note)
        # A handler waits until the main thread returns from a read or a collective; these bytes arrive at once.
        self._bytes, self._wakeup = os.pipe()
        os.set_blocking(self._bytes, False)
        os.set_blocking(self._wakeup, False)
        self._wakeup_before = signal.set_wakeup_fd(self._wakeup, warn_on_full_buffer=False)
        return self

    def __exit__(self, *error: object) -> None:
        signal.set_wakeup_fd(self._wakeup_before)
        for number, handler in self._before.items():
            signal.signal(number, handler)
        os.close(self._wakeup)
        os.close(self._bytes)
        self._bytes = -1

    def _note(self, number: int, frame: FrameType | None) -> None:
        self._seen = number

    def noticed(self) -> tuple[str, float] | None:
        """Return the signal that this rank has received and the seconds since the first such call; None for none.

        To be called by one thread other than the main one, which may be stuck.
        """
        if self._noticed is None:
            with suppress(OSError):  # no signal, or already closed
                received = [number for number in os.read(self._bytes, 4096) if number in SIGNALS]
                self._noticed = (signal.Signals(received[0]).name, time.monotonic()) if received else None
        return None if self._noticed is None else (self._noticed[0], time.monotonic() - self._noticed[1])

    def agreed(self) -> str | None:
        """Return the signal that any rank has received, the same on every rank; every rank takes part.

        Signals arrive on each rank at a different time, and all have to stop after the same step.
        """
        seen = self._seen
        if torch.distributed.get_world_size() > 1:
            shared = torch.tensor([seen], dtype=torch.int32, device=torch.cuda.current_device())
            torch.distributed.all_reduce(shared, op=torch.distributed.ReduceOp.MAX)
            seen = int(shared.item())
        return signal.Signals(seen).name if seen else None
