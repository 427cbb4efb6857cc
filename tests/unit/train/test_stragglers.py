"""Slow ranks are named with what they do longer than the others, from the times of every rank."""

from __future__ import annotations

from dataclasses import replace
from itertools import repeat

import pytest

from harness.train.stragglers import RankTimes, Straggler, StragglerWatch, write_slow_nodes

# A step of 1 s, of which 0.2 s are exchanges.
USUAL = RankTimes(compute_s=0.7, data_s=0.1, wait_s=0.2, running_s=0.75, queued_s=0.05)
SLOW = {
    "data": replace(USUAL, data_s=1.5),
    "core": replace(USUAL, compute_s=2.2, queued_s=1.5),
    "compute": replace(USUAL, compute_s=2.2, running_s=2.2),
    "stopped": replace(USUAL, compute_s=2.2),
}
NODES, STAGES = ["a", "a", "b", "b"], [0, 0, 0, 0]


def waiting_for(slow: RankTimes) -> RankTimes:
    return replace(USUAL, wait_s=slow.step_s - USUAL.busy_s)


def watch(**changes) -> StragglerWatch:
    return StragglerWatch(**{"nodes": NODES, "stages": STAGES, "ratio": 1.5, "steps": 5, **changes})


def run(watched: StragglerWatch, *parts):
    """Return what is found in each of so many steps of these times."""
    return [watched.step(times) for times, steps in parts for times in repeat(times, steps)]


@pytest.mark.parametrize("cause", SLOW)
def test_a_slow_rank_is_named_with_its_cause_after_k_steps_and_no_longer_when_it_recovers(cause):
    slow = SLOW[cause]
    steps = run(watch(), ([USUAL] * 4, 10), ([waiting_for(slow)] * 2 + [slow, waiting_for(slow)], 6), ([USUAL] * 4, 2))
    ratio = slow.busy_s / USUAL.busy_s
    assert steps[:14] == [[]] * 14
    assert steps[14] == steps[15] == [Straggler(cause, pytest.approx(ratio), 2, "b")]
    assert steps[16:] == [[], []]


ALMOST = replace(USUAL, data_s=0.7, compute_s=1.6, running_s=1.65)  # 40% data, 60% compute


@pytest.mark.parametrize(
    ("slow", "places", "stages", "on_gpu", "named"),
    [
        (SLOW["compute"], [3], STAGES, False, (3, "compute")),
        (SLOW["data"], [0], [0, 0], False, (0, "data")),
        # A core that idles says nothing about a GPU.
        (SLOW["stopped"], [3], STAGES, True, (3, "compute")),
        # The ranks of a stage are compared with each other alone.
        (SLOW["compute"], [0, 3, 4, 5], [0, 0, 0, 1, 1, 1], False, (0, "compute")),
        # A cause explains more than half of what a rank takes longer.
        (ALMOST, [3], STAGES, False, (3, "compute")),
    ],
)
def test_one_slow_rank_is_named_after_two_first_steps_and_k_more(slow, places, stages, on_gpu, named):
    times = [slow if rank in places else waiting_for(slow) for rank in range(len(stages))]
    steps = run(watch(nodes=list("abcdef")[: len(stages)], stages=stages, on_gpu=on_gpu), (times, 7))
    assert steps[:6] == [[]] * 6
    assert [(straggler.rank, straggler.cause) for straggler in steps[6]] == [named]


def test_a_node_all_ranks_of_which_are_slow_is_named_as_a_node():
    slow = SLOW["compute"]
    three = ["a", "a", "b", "b", "c", "c"]
    watched = watch(nodes=three, stages=[0] * 6)
    found = run(watched, ([waiting_for(slow)] * 2 + [slow] * 2 + [waiting_for(slow)] * 2, 7))[-1]
    assert [(straggler.rank, straggler.node, straggler.is_node) for straggler in found] == [
        (2, "b", True),
        (3, "b", True),
    ]
    assert found[0].describe(5).startswith("node b (all of its ranks, such as rank 2) has taken 2.9 times as long")


def test_a_slow_network_is_not_taken_for_a_slow_rank():
    slow = replace(USUAL, wait_s=4.0)
    steps = run(watch(), ([USUAL] * 4, 8), ([slow] * 4, 5))
    assert steps[:12] == [[]] * 12
    assert steps[12] == [Straggler("network", pytest.approx(20))]
    assert "although no rank is slow" in steps[12][0].describe(5)
    # Exchanges up to three times as long are no slow network.
    assert run(watch(), ([USUAL] * 4, 8), ([replace(USUAL, wait_s=0.59)] * 4, 9)) == [[]] * 17
    assert run(watch(), ([USUAL] * 4, 8), ([replace(USUAL, wait_s=0.61)] * 4, 9))[-1] != []


@pytest.mark.parametrize(
    ("ranks", "changes"),
    [
        ([USUAL] * 4, {}),
        ([replace(USUAL, compute_s=1.0), *[USUAL] * 3], {}),  # 1.4 times
        ([replace(USUAL, compute_s=0.001, data_s=0.0005), *[replace(USUAL, compute_s=0.001, data_s=0)] * 3], {}),
        # Three times as long, which is nothing beside the exchanges of a step.
        ([replace(USUAL, compute_s=0.2, wait_s=2.0), *[replace(USUAL, compute_s=0, wait_s=2.2)] * 3], {}),
        # The stages of a pipeline have different work, and a rank alone in its stage has none to compare with.
        ([SLOW["compute"], SLOW["compute"], USUAL, USUAL], {"stages": [0, 0, 1, 1]}),
        ([SLOW["compute"], USUAL], {"stages": [0, 1], "nodes": ["a", "b"]}),
        ([SLOW["compute"]], {"stages": [0], "nodes": ["a"]}),
    ],
)
def test_nobody_is_named_for_less(ranks, changes):
    assert run(watch(**changes), (ranks, 30)) == [[]] * 30


def test_one_long_step_names_nobody():
    slow = SLOW["stopped"]
    once = [waiting_for(slow)] * 3 + [slow]
    assert run(watch(), ([USUAL] * 4, 5), (once, 4), ([USUAL] * 4, 5), (once, 4)) == [[]] * 18


def test_the_batch_script_gets_the_nodes_to_leave_out_but_for_those_that_it_kept(tmp_path, monkeypatch):
    found = [Straggler("data", 3.0, 2, "b"), Straggler("core", 2.0, 5, "c"), Straggler("network", 4.0)]
    monkeypatch.delenv("SLURM_JOB_ID", raising=False)
    path = tmp_path / "logs" / "straggler-42.failed"
    assert write_slow_nodes(tmp_path, found, 10) == []
    monkeypatch.setenv("SLURM_JOB_ID", "42")
    assert write_slow_nodes(tmp_path, found, 10) == []
    (tmp_path / "logs").mkdir()
    assert write_slow_nodes(tmp_path, found[2:], 10) == []
    assert not path.exists()
    (tmp_path / "kept_nodes").write_text("c too few others\n")
    assert write_slow_nodes(tmp_path, found, 10) == ["b"]
    (line,) = path.read_text().splitlines()
    assert line.startswith(
        "b rank 2 on b has taken 3.0 times as long as the others for 10 steps: it waits for its data"
    )
