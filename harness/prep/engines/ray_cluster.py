"""Makes shards as tasks of a Ray cluster, whose nodes all see the source and the destination."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator, Sequence

from harness.errors import ConfigError, HarnessError, PrepError
from harness.prep.engines.shard import Receipt, ShardJob, do_shard
from harness.prep.engines.workers import loaded
from harness.prep.reading import Shard

# A node that goes takes its tasks with it; they are made again elsewhere.
_MAX_RETRIES = 10


def do_shards_with_ray(job: ShardJob, shards: Sequence[Shard]) -> Iterator[Receipt | HarnessError]:
    """Give the outcome of every shard, in order.

    Raises:
        ConfigError: Ray is not installed, or its cluster is not there.
        PrepError: a task was lost more often than it is tried.
    """
    try:
        import ray
    except ImportError as error:
        raise ConfigError(
            "Ray is not installed", where="engine", fix="pip install 'ray', or set engine=local"
        ) from error

    here = os.getcwd()  # noqa: PTH109 - a string, which goes to other machines

    def work(number: int, shard: Shard) -> Receipt | HarnessError:
        os.chdir(here)
        os.environ["TOKENIZERS_PARALLELISM"] = "false"  # a task has one core
        return do_shard(job, number, shard, loaded)

    was_there = ray.is_initialized()
    try:
        if not was_there:
            _knock(os.environ.get("RAY_ADDRESS", ""))
            ray.init(log_to_driver=False, configure_logging=False)
    except (OSError, RuntimeError, ValueError) as error:
        raise ConfigError(
            f"the Ray cluster cannot be reached: {error}",
            where=f"RAY_ADDRESS={os.environ.get('RAY_ADDRESS', '')}",
            fix="start it with `ray start --head`, or unset RAY_ADDRESS to work on this machine",
        ) from error
    try:
        task = ray.remote(num_cpus=1, max_retries=_MAX_RETRIES)(work)
        waiting = [task.remote(number, shard) for number, shard in enumerate(shards)]
        for one in waiting:
            yield ray.get(one)
    except ray.exceptions.RayError as error:
        raise PrepError(
            f"a task was lost: {str(error).strip().splitlines()[-1]}",
            where="engine=ray",
            fix="see to the cluster and start again: what is done is kept",
        ) from error
    finally:
        if not was_there:
            ray.shutdown()


def _knock(address: str) -> None:
    """Raise OSError where nobody listens at HOST:PORT: Ray would go on trying for minutes."""
    host, _, port = address.rpartition(":")
    if host and port.isdigit() and "//" not in address:
        socket.create_connection((host, int(port)), timeout=10).close()
