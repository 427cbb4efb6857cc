"""Submit jobs to a real cluster of two nodes, as a user does."""

from __future__ import annotations

import re
import signal
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from harness.recipes.parity import make_dataset
from small_packs import TINY

from ..distributed.conftest import ROOT, read_metrics, train
from .cluster import Cluster, missing

HARNESS = (sys.executable, "-m", "harness")
SETTINGS = (
    *TINY,
    *("loader.global_batch_size=8", "loader.block_packs=4", "loader.num_workers=0", "schedule.max_tokens_per_rank=256"),
    *("trainer.device=cpu", "trainer.eval_interval=0", "trainer.eval_batches=1", "optimizer.decay_steps=40"),
)
# Rates of a machine that does other work too are not compared: any is allowed.
PREFLIGHT = ("timeout_s=100", "min_node_gb_s=0", "min_pair_gb_s=0", "min_all_gb_s=0")


# States of a job that has not ended, SIGNALING for an instant only; "" where the controller does not answer.
GOING = ("PENDING", "CONFIGURING", "RUNNING", "COMPLETING", "REQUEUED", "SUSPENDED", "SIGNALING", "")


@pytest.fixture(scope="session")
def slurm() -> Iterator[Cluster]:
    yield from started(Cluster())


def started(cluster: Cluster) -> Iterator[Cluster]:
    lacking = missing()
    if lacking:
        pytest.skip(f"needs root and the Debian packages slurm-wlm munge iproute2 (missing: {', '.join(lacking)})")

    def end(number: int, _frame: object) -> None:
        signal.signal(number, signal.SIG_IGN)  # make sends it again
        pytest.exit("ended by SIGTERM", 128 + number)

    # Tests that a time limit ends with SIGTERM end their daemons too.
    previous = signal.signal(signal.SIGTERM, end)
    try:
        cluster.start()
        yield cluster
    finally:
        cluster.stop()
        signal.signal(signal.SIGTERM, previous)


@pytest.fixture(scope="session")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_dataset(tmp_path_factory.mktemp("slurm") / "data")


def losses_here(data: Path, folder: Path, ranks: int, *settings: str) -> list[float]:
    """Return the losses of ranks on this machine, without Slurm."""
    steps = train(folder, [f"data.path={data}", f"run_dir={folder}", *SETTINGS, *settings], ranks=ranks)
    return [line["loss"] for line in steps]


@dataclass(frozen=True)
class SlurmJob:
    cluster: Cluster
    job_id: str
    run_dir: Path

    @property
    def facts(self) -> dict[str, str]:
        return dict(re.findall(r"(\w+)=(\S*)", self.cluster.on("login", "scontrol", "show", "job", self.job_id)))

    @property
    def log(self) -> str:
        """The logs of the batch script, then those of the ranks."""
        paths = sorted((self.run_dir / "logs").glob("*.out"), key=lambda path: ("-rank" in path.name, path.name))
        return "\n".join(f"--- {path.name}\n{path.read_text()}" for path in paths)

    @property
    def metrics(self) -> list[dict[str, Any]]:
        return read_metrics(self.run_dir)

    @property
    def losses(self) -> list[float]:
        return [line["loss"] for line in self.metrics]

    def wait_for(self, happens: Callable[[], bool], event: str, *, timeout_s: float = 480) -> None:
        """Wait until it happens; fail if the job ends before."""
        deadline = time.monotonic() + timeout_s
        while not happens():
            state = self.facts.get("JobState", "")
            assert state in GOING, f"{state} before {event}:\n{self.log}"
            assert time.monotonic() < deadline, f"no {event} in {timeout_s:g} s, {state}:\n{self.log}"
            time.sleep(0.3)

    def wait(self, *, timeout_s: float = 960) -> str:
        deadline = time.monotonic() + timeout_s
        while True:
            state = self.facts.get("JobState", "")
            if state not in GOING:
                return state
            assert time.monotonic() < deadline, f"still {state} after {timeout_s:g} s:\n{self.log}"
            time.sleep(0.3)

    def signal(self, name: str) -> None:
        """Send a signal to the batch script only, as Slurm does before the time limit."""
        self.cluster.on("login", "scancel", "--batch", f"--signal={name}", self.job_id, check=True)


@pytest.fixture
def submit(slurm: Cluster, data: Path, tmp_path: Path) -> Iterator[Callable[..., SlurmJob]]:
    """submit(*overrides, nodes=2, run_dir=None): `harness submit sft` with small settings and runs in `tmp_path`."""
    slurm.wait_idle()
    jobs: list[SlurmJob] = []

    def start(*overrides: str, nodes: int = 2, run_dir: Path | None = None) -> SlurmJob:
        printed = slurm.on(
            "login",
            *(*HARNESS, "submit", "sft", f"nodes={nodes}", *([f"run_dir={run_dir}"] if run_dir else [])),
            *(f"data.path={data}", f"runs={tmp_path}/runs", *SETTINGS),
            *(*(f"cluster.preflight.{limit}" for limit in PREFLIGHT), *overrides),
            check=True,
            cwd=ROOT,
        )
        match = re.search(r"job (\d+), script (\S+)/job.sbatch", printed)
        assert match, printed
        jobs.append(SlurmJob(slurm, match[1], Path(match[2])))
        return jobs[-1]

    yield start
    for job in jobs:
        slurm.on("login", "scancel", job.job_id)
