"""The layout of the ranks changes no loss: real runs from one checkpoint, by `recipes.parity`."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from .conftest import run_command

FAST = (
    "2 parallel=data_distributed",
    "2 parallel=tp2_sp",
    "2 parallel=cp2",
    "2 parallel=pp2_vpp2 parallel.static_rows=true",
    "4 parallel=tp2_pp2_vpp2",
    "4 parallel=pp2_cp2 parallel.distributed_optimizer=true",
)
SMALLER = (
    "trainer.eval_interval=2",
    "trainer.eval_batches=1",
    "model.num_layers=4",
    "model.hidden_size=32",
    "model.ffn_hidden_size=64",
    "loader.global_batch_size=8",
)
PLANTED = "1 optimizer.weight_decay=0.5"


def parity(folder: Path, *overrides: str) -> tuple[int, str, dict]:
    code, output = run_command([sys.executable, "-m", "recipes.parity", f"folder={folder}", *overrides], timeout_s=3000)
    result = folder / "parity.json"
    return code, output, json.loads(result.read_text()) if result.exists() else {}


def test_layouts_of_two_and_four_ranks_train_as_one_does_and_another_setting_is_named(tmp_path) -> None:
    cases = json.dumps([*FAST, PLANTED])
    code, output, result = parity(tmp_path / "parity", "steps=3", f"sft_more={json.dumps(SMALLER)}", f"layouts={cases}")
    assert code == 1, output
    planted = result.pop("1x optimizer.weight_decay=0.5")
    assert "loss differs by" in planted["problems"][0]
    assert "1x optimizer.weight_decay=0.5: loss differs by" in output
    assert f"{len(FAST)} of {len(FAST) + 1} cases train as the reference does" in output
    assert len(result) == len(FAST)
    for name, case in result.items():
        assert case["problems"] == [], name
        assert case["steps"] == 5, name
        assert case["largest"]["loss"] <= 1e-5, name
        assert case["largest"]["validation_loss"] <= 1e-5, name
        assert case["largest"]["grad_norm"] <= 1e-4, name


@pytest.mark.nightly
@pytest.mark.timeout(3600)
def test_every_layout_of_up_to_eight_ranks_trains_twenty_steps_to_the_losses_of_one(tmp_path) -> None:
    code, output, result = parity(tmp_path / "parity")
    assert code == 0, output
    assert len(result) >= 16
    assert {case["steps"] for case in result.values()} == {22}
