"""A checkpoint resumes under another optimizer, on other layouts, and with other sizes of context parallelism."""

from __future__ import annotations

import pytest

from harness.train.digests import read_digests

from .conftest import found_by, overrides_of, read_metrics, run_ranks, run_sft

PLAIN, SPLIT = "parallel=data", "parallel=data_distributed"
# By name: the run that it resumes from, its last step, its settings.
RUNS = {
    dtype: {
        "undisturbed": (None, 6, PLAIN),
        "split": (None, 2, SPLIT),
        "plain-from-split": ("split", 4, PLAIN),
        "split-tensor-from-plain": ("plain-from-split", 6, "parallel=tp2 parallel.distributed_optimizer=true"),
    }
    for dtype in ("float32", "bfloat16")
}
RUNS["bfloat16"] |= {
    "host-tensor": ("split", 4, "parallel=tp2 parallel.distributed_optimizer=true optimizer.offload=0.5"),
    "plain-from-host": ("host-tensor", 6, PLAIN),
}
RUNS["float32"] |= {
    "uneven": ("split", 4, "parallel=pp2 parallel.distributed_optimizer=true parallel.pipeline_layout=Et*3|tL"),
    "plain-from-uneven": ("uneven", 6, PLAIN),
}
LAST = {
    "float32": ["split-tensor-from-plain", "plain-from-uneven"],
    "bfloat16": ["split-tensor-from-plain", "plain-from-host"],
}
# Sequences have up to 79 tokens, so some take all four ranks.
DYNAMIC = "schedule=dynamic_context schedule.max_tokens_per_rank=24"
RUNS["of four ranks"] = {
    "undisturbed": (None, 6, "schedule.name=cost_balanced parallel=cp4"),
    "dynamic": (None, 2, DYNAMIC),
    "fixed": ("dynamic", 4, "schedule.name=cost_balanced parallel=cp2"),
    "dynamic again": ("fixed", 6, f"{DYNAMIC} parallel.distributed_optimizer=true"),
}
LAST["of four ranks"] = ["dynamic again"]


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("kind", "nearness"),
    [
        pytest.param("float32", 1e-5, marks=pytest.mark.submission),
        pytest.param("bfloat16", 2e-3, marks=pytest.mark.submission),
        ("of four ranks", 1e-6),
    ],
)
def test_a_run_that_changes_between_steps_has_the_losses_of_one_that_does_not(dataset, tmp_path, kind, nearness):
    more = ["trainer.eval_interval=2", "trainer.checkpoint_interval=0", "resume=auto", "trainer.record_digests=true"]
    more += [f"model.dtype={kind}"] if kind != "of four ranks" else []
    runs = [
        (
            overrides_of(dataset, tmp_path / name, *more, f"trainer.steps={last}", *settings.split()),
            str(tmp_path / name),
            None if start is None else str(tmp_path / start),
        )
        for name, (start, last, settings) in RUNS[kind].items()
    ]
    run_sft(4 if kind == "of four ranks" else 2, tmp_path, runs)
    expected = read_metrics(tmp_path / "undisturbed")
    for name in LAST[kind]:
        changed = read_metrics(tmp_path / name)
        for column in ("step", "epoch", "packs_consumed", "tokens", "trained_tokens", "learning_rate"):
            assert [step[column] for step in changed] == [step[column] for step in expected], (name, column)
        for column, times in (("loss", 1), ("validation_loss", 1), ("grad_norm", 10)):
            values = [[step[column] or 0.0 for step in steps] for steps in (changed, expected)]
            assert values[0] == pytest.approx(values[1], rel=nearness * times), (name, column)
    if kind == "of four ranks":
        shared = [max(row.shared_by for row in step.rows) for step in read_digests(tmp_path / "dynamic again")]
        assert shared == [4, 4, 1, 1, 4, 4]


@pytest.mark.submission
def test_a_rank_copies_and_writes_its_own_share_and_gets_it_back_bit_by_bit(tmp_path) -> None:
    """It gathers nothing that others own, and either optimizer may have saved it."""
    run_ranks(2, "checkpoint_ranks", tmp_path)
    for dtype in ("float32", "bfloat16"):
        for found in (rank[dtype] for rank in found_by(tmp_path)):
            assert found["same"] == [True, True], dtype
            assert found["made"] <= 1.3 * found["own"]
            assert 0.7 * found["own"] <= found["written"] <= 1.3 * found["own"]
