"""`torchrun -m tests.distributed.straggler_ranks RUNS.json`: runs of `recipes.sft`, in each of which rank 1 is held up.

The file is a list of `[port, kind, overrides, variables]`. The ranks are on nodes of their own by name.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any
from unittest import mock

from harness.config import compose_config
from harness.formats import PackReader
from harness.megatron import prepare_process
from harness.plan import SftConfig
from harness.recipes import sft

from .forked import jobs_of

# Many times what a step of this model takes, also on a busy machine.
DELAY_S = 0.4


def stop_for_a_while() -> None:
    """Stop this process by SIGSTOP; another one lets it continue."""
    with subprocess.Popen(["sh", "-c", f"sleep {DELAY_S}; kill -CONT {os.getpid()}"]):
        os.kill(os.getpid(), signal.SIGSTOP)


def compute() -> None:
    until = time.thread_time() + DELAY_S
    while time.thread_time() < until:
        pass


class SlowNetwork:
    """Slows the loopback of this network namespace down from the tenth call on."""

    calls = 0

    def __call__(self) -> None:
        self.calls += 1
        if self.calls == 10:
            slow = ["rate", "4mbit", "burst", "16kb", "limit", "16mb"]
            subprocess.run(["tc", "qdisc", "add", "dev", "lo", "root", "tbf", *slow], check=True)


def before(owner: type, name: str, hold_up: Callable[[], None]) -> AbstractContextManager[Any]:
    function = getattr(owner, name)

    def held_up(*arguments: Any, **options: Any) -> Any:
        hold_up()
        return function(*arguments, **options)

    return mock.patch.object(owner, name, held_up)


def main() -> None:
    prepare_process()
    from harness.megatron.step import MegatronStep

    disturbed = {
        "stopped": lambda: before(MegatronStep, "train", stop_for_a_while),
        "compute": lambda: before(MegatronStep, "train", compute),
        "data": lambda: before(PackReader, "read", lambda: time.sleep(DELAY_S)),
        "network": lambda: before(MegatronStep, "train", SlowNetwork()),
    }
    rank = os.environ["RANK"]
    for kind, overrides, variables in jobs_of(sys.argv[1]):
        os.environ.update({**variables, "SLURMD_NODENAME": f"node{rank}"})
        with disturbed[kind]() if rank == "1" else nullcontext():
            print(f"{kind}: exit code {sft.main(compose_config('sft', SftConfig, overrides))}", flush=True)


if __name__ == "__main__":
    main()
