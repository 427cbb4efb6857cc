"""A graph of a row has the exchanges between tensor-parallel ranks, and none between data-parallel ones.

As a program on ranks, `FOLDER`: rows are replayed from a graph, exchanges between ranks included.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from megatron.core import parallel_state
from recorded_graphs import RecordedGraph, recorded_graphs

from harness.megatron.job import runtime
from harness.megatron.job.runtime import join
from harness.megatron.step import MegatronStep
from harness.plan import ModelConfig, OptimizerConfig, ParallelConfig
from harness.records import SequenceView
from harness.thd import ThdBatch, build_thd_batch

from .conftest import found_by, run_ranks


@pytest.mark.nightly
def test_replayed_rows_train_as_computed_ones_on_two_ranks(tmp_path) -> None:
    run_ranks(2, "test_row_graphs", tmp_path)
    for found in found_by(tmp_path):
        for name, exchanges in (("tp2_sp", True), ("data_distributed", False)):
            one = found[name]
            assert one["replays"] == 5
            assert (one["exchanges"] > 10) is exchanges
            for replayed, computed in zip(one["replayed"], one["computed"], strict=True):
                assert replayed == pytest.approx(computed, rel=1e-4)
            assert len({loss for loss, _ in one["replayed"]}) == 4


MODEL = ModelConfig(num_layers=2, hidden_size=32, ffn_hidden_size=64, num_attention_heads=2, num_query_groups=2)
LAYOUTS: dict[str, dict[str, Any]] = {
    "tp2_sp": {"tensor_parallel_size": 2, "sequence_parallel": True},
    "data_distributed": {"distributed_optimizer": True},
}


def rows_of(step: int, dp_rank: int, multiple: int) -> list[ThdBatch]:
    numbers = np.random.default_rng([step, dp_rank])
    rows = []
    for _ in range(1 + step % 2):
        documents = [numbers.integers(0, 100, length).astype(np.int32) for length in numbers.integers(2, 12, 1 + step)]
        views = [SequenceView(ids, np.r_[np.ones(len(ids) - 1, np.uint8), [0]]) for ids in documents]
        rows.append(build_thd_batch(views, pad_to_multiple=multiple))
    return rows


def train(job: runtime.Runtime, *, graphs: bool, **layout: Any) -> list[list[float]]:
    parallel_state.destroy_model_parallel()
    parallel = ParallelConfig(static_rows=True, cuda_graphs=graphs, **layout)
    place = join(parallel, job.world_size)
    step = MegatronStep(
        MODEL,
        parallel,
        place,
        device=job.device,
        vocab_size=128,
        optimizer=OptimizerConfig(lr=0.01, min_lr_ratio=1, warmup_steps=0),
        pad_rows_to=64,
        max_sequences=5,
    )
    results = [step.train(rows_of(number, place.dp_rank, parallel.pad_to_multiple)) for number in range(4)]
    return [[one.loss, one.grad_norm] for one in results]


def main(folder: Path) -> None:
    found: dict[str, Any] = {}
    with runtime.start("cpu") as job:
        for name, layout in LAYOUTS.items():
            with recorded_graphs() as graphs:
                replayed = train(job, graphs=True, **layout)
                exchanges = [operation for operation, *_ in graphs[0].operations if operation.namespace == "c10d"]
            found[name] = {
                "replayed": replayed,
                "computed": train(job, graphs=False, **layout),
                "exchanges": len(exchanges),
                "replays": sum(graph.replays for graph in RecordedGraph.made),
            }
    (folder / f"rank-{job.rank}.json").write_text(json.dumps(found))


if __name__ == "__main__":
    torch.set_num_threads(1)
    main(Path(sys.argv[1]))
