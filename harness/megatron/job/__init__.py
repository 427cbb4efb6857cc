"""The job of a run: its ranks and their device, and the signals, hangs and lost ranks that can end it.

`runtime` starts a process in its job and joins Megatron's groups; `stopping` turns signals into a last checkpoint;
`watchdog` names the rank that holds the others up; `waits` measures exchanges with other ranks; `all_reduce` is the
preflight's check of the links.
"""

from __future__ import annotations

from harness.megatron.job import runtime
from harness.megatron.job.all_reduce import check_all_reduce
from harness.megatron.job.runtime import gather_on_rank_0, join, on_rank_0
from harness.megatron.job.stopping import StopSignals
from harness.megatron.job.waits import Waits, thread_times
from harness.megatron.job.watchdog import Watchdog, is_about_ranks, waiting

__all__ = [
    "StopSignals",
    "Waits",
    "Watchdog",
    "check_all_reduce",
    "gather_on_rank_0",
    "is_about_ranks",
    "join",
    "on_rank_0",
    "runtime",
    "thread_times",
    "waiting",
]
