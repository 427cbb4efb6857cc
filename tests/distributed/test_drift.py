"""A rank whose copy of a parameter is no longer that of the others ends the run, with the parameter, ranks and step.

As a program on ranks, `JOBS.json`: runs of `recipes.sft`, one of whose ranks drifts after step 2. A job is the end of a
parameter's name and overrides; each rank writes its error next to the folder.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

from harness.config import compose_config
from harness.errors import HarnessError
from harness.megatron import prepare_process
from harness.plan import SftConfig
from harness.recipes import sft

from .conftest import overrides_of, read_metrics, run_jobs
from .forked import jobs_of

EXPERTS = ("model.family=qwen3_moe", "model.num_experts=4", "model.expert_ffn_hidden_size=16", "schedule=as_packed")
# Settings, the end of a drifting parameter's name on the second rank, its name in the error, and the copies.
DRIFTS = {
    "distributed": (["parallel=data_distributed"], "final_layernorm.weight", "decoder.final_layernorm.weight", "data"),
    "context": (["parallel=cp2"], "layers.0.mlp.linear_fc2.weight", "decoder.layers.0.mlp.linear_fc2.weight", "data"),
    "norms": (["parallel=tp2_sp"], "pre_mlp_layernorm.weight", "decoder.layers.0.pre_mlp_layernorm.weight", "tensor"),
    "stages": (["parallel=pp2"], "output_layer.weight", "embedding.word_embeddings.weight", "embedding"),
    "experts": (
        [*EXPERTS, "parallel=data"],
        "layers.1.mlp.experts.local_experts.3.linear_fc2.weight",
        "decoder.layers.1.mlp.experts.3.linear_fc2.weight",
        "expert-data",
    ),
}


@pytest.fixture(scope="module")
def runs(dataset: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("drift")
    settings = ("trainer.steps=3", "trainer.drift_interval=1", "trainer.eval_interval=0", "loader.num_workers=0")
    runs = [
        [end, overrides_of(dataset, place / name, "model.num_layers=2", *settings, *more)]
        for name, (more, end, *_) in DRIFTS.items()
    ]
    run_jobs(2, "test_drift", place, runs)
    return place


@pytest.mark.submission
@pytest.mark.parametrize("name", DRIFTS)
def test_one_bit_on_one_rank_is_named_by_parameter_ranks_and_step(runs, name) -> None:
    _, _, parameter, kind = DRIFTS[name]
    for rank in (0, 1):  # every rank stops, with the same words
        error = (runs / f"{name}-{rank}.txt").read_text()
        assert f"after step 2, the copies of {parameter} differ: rank 0 versus rank 1\n" in error
        assert f"where: {kind}{'' if kind == 'embedding' else '-parallel'} ranks 0, 1" in error
    # Step 1, before the drift, was compared too, and passed.
    assert [line["step"] for line in read_metrics(runs / name)] == [1, 2]


@pytest.mark.submission
def test_stages_between_the_first_and_the_last_have_no_copies_of_embeddings_after_another_layout(dataset, tmp_path):
    """Megatron-Core remembers the ranks of the embedding group of a layout that the same process left."""
    settings = ("trainer.steps=1", "trainer.drift_interval=1", "trainer.eval_interval=0", "loader.num_workers=0")
    layouts = {"two": "parallel=pp2", "four": "parallel.pipeline_parallel_size=4"}
    runs = [
        ["", overrides_of(dataset, tmp_path / name, "model.num_layers=4", *settings, layout)]
        for name, layout in layouts.items()
    ]
    run_jobs(4, "test_drift", tmp_path, runs)
    assert [len(read_metrics(tmp_path / name)) for name in layouts] == [1, 1]


if __name__ == "__main__":
    prepare_process()
    from harness.megatron.step import MegatronStep

    check = MegatronStep.check_drift

    for end, overrides in jobs_of(sys.argv[1]):
        config = compose_config("sft", SftConfig, overrides)

        def drifted(step: Any, number: int, end: str = end) -> None:
            if number == 2 and os.environ["RANK"] == "1":
                named = [pair for chunk in step.chunks for pair in chunk.module.named_parameters()]
                values = next(values.data for name, values in named if name.endswith(end)).view(-1)
                values[-1] = torch.nextafter(values[-1], torch.tensor(9.0))
            check(step, number)

        with mock.patch.object(MegatronStep, "check_drift", drifted):
            try:
                sft.main(config)
            except HarnessError as error:
                Path(f"{config.run_dir}-{os.environ['RANK']}.txt").write_text(str(error))
