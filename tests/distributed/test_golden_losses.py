"""Losses of today are those that were written down, with either version of Megatron-Core."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from recipes.parity import make_dataset

from .conftest import read_metrics, run_command

GOLDEN = Path(__file__).resolve().parents[1] / "golden" / "losses_cpu.json"


def test_a_small_run_has_the_losses_that_were_written_down(tmp_path) -> None:
    """Largest relative differences: loss 1e-5, gradient norm 1e-4; a change of the model, the data order, the schedule
    or the optimizer is larger."""
    golden = json.loads(GOLDEN.read_text())
    data = make_dataset(tmp_path / "data")
    settings = [f"data.path={data}", f"run_dir={tmp_path / 'run'}", *golden["settings"]]
    code, output = run_command([sys.executable, "-m", "recipes.sft", *settings])
    assert code == 0, output
    steps = read_metrics(tmp_path / "run")
    assert len(steps) == len(golden["loss"]) == 8
    assert [one["trained_tokens"] for one in steps] == golden["trained_tokens"]
    assert [one["loss"] for one in steps] == pytest.approx(golden["loss"], rel=1e-5)
    assert [one["grad_norm"] for one in steps] == pytest.approx(golden["grad_norm"], rel=1e-4)
    validated = [one["validation_loss"] for one in steps if one["validation_loss"] is not None]
    assert validated == pytest.approx(golden["validation_loss"], rel=1e-5)
