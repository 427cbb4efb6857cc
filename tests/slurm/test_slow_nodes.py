"""Nodes that are too slow or lose a rank are replaced by spare ones in the same job."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator

import pytest

from harness.train.checkpoints import CHECKPOINTS, whole_checkpoints

from .cluster import Cluster
from .conftest import SlurmJob, started
from .test_resuming import LONG, attempts, resumed_step, undisturbed

__all__ = ["undisturbed"]
pytestmark = [pytest.mark.slurm, pytest.mark.timeout(2400)]
# Without the preflight: on a busy machine its measurements differ between nodes.
ONE_SPARE = ("cluster.ranks_per_node=1", "cluster.spares=1", "cluster.preflight.enabled=false")
# Python runs this module at its start: on node2 every read of the dataset takes a while.
SLOW_DISK = """
import os, sys, time
if os.environ.get("SLURMD_NODENAME") == "node2" and "harness.recipes.sft" in sys.orig_argv:
    sys.path.insert(0, os.getcwd())
    from harness.formats import PackReader
    read = PackReader.read
    PackReader.read = lambda *arguments: time.sleep(2) or read(*arguments)
"""


@pytest.fixture(scope="module")
def slurm() -> Iterator[Cluster]:
    yield from started(Cluster(3))


def test_a_node_with_a_slow_disk_gives_way_to_a_spare_one_in_the_same_job(submit, slurm, tmp_path):
    (tmp_path / "sitecustomize.py").write_text(SLOW_DISK)
    job = submit(
        *(*ONE_SPARE, "trainer.steps=12", "trainer.straggler_steps=5", "trainer.on_straggler=exclude"),
        f"cluster.env={{PYTHONPATH: {tmp_path}}}",
    )
    assert job.wait() == "COMPLETED", job.log
    assert (job.facts["Restarts"], job.facts["NodeList"]) == ("0", "node[1-3]")
    assert "training on node1 node2, spare: node3" in job.log
    assert "too slow: rank 1 on node2 has taken" in job.log
    assert "it waits for its data" in job.log
    assert "training on node1 node3, spare:" in job.log
    assert (job.run_dir / "excluded_nodes").read_text().startswith("node2 rank 1 on node2 has taken")
    assert [line["step"] for line in job.metrics] == list(range(1, 13))
    (attempt,) = attempts(job)
    assert (attempt["reason"], attempt["step"], attempt["again"]) == ("straggler", 7, "in the job")


@pytest.mark.parametrize("lost", [pytest.param("rank", marks=pytest.mark.nightly), "node"])
def test_the_node_of_a_lost_rank_gives_way_to_a_spare_one_in_the_same_job(submit, slurm, undisturbed, lost):
    job = submit(*LONG, "cluster.spares=1")
    _lose_node_2(job, slurm, lost)
    assert job.facts["Restarts"] == "0"
    assert "training on node1 node3, spare:" in job.log
    assert (job.run_dir / "excluded_nodes").read_text().startswith("node2 rank 1 failed there")
    assert job.losses == undisturbed
    (attempt,) = attempts(job)
    assert attempt["again"] == "in the job"
    assert attempt["lost_s"] > 0
    assert "restarted in the job" in (job.run_dir / "report.md").read_text()
    assert resumed_step(job) in range(20, 150, 20)


def _lose_node_2(job: SlurmJob, slurm: Cluster, lost: str) -> None:
    job.wait_for(lambda: bool(whole_checkpoints(job.run_dir / CHECKPOINTS)), "a checkpoint")
    if lost == "node":
        slurm.kill_node("node2")
    else:
        os.kill(slurm.rank_on("node2"), signal.SIGKILL)
    try:
        assert job.wait() == "COMPLETED", job.log
    finally:
        if lost == "node":
            slurm.start_slurmd("node2")
