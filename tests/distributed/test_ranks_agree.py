"""The layout of the ranks changes no loss."""

from __future__ import annotations

import shutil

import pytest

LAYOUTS = {
    "data-2": (),
    "tensor-2": ("parallel.tensor_parallel_size=2",),
    "tensor-2-sequence": ("parallel.tensor_parallel_size=2", "parallel.sequence_parallel=true"),
    "pipeline-2": ("parallel.pipeline_parallel_size=2",),
    "context-2": ("parallel.context_parallel_size=2",),
}


def test_losses_of_one_rank_and_of_other_layouts_agree_at_every_step_from_the_same_checkpoint(
    several_sft, tmp_path
) -> None:
    started = tmp_path / "started"
    go_on = ("trainer.steps=8", "trainer.eval_interval=4", "trainer.checkpoint_interval=0", "resume=true")
    several_sft({started: ("trainer.steps=2", "trainer.eval_interval=0")}, ranks=1)
    shutil.copytree(started, tmp_path / "one-rank")
    expected = several_sft({tmp_path / "one-rank": go_on}, ranks=1)[tmp_path / "one-rank"]
    assert expected.column("step") == [1, 2, 3, 4, 5, 6, 7, 8]
    assert len(set(expected.column("loss"))) == 8
    for name in LAYOUTS:
        shutil.copytree(started, tmp_path / name)
    runs = several_sft({tmp_path / name: (*go_on, *overrides) for name, overrides in LAYOUTS.items()}, ranks=2)
    assert len(runs) == len(LAYOUTS)
    for folder, run in runs.items():
        assert run.column("step") == expected.column("step"), folder.name
        assert run.column("trained_tokens") == expected.column("trained_tokens"), folder.name
        assert run.column("tokens") == expected.column("tokens"), folder.name
        assert run.column("loss") == pytest.approx(expected.column("loss"), rel=1e-5), folder.name
        assert run.column("grad_norm") == pytest.approx(expected.column("grad_norm"), rel=1e-4), folder.name
        for step in (3, 7):
            assert run.column("validation_loss")[step] == pytest.approx(
                expected.column("validation_loss")[step], rel=1e-5
            ), folder.name
