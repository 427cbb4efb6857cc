"""Nodes that fail the preflight are named with srun's own reason or the figure measured, and left out."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from .cluster import Cluster
from .conftest import losses_here, started
from .test_preflight import mounted

pytestmark = [pytest.mark.slurm, pytest.mark.timeout(2400)]
ONE_RANK = "cluster.ranks_per_node=1"


@pytest.fixture(scope="module")
def slurm() -> Iterator[Cluster]:
    """A cluster of three nodes, with time for a requeued job to say which nodes to leave out."""
    yield from started(Cluster(3, credential_s=20))


def test_a_spare_replaces_a_node_that_fails_the_preflight_and_nodes_that_train_copy_the_data(
    submit, slurm, data, tmp_path
):
    python, closed, local = tmp_path / "python", tmp_path / "closed", tmp_path / "local"
    for path in (python, closed):
        path.write_text(f'#!/bin/sh\nexec {sys.executable} "$@"\n')
    python.chmod(0o755)
    closed.chmod(0o644)
    local.mkdir()
    with ExitStack() as mounts:
        mounts.enter_context(mounted(slurm, "node2", closed, python))
        for node in slurm.nodes:
            mounts.enter_context(mounted(slurm, node, "tmpfs", local, "-t", "tmpfs"))
        settings = ("cluster.spares=1", f"cluster.python={python}", f"cluster.local_dir={local}")
        job = submit("trainer.steps=3", ONE_RANK, *settings)
        assert job.wait() == "COMPLETED", job.log
        copies = {node: slurm.on(node, "find", local, "-name", "*.copied").strip() for node in slurm.nodes}
    assert (job.facts["Restarts"], job.facts["NodeList"]) == ("0", "node[1-3]")
    assert f"preflight: node2: launch: {python}: Permission denied" in job.log
    assert "training on node1 node3, spare:" in job.log
    assert (job.run_dir / "excluded_nodes").read_text().startswith("node2 launch: ")
    assert copies == {"node1": f"{local}{data}.copied", "node2": "", "node3": f"{local}{data}.copied"}
    assert f"preflight: 2 nodes, copy of {data}: " in job.log
    assert f"{local}{data}/train" in (job.run_dir / "report.md").read_text()
    assert job.losses == losses_here(data, tmp_path / "undisturbed", 2, "trainer.steps=3")


@pytest.mark.parametrize("spares", [0, pytest.param(1, marks=pytest.mark.nightly)])
def test_a_node_that_cannot_copy_the_data_is_left_out_with_the_reason(submit, slurm, data, tmp_path, spares):
    local = tmp_path / "local"
    local.mkdir()
    with ExitStack() as mounts:
        for node in slurm.nodes:
            size = "size=8k" if node == "node2" else "size=1g"
            mounts.enter_context(mounted(slurm, node, "tmpfs", local, "-t", "tmpfs", "-o", size))
        settings = ("cluster.preflight.enabled=false", f"cluster.local_dir={local}", f"cluster.spares={spares}")
        job = submit("trainer.steps=2", ONE_RANK, *settings)
        assert job.wait() == "COMPLETED", job.log
        copies = [node for node in slurm.nodes if slurm.on(node, "find", local, "-name", "*.copied")]
    assert f"preflight: node2: copy of {data}: " in job.log
    assert "GiB are free" in job.log
    assert "preflight: node1" not in job.log
    assert (job.run_dir / "excluded_nodes").read_text().startswith(f"node2 copy of {data}: ")
    assert (job.facts["Restarts"], job.facts["NodeList"]) == (("0", "node[1-3]") if spares else ("1", "node[1,3]"))
    assert copies == ["node1", "node3"]
    assert [line["step"] for line in job.metrics] == [1, 2]


def test_a_node_with_a_slow_network_is_named_with_its_rate(submit, slurm):
    slow = ["rate", "1mbit", "burst", "32kbit", "latency", "400ms"]
    slurm.on("node2", "tc", "qdisc", "add", "dev", "eth0", "root", "tbf", *slow, check=True)
    limits = ("cluster.preflight.min_pair_gb_s=0.0005", "cluster.preflight.timeout_s=200")
    try:
        job = submit("trainer.steps=2", ONE_RANK, *limits, nodes=3)
        assert job.wait() == "FAILED", job.log
    finally:
        slurm.on("node2", "tc", "qdisc", "del", "dev", "eth0", "root", check=True)
    assert re.search(r"preflight: node2: links to other nodes: gloo all-reduces 0\.000\d+ GB/s with each", job.log)
    assert "preflight: node1:" not in job.log
    assert "without these nodes the partition has 2, and the job needs 3" in job.log
    assert job.facts["Restarts"] == "0"
    assert not Path(job.run_dir / "excluded_nodes").exists()
