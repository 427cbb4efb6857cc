"""Handle stop signals, and detect ranks that hang or have died, from the rendezvous to the last step.

Every rank publishes its step, its activity and the time without progress through the store of the rendezvous. A rank
without progress for the limit ends the job; a timeout of collectives would end it later and name a rank that waited.
"""

from __future__ import annotations

import faulthandler
import json
import os
import re
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from datetime import timedelta
from pathlib import Path
from types import FrameType
from typing import Any, ClassVar, NoReturn

import torch.distributed
from torch.distributed import distributed_c10d

from harness.errors import HarnessError, LoaderError, LostRankError
from harness.printing import print_line, print_text
from harness.train.attempts import EXIT_STOPPED, Stop, write_stop

EXIT_HANG = 70
# Activity of a rank that waits for the others; a rank with any other activity is the likelier cause of a hang.
_WAITING = "waiting for the others"
_TOGETHER = ("training", _WAITING)
# A rank that published nothing for this many intervals has died or is suspended.
_SILENT_INTERVALS = 4
# A rank that receives a stop signal before its first step gets this long to complete and save that step.
_STARTUP_GRACE_S = 20.0
# Rank 0 waits this long for the others to report an error that occurred on all ranks.
_PART_S = 10.0
_FABRIC = re.compile("(TORCH_)?(NCCL|FR|GLOO|FI|UCX|OMPI_MCA)_")


# Slurm, torchrun and container engines send SIGTERM; we set `sbatch --signal` to send SIGUSR2 before the time limit.
# SIGUSR1 is not used: NCCL's libraries may catch it.
SIGNALS = (signal.SIGTERM, signal.SIGUSR2)


class StopSignals:
    """Context manager that records a stop signal instead of letting it kill the process.

    A second signal changes nothing: a scheduler that does not wait any longer sends SIGKILL.
    """

    def __init__(self) -> None:
        self._seen = 0
        self._before: dict[signal.Signals, Any] = {}
        self._noticed: tuple[str, float] | None = None

    def __enter__(self) -> StopSignals:
        for number in SIGNALS:
            self._before[number] = signal.signal(number, self._note)
        # A handler runs only after the main thread returns from a read or a collective; these bytes arrive at once.
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
        """Return the signal that this rank received and the seconds since a call first returned it, or None.

        Call it from one thread other than the main one, which may be stuck.
        """
        if self._noticed is None:
            with suppress(OSError):  # no signal, or already closed
                received = [number for number in os.read(self._bytes, 4096) if number in SIGNALS]
                self._noticed = (signal.Signals(received[0]).name, time.monotonic()) if received else None
        return None if self._noticed is None else (self._noticed[0], time.monotonic() - self._noticed[1])

    def agreed(self) -> str | None:
        """Return a signal that any rank has received, the same on every rank, or None; every rank takes part.

        Signals arrive on each rank at a different time, but all ranks have to stop after the same step.
        """
        seen = self._seen
        if torch.distributed.get_world_size() > 1:
            shared = torch.tensor([seen], dtype=torch.int32, device=torch.cuda.current_device())
            torch.distributed.all_reduce(shared, op=torch.distributed.ReduceOp.MAX)
            seen = int(shared.item())
        return signal.Signals(seen).name if seen else None


@dataclass(frozen=True)
class Beat:
    """State that a rank publishes: its current step, counted from 1, its activity, and the seconds without progress."""

    count: int
    step: int
    activity: str
    idle_s: float
    host: str
    process: int

    def __str__(self) -> str:
        return f"host {self.host}, process {self.process}"


def find_culprit(before: Mapping[int, Beat], after: Mapping[int, Beat]) -> tuple[int | None, str]:
    """Return the rank that delays the others, or None, and a sentence about it, given all beats at two times.

    A rank with the same count in both is silent; a rank in neither never published.
    """
    silent = [rank for rank, beat in sorted(after.items()) if rank in before and before[rank].count == beat.count]
    if silent:
        rank, beat = silent[0], after[silent[0]]
        others = f" (and {len(silent) - 1} more)" if len(silent) > 1 else ""
        last = f"last seen in step {beat.step}, {beat.activity}"
        return rank, f"rank {rank}{others} has exited or is suspended ({beat}); {last}"
    same = {(beat.step, beat.activity) for beat in after.values()}
    if len(same) == 1 and len(after) > 1:
        step, activity = same.pop()
        return None, f"all {len(after)} ranks are in step {step}, {activity}, and none is making progress"
    # Suspects are in the earliest step, and if possible not waiting; pick the one without progress for longest.
    first_step = min(beat.step for beat in after.values())
    behind = {rank: beat for rank, beat in after.items() if beat.step == first_step}
    suspects = {rank: beat for rank, beat in behind.items() if beat.activity not in _TOGETHER} or behind
    rank = max(suspects, key=lambda number: suspects[number].idle_s)
    beat = suspects[rank]
    return rank, f"rank {rank} ({beat}) has been in step {beat.step}, {beat.activity}, for {beat.idle_s:.0f} s"


class Watchdog:
    """Context manager that watches one rank from opening its data to its last step.

    Args:
        limit_s: a rank without progress for this long before its first step ends the job, with exit code 70.
        requested: returns the stop signal that this rank has received and the seconds since, or None.
        leave: records why the job ended before `training_begins`; returns False if another rank has recorded it.
    """

    current: ClassVar[Watchdog | None] = None

    def __init__(
        self,
        *,
        limit_s: float,
        requested: Callable[[], tuple[str, float] | None] = lambda: None,
        leave: Callable[[Stop], bool] = lambda stop: True,
    ) -> None:
        self._folder: Path | None = None
        self._limit_s, self._setting = limit_s, "trainer.startup_timeout_s"
        self._requested, self._leave_early = requested, leave
        self._rank, self._world = torch.distributed.get_rank(), torch.distributed.get_world_size()
        store: Any = distributed_c10d._get_default_store()
        # Use a separate connection: the main thread may be waiting on the other one.
        self._store = distributed_c10d.PrefixStore("beats", store.clone() if self._world > 1 else store)
        self._store.set_timeout(timedelta(seconds=max(5.0, _SILENT_INTERVALS * self._world / 256)))
        self._now = (0, "starting", time.monotonic())
        self._count = 0
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="watchdog", daemon=True)

    def __enter__(self) -> Watchdog:
        Watchdog.current = self
        self._publish()
        self._thread.start()
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        lost = None
        if isinstance(error, RuntimeError) and self._world > 1 and is_about_ranks(error):
            rank, sentence = self._culprit(time.sleep)
            what = sentence if rank is not None else f"the other ranks cannot be reached: {str(error).splitlines()[0]}"
            fix = "check that rank's log and the kernel log (out of memory?); resume=auto continues from the newest "
            lost = LostRankError(what, where=f"rank {self._rank}, step {self.step}", fix=f"{fix}checkpoint")
            lost.rank, lost.about = self._rank, rank
        Watchdog.current = None
        self._over.set()
        self._thread.join(timeout=5)
        if lost is not None:
            lost.is_shared = not self._leave_error(lost, rank=lost.about)
            raise lost from None
        if isinstance(error, Exception):
            shared = isinstance(error, HarnessError) and error.is_shared
            self._leave_error(error, rank=getattr(error, "rank", None) if shared else self._rank)
            if shared or getattr(error, "rank", None) is not None:
                self._part()

    def _part(self) -> None:
        """Make rank 0 exit last: the other ranks have this error too, and use the store, which rank 0 may host."""
        with suppress(RuntimeError):
            left, until = int(self._store.add("left", 1)), time.monotonic() + _PART_S
            while self._rank == 0 and left < self._world and time.monotonic() < until:
                time.sleep(0.05)
                left = int(self._store.add("left", 0))

    def training_begins(self, folder: Path, *, limit_s: float) -> None:
        """Use `limit_s` from now on, and record why the job ended in `folder`, the folder of the run."""
        self.at(*self.now)  # time before this call does not count against the new limit
        self._limit_s, self._setting = limit_s, "trainer.timeout_s"
        self._folder = folder

    def at(self, step: int, activity: str) -> None:
        """Report progress: this rank begins `activity` in `step`."""
        self._now = (step, activity, time.monotonic())

    @property
    def step(self) -> int:
        return self._now[0]

    @property
    def now(self) -> tuple[int, str]:
        """Current step, and this rank's activity in it."""
        return self._now[:2]

    @property
    def _interval_s(self) -> float:
        # Each beat is one request to the store's process: large jobs make about 250 per second.
        return min(self._limit_s / 8, max(1.0, self._world / 256))

    def _leave(self, stop: Stop) -> bool:
        """Record why the job ended; return True on the one rank that is to print it."""
        if self._folder is not None:
            return write_stop(self._folder, stop)
        is_first = self._leave_early(stop)
        with suppress(RuntimeError):
            # While the store answers, only it decides: otherwise one rank could be first in it, another in the folder.
            is_first = int(self._store.add("reported", 1)) == 1
        return is_first

    def _leave_error(self, error: Exception, *, rank: int | None) -> bool:
        message = error.what if isinstance(error, HarnessError) else str(error).partition("\n")[0]
        # Missing data and lost ranks may be back at the next attempt; invalid input would be refused again.
        requeue = isinstance(error, LoaderError | LostRankError) or not isinstance(error, HarnessError)
        return self._leave(Stop(max(0, self.step - 1), type(error).__name__, message, rank, requeue))

    def _watch(self) -> None:
        while not self._over.wait(self._interval_s):
            self._publish()
            if time.monotonic() - self._now[2] > self._limit_s:
                self._end_hang()
            requested = self._requested() if self._folder is None else None
            if requested is not None and requested[1] > _STARTUP_GRACE_S:
                step, activity = self.now
                message = f"{requested[0]} received before the first step, in step {step}, {activity}"
                if self._leave(Stop(max(0, step - 1), "signal", message)):
                    print_line(f"{message}: there is nothing to save; restart with resume=auto", file=sys.stderr)
                _exit_now(EXIT_STOPPED)

    def _publish(self) -> None:
        self._count += 1
        step, activity, since = self._now
        beat = Beat(self._count, step, activity, time.monotonic() - since, socket.gethostname(), os.getpid())
        with suppress(RuntimeError):  # the store's process has ended, and the job with it
            self._store.set(str(self._rank), json.dumps(asdict(beat)))

    def _beats(self) -> dict[int, Beat]:
        with suppress(RuntimeError):
            names = [str(rank) for rank in range(self._world)]
            if not self._store.check(names):
                names = [name for name in names if self._store.check([name])]
            # Use one request: a thousand ranks may send theirs at the same time.
            values = self._store.multi_get(names) if names else []
            return {int(name): Beat(**json.loads(value)) for name, value in zip(names, values, strict=True)}
        return {}

    def _culprit(self, wait: Callable[[float], object]) -> tuple[int | None, str]:
        before = self._beats()
        wait(_SILENT_INTERVALS * self._interval_s)
        after = self._beats()
        missing = sorted(set(range(self._world)) - set(after))
        if 0 in missing and not after:
            return 0, "rank 0, through which the ranks communicate, has exited or is suspended: check its log first"
        if missing:
            return missing[0], f"rank {missing[0]} never reported"
        return find_culprit(before, after)

    def _end_hang(self) -> None:
        def wait(seconds: float) -> None:
            until = time.monotonic() + seconds
            while time.monotonic() < until:
                self._publish()
                self._over.wait(self._interval_s / 2)

        since = self._now[2]
        rank, sentence = self._culprit(wait)
        if self._over.is_set() or self._now[2] != since:
            return
        message = f"no progress for {self._limit_s:g} s in step {self.step}: {sentence}"
        if self._leave(Stop(max(0, self.step - 1), "hang", message, rank=rank)):
            fix = "check that rank's log and node; resume=auto continues from the newest checkpoint. Increase "
            fix += f"{self._setting} if this can take longer"
            error = HarnessError(message, where=str(self._folder or f"rank {self._rank}"), fix=fix)
            print_text(f"HarnessError: {error}", file=sys.stderr)
        if rank in (self._rank, None):
            faulthandler.dump_traceback(all_threads=True)  # into this rank's log
        if self._folder is not None:
            with suppress(OSError):
                self._keep_stacks(self._folder / "stacks" / f"rank-{self._rank:05d}")
        if self._rank == 0 and self._world > 1:
            sys.stderr.flush()
            wait(_SILENT_INTERVALS * self._interval_s)  # others still use the store, which may be in this process
        _exit_now(EXIT_HANG)

    def _keep_stacks(self, place: Path) -> None:
        """Write this rank's thread stacks, and NCCL's flight recorder if it is on, to files named after `place`."""
        place.parent.mkdir(exist_ok=True)
        with place.with_suffix(".txt").open("w") as file:
            step, activity = self.now
            file.write(f"rank {self._rank} on {socket.gethostname()}, step {step}, {activity}\n")
            # Settings of the communication libraries.
            file.writelines(f"{name}={os.environ[name]}\n" for name in sorted(os.environ) if _FABRIC.match(name))
            file.flush()
            faulthandler.dump_traceback(file, all_threads=True)
        recorder: Any = getattr(torch._C._distributed_c10d, "_dump_nccl_trace", None)
        if torch.distributed.get_backend() == "nccl" and recorder is not None:
            place.with_suffix(".nccl.pickle").write_bytes(recorder())


def _exit_now(code: int) -> NoReturn:
    """End the process, even if its main thread is stuck in a collective or a read."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


@contextmanager
def waiting() -> Iterator[None]:
    """Mark a collective that ranks reach after work of their own, so that a missing rank is named in a hang."""
    watchdog = Watchdog.current
    if watchdog is None:
        yield
        return
    step, activity = watchdog.now
    watchdog.at(step, _WAITING)
    yield
    watchdog.at(step, activity)


def is_about_ranks(error: BaseException) -> bool:
    """Return True for errors that gloo and NCCL raise when another rank has died."""
    text = str(error)
    return isinstance(error, torch.distributed.DistError) or any(
        word in text for word in ("gloo", "Connection closed by peer", "Connection reset by peer", "NCCL")
    )
