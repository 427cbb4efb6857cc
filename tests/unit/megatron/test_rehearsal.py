"""Single ranks of large jobs are built and trained without the others, and have the memory of the plan."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from harness.recipes.parity import ParityConfig

from harness.config import CONFIGS, compose_config
from harness.errors import ConfigError
from harness.megatron.job import runtime
from harness.megatron.job.runtime import join
from harness.megatron.run import rehearsal
from harness.megatron.run.rehearsal import RankRehearsal, rehearse
from harness.megatron.step import MegatronStep
from harness.plan import ModelConfig, OptimizerConfig, ParallelConfig, SftConfig
from harness.thd import ThdBatch

EXPERIMENTS = sorted(path.stem for path in (CONFIGS / "experiment").glob("*node*.yaml"))
LAYOUTS = sorted(path.stem for path in (CONFIGS / "parallel").glob("*.yaml"))


def check(
    done: list[RankRehearsal], model: ModelConfig, parallel: ParallelConfig, *, shares_rows: bool = False
) -> None:
    stages = parallel.pipeline_parallel_size
    for one in done:
        assert one.layers == sum(map(len, parallel.chunks_of_stage(model.num_layers, one.place["pp"])))
        assert one.microbatches == 2 * stages
        assert one.sharded_tensors >= (6 if model.layer_pattern is None else 3) * one.layers
        assert one.found["weights"] == one.planned["weights"]
        assert one.found["gradients"] == one.planned["gradients"]
        # The distributed optimizer pads its buffers, and cuts them where weights do not end.
        assert one.found["optimizer"] <= 1.05 * one.planned["optimizer"] + 100_000
        # A scan, and attention of shared rows, keep others on a CPU than their kernels.
        assert ("activations" in one.found) == (model.layer_pattern is None and not shares_rows)
        if "activations" in one.found:
            # Hidden states of 32 numbers are little beside a router's scores of 256 experts.
            rel = 0.05 if model.num_experts < 256 else 0.1
            assert one.found["activations"] == pytest.approx(one.planned["activations"], rel=rel)
    assert done[-1].place["pp"] == stages - 1


DENSE = ParallelConfig(
    tensor_parallel_size=4,
    sequence_parallel=True,
    pipeline_parallel_size=2,
    virtual_pipeline_parallel_size=2,
    context_parallel_size=2,
    distributed_optimizer=True,
)
EXPERTS = ParallelConfig(expert_parallel_size=32, pipeline_parallel_size=2)


@pytest.mark.parametrize(
    ("preset", "parallel", "world_size", "offload"),
    [
        ("llama3_8b", DENSE, 512, 0.5),
        ("qwen3_30b_a3b", EXPERTS, 64, 0.0),
        pytest.param("nemotron3_super_120b_a12b", EXPERTS, 64, 0.0, marks=pytest.mark.submission),
        pytest.param("qwen3_5_35b_a3b", EXPERTS, 64, 0.0, marks=pytest.mark.submission),
        pytest.param("qwen3_omni_30b_a3b", EXPERTS, 64, 0.0, marks=pytest.mark.submission),
    ],
)
def test_ranks_of_a_large_job_train_a_step_and_have_the_planned_bytes(preset, parallel, world_size, offload) -> None:
    model = compose_config("sft", SftConfig, [f"model={preset}"]).model
    pattern = {"nemotron_h": "ME*E", "qwen3_5_moe_text": "DD*D"}.get(model.family)
    model = replace(model, num_layers=4, layer_pattern=pattern)
    done = rehearse(
        model, parallel, world_size=world_size, ranks=[0, world_size - 1], optimizer=OptimizerConfig(offload=offload)
    )
    check(done, model, parallel)


@pytest.mark.submission
def test_uneven_stages_of_61_layers_and_their_mtp_layer_have_the_planned_bytes_on_64_ranks() -> None:
    model = compose_config("sft", SftConfig, ["model=deepseek_v3"]).model
    model = replace(model, num_experts=16, mtp_layers=1, num_attention_heads=16, num_query_groups=16)
    parallel = ParallelConfig(
        tensor_parallel_size=2,
        sequence_parallel=True,
        pipeline_parallel_size=8,
        virtual_pipeline_parallel_size=4,
        pipeline_layout="Et|(tt|)*30mL",
        expert_parallel_size=8,
        distributed_optimizer=True,
    )
    done = rehearse(model, parallel, world_size=64, ranks=[0, 63])
    assert [one.layers for one in done] == [7, 6]
    check(done, model, parallel)


def test_ranks_of_a_large_job_share_rows_and_have_groups_of_every_size(monkeypatch) -> None:
    model = replace(compose_config("sft", SftConfig, ["model=llama3_8b"]).model, num_layers=4)
    parallel = replace(DENSE, context_parallel_size=1)
    groups: list[dict[int, int]] = []
    train = MegatronStep.train

    def see(step: MegatronStep, rows: list[ThdBatch], *arguments: Any) -> Any:
        groups.append({size: group.size() for size, group in step._shared_groups.items()})
        assert [row.shared_by for row in rows] == [16, 1, 1, 1]
        return train(step, rows, *arguments)

    monkeypatch.setattr(MegatronStep, "train", see)
    done = rehearse(model, parallel, world_size=128, ranks=[0, 127], shares_rows=True)
    check(done, model, parallel, shares_rows=True)
    assert groups == [{size: size for size in (1, 2, 4, 8, 16)}] * 2


def test_a_rehearsal_is_of_the_first_the_middle_and_the_last_rank(monkeypatch) -> None:
    monkeypatch.setattr(rehearsal, "_rehearse_rank", lambda *arguments: arguments[3])
    done = [rehearse(ModelConfig(), ParallelConfig(), world_size=size) for size in (1, 2, 512)]
    assert done == [[0], [0, 1], [0, 256, 511]]


def test_a_layout_that_megatron_or_the_ranks_refuse_is_refused_here() -> None:
    with pytest.raises(ConfigError, match="6 ranks cannot hold whole copies of a model on 4 ranks"):
        rehearse(ModelConfig(), ParallelConfig(pipeline_parallel_size=4), world_size=6)


def test_groups_of_a_job_whose_ranks_do_not_exist_have_its_sizes_and_are_gone_after_it() -> None:
    with runtime.alone(300, 512) as job:
        layout = join(DENSE, 512)
        assert (job.rank, torch.distributed.get_world_size()) == (300, 512)
        assert (layout.dp_size, layout.tp_size, layout.cp_size) == (32, 4, 2)
        assert torch.distributed.get_backend(torch.distributed.new_group([0, 300], backend="gloo")) == "fake"
    assert not torch.distributed.is_initialized()


@pytest.mark.nightly
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("name", EXPERIMENTS)
def test_every_experiment_s_ranks_train_a_step(name) -> None:
    config = compose_config("sft", SftConfig, [f"experiment={name}"])
    world_size = config.parallel.ranks
    assert world_size is not None
    shares_rows = config.shares_rows
    done = rehearse(config.model, config.parallel, world_size=world_size, shares_rows=shares_rows)
    check(done, config.model, config.parallel, shares_rows=shares_rows)


@pytest.mark.nightly
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("world_size", [8, 64, 512])
@pytest.mark.parametrize("name", LAYOUTS)
def test_every_layout_trains_a_step_on_many_ranks(name, world_size) -> None:
    parity = compose_config("parity", ParityConfig)
    experts = parity.kinds["qwen3_moe"].split() if "ep" in name or "etp" in name else []
    config = compose_config("sft", SftConfig, [*parity.sft, *experts, f"parallel={name}"])
    check(rehearse(config.model, config.parallel, world_size=world_size), config.model, config.parallel)
