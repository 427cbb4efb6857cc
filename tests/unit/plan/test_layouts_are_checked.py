"""A layout that cannot work is refused with its arithmetic, before any process group is made."""

from __future__ import annotations

from typing import Any

import pytest

from harness.errors import ConfigError
from harness.loader import CorpusConfig
from harness.plan.layout import ParallelConfig, padded_vocab_size
from harness.plan.model import ModelConfig
from harness.plan.model_checks import check_division
from harness.plan.settings import PretrainConfig, SftConfig, TrainerConfig
from harness.plan.work import sequence_cost
from harness.schedule import ScheduleConfig

OVERLAPS = {"tensor_parallel_size": 2, "sequence_parallel": True, "static_rows": True, "overlap_tensor_parallel": True}
STAGES = {"pipeline_parallel_size": 2}
ALLGATHER = {"expert_dispatcher": "allgather", "expert_parallel_size": 2}
INTERLEAVED = {"pipeline_parallel_size": 2, "virtual_pipeline_parallel_size": 2}
WITH_STEP = {**INTERLEAVED, "distributed_optimizer": True, "overlap_weights_with_step": True}
COMBINED = {"overlap_experts": True, "expert_parallel_size": 2}


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"tensor_parallel_size": 0}, "tensor_parallel_size is 0"),
        ({"virtual_pipeline_parallel_size": 2}, "virtual_pipeline_parallel_size is 2, and"),
        ({"sequence_parallel": True}, "has only one rank"),
        ({"expert_dispatcher": "deepep"}, "expert_dispatcher"),
        ({"expert_dispatcher": "allgather", "expert_parallel_size": 2}, "allgather requires rows of equal length for"),
        ({"expert_dispatcher": "flex"}, "but the layout has 1 "),
        ({"cuda_graphs": True}, "static_rows is null: CUDA graphs require rows of constant length"),
        ({"cuda_graphs": True, "static_rows": True, "pipeline_parallel_size": 2}, "pipeline_parallel_size is 2"),
        ({"cuda_graphs": True, "static_rows": True, "context_parallel_size": 2}, "and parallel.context_parallel_size"),
        ({"overlap_tensor_parallel": True, "static_rows": True}, "sequence_parallel is false: it overlaps that"),
        ({**OVERLAPS, "static_rows": False}, "static_rows is false: its buffers require rows of constant"),
        ({**OVERLAPS, "static_rows": None}, "static_rows is null, and parallel.pipeline_parallel_size is 1: its"),
        ({**STAGES, **ALLGATHER, "static_rows": False}, "allgather requires rows of equal length"),
        ({**OVERLAPS, "cuda_graphs": True}, "cuda_graphs is true: CUDA graphs do not support its streams"),
        ({**WITH_STEP, "virtual_pipeline_parallel_size": None}, "size is null: a stage has one model chunk"),
        ({**WITH_STEP, "distributed_optimizer": False}, "optimizer is false: weights are not gathered"),
        ({**WITH_STEP, "overlap_weights": False}, "overlap_weights is false: weights are gathered at once"),
        ({**WITH_STEP, "overlap_gradients": False}, "overlap_gradients is false: weights are gathered at once"),
        ({"overlap_experts": True}, "overlap_experts is true, and parallel.expert_parallel_size is 1: every rank has"),
        ({**COMBINED, **STAGES}, "virtual_pipeline_parallel_size is null: .* only in the interleaved schedule"),
        ({**COMBINED, **ALLGATHER, "static_rows": True}, "expert_dispatcher is allgather: Megatron-Core does not"),
        ({**COMBINED, "overlap_shared_experts": True}, "overlap_shared_experts is true: shared experts would"),
        ({"delay_weight_gradients": True}, "overlap_experts is false: only combined passes delay them"),
    ],
)
def test_parallel_sizes_that_contradict_each_other_are_refused(settings, message) -> None:
    with pytest.raises(ConfigError, match=message):
        ParallelConfig(**settings)


@pytest.mark.parametrize(
    ("settings", "on_gpu"),
    [
        ({}, False),
        (STAGES, True),
        ({**STAGES, "static_rows": False}, False),
        ({"static_rows": True}, True),
        ({**STAGES, **OVERLAPS, "static_rows": None}, True),
        ({**STAGES, **ALLGATHER}, True),
    ],
)
def test_rows_have_one_length_by_default_where_stages_of_a_gpu_pass_them_on(settings, on_gpu) -> None:
    run = SftConfig(parallel=ParallelConfig(**settings))
    assert run.planned().parallel.static_rows is run.on("cuda").parallel.static_rows is on_gpu
    assert run.on("cuda").on("cpu") == run.on("cuda")  # what a run records is not chosen again
    if settings.get("static_rows") is not None or not on_gpu:
        assert run.on("cpu").parallel.static_rows is bool(settings.get("static_rows"))
    corpus = PretrainConfig(parallel=ParallelConfig(**STAGES), data=CorpusConfig(reset_attention_mask=True, eod=0))
    assert corpus.on("cuda").parallel.static_rows is False


def test_rows_of_one_length_that_only_a_gpu_has_by_default_are_refused_on_a_cpu() -> None:
    run = SftConfig(parallel=ParallelConfig(**STAGES, **ALLGATHER))
    assert SftConfig(parallel=ParallelConfig(**STAGES)).on("cpu").parallel.static_rows is False
    with pytest.raises(ConfigError, match="allgather requires rows of equal length"):
        run.on("cpu")


@pytest.mark.parametrize(
    ("model", "trainer", "message"),
    [
        ({"lora_rank": 4}, {}, "lora_rank is 4: LoRA adapters"),
        ({"family": "qwen3_moe", "num_experts": 4, "expert_ffn_hidden_size": 64}, {}, "support it for experts"),
        ({"fp8": "mxfp8"}, {}, "fp8 is mxfp8: only bfloat16"),
        ({"attention": "torch"}, {}, "attention is torch: it requires Transformer"),
        ({"dtype": "float32"}, {}, r"model\.dtype is float32"),
        ({}, {"device": "cpu"}, r"trainer\.device is cpu"),
        ({}, {"sample_prompts": ["Hi"]}, "can be longer than a row"),
    ],
)
def test_runs_whose_exchanges_cannot_overlap_with_products_are_refused(model, trainer, message) -> None:
    def check(**changes: bool) -> None:
        sized = ModelConfig(hidden_size=512, ffn_hidden_size=1024, num_query_groups=4, **model)
        parallel = ParallelConfig(**{**OVERLAPS, **changes})
        SftConfig(model=sized, parallel=parallel, trainer=TrainerConfig(**trainer)).check(2)

    check(overlap_tensor_parallel=False)
    with pytest.raises(ConfigError, match=f"overlap_tensor_parallel is true, and .*{message}"):
        check()


def test_ranks_that_cannot_hold_whole_models_are_refused_and_the_smallest_batch_that_fits_is_not() -> None:
    with pytest.raises(
        ConfigError, match=r"6 ranks cannot hold whole copies of a model on 4 ranks \(tensor 2 x pipeline 2"
    ):
        ParallelConfig(tensor_parallel_size=2, pipeline_parallel_size=2).dp_size(6)
    assert ParallelConfig(tensor_parallel_size=2, pipeline_parallel_size=2).dp_size(8) == 2
    layout = ParallelConfig(context_parallel_size=2, tensor_parallel_size=8, sequence_parallel=True)
    layout.check(32, global_batch_size=2, max_tokens_per_rank=1000)
    ParallelConfig().check(1, global_batch_size=1, max_tokens_per_rank=1)


@pytest.mark.parametrize(
    ("parallel", "ranks", "packs", "tokens", "message"),
    [
        ({}, 8, 4, 4096, r"batch of 4 packs is too small for 8 data-parallel ranks \(8 ranks / 1 .*\)"),
        ({"tensor_parallel_size": 2}, 8, 3, 4096, r"of 3 packs is too small for 4 .* ranks \(8 ranks / 2 "),
        ({"context_parallel_size": 4}, 4, 8, 1001, r"4,004 tokens \(1,001 per rank \* context 4\) is not a multiple"),
        (
            {"context_parallel_size": 2, "tensor_parallel_size": 8, "sequence_parallel": True},
            16,
            8,
            1004,
            r"2,008 tokens .* is not a multiple of 16, .* and context \* tensor 8 parts",
        ),
    ],
)
def test_ranks_and_rows_that_do_not_fit_a_layout_are_refused_with_the_arithmetic(
    parallel, ranks, packs, tokens, message
) -> None:
    with pytest.raises(ConfigError, match=message):
        ParallelConfig(**parallel).check(ranks, global_batch_size=packs, max_tokens_per_rank=tokens)


LATENT = {"family": "deepseek_v3", "kv_lora_rank": 8, "num_attention_heads": 4, "num_query_groups": 4}
LATENT_EXPERTS = {**LATENT, "num_experts": 4}
GRAPHS = {"static_rows": True, "cuda_graphs": True}
CUT = {"tensor_parallel_size": 2, "sequence_parallel": True}
CUT_EXPERTS = {**CUT, "expert_tensor_parallel_size": 2}


@pytest.mark.parametrize(
    ("model", "parallel", "message"),
    [
        ({"num_query_groups": 2}, {"tensor_parallel_size": 4}, "num_query_groups 2 is not a multiple"),
        ({"num_layers": 4}, {"pipeline_parallel_size": 3}, "4 layers cannot be cut into 3"),
        ({"num_layers": 6}, INTERLEAVED, "6 layers cannot be cut into 4"),
        ({"num_attention_heads": 6, "num_query_groups": 3, "hidden_size": 96}, {"tensor_parallel_size": 3}, "3 tensor"),
        ({"num_experts": 6}, {"expert_parallel_size": 4}, "num_experts 6 is not a multiple of expert_parallel_size 4"),
        ({}, {"expert_parallel_size": 2}, "the model has no experts to divide"),
        ({"num_experts": 4, "expert_ffn_hidden_size": 33}, CUT_EXPERTS, "expert_ffn_hidden_size 33 is not a multiple"),
        ({"num_experts": 4, "shared_ffn_hidden_size": 33}, CUT, "shared_ffn_hidden_size 33 is not a multiple of"),
        ({"num_experts": 4}, {"tensor_parallel_size": 2}, "only with sequence parallelism"),
        (LATENT_EXPERTS, {"tensor_parallel_size": 2}, "latent attention on 2 tensor-parallel ranks only with sequence"),
        (
            {**LATENT_EXPERTS, "qk_rope_head_dim": 6},
            {**CUT, "tensor_parallel_size": 4},
            "the 14 outputs of linear_kv_down_proj",
        ),
        ({"num_experts": 4, "lora_rank": 2}, CUT_EXPERTS, "experts with adapters cannot be cut into 2 parts"),
        ({"family": "gpt_oss", "sliding_window": 8, "num_experts": 4}, CUT_EXPERTS, "experts with biases cannot be"),
        ({"num_experts": 4, "expert_ffn_hidden_size": 32}, GRAPHS, "num_experts is 4: CUDA graphs"),
        ({"fp8": "tensorwise"}, GRAPHS, "fp8 is tensorwise: CUDA graphs do not support FP8"),
        ({"lora_rank": 2}, WITH_STEP, "lora_rank is 2: weights of adapters are gathered at once"),
        ({"num_experts": 4}, WITH_STEP, "num_experts is 4: Megatron-Core gathers experts before"),
    ],
)
def test_a_model_that_a_layout_cannot_divide_or_capture_is_refused(model, parallel, message) -> None:
    made = ModelConfig(**{"hidden_size": 512, "ffn_hidden_size": 768, "num_attention_heads": 4, **model})
    check_division(made, ParallelConfig())
    with pytest.raises(ConfigError, match=message):
        check_division(made, ParallelConfig(**parallel))


def test_ranks_that_cannot_hold_whole_experts_are_refused_with_the_arithmetic() -> None:
    layout = ParallelConfig(pipeline_parallel_size=2, expert_parallel_size=4)
    message = (
        r"the 6 ranks of a pipeline stage \(12 / 2 stages\) cannot hold whole copies of experts on 4 ranks \(expert 4"
    )
    with pytest.raises(ConfigError, match=message) as refused:
        layout.dp_size(12)
    assert "start a multiple of 8 ranks" in str(refused.value)
    assert layout.dp_size(16) == 8
    assert layout.expert_copies(16) == 2
    # Expert-parallel ranks are tensor- and context-parallel ranks too.
    both = ParallelConfig(tensor_parallel_size=2, sequence_parallel=True, expert_parallel_size=2)
    assert (both.dp_size(2), both.expert_copies(2)) == (1, 1)


HYBRID = {"family": "nemotron_h", "layer_pattern": "M*-E", "num_experts": 4, "scan_num_heads": 8, "scan_head_dim": 8}


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"hidden_size": 100, "num_attention_heads": 3}, "hidden_size 100 is not a multiple of num_attention_heads 3"),
        ({"num_attention_heads": 4, "num_query_groups": 3}, "num_attention_heads 4 is not a multiple of"),
        ({"dtype": "float8"}, "'float8' is not known"),
        ({"attention": "xformers"}, "'xformers' is not known"),
        ({"num_layers": 0}, "num_layers is 0"),
        ({"experts_per_token": 5}, "cannot be routed to 5 of 4 experts"),
        ({"dense_layers": 4}, "4 of 4 layers are dense"),
        ({"router_groups": 2}, "cannot come evenly from null of 2 groups"),
        ({"router_groups": 3, "router_top_groups": 1}, "cannot come evenly from 1 of 3 groups of 4 experts"),
        ({"router_groups": 4, "router_top_groups": 1}, "cannot come evenly from 1 of 4 groups of 4 experts"),
        ({"router_groups": 2, "router_top_groups": 1}, "family llama have no groups of experts"),
        ({**LATENT, "num_experts": 8, "router_groups": 4, "router_top_groups": 2}, "rank a group by the sum of its"),
        ({"expert_bias": True}, "only with a sigmoid router"),
        ({"experts_per_token": 1}, "would always be 1"),
        ({"router_score": "relu"}, "'relu' is not known"),
        ({"family": "deepseek_v3"}, "deepseek_v3 require the setting kv_lora_rank, but it is 0"),
        ({"kv_lora_rank": 8}, "llama do not have the setting kv_lora_rank, but it is 8"),
        ({**LATENT, "num_query_groups": 2}, "as many query groups as attention heads"),
        ({**LATENT, "qk_rope_head_dim": 5}, "the rotary embedding rotates 5 of the 133 numbers"),
        ({**LATENT, "rope_scaling": "llama3"}, "rope_scaling is llama3: .* not support this scaling with latent"),
        ({"qk_norm": True}, "family llama do not have the setting qk_norm, but it is true"),
        ({"family": "glm4_moe"}, "family glm4_moe require the setting qk_norm, but it is null"),
        ({"family": "glm4_moe", "qk_norm": False, "rope_scaling": "yarn"}, "yarn does not support the partial"),
        ({"num_experts": 0, "aux_loss": 0.1, "grouped_gemm": "on"}, "aux_loss, grouped_gemm would have no effect"),
        ({"sliding_window": 8}, "family llama do not have the setting sliding_window, but it is 8"),
        ({"family": "gpt_oss"}, "family gpt_oss require the setting sliding_window, but it is null"),
        ({**HYBRID, "family": "llama"}, "do not have the setting layer_pattern"),
        ({**HYBRID, "layer_pattern": "M*-"}, "3 letters"),
        ({**HYBRID, "layer_pattern": "M*-A"}, "for 4 layers"),
        ({**HYBRID, "num_experts": 0}, "the pattern has 1 layers with experts"),
        ({**HYBRID, "dense_layers": 1}, "dense_layers is 1: hybrid models cannot have it"),
        (
            {**HYBRID, "mtp_layers": 1, "tie_embeddings": False},
            "mtp_layers is 1: hybrid models do not support MTP layers",
        ),
        ({**HYBRID, "scan_head_dim": 0}, "a size is 0"),
        ({**HYBRID, "rope_scaling": "linear"}, "rope_scaling is linear: hybrid models cannot have it"),
        ({**HYBRID, "fp8": "tensorwise"}, "FP8 is not supported with hybrid models"),
    ],
)
def test_a_model_that_cannot_exist_is_refused(settings, message) -> None:
    for whole in (HYBRID, LATENT_EXPERTS):
        ModelConfig(**whole)
    with pytest.raises(ConfigError, match=message):
        ModelConfig(**{"num_experts": 4, **settings})


def test_the_vocabulary_is_padded_to_a_multiple_of_128_on_every_layout() -> None:
    assert padded_vocab_size(8192) == 8192
    assert padded_vocab_size(8193) == 8320


@pytest.mark.parametrize(
    ("family", "heads", "groups", "tp_size", "ranks", "ranks_on_a_gpu"),
    [
        ("nemotron_h", 128, 8, 1, 128, 16),
        ("nemotron_h", 128, 8, 8, 16, 2),
        ("nemotron_h", 12, 3, 1, 1, 1),  # two ranks would have one and a half groups
        ("qwen3_next", 32, 16, 2, 16, 16),
    ],
)
def test_ranks_that_share_a_sequence_have_whole_heads_and_groups_of_scans(
    family, heads, groups, tp_size, ranks, ranks_on_a_gpu
) -> None:
    more = (
        {"layer_pattern": "M*-M"}
        if family == "nemotron_h"
        else {"layer_pattern": "DD*D", "num_experts": 4, "expert_ffn_hidden_size": 8, "shared_ffn_hidden_size": 8}
    )
    sizes = {**more, "scan_num_heads": heads, "scan_head_dim": 64, "scan_num_groups": groups, "scan_state_dim": 128}
    model, parallel = ModelConfig(family=family, **sizes), ParallelConfig(tp_size)
    assert [sequence_cost(model, parallel, on_gpu=on_gpu).most_ranks for on_gpu in (False, True)] == [
        ranks,
        ranks_on_a_gpu,
    ]


@pytest.mark.parametrize(
    ("parallel", "numbers", "row"),
    [
        # Nemotron 3 Ultra, of which state-spaces/mamba issue 1015 has measured wrong values.
        ({}, 35_072, 61_230),
        ({"tensor_parallel_size": 2}, 17_536, 122_461),
        # A rank scans all tokens of a row for its share of the heads; ranks that outnumber the groups have one each.
        ({"context_parallel_size": 4}, 8_768, 244_922),
        ({"context_parallel_size": 16}, 2_320, 925_639),
    ],
)
def test_rows_that_the_kernels_of_a_scan_would_compute_wrong_are_refused(parallel, numbers, row) -> None:
    sizes = {"scan_num_heads": 256, "scan_head_dim": 64, "scan_num_groups": 8, "scan_state_dim": 128}
    model = ModelConfig(family="nemotron_h", layer_pattern="M*-M", num_attention_heads=16, num_query_groups=16, **sizes)
    layout = ParallelConfig(**parallel)
    each = layout.pad_to_multiple
    most = row // layout.context_parallel_size // each * each

    def check(tokens: int, **trainer: Any) -> None:
        of_run = {"model": model, "parallel": layout, "trainer": TrainerConfig(**trainer)}
        SftConfig(**of_run, schedule=ScheduleConfig(max_tokens_per_rank=tokens)).check_layout(layout.model_ranks)

    check(most)
    with pytest.raises(ConfigError, match=rf"tokens x {numbers:,} numbers = 2,\d+,\d+,\d+, and mamba-ssm") as refused:
        check(most + each)
    assert refused.value.fix.startswith(f"rows of at most {row:,} tokens over context-parallel ranks")
    # They scan in PyTorch.
    check(most + each, device="cpu")
    check(most + each, deterministic=True)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"mtp_layers": 1, "tie_embeddings": False}, "mtp_layers is 1: .* MTP layers on packed rows"),
        ({"recompute": "full"}, "recompute is full: .* layer by layer"),
        ({"recompute": "selective", "recompute_modules": ["moe"]}, "moe.*: experts that are computed in parts"),
        ({"num_experts": 2}, "2 expert-parallel ranks have one expert each of 2"),
    ],
)
def test_passes_that_cannot_be_combined_are_refused_by_name(settings, message) -> None:
    sizes = {"num_layers": 2, "hidden_size": 32, "num_attention_heads": 2, "num_query_groups": 2, "num_experts": 4}
    experts = {"family": "glm4_moe", "qk_norm": False, "experts_per_token": 2, "expert_ffn_hidden_size": 32}
    with pytest.raises(ConfigError, match=message) as caught:
        check_division(ModelConfig(**{**sizes, **experts, **settings}), ParallelConfig(**COMBINED))
    assert "parallel.overlap_experts" in caught.value.where
    assert "parallel.overlap_experts=false" in caught.value.fix
    assert ParallelConfig(**COMBINED, context_parallel_size=2).device_connections() == 32
