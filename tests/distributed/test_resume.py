"""A run that was killed resumes as if nothing had happened."""

from __future__ import annotations

import pytest

from .conftest import command, kill_after, read_metrics, run_command

# Cheaper tests of the same run by default: test_stopping, and tests/unit/megatron/test_checkpoints.
pytestmark = pytest.mark.nightly

SETTINGS = ("trainer.steps=9", "trainer.eval_interval=4", "trainer.checkpoint_interval=3")
SAME = (
    "step",
    "epoch",
    "loss",
    "validation_loss",
    "learning_rate",
    "grad_norm",
    "tokens",
    "trained_tokens",
    "packs_consumed",
)


@pytest.fixture(scope="module")
def undisturbed(dataset, tmp_path_factory):
    folder = tmp_path_factory.mktemp("undisturbed")
    code, output = run_command(command(dataset, folder / "run", *SETTINGS, ranks=2))
    assert code == 0, output
    return [{name: line[name] for name in SAME} for line in read_metrics(folder / "run")]


# Before the first checkpoint; during its writing; with trained steps after it; during the writing of the last one.
@pytest.mark.parametrize("step", [5, *(pytest.param(step, marks=pytest.mark.nightly) for step in (1, 3, 9))])
def test_a_run_killed_at_a_step_and_resumed_gives_the_same_losses_bit_for_bit(
    dataset, sft, undisturbed, tmp_path, step
) -> None:
    folder = tmp_path / "run"
    kill_after(step, command(dataset, folder, *SETTINGS, ranks=2), folder)
    resumed = sft(folder, *SETTINGS, "resume=auto", ranks=2)
    assert resumed.code == 0, resumed.output
    assert [{name: line[name] for name in SAME} for line in resumed.metrics] == undisturbed


def test_a_checkpoint_cut_short_is_passed_over_and_other_data_is_refused(sft, undisturbed, tmp_path, dataset) -> None:
    folder = tmp_path / "run"
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
    assert resumed.column("loss") == pytest.approx([line["loss"] for line in undisturbed], rel=1e-5)
