"""The training loss of each dataset of a blend is that of its tokens alone, on every layout."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path

import pytest

from harness.parity.compare import Tolerances, compare_runs
from harness.parity.locate import recorded_run
from harness.plan import SftConfig
from harness.recipes import sft

from .conftest import forked, overrides_of, run_here, train

# Rates that change nothing: every step has the losses of the weights that are drawn.
STILL = (
    *("optimizer.lr=1e-30", "optimizer.weight_decay=0", "trainer.steps=2", "trainer.record_digests=true"),
    "trainer.checkpoint_interval=1",
)


def blended(dataset: Path, folder: Path, *more: str) -> list[str]:
    blend = f"data.blend=[{{path:{dataset}/train}},{{path:{dataset}/validation}}]"
    return [*overrides_of(dataset, folder, *STILL, "model.tie_embeddings=true", *more), blend]


def test_the_loss_of_a_source_is_that_of_a_run_on_it_alone(dataset, tmp_path) -> None:
    whole, source = ("loader.global_batch_size=10000", "trainer.steps=1"), dataset / "train"
    run_here(sft, SftConfig, blended(dataset, tmp_path / "both", *whole))
    run_here(sft, SftConfig, [*overrides_of(source, tmp_path / "alone", *STILL), *whole])
    ([both], [alone]) = (recorded_run(tmp_path / name).steps for name in ("both", "alone"))
    other = both.source_losses.pop(str(dataset / "validation"))
    assert both.source_losses == pytest.approx({str(source): alone.loss}, rel=1e-6)
    assert other != pytest.approx(alone.loss, rel=1e-3)
    report = (tmp_path / "both" / "report.md").read_text()
    assert f"training loss of {source} | {alone.loss:.4f} at step 1" in report


# Two data-parallel ranks of two stages; at night two context-parallel ones.
@pytest.mark.parametrize(
    "layout",
    [pytest.param("pp2", marks=pytest.mark.submission), pytest.param("pp2_cp2", marks=pytest.mark.nightly)],
)
def test_losses_of_sources_agree_with_one_rank_from_one_checkpoint(dataset, tmp_path, layout) -> None:
    alone, folder = tmp_path / "alone", tmp_path / "run"
    run_here(sft, SftConfig, blended(dataset, alone))
    shutil.copytree(alone, folder)
    shutil.rmtree(folder / "checkpoints" / "step-00000002")
    arguments = blended(dataset, folder, f"parallel={layout}", "resume=true")
    train(folder, arguments, ranks=4, start=forked)
    expected, found = recorded_run(alone), recorded_run(folder)
    checks = compare_runs(expected, found, Tolerances())
    assert [check.difference for check in checks if check.difference is not None] == []
    assert "sources" in [check.name for check in checks]
    last = found.steps[-1]
    wrong = {name: loss * 1.001 for name, loss in last.source_losses.items()}
    changed = replace(found, steps=[*found.steps[:-1], replace(last, source_losses=wrong)])
    [failed] = [check for check in compare_runs(expected, changed, Tolerances()) if not check.passed]
    assert (failed.name, failed.difference.step, failed.difference.field) == ("sources", 2, str(dataset / "train"))
