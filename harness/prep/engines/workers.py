"""Who makes the shards: this process, processes beside it, or a Ray cluster; the result is the same."""

from __future__ import annotations

import os
import threading
from collections import deque
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from functools import lru_cache
from multiprocessing import get_context, parent_process

from harness.errors import HarnessError, PrepError
from harness.prep.engines.chunk import TokenizeJob
from harness.prep.engines.shard import Receipt, ShardJob, do_shard
from harness.prep.reading import Shard
from harness.prep.tokenize import ChatTokenizer

# Below this many bytes of source, starting processes takes longer than tokenising.
_WORKERS_PAY_BYTES = 64 << 20


def count_workers(num_workers: int, source_bytes: int) -> int:
    """The number of processes that `data.num_workers` stands for; 0 is the main process alone."""
    if num_workers >= 0:
        return num_workers
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return cores if cores > 1 and source_bytes >= _WORKERS_PAY_BYTES else 0


def do_shards(job: ShardJob, shards: Sequence[Shard], *, engine: str, num_workers: int) -> Iterator[Receipt]:
    """Make all shards that are not there, and give their receipts in order.

    Args:
        engine: `local`, or `ray` for the cluster that RAY_ADDRESS names (one on this machine where it names none).
        num_workers: processes of the local engine; 0 works here.

    Raises:
        HarnessError: of the first shard that cannot be made.
        PrepError: a worker died.
    """
    made = _with_ray(job, shards) if engine == "ray" else _here(job, shards, num_workers)
    for outcome in made:
        if isinstance(outcome, HarnessError):
            raise outcome
        yield outcome


def _here(job: ShardJob, shards: Sequence[Shard], num_workers: int) -> Iterator[Receipt | HarnessError]:
    if num_workers == 0:
        for number, shard in enumerate(shards):
            yield do_shard(job, number, shard, loaded)
        return
    # Spawned, not forked: the tokenizer's library has threads of its own, which a fork would leave locked.
    context = get_context("spawn")
    with ProcessPoolExecutor(num_workers, mp_context=context, initializer=_begin_worker) as pool:
        waiting: deque[Future[Receipt | HarnessError]] = deque()
        try:
            for number, shard in enumerate(shards):
                waiting.append(pool.submit(do_shard, job, number, shard, loaded))
                if len(waiting) > 3 * num_workers:
                    yield waiting.popleft().result()
            while waiting:
                yield waiting.popleft().result()
        except BrokenProcessPool as error:
            raise PrepError(
                "a tokenising process died",
                where=f"{num_workers} workers",
                fix="start again, what is done is kept; if memory ran out, lower data.num_workers",
            ) from error
        finally:
            pool.shutdown(wait=False, cancel_futures=True)


def _with_ray(job: ShardJob, shards: Sequence[Shard]) -> Iterator[Receipt | HarnessError]:
    from harness.prep.engines.ray_cluster import do_shards_with_ray

    return do_shards_with_ray(job, shards)


def _begin_worker() -> None:
    # One process per core is enough; threads beside it would fight for the same cores.
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    # A worker holds both ends of the pool's pipes, and would wait for ever for work of a main process that was killed.
    threading.Thread(target=_end_with_parent, daemon=True).start()


def _end_with_parent() -> None:
    parent = parent_process()
    assert parent is not None
    parent.join()
    os._exit(1)


@lru_cache(maxsize=1)
def loaded(job: TokenizeJob) -> ChatTokenizer:
    """The job's tokenizer, loaded once a process."""
    return job.load()
