"""One data-parallel rank that reads an epoch through its workers and waits, all processes alive, to be looked at.

    reading_rank.py DATASET DP_RANK DP_SIZE WORKERS START_METHOD STEPS

Prints its own and its workers' process ids on one line once STEPS steps (0: an epoch) are read, and ends when its
standard input is closed.
"""

from __future__ import annotations

import itertools
import os
import sys

from harness.formats import open_dataset
from harness.loader import Loader, LoaderConfig, RankLayout
from harness.schedule import ScheduleConfig


def main(path: str, dp_rank: str, dp_size: str, workers: str, start_method: str, steps: str) -> None:
    made = Loader(
        open_dataset(path),
        LoaderConfig(global_batch_size=32, num_workers=int(workers), start_method=start_method, prefetch_factor=1),
        schedule=ScheduleConfig("dp_balanced", 4096),
        layout=RankLayout(dp_rank=int(dp_rank), dp_size=int(dp_size)),
    )
    with made:
        batches = iter(made)
        for _ in itertools.islice(batches, int(steps) or made.num_steps_per_epoch):
            pass
        print(os.getpid(), *made.worker_pids(), flush=True)
        sys.stdin.read()


if __name__ == "__main__":
    main(*sys.argv[1:])
