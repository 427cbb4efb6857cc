"""Preparation of one dataset on all nodes of an allocation.

The variable PYTHON names the interpreter of the job, which needs `pip install '.[tokenize,ray]'` and no PyTorch;
without it, the job runs with the interpreter of the tests.
"""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from ..distributed.conftest import ROOT
from ..integration.test_prepare_shards import command, content, write_source
from .conftest import SlurmJob

pytestmark = [pytest.mark.slurm, pytest.mark.timeout(2400)]


@pytest.mark.nightly
def test_preparation_on_two_nodes_writes_the_same_dataset_as_one_machine(slurm, tmp_path):
    python = os.environ.get("PYTHON", sys.executable)
    if subprocess.run([python, "-c", "import ray"], capture_output=True, check=False).returncode:
        pytest.skip(f"{python} cannot import ray: pip install '.[tokenize,ray]', or set PYTHON to another interpreter")
    slurm.wait_idle()
    source = write_source(tmp_path / "chats", files=2, records=2000)
    subprocess.run([python, *command(tmp_path / "whole", source, "")[1:]], cwd=ROOT, check=True, capture_output=True)
    log = tmp_path / "prepare.out"
    printed = slurm.on(
        "login",
        *("env", f"PYTHON={python}", "sbatch", "--parsable", "--nodes=2", f"--output={log}"),
        *("slurm/prepare.sbatch", *command(tmp_path / "d", source, "")[3:]),
        check=True,
        cwd=ROOT,
    )
    job = SlurmJob(slurm, printed.strip(), tmp_path)
    assert job.wait(timeout_s=1200) == "COMPLETED", log.read_text()
    assert "Ray on 2 nodes" in log.read_text()
    assert content(tmp_path / "d") == content(tmp_path / "whole")
    (ROOT / f"ray-{job.job_id}.log").unlink()
