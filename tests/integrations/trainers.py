"""Programs of this folder, run with the Python of another trainer's environment."""

from __future__ import annotations

import json
import os
import subprocess
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from environments import ROOT, Environment

from tests.distributed.conftest import kill_tree

HERE = Path(__file__).parent


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
