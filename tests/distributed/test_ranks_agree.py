"""The layout of the ranks changes no loss."""

from __future__ import annotations

import shutil

import pytest


@pytest.fixture
def started(sft, tmp_path):
    """A run of one rank with a checkpoint after its second step."""
    folder = tmp_path / "started"
    run = sft(folder, "trainer.steps=2", "trainer.eval_interval=0", "loader.num_workers=0")
    assert run.code == 0, run.output
    return folder


def test_losses_of_one_rank_and_of_other_layouts_agree_at_every_step_from_the_same_checkpoint(
    sft, started, tmp_path
) -> None:
    layouts = {
        "one rank": (1,),
        "data 2": (2,),
        "tensor 2": (2, "parallel.tensor_parallel_size=2", "parallel.sequence_parallel=true"),
        "pipeline 2": (2, "parallel.pipeline_parallel_size=2"),
        "context 2": (2, "parallel.context_parallel_size=2"),
    }
    runs = {}
    for name, (ranks, *overrides) in layouts.items():
        folder = tmp_path / name.replace(" ", "-")
        shutil.copytree(started, folder)
        runs[name] = sft(
            folder,
            "trainer.steps=8",
            "trainer.eval_interval=4",
            "resume=true",
            "loader.num_workers=0",
            *overrides,
            ranks=ranks,
        )
        assert runs[name].code == 0, runs[name].output
    expected = runs["one rank"]
    assert expected.column("step") == [1, 2, 3, 4, 5, 6, 7, 8]
    assert len(set(expected.column("loss"))) == 8
    for name, run in runs.items():
        assert run.column("step") == expected.column("step"), name
        assert run.column("trained_tokens") == expected.column("trained_tokens"), name
        assert run.column("tokens") == expected.column("tokens"), name
        assert run.column("loss") == pytest.approx(expected.column("loss"), rel=1e-5), name
        assert run.column("grad_norm") == pytest.approx(expected.column("grad_norm"), rel=1e-4), name
        assert run.column("validation_loss")[3] == pytest.approx(expected.column("validation_loss")[3], rel=1e-5), name
