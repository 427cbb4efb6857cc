"""Megatron-LM's calls of its packing scheduler give every rank the rows that the loader plans."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from .conftest import run_jobs

TWO = [
    ({}, "dp_balanced"),
    ({"tensor_parallel_size": 2, "sequence_parallel": True}, "cost_balanced"),
    ({"pipeline_parallel_size": 2, "virtual_pipeline_parallel_size": 2}, "dp_balanced"),
    ({"context_parallel_size": 2}, "dp_balanced"),
]
FOUR = [
    ({}, "cost_balanced"),
    ({"tensor_parallel_size": 2, "pipeline_parallel_size": 2, "virtual_pipeline_parallel_size": 2}, "dp_balanced"),
    ({"context_parallel_size": 2, "tensor_parallel_size": 2, "sequence_parallel": True}, "dp_balanced"),
]
FOUR_MORE = [
    ({"pipeline_parallel_size": 4}, "dp_balanced"),
    ({"tensor_parallel_size": 2}, "dp_balanced"),
    ({"context_parallel_size": 2, "pipeline_parallel_size": 2}, "cost_balanced"),
]


@pytest.mark.parametrize(
    ("ranks", "layouts"),
    [(2, TWO), *(pytest.param(4, four, marks=pytest.mark.nightly) for four in (FOUR, FOUR_MORE))],
    ids=["two ranks", "four ranks", "four ranks, other layouts"],
)
def test_rows_of_a_stream_are_those_of_the_plan_and_a_broken_stream_stops_every_rank(
    dataset: Path, tmp_path: Path, ranks: int, layouts: list[tuple[dict[str, Any], str]]
) -> None:
    out = tmp_path / "report"
    run_jobs(ranks, "stream_ranks", tmp_path, layouts, dataset / "train", out)
    for rank in range(ranks):
        report = [json.loads(line) for line in Path(f"{out}.{rank}").read_text().splitlines()]
        assert [(one["layout"], one["schedule"]) for one in report] == layouts
        for one in report:
            assert one["different"] == [], one
            assert one["rows"] >= 3, one
            assert one["ended"], one
            assert one["error"] == ("planted" if rank == 0 else "rank 0: planted"), one
