"""Fusions by device and setting, and the warnings of a run on a GPU that does without."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from harness.errors import ConfigError
from harness.megatron.job.runtime import settle, start
from harness.megatron.model.fusions import choose_fusions, slow_parts
from harness.megatron.model.gpt import _check_backend_variables, engine_layers, transformer_config
from harness.plan import ModelConfig, OptimizerConfig, ParallelConfig
from harness.plan.settings import SftConfig

GPU, CPU = torch.device("cuda"), torch.device("cpu")
ROOT = Path(__file__).resolve().parents[3]


def fused(model: ModelConfig, device: torch.device) -> list[bool]:
    """Return whether activations, the loss and weight gradients are fused."""
    return list(choose_fusions(model, device).values())[:3]


def test_fusions_are_on_by_default_on_a_gpu_alone_and_as_set_anywhere() -> None:
    assert fused(ModelConfig(), CPU) == [False, False, False]
    half, whole = ModelConfig(), ModelConfig(dtype="float32")  # bfloat16 on a GPU
    assert fused(half, GPU) == [True, True, False]
    # Megatron's fused loss rounds gradients to bfloat16.
    assert fused(whole, GPU) == [True, False, False]
    both = replace(half, dtype="bfloat16", fuse_swiglu="on", fuse_cross_entropy="on")
    assert fused(both, CPU) == [True, True, False]
    assert fused(ModelConfig(fuse_swiglu="off", fuse_cross_entropy="off"), GPU) == [False, False, False]
    made = transformer_config(ModelConfig(dtype="bfloat16"), ParallelConfig(), GPU)
    assert (made.bias_activation_fusion, made.cross_entropy_loss_fusion) == (True, True)


def test_tokens_are_sorted_by_transformer_engine_on_a_gpu_that_has_it(monkeypatch) -> None:
    experts = ModelConfig(num_experts=4, dtype="bfloat16", fuse_weight_gradient="off")
    (found,) = [one for one in slow_parts(experts, ParallelConfig(), GPU, has_engine=True) if "permutation" in one]
    assert found.startswith("model.fuse_permutation is auto, but Transformer Engine is not installed")
    monkeypatch.syspath_prepend(ROOT / "tests/engine_stub")
    assert choose_fusions(experts, GPU)["moe_permute_fusion"]
    assert not choose_fusions(experts, CPU)["moe_permute_fusion"]
    shared, overlapped = replace(experts, shared_ffn_hidden_size=64), ParallelConfig(overlap_shared_experts=True)
    assert transformer_config(shared, overlapped, CPU).moe_shared_expert_overlap
    delayed = ParallelConfig(expert_parallel_size=2, overlap_experts=True, delay_weight_gradients=True)
    made = transformer_config(experts, delayed, CPU)
    assert made.overlap_moe_expert_parallel_comm
    assert made.delay_wgrad_compute
    assert not choose_fusions(replace(experts, fuse_permutation="off"), GPU)["moe_permute_fusion"]
    assert not [one for one in slow_parts(experts, ParallelConfig(), GPU, has_engine=True) if "permutation" in one]


def test_a_fusion_that_cannot_be_had_is_refused_by_name() -> None:
    with pytest.raises(ConfigError, match="fuse_weight_gradient is on, but there is no GPU"):
        choose_fusions(ModelConfig(fuse_weight_gradient="on"), CPU)
    with pytest.raises(ConfigError, match="fuse_permutation is on, but Transformer Engine is not installed"):
        choose_fusions(ModelConfig(fuse_permutation="on"), GPU)
    with pytest.raises(ConfigError, match="fuse_weight_gradient is on, but Apex"):
        choose_fusions(ModelConfig(fuse_weight_gradient="on"), GPU)
    with pytest.raises(ConfigError, match="rounds gradients to bfloat16"):
        choose_fusions(ModelConfig(fuse_cross_entropy="on", dtype="float32"), GPU)
    with start("cpu", deterministic=True):
        assert choose_fusions(ModelConfig(dtype="bfloat16"), GPU)["cross_entropy_loss_fusion"] is False
        assert transformer_config(ModelConfig(), ParallelConfig(), CPU).deterministic_mode
        with pytest.raises(ConfigError, match="is not deterministic"):
            choose_fusions(ModelConfig(fuse_cross_entropy="on"), GPU)
    assert not torch.are_deterministic_algorithms_enabled()


def test_a_run_on_a_gpu_is_told_what_is_slow_and_why(monkeypatch) -> None:
    monkeypatch.setenv("CUDA_DEVICE_MAX_CONNECTIONS", "32")
    assert slow_parts(ModelConfig(), ParallelConfig(), CPU, has_engine=False) == []
    whole = ModelConfig(dtype="float32")
    attention, dtype, gradient = slow_parts(whole, ParallelConfig(), GPU, has_engine=False)
    assert attention.startswith("model.attention is auto, but Transformer Engine cannot be imported")
    assert dtype.startswith("model.dtype is float32")
    assert gradient.startswith("model.fuse_weight_gradient is auto, but Apex")
    padded = slow_parts(whole, ParallelConfig(context_parallel_size=2), GPU, has_engine=False)
    assert "no float32 attention with parallel.context_parallel_size" in padded[0]
    quick = ModelConfig(dtype="bfloat16", fuse_weight_gradient="off")
    assert slow_parts(quick, ParallelConfig(), GPU, has_engine=True) == []
    graphs = ParallelConfig(static_rows=True, cuda_graphs=True)
    assert "reduced after the last row" in slow_parts(quick, graphs, GPU, has_engine=True)[0]
    monkeypatch.setenv("CUDA_DEVICE_MAX_CONNECTIONS", "1")
    with start("cpu", deterministic=True):
        attention, _ = slow_parts(quick, ParallelConfig(context_parallel_size=2), GPU, has_engine=True)
        assert "with parallel.context_parallel_size such a row ends the run" in attention
    # Whether or not it is installed here.
    assert not engine_layers(whole, ParallelConfig(static_rows=True), GPU)


@pytest.mark.parametrize(
    ("value", "parallel", "message"),
    [
        ("1", {}, "is 1, which queues communication after kernels: set it to 32"),
        ("8", {}, ""),
        (None, {}, "is not set, which queues communication after kernels"),
        ("1", {"tensor_parallel_size": 2}, ""),
        ("8", {"tensor_parallel_size": 2}, "is 8, which delays communication until the overlapped GEMM ends"),
        (None, {"context_parallel_size": 2}, "is not set, which delays communication .* set it to 1"),
        ("32", {"pipeline_parallel_size": 2, "expert_parallel_size": 2}, ""),
    ],
)
def test_connections_to_the_gpu_that_do_not_fit_the_layout_are_named(monkeypatch, value, parallel, message) -> None:
    monkeypatch.delenv("CUDA_DEVICE_MAX_CONNECTIONS", raising=False)
    if value is not None:
        monkeypatch.setenv("CUDA_DEVICE_MAX_CONNECTIONS", value)
    quick = ModelConfig(dtype="bfloat16", fuse_weight_gradient="off")
    found = "\n".join(slow_parts(quick, ParallelConfig(**parallel), GPU, has_engine=True))
    assert bool(found) == bool(message)
    assert re.search(message, found), found
    assert slow_parts(quick, ParallelConfig(**parallel), CPU, has_engine=True) == []


FLOAT = {"attention": "transformer_engine", "dtype": "float32"}
HALF = {"dtype": "bfloat16"}
MOMENTS = {"moments_dtype": "bfloat16"}
SPLIT = {"distributed_optimizer": True}
WITH_STEP = {**SPLIT, "pipeline_parallel_size": 2, "virtual_pipeline_parallel_size": 2}
WITH_STEP |= {"overlap_weights_with_step": True}


@pytest.mark.parametrize(
    ("model", "parallel", "optimizer", "device", "message"),
    [
        (FLOAT, {}, {}, "cpu", "trainer.device is cpu"),
        (FLOAT, {"context_parallel_size": 2}, {}, "auto", "float32 and parallel.context_parallel_size is 2"),
        (FLOAT, {"static_rows": True}, {}, "cuda", "float32 and parallel.static_rows is true"),
        (FLOAT, {"tensor_parallel_size": 2, "sequence_parallel": True}, {}, "cuda", "and parallel.sequence_parallel"),
        ({"dtype": "float32"}, {"gradient_dtype": "bfloat16"}, {}, "auto", "is bfloat16, and model.dtype is float32"),
        ({}, {"gradient_dtype": "bfloat16"}, {}, "cpu", "and model.dtype is float32"),
        ({**FLOAT, "attention": "flash"}, {}, {}, "cuda", "is flash: this kernel does not support float32"),
        (HALF, {}, {"offload": 0.5}, "cuda", "offload is 0.5, and parallel.distributed_optimizer is false"),
        (HALF, {}, MOMENTS, "cuda", "moments_dtype is bfloat16, and parallel.distributed_optimizer is false"),
        ({"dtype": "float32"}, SPLIT, {"offload": 1}, "cuda", "is 1, and model.dtype is float32"),
        ({}, SPLIT, {"offload": 1}, "cpu", "and model.dtype is float32"),
        (HALF, SPLIT, MOMENTS, "cpu", "moments_dtype is bfloat16, and trainer.device is cpu"),
        (HALF, WITH_STEP, {"offload": 0.5}, "cuda", "step is true, and optimizer.offload is 0.5: it is not supported"),
    ],
)
def test_what_a_dtype_an_optimizer_or_transformer_engine_cannot_do_is_refused_before_a_job(
    model, parallel, optimizer, device, message
) -> None:
    config = SftConfig(
        model=ModelConfig(**model), parallel=ParallelConfig(**parallel), optimizer=OptimizerConfig(**optimizer)
    )
    config.trainer.device = device
    with pytest.raises(ConfigError, match=message):
        config.check_dtypes()
    config.model.dtype, config.trainer.device, config.parallel.distributed_optimizer = "bfloat16", "cuda", True
    config.parallel.overlap_weights_with_step = False
    config.check_dtypes()


def test_weights_are_bfloat16_on_gpus_and_float32_on_cpus_unless_they_are_set(monkeypatch) -> None:
    assert transformer_config(ModelConfig(), ParallelConfig(), CPU).params_dtype == torch.float32
    assert transformer_config(ModelConfig(), ParallelConfig(), GPU).params_dtype == torch.bfloat16
    assert transformer_config(ModelConfig(dtype="float32"), ParallelConfig(), GPU).params_dtype == torch.float32
    config = SftConfig()
    for has_gpu, device, dtype in ((False, "auto", "float32"), (True, "auto", "bfloat16"), (True, "cpu", "float32")):
        monkeypatch.setattr(torch.cuda, "is_available", lambda has_gpu=has_gpu: has_gpu)
        config.trainer.device = device
        # What a run's own settings record.
        assert settle(config).model.dtype == dtype
    config.model.dtype = "float32"
    config.trainer.device = "auto"
    assert settle(config).model.dtype == "float32"


def test_a_variable_that_names_another_backend_is_refused_by_name(monkeypatch) -> None:
    for name in ("NVTE_FUSED_ATTN", "NVTE_UNFUSED_ATTN"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("NVTE_FLASH_ATTN", "0")
    with pytest.raises(ConfigError, match=r"NVTE_FLASH_ATTN is 0, but model\.attention is flash, which sets it to 1"):
        _check_backend_variables(ModelConfig(attention="flash"))
    _check_backend_variables(ModelConfig(attention="fused"))
    made = [transformer_config(ModelConfig(attention=name), ParallelConfig(), CPU) for name in ("flash", "auto")]
    assert [one.attention_backend.name for one in made] == ["flash", "auto"]
