"""Write run folders as `recipes.sft` does, with batches of a real loader and made-up losses."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path

from step_metrics import metrics

from harness.formats import open_dataset
from harness.loader import DataConfig, Loader, LoaderConfig
from harness.plan import SftConfig, TrainerConfig
from harness.schedule import ScheduleConfig
from harness.settings import to_yaml
from harness.train.digests import DigestWriter, merge_ranks, rank_rows
from harness.train.metrics import METRICS_FILE, StepMetrics


def write_run(
    folder: Path,
    data: Path,
    *,
    steps: int = 4,
    seed: int = 0,
    ranks: int = 1,
    change: Callable[[StepMetrics], StepMetrics] = lambda made: made,
) -> Path:
    """Write a run of `steps` steps of `ranks` ranks on `data / "train"`; `change` edits the metrics of each step."""
    loading = LoaderConfig(global_batch_size=6, num_workers=0, seed=seed)
    schedule = ScheduleConfig("dp_balanced", 512)
    loaders = [
        Loader(open_dataset(data / "train"), loading, schedule=schedule, num_steps=steps, dp_rank=rank, dp_size=ranks)
        for rank in range(ranks)
    ]
    folder.mkdir(parents=True)
    settings = SftConfig(data=DataConfig(str(data)), trainer=TrainerConfig(device="cpu"), run_dir=str(folder))
    (folder / "config.yaml").write_text(to_yaml(settings))
    digests = DigestWriter(folder)
    lines = []
    for number, batches in enumerate(zip(*loaders, strict=True), start=1):
        batch = batches[0]
        rows = [
            rank_rows(one, process=rank, dp_rank=rank, is_first_stage=True, is_last_stage=True)
            for rank, one in enumerate(batches)
        ]
        digests.write(merge_ranks(number, batch, rows))
        made = metrics(
            number,
            6.0 / number,
            epoch=batch.epoch,
            tokens=batch.num_tokens,
            trained_tokens=sum(row.num_trained_tokens for one in batches for row in one.rows),
            fill=batch.imbalance.fill,
            num_microbatches=batch.num_microbatches,
            packs_consumed=batch.state.packs_consumed,
        )
        lines.append(json.dumps(asdict(change(made))) + "\n")
    digests.close()
    (folder / METRICS_FILE).write_text("".join(lines))
    return folder
