"""Weights that are gathered in the next forward pass are those of the last step wherever they are read."""

from __future__ import annotations

import json

from .conftest import forked, run_command


def test_weights_gathered_behind_layers_train_evaluate_and_save_as_those_gathered_at_once(tmp_path) -> None:
    code, output = run_command([*forked(2), "tests.distributed.overlap_ranks", str(tmp_path)])
    assert code == 0, output
    for rank in range(2):
        found = json.loads((tmp_path / f"rank-{rank}.json").read_text())
        assert found["behind"] == found["at once"]
        losses = found["behind"]["losses"]
        assert found["behind"]["resumed"] == losses[-1]
        assert len(set(losses)) == len(losses)
