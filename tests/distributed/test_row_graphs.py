"""A graph of a row has the exchanges between tensor-parallel ranks, and none between data-parallel ones."""

from __future__ import annotations

import pytest

from .conftest import found_by, run_ranks


@pytest.mark.nightly
def test_replayed_rows_train_as_computed_ones_on_two_ranks(tmp_path) -> None:
    run_ranks(2, "graph_ranks", tmp_path)
    for found in found_by(tmp_path):
        for name, exchanges in (("tp2_sp", True), ("data_distributed", False)):
            one = found[name]
            assert one["replays"] == 5
            assert (one["exchanges"] > 10) is exchanges
            for replayed, computed in zip(one["replayed"], one["computed"], strict=True):
                assert replayed == pytest.approx(computed, rel=1e-4)
            assert len({loss for loss, _ in one["replayed"]}) == 4
