"""Killed and resumed runs train the same as an undisturbed one, and tonight's run agrees with the baseline."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from harness.recipes.parity import make_dataset
from small_packs import TINY

from harness.formats import FORMATS, convert_dataset
from harness.parity.baselines import against
from harness.parity.compare import IDENTICAL, compare_runs, on_device
from harness.parity.locate import recorded_run
from harness.parity.result import REPORT_FILE, to_json

from ..distributed.conftest import ROOT, kill_after, launcher, run_command

pytestmark = [pytest.mark.nightly, pytest.mark.timeout(1200)]
SETTINGS = (
    *TINY,
    "loader.global_batch_size=16",
    "loader.block_packs=4",
    "schedule.max_tokens_per_rank=256",
    "optimizer.warmup_steps=5",  # as the baseline was made
    "trainer.steps=24",
    "trainer.eval_interval=8",
    "trainer.checkpoint_interval=5",
    "trainer.record_batches=true",
    "resume=auto",
)


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_dataset(tmp_path_factory.mktemp("resume") / "data")


def command(data: Path, folder: Path, *overrides: str, ranks: int = 1) -> list[str]:
    return [*launcher(ranks), "harness.recipes.sft", f"data.path={data}", f"run_dir={folder}", *SETTINGS, *overrides]


@pytest.fixture(scope="module")
def undisturbed(data, device, tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("undisturbed") / "run"
    code, output = run_command(command(data, folder, f"trainer.device={device}", "loader.num_workers=0"))
    assert code == 0, output
    return folder


@pytest.mark.parametrize("format", list(FORMATS))
def test_a_run_with_four_workers_killed_twice_trains_the_same_as_an_undisturbed_one(
    data, undisturbed, device, tmp_path, format
) -> None:
    """The kills are in the first epoch (10 steps each) and in the second, between checkpoints."""
    for split in ("train", "validation"):
        convert_dataset(data / split, tmp_path / "data" / split, format=format)
    folder = tmp_path / "run"
    arguments = command(tmp_path / "data", folder, f"trainer.device={device}", "loader.num_workers=4")
    kill_after(7, arguments, folder)
    kill_after(18, arguments, folder)
    code, output = run_command(arguments)
    assert code == 0, output
    checks = compare_runs(
        recorded_run(undisturbed), recorded_run(folder), on_device(IDENTICAL, device), same_layout=True
    )
    assert [check.difference.message for check in checks if check.difference is not None] == []
    assert len(checks) == 7


def test_tonights_run_agrees_with_the_baseline(device, reports, tmp_path) -> None:
    """Compare with `tests/golden/baselines/sft-cpu.json`; data is compared on any device."""
    folder = tmp_path / "run"
    data = make_dataset(tmp_path / "data")
    code, output = run_command(command(data, folder, f"trainer.device={device}", "loader.num_workers=4"))
    assert code == 0, output
    report = against("sft-cpu", folder, ROOT / "tests/golden/baselines", command="pytest -m nightly")
    if reports is not None:
        (reports / "baseline").mkdir(parents=True, exist_ok=True)
        (reports / "baseline" / REPORT_FILE).write_text(to_json(report))
    checks = {check.name: check for check in report.cells[-1].checks}
    wrong = [check.difference.message for check in checks.values() if check.difference is not None]
    if device == "cpu":
        assert (report.verdict, wrong) == ("same", []), report.cells[-1].reason
    else:  # another device rounds otherwise, by more the longer it trains; its data may not differ
        assert all(checks[name].passed for name in ("data", "steps", "trained_tokens")), wrong
    shutil.rmtree(folder)
