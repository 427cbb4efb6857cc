"""TODO."""

from __future__ import annotations

from harness.megatron.job.all_reduce import check_all_reduce
from harness.megatron.job.runtime import on_rank_0
from harness.megatron.job.stopping import StopSignals
from harness.megatron.job.topology import join
from harness.megatron.job.watchdog import Watchdog, is_about_ranks, waiting

__all__ = [
    "StopSignals",
    "Watchdog",
    "check_all_reduce",
    "is_about_ranks",
    "join",
    "on_rank_0",
    "waiting",
]
