"""Asked to stop: a signal from a scheduler becomes a checkpoint after the step that is running."""

from __future__ import annotations

import signal
from types import FrameType, TracebackType
from typing import Any

import torch
import torch.distributed

# SIGTERM is what Slurm, torchrun and container engines send; SIGUSR2 what `sbatch --signal` is told to send before the
# end. SIGUSR1 is left alone: NCCL's libraries may catch it.
SIGNALS = (signal.SIGTERM, signal.SIGUSR2)


class StopSignals:
    """Context manager: remembers a signal to stop instead of dying of it.

    A second signal of the same kind changes nothing: a scheduler that has run out of patience sends SIGKILL.
    """

    def __init__(self) -> None:
        self._seen = 0
        self._before: dict[signal.Signals, Any] = {}

    def __enter__(self) -> StopSignals:
        for number in SIGNALS:
            self._before[number] = signal.signal(number, self._note)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _note(self, number: int, frame: FrameType | None) -> None:
        self._seen = number

    def agreed(self) -> str | None:
        """The signal that any rank has seen, the same answer on every rank; every rank takes part.

        Signals arrive on each rank at a time of its own, and all have to stop after the same step.
        """
        seen = self._seen
        if torch.distributed.get_world_size() > 1:
            shared = torch.tensor([seen], dtype=torch.int32, device=torch.cuda.current_device())
            torch.distributed.all_reduce(shared, op=torch.distributed.ReduceOp.MAX)
            seen = int(shared.item())
        return signal.Signals(seen).name if seen else None
