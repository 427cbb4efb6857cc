"""Jobs that never reach their first step name the rank that they wait for, and end on a signal."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from harness.formats.manifest import MANIFEST_NAME
from harness.parity.running import free_ports
from harness.train.attempts import decide
from tests.samples.warm_python import warm_python

from .conftest import ROOT, command, environment, overrides_of, run_command
from .test_stopping import started

pytestmark = pytest.mark.submission


def handles(process: int, number: signal.Signals) -> bool:
    status = Path(f"/proc/{process}/status").read_text()
    caught = int(next(line for line in status.splitlines() if line.startswith("SigCgt")).split()[1], 16)
    return bool(caught >> (number - 1) & 1)


@pytest.fixture
def unreadable(dataset, tmp_path) -> Path:
    """A dataset on storage that does not respond: opening its manifest never returns."""
    folder = tmp_path / "data"
    shutil.copytree(dataset, folder)
    manifest = folder / "train" / MANIFEST_NAME
    manifest.unlink()
    os.mkfifo(manifest)
    return folder


def test_a_missing_rank_is_named(dataset, tmp_path) -> None:
    recipe = [warm_python(), "-m", "harness.recipes.sft", *overrides_of(dataset, tmp_path / "run")]
    launcher = [warm_python(), "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", "--no-python"]
    script = 'if [ "$RANK" = 1 ]; then exec sleep 1000; fi; exec "$@"'
    code, output = run_command([*launcher, "bash", "-c", script, "bash", *recipe, "trainer.startup_timeout_s=5"])
    assert code == 1
    assert output.count("LostRankError: rank 1 of 2 did not connect within 5 s") == 1, output
    assert not (tmp_path / "run").exists()


# A rank that is slow to end, and asks the store in rank 0's process when that has long ended.
LATE = """
import time
from harness.megatron.job.watchdog import Watchdog
from harness.recipes.sft import entry
leave = Watchdog._leave
Watchdog._leave = lambda self, stop: time.sleep(2) or leave(self, stop)
entry()
"""


@pytest.mark.parametrize("program", ["-m harness.recipes.sft", "late.py"])
def test_a_dataset_missing_on_one_rank_ends_the_job_at_once_with_the_error_alone(dataset, tmp_path, program) -> None:
    missing = tmp_path / "missing"
    (tmp_path / "late.py").write_text(LATE)
    launcher = "import sys; from harness.launch.local import start_ranks; sys.exit(start_ranks(sys.argv[1:], 2))"
    other = program.replace("late.py", str(tmp_path / "late.py"))
    script = f'if [ "$RANK" = 1 ]; then exec "$0" {other} "$@" data.path={missing}; fi; '
    script += 'exec "$0" -m harness.recipes.sft "$@"'
    recipe = [warm_python(), *overrides_of(dataset, tmp_path / "run")]
    code, output = run_command([sys.executable, "-c", launcher, "bash", "-c", script, *recipe])
    assert code == 2, output
    assert len(output.splitlines()) == 3, output
    error, where, fix = output.splitlines()
    assert error == "FormatError: rank 1: there is no dataset"
    assert where == f"  where: {missing}"
    assert fix.startswith("  fix: ")
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("which", ["one", "all"])
def test_storage_that_does_not_respond_ends_the_job_and_names_the_rank_that_waits_for_it(
    dataset, unreadable, tmp_path, which
) -> None:
    """Ranks are started one by one, as by srun: the store where they meet ends with rank 0."""
    folders = (dataset if which == "one" else unreadable, unreadable)
    place = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_ports(1)[0])}
    ranks = [
        subprocess.Popen(
            [warm_python(), *command(data, tmp_path / "run", "trainer.startup_timeout_s=45")[1:]],
            env={**environment(), **place, "RANK": str(rank), "LOCAL_RANK": str(rank)},
            cwd=ROOT,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank, data in enumerate(folders)
    ]
    outputs = [rank.communicate(timeout=200)[0] for rank in ranks]
    assert [rank.returncode for rank in ranks][1] == 70, outputs
    named = "rank 1 (host " if which == "one" else "all 2 ranks are in step 1, opening the data, and none is"
    errors = [line for line in "".join(outputs).splitlines() if line.startswith("HarnessError: no progress for 45 s")]
    assert len(errors) == 1, outputs
    assert f"in step 1: {named}" in errors[0]
    assert "Increase trainer.startup_timeout_s" in "".join(outputs)
    # The stack of the rank that holds the others up.
    assert "manifest.py" in outputs[1]
    assert not (tmp_path / "run").exists()


@pytest.mark.nightly
def test_a_job_that_is_asked_to_stop_before_its_first_step_ends(unreadable, tmp_path) -> None:
    folder = tmp_path / "run"
    folder.mkdir()  # as Slurm's script does
    with started(unreadable, folder, "resume=auto", variables={"SLURM_JOB_ID": "7"}) as job:
        job.wait_for(lambda: [handles(process.pid, signal.SIGUSR2) for process in job.everyone()[1:]] == [True, True])
        for process in job.everyone()[1:]:
            process.send_signal(signal.SIGUSR2)
        code, output = job.end()
    assert code == 1
    assert "exitcode  : 75" in output
    assert "SIGUSR2 received before the first step, in step 1, opening the data" in output
    assert job.stopped()["reason"] == "signal"
    assert decide(folder, exit_code=code).requeue
