"""A checkpoint of the plain or the distributed optimizer resumes under the other, and on other layouts."""

from __future__ import annotations

import pytest

from .conftest import SMALL, found_by, read_metrics, run_ranks, run_sft

pytestmark = pytest.mark.submission

PLAIN, SPLIT = "parallel=data", "parallel=data_distributed"
# name: run that it resumes from, its last step, its settings.
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


@pytest.mark.nightly
def test_a_run_that_changes_its_optimizer_twice_has_the_losses_of_one_that_does_not(dataset, tmp_path) -> None:
    runs = []
    for dtype, by_name in RUNS.items():
        for name, (start, last, settings) in by_name.items():
            more = ("trainer.eval_interval=0", "trainer.checkpoint_interval=0", "resume=auto", *settings.split())
            overrides = [f"data.path={dataset}", *SMALL, f"model.dtype={dtype}", f"trainer.steps={last}", *more]
            before = None if start is None else str(tmp_path / f"{dtype}-{start}")
            runs.append((overrides, str(tmp_path / f"{dtype}-{name}"), before))
    run_sft(2, tmp_path, runs)
    for dtype, nearness in (("float32", 1e-5), ("bfloat16", 2e-3)):
        expected = read_metrics(tmp_path / f"{dtype}-undisturbed")
        for name in LAST[dtype]:
            changed = read_metrics(tmp_path / f"{dtype}-{name}")
            assert [step["step"] for step in changed] == [1, 2, 3, 4, 5, 6]
            for column in ("loss", "grad_norm", "learning_rate"):
                assert [step[column] for step in changed] == pytest.approx(
                    [step[column] for step in expected], rel=nearness * (10 if column == "grad_norm" else 1)
                ), (dtype, name, column)


def test_a_rank_copies_and_writes_its_own_share_and_gets_it_back_bit_by_bit(tmp_path) -> None:
    """It gathers nothing that others own, and either optimizer may have saved it."""
    run_ranks(2, "checkpoint_ranks", tmp_path)
    for dtype in ("float32", "bfloat16"):
        for found in (rank[dtype] for rank in found_by(tmp_path)):
            assert found["same"] == [True, True], dtype
            assert found["made"] <= 1.3 * found["own"]
            assert 0.7 * found["own"] <= found["written"] <= 1.3 * found["own"]
