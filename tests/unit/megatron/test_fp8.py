"""Products in 8 bits: settings that reach Megatron, rows of whole blocks, and refusals of what cannot have them."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from harness.errors import ConfigError
from harness.megatron.model import gpt
from harness.plan import ModelConfig, ParallelConfig
from harness.plan.layout import fp8_row_multiple
from harness.plan.model_checks import check_division
from harness.plan.settings import SftConfig, TrainerConfig
from harness.records import SequenceView
from harness.schedule import ScheduleConfig
from harness.thd import build_thd_batch

from .conftest import one_rank

CPU = torch.device("cpu")
HALF = ModelConfig(dtype="bfloat16", hidden_size=512, ffn_hidden_size=1024)


@pytest.mark.parametrize(
    ("recipe", "format"), [("tensorwise", "hybrid"), ("blockwise", "e4m3"), ("mxfp8", "e4m3"), ("off", None)]
)
def test_a_recipe_reaches_megatron(monkeypatch, recipe, format) -> None:
    monkeypatch.setattr(gpt, "engine_layers", lambda *_: True)
    made = gpt.transformer_config(replace(HALF, fp8=recipe), ParallelConfig(), CPU)
    assert made.fp8 == format
    if format is not None:
        assert made.fp8_recipe == recipe
    experts = replace(HALF, family="qwen3_moe", num_experts=4, fp8=recipe)
    padding = gpt._fp8(experts, ParallelConfig(), CPU).get("moe_router_padding_for_quantization", False)
    assert padding is (format is not None)


def test_layers_without_transformer_engine_are_refused() -> None:
    with pytest.raises(ConfigError, match="but layers use PyTorch"):
        gpt.transformer_config(replace(HALF, fp8="tensorwise"), ParallelConfig(), CPU)


@pytest.mark.parametrize(
    ("recipe", "parallel", "multiple"),
    [
        ("off", {"context_parallel_size": 4}, 1),
        ("tensorwise", {}, 16),
        ("mxfp8", {"context_parallel_size": 2}, 64),
        ("tensorwise", {"tensor_parallel_size": 2, "sequence_parallel": True, "context_parallel_size": 2}, 64),
        ("blockwise", {"tensor_parallel_size": 2}, 128),
    ],
)
def test_a_ranks_part_of_a_row_has_whole_blocks(recipe, parallel, multiple) -> None:
    assert fp8_row_multiple(recipe, ParallelConfig(**parallel)) == multiple


@pytest.mark.parametrize(
    ("changes", "where"),
    [
        ({"model": {"dtype": "float32"}}, "model.dtype"),
        ({"model": {"attention": "torch"}}, "model.attention"),
        ({"model": {"lora_rank": 8}}, "model.lora_rank"),
        ({"trainer": {"device": "cpu"}}, "trainer.device"),
    ],
)
def test_runs_that_cannot_multiply_in_8_bits_are_refused_by_their_settings(changes, where) -> None:
    model = replace(HALF, fp8="tensorwise", **changes.get("model", {}))
    config = SftConfig(model=model, trainer=TrainerConfig(**changes.get("trainer", {})))
    with pytest.raises(ConfigError, match="FP8 requires a GPU") as refused:
        config.check(1)
    assert where in refused.value.where
    SftConfig(model=replace(HALF, fp8="tensorwise")).check(1)


def test_sizes_that_are_no_whole_blocks_are_refused_with_their_numbers() -> None:
    model = replace(HALF, hidden_size=192, num_attention_heads=4, fp8="tensorwise")
    check_division(model, ParallelConfig())
    with pytest.raises(ConfigError, match="blocks are 128 wide, and the inputs of linear_qkv on a rank are 192"):
        check_division(replace(model, fp8="blockwise"), ParallelConfig())
    config = SftConfig(model=replace(HALF, fp8="blockwise"), schedule=ScheduleConfig(max_tokens_per_rank=4000))
    with pytest.raises(ConfigError, match="pads rows to a multiple of 128 tokens, but the largest row has 4,000"):
        config.check_layout(1)


def test_rows_are_padded_before_they_reach_the_model_and_the_loss_stays(monkeypatch) -> None:
    seen: list[int] = []
    model = ModelConfig(num_layers=1, hidden_size=32, ffn_hidden_size=32, num_attention_heads=2, num_query_groups=2)
    ids = np.arange(11, dtype=np.int32)
    row = build_thd_batch([SequenceView(ids, np.r_[np.ones(10, np.uint8), [0]])] * 2)
    with one_rank(model, vocab_size=64) as step:

        def loss(rows: Any, chunk: Any) -> Any:
            output, report = step.forward_row(rows, chunk)
            seen.append(output.shape[1])
            return output, report

        plain = step.run_rows([row], loss)[0]
        monkeypatch.setattr(step, "_row_multiple", 16)
        padded = step.run_rows([row], loss)[0]
    assert seen == [20, 32]
    torch.testing.assert_close(padded, plain)
