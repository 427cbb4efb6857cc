"""Losses equal the recorded ones, with either version of Megatron-Core."""

from __future__ import annotations

import json

import pytest
from harness.recipes.parity import make_dataset

from harness.plan import SftConfig
from harness.recipes import sft

from .conftest import ROOT, read_metrics, run_here

GOLDEN = ROOT / "tests" / "golden" / "losses_cpu.json"


def test_a_small_run_has_the_recorded_losses(tmp_path) -> None:
    """Largest relative differences: loss 1e-5, gradient norm 1e-4; a change of the model, the data order, the schedule
    or the optimizer is larger."""
    golden = json.loads(GOLDEN.read_text())
    data = make_dataset(tmp_path / "data")
    settings = [f"data.path={data}", f"run_dir={tmp_path / 'run'}", *golden["settings"]]
    run_here(sft, SftConfig, settings)
    steps = read_metrics(tmp_path / "run")
    assert len(steps) == len(golden["loss"]) == 8
    assert [step["trained_tokens"] for step in steps] == golden["trained_tokens"]
    assert [step["loss"] for step in steps] == pytest.approx(golden["loss"], rel=1e-5)
    assert [step["grad_norm"] for step in steps] == pytest.approx(golden["grad_norm"], rel=1e-4)
    validated = [step["validation_loss"] for step in steps if step["validation_loss"] is not None]
    assert validated == pytest.approx(golden["validation_loss"], rel=1e-5)
