"""A graph of a row has the exchanges between tensor-parallel ranks, and none between data-parallel ones."""

from __future__ import annotations

import json

import pytest

from .conftest import forked, run_command


@pytest.mark.nightly
def test_replayed_rows_train_as_computed_ones_on_two_ranks(tmp_path) -> None:
    code, output = run_command([*forked(2), "tests.distributed.graph_ranks", str(tmp_path)])
    assert code == 0, output
    ranks = [json.loads((tmp_path / f"rank-{rank}.json").read_text()) for rank in range(2)]
    for found in ranks:
        for name, exchanges in (("tp2_sp", True), ("data_distributed", False)):
            one = found[name]
            assert one["replays"] == 5
            assert (one["exchanges"] > 10) is exchanges
            for replayed, computed in zip(one["replayed"], one["computed"], strict=True):
                assert replayed == pytest.approx(computed, rel=1e-4)
            assert len({loss for loss, _ in one["replayed"]}) == 4
