"""The time of exchanges with other ranks is added up, on a CPU in `wait` and on a GPU between events."""

from __future__ import annotations

import threading

import pytest
import torch
import torch.distributed
from torch._C._distributed_c10d import ProcessGroup, Work
from torch.distributed.distributed_c10d import _coalescing_manager

from harness.megatron.job import runtime
from harness.megatron.job.waits import Waits


@pytest.fixture(autouse=True)
def job():
    with runtime.start("cpu"):
        yield


class Clock:
    """Stands in for events of a GPU: each that is recorded is 2 s after the one before."""

    now_s = 0.0

    def record(self) -> None:
        Clock.now_s += 2.0
        self.at_s = Clock.now_s

    def elapsed_time(self, later: Clock) -> float:
        return (later.at_s - self.at_s) * 1e3


@pytest.fixture
def gpu(monkeypatch):
    monkeypatch.setattr("harness.megatron.job.waits._event", Clock)
    monkeypatch.setattr("torch.cuda.current_stream", lambda: torch.cuda.Stream())
    monkeypatch.setattr(torch.cuda.Stream, "synchronize", lambda self: None, raising=False)
    return torch.device("cuda")


def test_every_way_to_exchange_counts_on_a_cpu():
    values = torch.ones(4)
    with Waits(torch.device("cpu")) as waits:
        totals = [waits.total_s()]
        for exchange in (
            lambda: torch.distributed.all_reduce(values),
            lambda: torch.distributed.all_reduce(values, async_op=True).wait(),
            lambda: torch.distributed.broadcast_object_list([1], src=0),
            lambda: torch.distributed.all_gather([torch.empty(4)], values),
        ):
            exchange()
            totals.append(waits.total_s())
        with _coalescing_manager(async_ops=True) as coalesced:
            torch.distributed.all_reduce(values)
        coalesced.wait()
        totals.append(waits.total_s())
        assert totals == sorted(set(totals))  # each adds some
        # As a checkpoint does that is written beside the steps.
        thread = threading.Thread(target=lambda: torch.distributed.all_reduce(values))
        thread.start()
        thread.join()
        assert waits.total_s() == totals[-1]
    wait = vars(Work)["wait"]
    with Waits(torch.device("cpu")):
        assert vars(Work)["wait"] is not wait
    assert vars(Work)["wait"] is wait


def test_exchanges_count_between_events_on_a_gpu(gpu):
    values, before = torch.ones(4), ProcessGroup.allreduce
    with Waits(gpu) as waits:
        torch.distributed.all_reduce(values)  # the exchange, and on gloo the wait for it
        assert waits.total_s() == 4
        work = torch.distributed.all_reduce(values, async_op=True)
        assert waits.total_s() == 6
        work.wait()
        torch.distributed.broadcast(values, src=0)
        assert waits.total_s() == 12
    assert values.tolist() == [1] * 4
    assert ProcessGroup.allreduce is before
