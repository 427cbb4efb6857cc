"""Layouts of uneven pipelines are read as Megatron-Core does, refused with their arithmetic, and balanced by work."""

from __future__ import annotations

from dataclasses import replace

import pytest
from megatron.core.transformer.enums import LayerType
from megatron.core.transformer.pipeline_parallel_layer_layout import PipelineParallelLayerLayout

from harness.config import compose_config
from harness.errors import ConfigError
from harness.plan.layout import ParallelConfig
from harness.plan.memory import count_weights, plan_memory, plan_stage_memory
from harness.plan.model import ModelConfig
from harness.plan.model_checks import balanced_layout, check_division
from harness.plan.settings import SftConfig
from harness.plan.stages import balance_stages, read_stages

LETTERS = {LayerType.embedding: "E", LayerType.decoder: "t", LayerType.mtp: "m", LayerType.loss: "L"}


@pytest.mark.parametrize(
    ("text", "stages", "chunks"),
    [
        ("Et*3|t*4|t*3L", 3, 1),
        ("E|(tt|)*6mL", 4, 2),
        ("Et,(t|ttt)*2,|t*2L", 2, 2),
        ("Et*2|(t*3|)*30t*2L", 8, 4),
        ("Et|t*10mmL", 2, 1),
    ],
)
def test_a_layout_gives_each_stage_the_layers_that_megatron_gives_it(text, stages, chunks) -> None:
    wanted = PipelineParallelLayerLayout(text, stages)
    assert read_stages(text) == tuple(
        "".join(LETTERS[one] for one in chunk) for chunk in PipelineParallelLayerLayout.parse_str_to_list(text)
    )
    parallel = ParallelConfig(
        pipeline_parallel_size=stages,
        virtual_pipeline_parallel_size=chunks if chunks > 1 else None,
        pipeline_layout=text,
    )
    layers = wanted.flatten_layout.count(LayerType.decoder)
    for stage in range(stages):
        for chunk, found in enumerate(parallel.chunks_of_stage(layers, stage)):
            before = [wanted.layout[other % stages][other // stages] for other in range(chunk * stages + stage)]
            first = sum(one.count(LayerType.decoder) for one in before)
            assert list(found) == list(range(first, first + wanted.layout[stage][chunk].count(LayerType.decoder)))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("tt|ttL", "stage 0 of 2 of pipeline_layout 'tt|ttL' is 'tt'"),
        ("Ett|tt", "stage 1 of 2 .* is 'tt'"),
        ("Et|tLt", "stage 1 of 2 .* is 'tLt'"),
        ("Etm|tL", "stage 0 of 2 .* is 'Etm'"),
        ("Et|mtL", "stage 1 of 2 .* is 'mtL'"),
        ("Et||tL", "stage 1 of 3 .* is ''"),
        ("Et|dtL", "stage 1 of 2 .* is 'dtL'"),
        ("Et|t|tL", r"has 3 stages instead of 2 \(pipeline 2 x virtual pipeline 1\)"),
        ("Et|t*999999999L", "has 1,000,000,0.. letters, and the most are 100,000"),
        ("Et|(t*99999)*99999L", "letters, and the most are 100,000"),
    ],
)
def test_a_layout_that_no_pipeline_has_is_refused_by_stage(text, message) -> None:
    with pytest.raises(ConfigError, match=message):
        ParallelConfig(pipeline_parallel_size=2, pipeline_layout=text)


def test_a_layout_of_one_stage_and_more_chunks_than_layers_are_refused() -> None:
    with pytest.raises(ConfigError, match="pipeline_parallel_size is 1: a single stage contains all layers"):
        ParallelConfig(pipeline_layout="EttL")
    with pytest.raises(ConfigError, match="2 layers cannot be cut into 4 equal") as refused:
        check_division(ModelConfig(num_layers=2), ParallelConfig(pipeline_parallel_size=4))
    assert refused.value.fix.startswith("fewer stages")


@pytest.mark.parametrize(
    ("model", "settings", "message"),
    [
        ({"num_layers": 7}, {}, "7 layers cannot be cut into 2 equal"),
        ({"num_layers": 7}, {"pipeline_layout": "Ett|t*4L"}, r"has 6 layers \(t\) and 0 MTP layers \(m\), .* 7 and 0"),
        ({"num_layers": 4}, {"pipeline_layout": "Ett|ttmL"}, r"has 4 layers \(t\) and 1 MTP layers \(m\), .* 4 and 0"),
    ],
)
def test_the_error_of_layers_that_do_not_fit_has_a_setting_with_which_they_do(model, settings, message) -> None:
    layout = ParallelConfig(pipeline_parallel_size=2, **settings)
    with pytest.raises(ConfigError, match=message) as refused:
        check_division(ModelConfig(**model), layout)
    line = refused.value.fix.split(", ")[0]
    name, _, value = line.partition("=")
    assert name == "parallel.pipeline_layout"
    check_division(ModelConfig(**model), replace(layout, pipeline_layout=value.strip("'")))
    # As Hydra and a shell read it, which strips the quotes.
    for text in (line, line.replace("'", "")):
        composed = compose_config("sft", SftConfig, [text, "parallel.pipeline_parallel_size=2"])
        assert composed.parallel.pipeline_layout == value.strip("'")


@pytest.mark.parametrize(
    ("layers", "chunks", "settings", "wanted"),
    [
        (7, 2, {}, "Et*3|t*4L"),
        (10, 4, {}, "Et*2|t*2|t*3|t*3L"),
        (61, 8, {"loss_layers": 1.6}, "Et*7|t*8|t*8|t*8|t*8|t*8|t*8|t*6L"),
        (61, 32, {"loss_layers": 4.3, "mtp_layers": 1}, "Et|" + "t*2|" * 30 + "mL"),
        (94, 32, {"loss_layers": 2.8}, "Et*3|" + "t*3|" * 30 + "tL"),
        (3, 4, {"loss_layers": 9.0}, "Et|t|t|L"),
        (3, 5, {}, None),
    ],
)
def test_the_loss_counts_as_layers_and_the_first_stages_have_no_more_than_others(
    layers, chunks, settings, wanted
) -> None:
    assert balance_stages(layers, chunks, **settings) == wanted


def test_the_published_layout_of_deepseek_v3_is_the_balanced_one() -> None:
    model = compose_config("sft", SftConfig, ["model=deepseek_v3", "model.vocab_size=129280"]).model
    for mtp_layers, text in ((0, "Et|(tt|)*30L"), (1, "Et|(tt|)*30mL")):
        found = balanced_layout(replace(model, mtp_layers=mtp_layers), 32)
        assert found is not None
        assert read_stages(found) == read_stages(text)


def test_the_stage_with_the_most_layers_decides_the_memory_and_all_weights_are_on_some_stage() -> None:
    sizes = {"vocab_size": 128, "dp_size": 1, "max_tokens_per_rank": 4096, "microbatches": 8}
    model = ModelConfig(num_layers=12)
    uneven = ParallelConfig(pipeline_parallel_size=4, pipeline_layout="Et|t*2|t*8|tL")
    even = ParallelConfig(pipeline_parallel_size=4)
    memory = plan_memory(model, uneven, **sizes)
    assert memory.stage == 2
    assert memory.total > plan_memory(model, even, **sizes).total
    # Of as many microbatches, 2, each layer keeps the same.
    third = plan_stage_memory(model, even, stage=2, **sizes)
    assert memory.activations == pytest.approx(third.activations * 8 / 3, rel=0.02)
    for layout in (uneven, even):
        stages = range(4)
        assert sum(count_weights(model, layout, stage=stage, vocab_size=128).whole for stage in stages) == sum(
            count_weights(model, even, stage=stage, vocab_size=128).whole for stage in stages
        )


@pytest.mark.parametrize(
    ("layout", "targets", "stage"),
    [("E|t*4L", ["linear_qkv"], 0), ("Et*4|L", ["linear_qkv"], 1), ("Ett|ttL", ["linear_fc1"], 1)],
)
def test_a_stage_without_adapters_is_refused_where_they_alone_are_trained(layout, targets, stage) -> None:
    parallel = ParallelConfig(pipeline_parallel_size=2, pipeline_layout=layout)
    sizes = {"scan_num_heads": 4, "scan_head_dim": 8, "scan_state_dim": 8, "scan_num_groups": 1}
    kind = {"family": "nemotron_h", "layer_pattern": "-***", **sizes} if targets == ["linear_fc1"] else {}
    model = ModelConfig(num_layers=4, lora_rank=2, lora_targets=targets, **kind)
    with pytest.raises(ConfigError, match=f"no layer of pipeline stage {stage} has an adapter"):
        check_division(model, parallel)
    check_division(replace(model, lora_rank=0), parallel)


def test_the_balanced_last_stage_of_adapters_has_a_layer_also_where_a_large_vocabulary_is_work_for_many() -> None:
    small = ModelConfig(num_layers=8, hidden_size=32, ffn_hidden_size=32, vocab_size=100_000)
    assert balanced_layout(small, 4) == "Et*2|t*3|t*3|L"
    assert balanced_layout(replace(small, lora_rank=2), 4) == "Et*2|t*2|t*3|tL"
