"""Runs on two nodes have the losses of a run on one machine."""

from __future__ import annotations

import sys

import pytest

from ..distributed.conftest import ROOT
from .conftest import HARNESS, losses_here

pytestmark = [pytest.mark.slurm, pytest.mark.timeout(2400)]


@pytest.fixture(scope="module")
def local(data, tmp_path_factory) -> list[float]:
    """The losses of four ranks on this machine, without Slurm."""
    return losses_here(data, tmp_path_factory.mktemp("local") / "run", 4, "trainer.steps=6")


@pytest.mark.parametrize("kind", ["srun", "torchrun"])
def test_two_nodes_of_two_ranks_have_the_losses_of_one_machine(submit, local, kind):
    job = submit("trainer.steps=6", f"cluster.launcher={kind}")
    assert job.wait() == "COMPLETED", job.log
    assert job.losses == local
    assert len(local) == 6
    assert "preflight: 2 nodes, 0 GPUs each" in job.log
    assert "all-reduce by gloo over 2 ranks" in job.log
    logs = sorted(path.name for path in (job.run_dir / "logs").glob(f"sft-{job.job_id}-*"))
    expected = {"srun": [f"rank{rank}" for rank in range(4)], "torchrun": ["node0", "node1"]}[kind]
    assert logs == [f"sft-{job.job_id}-{name}.out" for name in expected]
    assert job.facts["NodeList"] == "node[1-2]"


def test_a_job_that_sbatch_refuses_is_reported_and_leaves_no_folder(slurm, data, tmp_path):
    printed = slurm.on(
        "login",
        *HARNESS,
        *("submit", "sft", "cluster.partition=nowhere", f"data.path={data}", f"runs={tmp_path}/runs"),
        cwd=ROOT,
    )
    assert "sbatch failed: sbatch: error:" in printed
    assert not list((tmp_path / "runs").glob("*"))


def test_every_step_of_a_job_with_an_image_runs_in_the_container(submit, tmp_path):
    """With an srun that records and removes the options of Pyxis, which is not installed, and runs on the node."""
    recorded, shared = tmp_path / "recorded", tmp_path.parent  # has the runs and the dataset
    srun = tmp_path / "bin" / "srun"
    srun.parent.mkdir()
    srun.write_text(
        f"""#!/bin/bash
kept=() container=()
for word in "$@"; do
  case $word in
    --container-workdir=*) container+=("$word") kept+=("--chdir=${{word#*=}}") ;;
    --container-* | --no-container-*) container+=("$word") ;;
    *) kept+=("$word") ;;
  esac
done
echo "${{container[*]}} ${{kept[*]}}" >>{recorded}
exec /usr/bin/srun "${{kept[@]}}"
"""
    )
    srun.chmod(0o755)
    job = submit(
        *("trainer.steps=2", "cluster.ranks_per_node=1", f"cluster.workdir={ROOT}", f"cluster.python={sys.executable}"),
        *("cluster.image=/shared/x.sqsh", f"cluster.mounts=[{shared}:{shared}]"),
        f"cluster.setup=['export PATH={srun.parent}:$PATH']",
    )
    assert job.wait() == "COMPLETED", job.log
    steps = [line for line in recorded.read_text().splitlines() if line.startswith("--container-image")]
    # Two steps of the preflight on all nodes, each judged on the first node, and the ranks.
    assert len(steps) == 5
    assert [step for step in steps if "preflight judge" in step] == [steps[1], steps[3]]
    assert all("--relative=0 --overlap" in steps[number] for number in (1, 3))
    expected = f"--container-image=/shared/x.sqsh --container-workdir={ROOT} --container-mounts={shared}:{shared}"
    assert all(step.startswith(f"{expected} --no-container-mount-home --container-env=MASTER_ADDR,") for step in steps)
    assert "all-reduce by gloo over 2 ranks" in job.log
