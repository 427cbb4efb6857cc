"""Trainers read the global batches of the loader, and go on from their own checkpoints on another number of ranks.

Digests of what a model is given, and positions, are compared with those of one loader on one rank that never stopped.
Labels count where they are trained: some trainers replace the others.
"""

from __future__ import annotations

import json
from dataclasses import asdict, replace
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from harness.recipes.parity import make_dataset

from harness.formats import open_dataset
from harness.integrations import INTEGRATIONS, RankStream, missing_packages
from harness.loader import LoaderConfig
from harness.schedule import ScheduleConfig
from tests.distributed.conftest import launcher, run_command
from tests.integrations.probes import PROBES, ProbeJob, content_digest, trained_part

pytestmark = [pytest.mark.nightly, pytest.mark.timeout(1800)]
HALF = 10
# First step, ranks of the job, and loader workers of each.
JOBS = ((0, 2, 1), (HALF, 3, 0))
INSTALLED = ("torch", "accelerate", "huggingface", "trl")  # by the extra `dev`


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(make_dataset(tmp_path_factory.mktemp("made")) / "train")


def loader(workers: int) -> dict[str, Any]:
    # 40 or 160 packs leave a ragged end of an epoch.
    return {"global_batch_size": 12, "seed": 5, "block_packs": 4, "num_workers": workers}


def run_probe(job: ProbeJob, ranks: int, folder: Path) -> list[dict[str, Any]]:
    """Run a job on ranks; return the digests of each step and the last position, by rank."""
    folder.mkdir()
    values = asdict(job)
    del values["rank"], values["world_size"]
    (folder / "job.json").write_text(json.dumps(values))
    code, output = run_command([*launcher(ranks), "tests.integrations.probes", str(folder / "job.json")])
    assert code == 0, output
    return [json.loads((folder / f"rank-{rank}.json").read_text()) for rank in range(ranks)]


@pytest.mark.parametrize("schedule", ["as_packed", "dp_balanced"])
@pytest.mark.parametrize("name", PROBES)
def test_a_trainer_reads_the_batches_of_the_loader_and_goes_on_with_other_ranks(data, tmp_path, name, schedule) -> None:
    if missing := missing_packages(name):
        assert name not in INSTALLED, missing
        pytest.skip(f"{' and '.join(missing)} not installed: {INTEGRATIONS[name].install}")
    # The largest pack fits a row, and dp_balanced makes several rows of a global batch.
    settings = {"name": schedule, "max_tokens_per_rank": open_dataset(data).pack_size}
    with RankStream(data, LoaderConfig(**loader(0)), schedule=ScheduleConfig(**settings)) as stream:
        batches = list(islice(stream, 2 * HALF))
    expected = [content_digest([trained_part(row) for row in batch.rows]) for batch in batches]

    job = ProbeJob(name, data, {}, settings, first_step=0, last_step=0, folder=str(tmp_path))
    for first, ranks, workers in JOBS:
        job = replace(job, first_step=first, last_step=first + HALF, loader=loader(workers))
        records = run_probe(job, ranks, tmp_path / f"from-{first}")
        assert [len(record["steps"]) for record in records] == [HALF] * ranks
        of_steps = zip(*(record["steps"] for record in records), strict=True)
        tables = [[np.asarray(table, np.uint64) for rank in step for table in rank] for step in of_steps]
        assert [content_digest(step) for step in tables] == expected[first : first + HALF]
        assert [record["position"] for record in records] == [asdict(batches[job.last_step - 1].state)] * ranks
        job = replace(job, position=records[0]["position"])
