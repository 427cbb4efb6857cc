"""Engines that make shards: this process, worker processes, or a Ray cluster; the result is the same."""

from __future__ import annotations

import importlib.util
import os
import socket
import threading
from collections import deque
from collections.abc import Iterable, Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from multiprocessing import get_context, parent_process

from harness.checks import require_cores, usable_cores
from harness.errors import ConfigError, HarnessError, PrepError
from harness.prep.shards import Receipt, ShardJob, do_shard
from harness.prep.sources.reading import SourceShard

ENGINES = ("local", "ray")
# For smaller sources, starting processes takes longer than tokenizing.
_WORKERS_PAY_BYTES = 64 << 20
# Tasks lost with a failed node run again elsewhere.
_MAX_RETRIES = 10


def check_engine(engine: str) -> None:
    """Raise ConfigError if the engine's package is not installed."""
    if engine == "ray" and importlib.util.find_spec("ray") is None:
        what = "Ray is not installed"
        raise ConfigError(what, where="engine", fix="pip install 'megatron-sft-harness[ray]', or set engine=local")


def do_shards(
    job: ShardJob, shards: Iterable[SourceShard], *, engine: str, num_workers: int, source_bytes: int
) -> Iterator[Receipt]:
    """Make all missing shards, and yield the receipts of all shards in order.

    The engine is `ray`, the cluster at RAY_ADDRESS (a cluster on this machine if unset), or `local`, with `num_workers`
    processes; 0 works in this process, -1 decides by `source_bytes`.
    """
    if engine == "ray":
        outcomes = _run_on_ray(job, shards)
    else:
        if num_workers < 0:
            cores = usable_cores()
            num_workers = cores if cores > 1 and source_bytes >= _WORKERS_PAY_BYTES else 0
        outcomes = _run_locally(job, shards, num_workers)
    for outcome in outcomes:
        if isinstance(outcome, HarnessError):
            raise outcome
        yield outcome


def _run_locally(job: ShardJob, shards: Iterable[SourceShard], num_workers: int) -> Iterator[Receipt | HarnessError]:
    if num_workers == 0:
        for number, shard in enumerate(shards):
            yield do_shard(job, number, shard)
        return
    require_cores(num_workers, setting="data.num_workers")
    # Spawned, not forked: the tokenizers library has its own threads, whose locks a fork would leave held.
    context = get_context("spawn")
    with ProcessPoolExecutor(num_workers, mp_context=context, initializer=_begin_worker) as pool:
        waiting: deque[Future[Receipt | HarnessError]] = deque()
        try:
            for number, shard in enumerate(shards):
                waiting.append(pool.submit(do_shard, job, number, shard))
                if len(waiting) > 3 * num_workers:
                    yield waiting.popleft().result()
            while waiting:
                yield waiting.popleft().result()
        except BrokenProcessPool as error:
            fix = "start again: finished shards are kept; if memory ran out, lower data.num_workers"
            raise PrepError("a tokenizing process died", where=f"data.num_workers={num_workers}", fix=fix) from error
        finally:
            pool.shutdown(wait=False, cancel_futures=True)


def _begin_worker() -> None:
    # One process per core is enough; more threads would compete for the same cores.
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    parent = parent_process()
    assert parent is not None

    def end_with_parent() -> None:
        parent.join()
        os._exit(1)

    # A worker holds both ends of the pool's pipes, and would wait forever for work from a killed main process.
    threading.Thread(target=end_with_parent, daemon=True).start()


def _run_on_ray(job: ShardJob, shards: Iterable[SourceShard]) -> Iterator[Receipt | HarnessError]:
    """Make shards as tasks of a Ray cluster whose nodes all have access to the source and the destination."""
    import ray

    here = os.getcwd()  # noqa: PTH109 - a string to send to other machines

    def work(number: int, shard: SourceShard) -> Receipt | HarnessError:
        os.chdir(here)
        os.environ["TOKENIZERS_PARALLELISM"] = "false"  # a task has one core
        return do_shard(job, number, shard)

    was_connected = ray.is_initialized()
    address = os.environ.get("RAY_ADDRESS", "")
    try:
        if not was_connected:
            host, _, port = address.rpartition(":")
            if host and port.isdigit() and "//" not in address:
                # If nothing listens there, Ray would keep trying for minutes.
                socket.create_connection((host, int(port)), timeout=10).close()
            ray.init(log_to_driver=False, configure_logging=False)
    except (OSError, RuntimeError, ValueError) as error:
        what = f"the Ray cluster cannot be reached: {error}"
        fix = "start it with `ray start --head`, or unset RAY_ADDRESS to use this machine"
        raise ConfigError(what, where=f"RAY_ADDRESS={address}", fix=fix) from error
    try:
        task = ray.remote(num_cpus=1, max_retries=_MAX_RETRIES)(work)
        for outcome in [task.remote(number, shard) for number, shard in enumerate(shards)]:
            yield ray.get(outcome)
    except ray.exceptions.RayError as error:
        what = f"a task was lost: {str(error).strip().splitlines()[-1]}"
        fix = "check the cluster and start again; finished shards are kept"
        raise PrepError(what, where="engine=ray", fix=fix) from error
    finally:
        if not was_connected:
            ray.shutdown()
