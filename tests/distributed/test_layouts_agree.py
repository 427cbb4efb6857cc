"""The layout of the ranks changes no loss: real runs from one checkpoint, by `recipes.parity`."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from harness.parity.result import REPORT_FILE, CellResult, read_report

from .conftest import run_command

FAST = (
    "2 parallel=data_distributed",
    "2 parallel=tp2_sp",
    "2 parallel=cp2",
    "2 parallel=pp2_vpp2 parallel.static_rows=true",
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


def parity(folder: Path, *overrides: str) -> tuple[int, str, dict[str, CellResult]]:
    code, output = run_command(
        [sys.executable, "-m", "recipes.parity", "check=layouts", f"folder={folder}", *overrides], timeout_s=3000
    )
    path = folder / REPORT_FILE
    return code, output, {cell.name: cell for cell in read_report(path).cells} if path.exists() else {}


def test_layouts_of_two_ranks_train_like_one_rank_and_a_differing_setting_is_named(tmp_path) -> None:
    cases = json.dumps(["1 parallel=data", *FAST, PLANTED])
    code, output, cells = parity(tmp_path / "parity", "steps=3", f"sft_more={json.dumps(SMALLER)}", f"layouts={cases}")
    assert code == 1, output
    planted = cells.pop("layouts: weight_decay=0.5")
    assert planted.status == "different"
    assert planted.first_difference.field == "loss"
    assert "layouts: weight_decay=0.5: step 4: loss is" in output
    assert f"{len(FAST)} of {len(FAST) + 1} compared cells are the same: DIFFERENT" in output
    reference = cells.pop("layouts: data")
    assert (reference.status, reference.reference) == ("same", None)
    assert len(cells) == len(FAST)
    for name, cell in cells.items():
        assert (cell.status, cell.reference) == ("same", "layouts: data"), name
        assert cell.series.step == [1, 2, 3, 4, 5], name
        largest = {check.name: check.largest for check in cell.checks if check.largest is not None}
        assert largest["loss"] <= 1e-5, name
        assert largest["validation_loss"] <= 1e-5, name
        assert largest["grad_norm"] <= 1e-4, name
        assert {check.name for check in cell.checks} >= {"data", "steps", "trained_tokens"}, name


@pytest.mark.nightly
@pytest.mark.timeout(3600)
def test_every_layout_of_up_to_eight_ranks_trains_twenty_steps_to_the_losses_of_one_rank(tmp_path) -> None:
    code, output, cells = parity(tmp_path / "parity")
    assert code == 0, output
    assert len(cells) >= 17
    assert {len(cell.series.step) for cell in cells.values()} == {22}
    assert [cell.name for cell in cells.values() if cell.reference is None] == ["layouts: data"]
