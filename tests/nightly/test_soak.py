"""2,000 steps leak nothing: memory, open files and /dev/shm end where they were early on."""

from __future__ import annotations

import statistics
import subprocess
import time
from dataclasses import dataclass
from pathlib import Path

import psutil
import pytest
from harness.recipes.parity import make_dataset
from small_packs import TINY

from harness.formats import FORMATS, convert_dataset

from ..distributed.conftest import ROOT, environment, launcher, read_metrics

pytestmark = [pytest.mark.nightly, pytest.mark.timeout(2400)]
STEPS = 2000
SHM = Path("/dev/shm")


@dataclass(frozen=True)
class Sample:
    """Of a run with all its processes; memory with pages that they share counted once."""

    step: int
    memory_bytes: int
    open_files: int
    processes: int
    shm_bytes: int


def sample(top: psutil.Process, step: int) -> Sample | None:
    try:
        tree = [top, *top.children(recursive=True)]
        memory = sum(one.memory_full_info().pss for one in tree)
        return Sample(step, memory, sum(one.num_fds() for one in tree), len(tree), shm_bytes())
    except psutil.Error:  # one of them is just ending
        return None


def shm_bytes() -> int:
    total = 0
    for path in SHM.rglob("*"):
        try:
            total += path.stat().st_size
        except OSError:
            continue
    return total


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_dataset(tmp_path_factory.mktemp("soak") / "data")


# Workers that end with every epoch leak in other places than ones that stay.
@pytest.mark.parametrize(
    ("format", "persistent"), [*((name, True) for name in FORMATS), ("parquet", False), ("jsonl", False)]
)
def test_a_soak_of_2000_steps_grows_in_nothing(source, tmp_path, device, format, persistent) -> None:
    for split in ("train", "validation"):
        convert_dataset(source / split, tmp_path / "data" / split, format=format)
    arguments = [
        *launcher(1),
        "harness.recipes.sft",
        f"data.path={tmp_path / 'data'}",
        f"run_dir={tmp_path / 'run'}",
        *TINY,
        # 40 steps an epoch: 50 epochs. Workers are started 50 times where they do not persist.
        "loader.global_batch_size=4",
        "loader.block_packs=4",
        f"loader.num_workers={4 if persistent else 1}",
        f"loader.persistent_workers={str(persistent).lower()}",
        "schedule.max_tokens_per_rank=512",
        f"trainer.steps={STEPS}",
        "trainer.eval_interval=200",
        "trainer.checkpoint_interval=200",
        f"trainer.device={device}",
        "trainer.record_digests=true",
    ]
    before = shm_bytes()
    log = (tmp_path / "log.txt").open("w")
    process = subprocess.Popen(arguments, env=environment(), cwd=ROOT, stdout=log, stderr=log)
    samples: list[Sample] = []
    try:
        top = psutil.Process(process.pid)
        while process.poll() is None:
            made = len(read_metrics(tmp_path / "run"))
            taken = sample(top, made)
            if taken is not None:
                samples.append(taken)
            time.sleep(1.5)  # to walk every page of five processes takes its time, too
    finally:
        process.kill()
        process.wait()
        log.close()
    assert process.returncode == 0, (tmp_path / "log.txt").read_text()[-3000:]
    steps = read_metrics(tmp_path / "run")
    assert [line["step"] for line in steps] == list(range(1, STEPS + 1))
    assert steps[-1]["loss"] < 0.8 * steps[0]["loss"]
    assert max(line["data_wait_s"] for line in steps[50:]) < 30

    # Everything has been used once by step 500; validations and checkpoints come and go in both parts.
    early = [one for one in samples if 500 <= one.step < 1000]
    late = [one for one in samples if 1500 <= one.step < STEPS]
    assert len(early) >= 3
    assert len(late) >= 3
    checks = (
        # A checkpoint is written by forked processes, each with memory and all open files, and which sample meets them
        # is chance: what stays is in every sample.
        ("memory_bytes", 24 * 2**20, statistics.median),
        ("open_files", 8, min),
        ("processes", 1, min),
        ("shm_bytes", 2**20, max),
    )
    for name, allowance, of in checks:
        was, came = (of(getattr(one, name) for one in part) for part in (early, late))
        assert came <= 1.02 * was + allowance, f"{name} grew from {was:,} to {came:,}"
    time.sleep(1)
    assert shm_bytes() <= before + 2**20
