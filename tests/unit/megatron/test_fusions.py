"""Fusions by device and setting, and the warnings of a run on a GPU that does without."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from harness.errors import ConfigError
from harness.megatron.job.runtime import start
from harness.megatron.model.fusions import Fusions, choose_fusions, slow_parts
from harness.megatron.model.gpt import engine_layers, transformer_config
from harness.plan import ModelConfig, ParallelConfig
from harness.plan.settings import SftConfig

GPU, CPU = torch.device("cuda"), torch.device("cpu")


def test_fusions_are_on_by_default_on_a_gpu_alone_and_as_set_anywhere() -> None:
    assert choose_fusions(ModelConfig(), CPU) == Fusions(False, False, False)
    half = ModelConfig(dtype="bfloat16")
    assert choose_fusions(half, GPU) == Fusions(True, True, False)
    # Megatron's fused loss rounds gradients to bfloat16.
    assert choose_fusions(ModelConfig(), GPU) == Fusions(True, False, False)
    both = replace(half, fuse_swiglu="on", fuse_cross_entropy="on")
    assert choose_fusions(both, CPU) == Fusions(True, True, False)
    assert choose_fusions(ModelConfig(fuse_swiglu="off", fuse_cross_entropy="off"), GPU) == Fusions(False, False, False)
    made = transformer_config(ModelConfig(dtype="bfloat16"), ParallelConfig(), GPU)
    assert (made.bias_activation_fusion, made.cross_entropy_loss_fusion) == (True, True)


def test_a_fusion_that_cannot_be_had_is_refused_by_name() -> None:
    with pytest.raises(ConfigError, match="fuse_weight_gradient is on, and there is no GPU"):
        choose_fusions(ModelConfig(fuse_weight_gradient="on"), CPU)
    with pytest.raises(ConfigError, match="fuse_weight_gradient is on, and Apex"):
        choose_fusions(ModelConfig(fuse_weight_gradient="on"), GPU)
    with pytest.raises(ConfigError, match="rounds gradients to bfloat16"):
        choose_fusions(ModelConfig(fuse_cross_entropy="on"), GPU)
    with start("cpu", deterministic=True):
        assert choose_fusions(ModelConfig(dtype="bfloat16"), GPU).cross_entropy is False
        assert transformer_config(ModelConfig(), ParallelConfig(), CPU).deterministic_mode
        with pytest.raises(ConfigError, match="adds in any order"):
            choose_fusions(ModelConfig(fuse_cross_entropy="on"), GPU)
    assert not torch.are_deterministic_algorithms_enabled()


def test_a_run_on_a_gpu_is_told_what_is_slow_and_why() -> None:
    assert slow_parts(ModelConfig(), ParallelConfig(), CPU, has_engine=False) == []
    attention, dtype, gradient = slow_parts(ModelConfig(), ParallelConfig(), GPU, has_engine=False)
    assert attention.startswith("model.attention is auto, and Transformer Engine cannot be imported")
    assert dtype.startswith("model.dtype is float32")
    assert gradient.startswith("model.fuse_weight_gradient is auto, and Apex")
    padded = slow_parts(ModelConfig(), ParallelConfig(context_parallel_size=2), GPU, has_engine=False)
    assert "no float32 attention with parallel.context_parallel_size" in padded[0]
    quick = ModelConfig(dtype="bfloat16", fuse_weight_gradient="off")
    assert slow_parts(quick, ParallelConfig(), GPU, has_engine=True) == []
    # Whether or not it is installed here.
    assert not engine_layers(ModelConfig(), ParallelConfig(static_rows=True), GPU)


@pytest.mark.parametrize(
    ("model", "parallel", "device", "message"),
    [
        ({}, {}, "cpu", "trainer.device is cpu"),
        ({}, {"context_parallel_size": 2}, "auto", "float32, and parallel.context_parallel_size is set"),
        ({}, {"static_rows": True}, "cuda", "float32, and parallel.static_rows is set"),
        ({}, {"tensor_parallel_size": 2, "sequence_parallel": True}, "cuda", "and parallel.sequence_parallel is set"),
        ({"attention": "auto"}, {"gradient_dtype": "bfloat16"}, "auto", "gradient_dtype is bfloat16, and model.dtype"),
    ],
)
def test_what_transformer_engine_or_a_dtype_cannot_do_is_refused_before_a_job(model, parallel, device, message) -> None:
    config = SftConfig(
        model=ModelConfig(**{"attention": "transformer_engine", **model}), parallel=ParallelConfig(**parallel)
    )
    config.trainer.device = device
    with pytest.raises(ConfigError, match=message):
        config.check_dtypes()
    config.model.dtype, config.trainer.device = "bfloat16", "cuda"
    config.check_dtypes()
