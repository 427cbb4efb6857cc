"""A checkpoint of a context-parallel size for each row resumes under one size for all rows, and the other way round."""

from __future__ import annotations

import pytest

from harness.train.digests import read_digests

from .conftest import overrides_of, read_metrics, run_sft

# Sequences have up to 79 tokens, so some take all four ranks.
DYNAMIC = "schedule=dynamic_context schedule.max_tokens_per_rank=24"
# name: run that it resumes from, its last step, its settings.
RUNS = {
    "undisturbed": (None, 6, "schedule.name=cost_balanced parallel=cp4"),
    "dynamic": (None, 2, DYNAMIC),
    "fixed": ("dynamic", 4, "schedule.name=cost_balanced parallel=cp2"),
    "dynamic again": ("fixed", 6, f"{DYNAMIC} parallel.distributed_optimizer=true"),
}


@pytest.mark.nightly
def test_a_run_that_changes_between_one_size_and_a_size_for_each_row_has_the_losses_of_one_that_does_not(
    dataset, tmp_path
) -> None:
    runs = []
    for name, (start, last, settings) in RUNS.items():
        more = (f"trainer.steps={last}", "trainer.eval_interval=2", "trainer.checkpoint_interval=0", "resume=auto")
        overrides = overrides_of(dataset, tmp_path / name, *more, "trainer.record_digests=true", *settings.split())
        runs.append((overrides, str(tmp_path / name), None if start is None else str(tmp_path / start)))
    run_sft(4, tmp_path, runs)
    shared = [max(row.shared_by for row in step.rows) for step in read_digests(tmp_path / "dynamic again")]
    assert shared == [4, 4, 1, 1, 4, 4]
    expected, changed = (read_metrics(tmp_path / name) for name in ("undisturbed", "dynamic again"))
    for column in ("step", "epoch", "packs_consumed", "tokens", "trained_tokens", "learning_rate"):
        assert [step[column] for step in changed] == [step[column] for step in expected], column
    for column, nearness in (("loss", 1e-6), ("validation_loss", 1e-6), ("grad_norm", 1e-5)):
        values = [[step[column] or 0.0 for step in steps] for steps in (changed, expected)]
        assert values[0] == pytest.approx(values[1], rel=nearness), column
