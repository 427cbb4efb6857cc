"""Preparation of one dataset on all nodes of an allocation."""

from __future__ import annotations

import subprocess
import sys

import pytest

from ..distributed.conftest import ROOT
from ..integration.test_prepare_shards import command, content, write_source
from .conftest import SlurmJob

pytestmark = [pytest.mark.slurm, pytest.mark.timeout(600)]


def test_preparation_on_two_nodes_writes_the_same_dataset_as_one_machine(slurm, tmp_path):
    pytest.importorskip("ray", reason="needs the extra ray: pip install -e '.[ray]'")
    slurm.wait_idle()
    source = write_source(tmp_path / "chats", files=2, records=2000)
    subprocess.run(command(tmp_path / "whole", source, ""), check=True, capture_output=True)
    log = tmp_path / "prepare.out"
    printed = slurm.on(
        "login",
        *("env", f"PYTHON={sys.executable}", "sbatch", "--parsable", "--nodes=2", f"--output={log}"),
        *("slurm/prepare.sbatch", *command(tmp_path / "d", source, "")[3:]),
        check=True,
        cwd=ROOT,
    )
    job = SlurmJob(slurm, printed.strip(), tmp_path)
    assert job.wait(timeout_s=300) == "COMPLETED", log.read_text()
    assert "Ray on 2 nodes" in log.read_text()
    assert content(tmp_path / "d") == content(tmp_path / "whole")
    (ROOT / f"ray-{job.job_id}.log").unlink()
