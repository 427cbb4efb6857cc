"""Start ranks as torchrun does, in processes forked after the imports, which saves each rank seconds of them.

    python -m tests.distributed.forked NUM_RANKS MODULE ARGUMENTS...

For tests of what ranks compute; those of how they start and end use torchrun itself.
"""

from __future__ import annotations

import json
import os
import runpy
import signal
import sys
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

from harness.megatron import prepare_process


def jobs_of(listed: str) -> Iterator[list[Any]]:
    """Yield the jobs of a file's list, whose ranks each meet at the port before them, one job after the other."""
    os.environ["TORCHELASTIC_USE_AGENT_STORE"] = "False"  # the launcher's store remembers the job before
    for port, *job in json.loads(Path(listed).read_text()):
        os.environ["MASTER_PORT"] = str(port)
        yield job


def become_rank(rank: int, num_ranks: int, ports: int) -> None:
    """Run MODULE as one rank, once the port of the store has come through the pipe."""
    port = os.read(ports, 16).decode()
    os.environ.update(
        RANK=str(rank),
        LOCAL_RANK=str(rank),
        WORLD_SIZE=str(num_ranks),
        LOCAL_WORLD_SIZE=str(num_ranks),
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT=port,
        TORCHELASTIC_USE_AGENT_STORE="True",  # rank 0 connects to the store, and does not open one
    )
    sys.argv = sys.argv[2:]
    runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)


def main() -> int:
    sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "samples"))
    prepare_process()
    import pytest  # noqa: F401 - of tests that are the program of their ranks too
    import torch._dynamo  # noqa: F401 - the first optimizer imports it, which takes each rank two seconds
    from torch.distributed import TCPStore

    num_ranks = int(sys.argv[1])
    pipes = [os.pipe() for _ in range(num_ranks)]
    pids = []
    for rank, (ports, _) in enumerate(pipes):
        pid = os.fork()
        if pid == 0:
            become_rank(rank, num_ranks, ports)
            return 0
        pids.append(pid)
    # After the forks: the store has a thread, and a forked process has none but its first.
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=300))
    for _, writer in pipes:
        os.write(writer, str(store.port).encode())
    failed = False
    while pids:
        pid, status = os.wait()
        pids.remove(pid)
        if os.waitstatus_to_exitcode(status) != 0 and not failed:
            failed = True
            for other in pids:
                os.kill(other, signal.SIGTERM)
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
