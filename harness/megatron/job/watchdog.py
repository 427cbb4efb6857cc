"""Notices ranks that stand still or are gone, from where they have met to the last step, and says which.

Every rank tells the others, through the store that the job met at, which step it is in, what it does there and since
when. A rank that has made no progress for the limit ends the job; collectives alone would end it later, and would name
whoever waited.
"""

from __future__ import annotations

import faulthandler
import json
import os
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from datetime import timedelta
from pathlib import Path
from types import TracebackType
from typing import Any, ClassVar

import torch.distributed
from torch.distributed import distributed_c10d

from harness.errors import HarnessError, LoaderError, LostRankError
from harness.train import EXIT_STOPPED, Stop, write_stop

EXIT_HANG = 70
# What a rank does while it waits for the others: the others' own work is the likelier cause of a standstill.
_WAITING = "waiting for the others"
_TOGETHER = ("training", _WAITING)
# A rank that has not told anything for so many intervals is gone or stopped.
_SILENT_INTERVALS = 4
# A rank that is asked to stop before its first step may still come to it, and save it, within so long.
_STARTUP_GRACE_S = 20.0


@dataclass(frozen=True)
class Beat:
    """What a rank tells of itself.

    Attributes:
        count: grows with each telling.
        step: that it is in, 1 for the first.
        doing: what, as in "training" or "reading data".
        stood_s: seconds without progress.
    """

    count: int
    step: int
    doing: str
    stood_s: float
    host: str
    process: int

    def __str__(self) -> str:
        return f"host {self.host}, process {self.process}"


def find_culprit(before: Mapping[int, Beat], after: Mapping[int, Beat]) -> tuple[int | None, str]:
    """Which rank holds the others up, from what all told at two moments.

    Args:
        before, after: by rank. A rank whose count is the same in both is silent; one that is in neither never spoke.

    Returns:
        The rank, None where it cannot be told; and a sentence.
    """
    silent = [rank for rank, beat in sorted(after.items()) if rank in before and before[rank].count == beat.count]
    if silent:
        rank, beat = silent[0], after[silent[0]]
        others = f" (and {len(silent) - 1} more)" if len(silent) > 1 else ""
        return rank, f"rank {rank}{others} is gone or stopped ({beat}); last heard of in step {beat.step}, {beat.doing}"
    same = {(beat.step, beat.doing) for beat in after.values()}
    if len(same) == 1 and len(after) > 1:
        step, doing = same.pop()
        return None, f"all {len(after)} ranks are in step {step}, {doing}, and none goes on"
    # Behind, or at something of its own; of these the one that has stood longest.
    first_step = min(beat.step for beat in after.values())
    behind = {rank: beat for rank, beat in after.items() if beat.step == first_step}
    alone = {rank: beat for rank, beat in behind.items() if beat.doing not in _TOGETHER}
    suspects = alone or behind
    rank = max(suspects, key=lambda one: suspects[one].stood_s)
    beat = suspects[rank]
    return rank, f"rank {rank} ({beat}) has been in step {beat.step}, {beat.doing}, for {beat.stood_s:.0f} s"


class Watchdog:
    """Context manager around what one rank does, from the opening of its data to its last step.

    Args:
        limit_s: a rank without progress for so long before its first step ends the job, with exit code 70.
        asked: the signal to stop that this rank has seen, and since how many seconds; None for none.
        leave: keeps the reason of an end before `training_begins`; False where it has that of another rank.

    Attributes:
        current: the one at work in this process.
    """

    current: ClassVar[Watchdog | None] = None

    def __init__(
        self,
        *,
        limit_s: float,
        asked: Callable[[], tuple[str, float] | None] = lambda: None,
        leave: Callable[[Stop], bool] = lambda stop: True,
    ) -> None:
        self._folder: Path | None = None
        self._limit_s, self._setting = limit_s, "trainer.startup_timeout_s"
        self._asked, self._leave_early = asked, leave
        self._rank, self._world = torch.distributed.get_rank(), torch.distributed.get_world_size()
        store: Any = distributed_c10d._get_default_store()
        # A connection of its own: the main thread may be waiting on the other.
        self._store = distributed_c10d.PrefixStore("beats", store.clone() if self._world > 1 else store)
        self._store.set_timeout(timedelta(seconds=max(5.0, _SILENT_INTERVALS * self._world / 256)))
        self._now = (0, "starting", time.monotonic())
        self._count = 0
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="watchdog", daemon=True)

    def __enter__(self) -> Watchdog:
        Watchdog.current = self
        self._tell()
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if isinstance(error, RuntimeError) and self._world > 1 and is_about_ranks(error):
            lost = self._lost(error)
            self._end_watching()
            lost.is_shared = not self._leave(lost, rank=lost.about)
            raise lost from None
        self._end_watching()
        if isinstance(error, Exception):
            is_shared = isinstance(error, HarnessError) and error.is_shared
            self._leave(error, rank=None if is_shared else self._rank)

    def training_begins(self, folder: Path, *, limit_s: float) -> None:
        """From here on the limit is `limit_s`, and the reason of an end is left in `folder`, which is this run's."""
        self.at(*self.now)  # the limit is for what begins now
        self._limit_s, self._setting = limit_s, "trainer.timeout_s"
        self._folder = folder

    @property
    def _interval_s(self) -> float:
        # Each telling is one request to the store's process: a thousand ranks make 250 a second.
        return min(self._limit_s / 8, max(1.0, self._world / 256))

    def _leave_stop(self, stop: Stop) -> bool:
        """Leave the reason of an end; True on one rank, which tells it."""
        if self._folder is not None:
            return write_stop(self._folder, stop)
        is_first = self._leave_early(stop)
        with suppress(RuntimeError):
            # The store alone decides while it answers: of two ranks one may be first there, the other in the folder.
            is_first = int(self._store.add("told", 1)) == 1
        return is_first

    def _leave(self, error: Exception, *, rank: int | None) -> bool:
        told = error.what if isinstance(error, HarnessError) else str(error).partition("\n")[0]
        # Data that does not come and ranks that go may be better next time; what is refused is refused again.
        requeue = isinstance(error, LoaderError | LostRankError) or not isinstance(error, HarnessError)
        return self._leave_stop(Stop(max(0, self.step - 1), type(error).__name__, told, rank, requeue))

    def at(self, step: int, doing: str) -> None:
        """Progress: this rank now does `doing` in `step`."""
        self._now = (step, doing, time.monotonic())

    @property
    def step(self) -> int:
        return self._now[0]

    @property
    def now(self) -> tuple[int, str]:
        """The step, and what this rank does in it."""
        return self._now[:2]

    def _end_watching(self) -> None:
        Watchdog.current = None
        self._over.set()
        self._thread.join(timeout=5)

    def _watch(self) -> None:
        while not self._over.wait(self._interval_s):
            self._tell()
            if time.monotonic() - self._now[2] > self._limit_s:
                self._end_job()
            asked = self._asked() if self._folder is None else None
            if asked is not None and asked[1] > _STARTUP_GRACE_S:
                self._end_startup(asked[0])

    def _end_startup(self, name: str) -> None:
        step, doing, _ = self._now
        message = f"{name} came before the first step, in step {step}, {doing}"
        if self._leave_stop(Stop(max(0, step - 1), "signal", message)):
            print(f"{message}: there is nothing to save, resume=auto starts again", file=sys.stderr)
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(EXIT_STOPPED)  # the main thread may be stuck

    def _tell(self) -> None:
        self._count += 1
        step, doing, since = self._now
        beat = Beat(self._count, step, doing, time.monotonic() - since, socket.gethostname(), os.getpid())
        with suppress(RuntimeError):  # the store's process is gone; so is the job
            self._store.set(str(self._rank), json.dumps(asdict(beat)))

    def _beats(self) -> dict[int, Beat]:
        with suppress(RuntimeError):
            names = [str(rank) for rank in range(self._world)]
            if not self._store.check(names):
                names = [name for name in names if self._store.check([name])]
            # One request: a thousand ranks may ask at the same time.
            told = self._store.multi_get(names) if names else []
            return {int(name): Beat(**json.loads(one)) for name, one in zip(names, told, strict=True)}
        return {}

    def _culprit(self, wait: Callable[[float], object]) -> tuple[int | None, str]:
        before = self._beats()
        wait(_SILENT_INTERVALS * self._interval_s)
        after = self._beats()
        if len(after) < self._world:
            missing = sorted(set(range(self._world)) - set(after))
            if 0 in missing and not after:
                return 0, "rank 0 has ended or stopped, and the ranks tell each other through it: see its log first"
            return missing[0], f"rank {missing[0]} has never been heard of"
        return find_culprit(before, after)

    def _end_job(self) -> None:
        def wait(seconds: float) -> None:
            until = time.monotonic() + seconds
            while time.monotonic() < until:
                self._tell()
                self._over.wait(self._interval_s / 2)

        since = self._now[2]
        rank, told = self._culprit(wait)
        if self._over.is_set() or self._now[2] != since:
            return
        step = self.step
        message = f"no progress for {self._limit_s:g} s in step {step}: {told}"
        if self._leave_stop(Stop(max(0, step - 1), "hang", message, rank=rank)):
            print(
                f"HarnessError: {message}\n  where: {self._folder or f'rank {self._rank}'}\n"
                "  fix:   look at that rank's log and node; the run resumes from its newest checkpoint with "
                f"resume=auto. Raise {self._setting} where it may take longer",
                file=sys.stderr,
            )
        if rank in (self._rank, None):
            faulthandler.dump_traceback(all_threads=True)  # where it stands, for its log
        sys.stdout.flush()
        sys.stderr.flush()
        if self._rank == 0 and self._world > 1:
            wait(_SILENT_INTERVALS * self._interval_s)  # others are asking the store, which may be in this process
        # The main thread is stuck, in a collective or in a read: there is nothing to clean up with.
        os._exit(EXIT_HANG)

    def _lost(self, error: RuntimeError) -> LostRankError:
        rank, told = self._culprit(time.sleep)
        lost = LostRankError(
            told if rank is not None else f"the other ranks cannot be reached: {str(error).splitlines()[0]}",
            where=f"rank {self._rank}, step {self.step}",
            fix="see the log of that rank and the kernel's (out of memory?); the run resumes from its newest "
            "checkpoint with resume=auto",
        )
        lost.rank = self._rank
        lost.about = rank
        return lost


@contextmanager
def waiting() -> Iterator[None]:
    """Around a collective that ranks come to from work of their own: who is not there yet holds the others up."""
    watchdog = Watchdog.current
    if watchdog is None:
        yield
        return
    step, doing = watchdog.now
    watchdog.at(step, _WAITING)
    yield
    watchdog.at(step, doing)


def is_about_ranks(error: BaseException) -> bool:
    """True for what gloo and NCCL raise when another rank is gone."""
    told = str(error)
    return isinstance(error, torch.distributed.DistError) or any(
        word in told for word in ("gloo", "Connection closed by peer", "Connection reset by peer", "NCCL")
    )
