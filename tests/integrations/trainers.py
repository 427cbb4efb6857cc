"""Programs of this folder, run with the Python of another trainer's environment."""

from __future__ import annotations

import json
import os
import subprocess
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
from environments import ROOT, Environment

from harness.formats import open_dataset
from harness.loader import Loader, LoaderConfig, RankLayout
from harness.schedule import ScheduleConfig
from harness.thd import ThdBatch, pad_row
from tests.distributed.conftest import kill_tree

HERE = Path(__file__).parent


def rows_of_loader(
    data: Path, first: int, last: int, *, row_tokens: int | None = None, block_packs: int = 4, **layout: int
) -> list[ThdBatch]:
    """Return the rows of these steps of six packs, counted from 1, as the loader gives them to one rank."""
    config = LoaderConfig(global_batch_size=6, num_workers=0, block_packs=block_packs)
    options = {"schedule": ScheduleConfig("as_packed", 256), "layout": RankLayout(**layout)}
    loader = Loader(open_dataset(data / "train"), config, **options)
    rows = [row for batch in islice(loader, first - 1, last) for row in batch.rows]
    return rows if row_tokens is None else [pad_row(row, row_tokens) for row in rows]


@dataclass(frozen=True)
class Trained:
    """Losses by step, and per rank the arrays of every microbatch that its model received."""

    losses: dict[int, float]
    rows: list[list[dict[str, Any]]]


@dataclass(frozen=True)
class Trainer:
    """Runs programs of this folder with the Python of an environment."""

    environment: Environment
    folder: Path

    def run(self, program: str, settings: dict[str, Any], *, ranks: int = 1, code: int = 0) -> str:
        file = self.folder / "settings.json"
        file.write_text(json.dumps(settings))
        launch = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
        variables = {**os.environ, "PYTHONPATH": f"{ROOT}:{HERE}", "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
        process = subprocess.Popen(
            [self.environment.python, "-W", "ignore", *launch, HERE / program, file],
            cwd=self.folder,
            env=variables,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        try:
            printed, _ = process.communicate(timeout=600)
        except BaseException:
            # A trainer that failed in one rank leaves the others waiting.
            kill_tree(process)
            process.communicate()
            raise
        assert process.returncode == code, printed[-6000:]
        return printed

    def train(self, program: str, settings: dict[str, Any], *, ranks: int = 1) -> Trained:
        out = self.folder / f"out-{len(list(self.folder.glob('out-*')))}"
        out.mkdir()
        self.run(program, {**settings, "out": str(out)}, ranks=ranks)
        rows = []
        for rank in range(ranks):
            with np.load(out / f"rank{rank}.npz") as arrays:
                count = 1 + max(int(name.partition(".")[0]) for name in arrays)
                made: list[dict[str, Any]] = [{} for _ in range(count)]
                for name, value in arrays.items():
                    number, _, field = name.partition(".")
                    made[int(number)][field] = value
            rows.append(made)
        steps = json.loads((out / f"rank{ranks - 1}.json").read_text())["steps"]
        return Trained({one["step"]: one["loss"] for one in steps}, rows)
