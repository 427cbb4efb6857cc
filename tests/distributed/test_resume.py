"""A run resumes from the newest whole checkpoint as if nothing had happened, also with a newer Megatron-Core."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from harness.recipes.parity import ParityConfig

from harness.config import compose_config
from harness.megatron import compat
from harness.plan import SftConfig
from harness.recipes import sft as sft_recipe

from .conftest import ROOT, forked, overrides_of, read_metrics, run_command, run_here

# Runs that are killed: test_stopping on two ranks, and tests/kills at any write.
pytestmark = [pytest.mark.nightly, pytest.mark.submission]

SETTINGS = ("trainer.steps=9", "trainer.eval_interval=4", "trainer.checkpoint_interval=3")
SAME = (
    *("step", "epoch", "loss", "validation_loss", "learning_rate", "grad_norm", "tokens", "trained_tokens"),
    "packs_consumed",
)


def test_a_checkpoint_cut_short_is_passed_over_and_other_data_is_refused(sft, tmp_path, dataset) -> None:
    folder = tmp_path / "run"
    undisturbed = sft(tmp_path / "undisturbed", *SETTINGS)
    assert sft(folder, *SETTINGS, "trainer.steps=5").code == 0
    checkpoints = folder / "checkpoints"
    assert sorted(path.name for path in checkpoints.iterdir()) == ["step-00000003", "step-00000005"]
    (checkpoints / "step-00000005").rename(checkpoints / "step-00000005.unfinished")
    (checkpoints / "step-00000007").mkdir()
    (checkpoints / "step-00000001.removed").mkdir()

    other = sft(folder, *SETTINGS, "resume=true", f"data.path={dataset / 'validation'}")
    assert other.code == 2
    assert "trained on other data" in other.output
    assert "Traceback" not in other.output

    other = sft(folder, *SETTINGS, "resume=true", "model.num_layers=2")
    assert (other.code, "the checkpoint does not fit this run" in other.output) == (2, True), other.output
    assert "Traceback" not in other.output
    assert "num_layers: 4" in (folder / "config.yaml").read_text()

    resumed = sft(folder, *SETTINGS, "resume=true")
    assert resumed.code == 0, resumed.output
    assert resumed.column("step") == list(range(1, 10))
    # Leftovers of writing or removing in the killed run are gone.
    assert [path.name for path in checkpoints.iterdir() if path.suffix] == []
    assert [{name: line[name] for name in SAME} for line in resumed.metrics] == [
        {name: line[name] for name in SAME} for line in undisturbed.metrics
    ]


@pytest.mark.skipif(not compat.COMMON_VALUES_HAVE_A_FILE, reason="begins with megatron-core 0.16")
@pytest.mark.parametrize(("kind", "parallel", "ranks"), [("dense", "data", 1), ("hybrid_moe", "tp2_sp", 2)])
def test_megatron_core_0_19_goes_on_from_checkpoints_of_0_16_and_the_reverse_is_refused(
    dataset, tmp_path, kind, parallel, ranks
) -> None:
    found = subprocess.run([ROOT / ".ci/versions"], capture_output=True, text=True, check=False)
    if found.returncode == 3:
        pytest.skip("needs Python 3.12")
    assert found.returncode == 0, found.stderr
    newer = found.stdout.strip()
    settings = ["trainer.steps=4", "trainer.checkpoint_interval=2", "trainer.eval_interval=0"]
    settings += compose_config("parity", ParityConfig).kinds.get(kind, "").split()

    def train(python: str, folder: Path, *more: str, ranks: int = 1) -> tuple[int, str]:
        module = [*forked(ranks)[1:], "harness.recipes.sft"]
        return run_command([python, *module, *overrides_of(dataset, folder, *settings, *more)])

    run_here(sft_recipe, SftConfig, overrides_of(dataset, tmp_path / "older", *settings))
    code, output = train(newer, tmp_path / "newer")
    assert code == 0, output
    undisturbed = read_metrics(tmp_path / "older")
    for name in ("older", "newer"):
        shutil.copytree(tmp_path / name, tmp_path / f"{name}-again")
        shutil.rmtree(tmp_path / f"{name}-again" / "checkpoints" / "step-00000004")

    code, output = train(newer, tmp_path / "older-again", f"parallel={parallel}", "resume=true", ranks=ranks)
    assert code == 0, output
    resumed = read_metrics(tmp_path / "older-again")
    assert json.loads((tmp_path / "older-again" / "resumes.jsonl").read_text())["after_step"] == 2
    assert [line["step"] for line in resumed] == [1, 2, 3, 4]
    for name, tolerance in (("loss", 1e-5), ("grad_norm", 1e-4)):
        expected = [line[name] for line in undisturbed]
        assert [line[name] for line in read_metrics(tmp_path / "newer")] == pytest.approx(expected, rel=tolerance)
        assert [line[name] for line in resumed] == pytest.approx(expected, rel=tolerance)

    code, output = train(sys.executable, tmp_path / "newer-again", "resume=true")
    assert code == 2
    assert "the checkpoint has no common.pt: megatron-core 0.17 and later store its values in a form" in output
    assert "Traceback" not in output
