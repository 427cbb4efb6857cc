"""Nodes that fail the preflight are named with srun's own reason or the figure measured, and left out."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from .cluster import Cluster
from .conftest import started
from .test_preflight import mounted

pytestmark = [pytest.mark.slurm, pytest.mark.timeout(600)]
ONE_RANK = "cluster.ranks_per_node=1"


@pytest.fixture(scope="module")
def slurm() -> Iterator[Cluster]:
    """A cluster of three nodes, with time for a requeued job to say which nodes to leave out."""
    yield from started(Cluster(3, kill_wait_s=30, credential_s=20))


def test_a_node_that_cannot_run_the_interpreter_is_left_out_and_the_job_runs_on_the_others(submit, slurm, tmp_path):
    python, closed = tmp_path / "python", tmp_path / "closed"
    for path in (python, closed):
        path.write_text(f'#!/bin/sh\nexec {sys.executable} "$@"\n')
    python.chmod(0o755)
    closed.chmod(0o644)
    with mounted(slurm, "node2", closed, python):
        job = submit("trainer.steps=2", ONE_RANK, f"cluster.python={python}")
        assert job.wait() == "COMPLETED", job.log
    assert f"preflight: node2: permission: {python}: Permission denied" in job.log
    assert "preflight: node1" not in job.log
    assert (job.facts["Restarts"], job.facts["NodeList"]) == ("1", "node[1,3]"), job.log
    assert (job.run_dir / "excluded_nodes").read_text().startswith("node2 permission: ")


def test_a_node_with_a_slow_network_is_named_with_its_rate(submit, slurm):
    slow = ["rate", "8mbit", "burst", "32kbit", "latency", "400ms"]
    slurm.on("node2", "tc", "qdisc", "add", "dev", "eth0", "root", "tbf", *slow, check=True)
    limits = ("cluster.preflight.min_pair_gb_s=0.005", "cluster.preflight.timeout_s=90")
    try:
        job = submit("trainer.steps=2", ONE_RANK, *limits, nodes=3)
        assert job.wait() == "FAILED", job.log
    finally:
        slurm.on("node2", "tc", "qdisc", "del", "dev", "eth0", "root", check=True)
    assert re.search(r"preflight: node2: links to other nodes: gloo all-reduces 0\.00\d+ GB/s with each", job.log)
    assert "preflight: node1:" not in job.log
    assert "without these nodes the partition has 2, and the job needs 3" in job.log
    assert job.facts["Restarts"] == "0"
    assert not Path(job.run_dir / "excluded_nodes").exists()
