"""Runs on two nodes train what a run on one machine does."""

from __future__ import annotations

import pytest

from ..distributed.conftest import ROOT, launcher, read_metrics, run_command
from .conftest import HARNESS, SETTINGS

pytestmark = [pytest.mark.slurm, pytest.mark.timeout(600)]


@pytest.fixture(scope="module")
def local(data, tmp_path_factory) -> list[float]:
    """The losses of four ranks on this machine, without Slurm."""
    folder = tmp_path_factory.mktemp("local") / "run"
    code, output = run_command(
        [*launcher(4), "recipes.sft", f"data.path={data}", f"run_dir={folder}", *SETTINGS, "trainer.steps=6"]
    )
    assert code == 0, output
    return [line["loss"] for line in read_metrics(folder)]


@pytest.mark.parametrize("kind", ["srun", "torchrun"])
def test_two_nodes_of_two_ranks_have_the_losses_of_one_machine(submit, local, kind):
    job = submit("trainer.steps=6", f"cluster.launcher={kind}")
    assert job.wait() == "COMPLETED", job.log
    assert job.losses == local
    assert len(local) == 6
    assert "preflight: 2 nodes, 0 GPUs each" in job.log
    assert "all-reduce by gloo over 2 ranks" in job.log
    logs = sorted(path.name for path in (job.run_dir / "logs").glob(f"sft-{job.job_id}-*"))
    own = {"srun": [f"rank{rank}" for rank in range(4)], "torchrun": ["node0", "node1"]}[kind]
    assert logs == [f"sft-{job.job_id}-{name}.out" for name in own]
    assert job.facts["NodeList"] == "node[1-2]"


def test_a_job_that_sbatch_refuses_is_told_and_leaves_no_folder(slurm, data, tmp_path):
    told = slurm.on(
        "login",
        *HARNESS,
        "submit",
        "sft",
        "cluster.partition=nowhere",
        f"data.path={data}",
        f"runs={tmp_path}/runs",
        cwd=ROOT,
    )
    assert "sbatch refuses the job: sbatch: error:" in told
    assert not list((tmp_path / "runs").glob("*"))
