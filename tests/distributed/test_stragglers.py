"""A rank that is held up on purpose is named with its cause, and its node can be left out."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from typing import Any

import pytest

from harness.parity.running import free_ports
from harness.train.attempts import decide

from .conftest import launcher, overrides_of, read_metrics, run_command

SETTINGS = (
    *("trainer.steps=9", "trainer.straggler_steps=5", "trainer.eval_interval=0", "trainer.checkpoint_interval=0"),
    *("loader.num_workers=0", "model.num_layers=2"),
)


def run_ranks(
    dataset: Path, folder: Path, runs: list[tuple[str, list[str], dict[str, str]]], *, within: tuple[str, ...] = ()
) -> str:
    jobs = [
        [port, kind, overrides_of(dataset, folder / kind, *SETTINGS, *more), variables]
        for port, (kind, more, variables) in zip(free_ports(len(runs)), runs, strict=True)
    ]
    (folder / "runs.json").write_text(json.dumps(jobs))
    code, output = run_command([*within, *launcher(2), "tests.distributed.straggler_ranks", str(folder / "runs.json")])
    assert code == 0, output
    return output


def found(folder: Path) -> list[list[tuple[Any, ...]]]:
    return [[(s["rank"], s["node"], s["cause"]) for s in line["stragglers"]] for line in read_metrics(folder)]


@pytest.mark.submission
@pytest.mark.nightly
def test_a_rank_with_slow_data_and_a_stopped_one_are_told_apart_and_a_node_is_left_out(dataset, tmp_path) -> None:
    logs = tmp_path / "stopped" / "logs"
    logs.mkdir(parents=True)  # as `harness submit` makes it
    leave_out = ["trainer.on_straggler=exclude", "resume=auto"]
    runs = [("data", [], {}), ("stopped", leave_out, {"SLURM_JOB_ID": "42"})]
    output = run_ranks(dataset, tmp_path, runs)

    # The first two steps are not compared.
    assert found(tmp_path / "data") == [[]] * 6 + [[(1, "node1", "data")]] * 3
    last = read_metrics(tmp_path / "data")[-1]
    assert len(last["rank_compute_s"]) == 2
    warning = "warning: rank 1 on node1 has taken "
    assert output.count(warning) == 2, output
    assert "for 5 steps: it waits for its data" in output
    assert "| slow rank 1 on node1 | it waits for its data" in (tmp_path / "data" / "report.md").read_text()
    assert "data: exit code 0" in output

    assert found(tmp_path / "stopped") == [[]] * 6 + [[(1, "node1", "stopped")]]
    assert "for 5 steps: it is suspended for part of the time" in output
    assert output.count("stopped: exit code 75") == 2, output
    assert (logs / "straggler-42.failed").read_text().startswith("node1 rank 1 on node1 has taken ")
    stopped = json.loads((tmp_path / "stopped" / "_stopped.json").read_text())
    assert (stopped["reason"], stopped["step"]) == ("straggler", 7)
    assert (tmp_path / "stopped" / "checkpoints" / "step-00000007").is_dir()
    assert decide(tmp_path / "stopped", exit_code=75).requeue


@pytest.mark.nightly
def test_a_rank_with_more_work_is_told_apart_from_one_that_does_not_run(dataset, tmp_path) -> None:
    run_ranks(dataset, tmp_path, [("compute", [], {})])
    # On a busy machine other processes have its core for more than half of the time.
    assert found(tmp_path / "compute")[-1] in ([(1, "node1", "compute")], [(1, "node1", "core")])


@pytest.mark.nightly
@pytest.mark.skipif(
    os.geteuid() != 0 or not all(map(shutil.which, ("unshare", "ip", "tc"))), reason="needs root, unshare and iproute2"
)
def test_a_network_that_becomes_slow_is_told_apart_from_a_slow_rank(dataset, tmp_path) -> None:
    within = ("unshare", "--net", "sh", "-c", 'ip link set lo up mtu 1500 && exec "$@"', "sh")
    runs: list[tuple[str, list[str], dict[str, str]]] = [("network", ["trainer.steps=18"], {})]
    output = run_ranks(dataset, tmp_path, runs, within=within)
    assert found(tmp_path / "network")[-1] == [(None, "", "network")]
    assert "the ranks exchange data more slowly than before" in output
