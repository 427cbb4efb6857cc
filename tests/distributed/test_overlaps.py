"""Weights that are gathered in the next forward pass are those of the last step wherever they are read."""

from __future__ import annotations

from .conftest import found_by, run_ranks


def test_weights_gathered_behind_layers_train_evaluate_and_save_as_those_gathered_at_once(tmp_path) -> None:
    run_ranks(2, "overlap_ranks", tmp_path)
    for found in found_by(tmp_path):
        assert found["behind"] == found["at once"]
        losses = found["behind"]["losses"]
        assert found["behind"]["resumed"] == losses[-1]
        assert len(set(losses)) == len(losses)
