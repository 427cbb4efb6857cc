"""The planned memory of a run is the memory that PyTorch uses."""

from __future__ import annotations

import io
import json
import random
import re
from dataclasses import replace

import numpy as np
import pytest
import torch
from rich.console import Console

from harness.config import compose_config
from harness.errors import ConfigError
from harness.formats import open_dataset, open_writer
from harness.megatron.batch import run_row, to_device
from harness.megatron.job import runtime
from harness.megatron.job.runtime import join
from harness.megatron.run.rehearsal import KeptBytes
from harness.megatron.step import MegatronStep
from harness.parity.made_data import make_dataset
from harness.plan.encoders import encoder_work
from harness.plan.hf_config import to_hf_config
from harness.plan.layout import ParallelConfig
from harness.plan.memory import Kernels, count_weights, plan_memory
from harness.plan.model import ModelConfig
from harness.plan.run_plan import AssumedPacks, plan_run
from harness.plan.search import check_memory
from harness.plan.settings import OptimizerConfig, PretrainConfig, SftConfig
from harness.plan.work import Machine
from harness.records import Pack, SequenceView
from harness.thd import build_thd_batch
from tests.samples import scan_kernel

TOKENS, VOCAB = 512, 300
ONE = ParallelConfig()
CPU = torch.device("cpu")


# Latent attention, in a model whose layers are dense except the last.
LATENT = {"family": "deepseek_v3", "num_query_groups": 4, "num_experts": 4, "dense_layers": 2, "head_dim": None}
LATENT |= {"kv_lora_rank": 48, "qk_nope_head_dim": 24, "qk_rope_head_dim": 12, "v_head_dim": 16}
# Layers with a scan, by the stand-ins for its kernels.
SCANS = {"scan_num_heads": 8, "scan_head_dim": 16, "scan_state_dim": 24, "scan_num_groups": 2}
SCANS |= {"family": "nemotron_h", "layer_pattern": "M*M", "tie_embeddings": False}


MANY = {"num_experts": 128, "expert_ffn_hidden_size": 16, "dtype": "bfloat16"}


def model_of(**settings) -> ModelConfig:
    sizes = {"num_layers": 3, "hidden_size": 64, "ffn_hidden_size": 160}
    heads = {"num_attention_heads": 4, "num_query_groups": 2, "head_dim": 24}
    return ModelConfig(**{**sizes, **heads, **settings})


def again(*modules: str) -> dict[str, object]:
    return {"recompute": "selective", "recompute_modules": list(modules)}


MODELS = [
    {},
    {"dtype": "bfloat16"},
    {"dtype": "bfloat16", "recompute": "selective", "num_query_groups": 1},
    {"dtype": "bfloat16", "recompute": "full"},
    {"dtype": "bfloat16", "fuse_swiglu": "on", "fuse_cross_entropy": "on"},
    {"family": "qwen2", "tie_embeddings": False},
    {"family": "qwen3", "dtype": "bfloat16"},
    {"num_experts": 8, "expert_ffn_hidden_size": 48, "dense_layers": 1, "shared_ffn_hidden_size": 64},
    {"num_experts": 8, "experts_per_token": 3, "expert_ffn_hidden_size": 48, "dtype": "bfloat16"},
    {"family": "olmoe", "num_experts": 8, "num_query_groups": 4, "dtype": "bfloat16"},
    {"family": "glm4_moe", "qk_norm": True, "num_experts": 8, "shared_ffn_hidden_size": 160, "dtype": "bfloat16"},
    {"family": "glm4_moe", "qk_norm": False, "num_experts": 8, "tie_embeddings": False, "mtp_layers": 2},
    {**LATENT, "num_experts": 8, "tie_embeddings": False, "mtp_layers": 1, "dtype": "bfloat16"},
    # Many experts, and small ones: the router keeps most.
    {**MANY, "experts_per_token": 2},
    {**MANY, "router_normalize": False, "z_loss": 0.01},
    {**MANY, "family": "glm4_moe", "router_score": "sigmoid", "qk_norm": True, "tie_embeddings": False},
    {**MANY, "num_experts": 8, "experts_per_token": 2, "lora_rank": 16},
    {"family": "gpt_oss", "num_experts": 8, "sliding_window": 600, "dtype": "bfloat16"},
    {**LATENT, "q_lora_rank": 40, "dtype": "bfloat16", "num_experts": 8, "expert_ffn_hidden_size": 48},
    {**LATENT, "recompute": "selective"},
    {**LATENT, **again("core_attn", "mlp", "moe"), "shared_ffn_hidden_size": 160},
    LATENT,
    {**LATENT, "lora_rank": 4, "q_lora_rank": 40, "shared_ffn_hidden_size": 160},
    {"lora_rank": 4},
    {"lora_rank": 4, "dtype": "bfloat16", "recompute": "full"},
    {"lora_rank": 4, "dtype": "bfloat16", **again("mlp")},
    {"family": "qwen3", "dtype": "bfloat16", **again("core_attn", "mlp")},
    {"num_experts": 8, "dense_layers": 1, "shared_ffn_hidden_size": 64, **again("shared_experts")},
    {"recompute": "full", "recompute_layers": 2},
    {"num_experts": 8, "recompute": "full", "recompute_layers": 1, "dtype": "bfloat16"},
    SCANS,
    {**SCANS, "layer_pattern": "MMM", "dtype": "bfloat16"},
    {**SCANS, "layer_pattern": "ME-", "num_experts": 8, "shared_ffn_hidden_size": 160, "dtype": "bfloat16"},
    {**SCANS, "layer_pattern": "MEE", "num_experts": 8, "expert_latent_size": 24, "experts_per_token": 4},
    {**SCANS, "layer_pattern": "ME-", "num_experts": 8, "expert_latent_size": 24, "lora_rank": 4},
    {**SCANS, "layer_pattern": "M*-", "lora_rank": 4, "dtype": "bfloat16"},
    {**SCANS, "recompute": "full", "dtype": "bfloat16"},
]
# The nightly run has all.
SAMPLED = random.Random(0).sample(range(len(MODELS)), 10)


@pytest.mark.parametrize(
    "settings",
    [one if at in SAMPLED else pytest.param(one, marks=pytest.mark.nightly) for at, one in enumerate(MODELS)],
    ids=lambda settings: "-".join(map(str, settings.values())) or "float32",
)
def test_memory_of_a_rank_is_what_its_tensors_take(settings, monkeypatch) -> None:
    model = model_of(**settings)
    scan_kernel.install(monkeypatch)
    kernels = Kernels(swiglu=model.fuse_swiglu == "on")
    planned = plan_memory(model, ONE, vocab_size=VOCAB, dp_size=1, max_tokens_per_rank=TOKENS, kernels=kernels)
    with runtime.start("cpu"):
        layout = join(ONE, 1)
        step = MegatronStep(model, ONE, layout, device=CPU, vocab_size=VOCAB)
        parameters = list(step.chunks[0].parameters())
        assert planned.weights == sum(one.numel() * one.element_size() for one in parameters)
        trained = [one for one in parameters if one.requires_grad]
        assert planned.gradients == sum(one.main_grad.numel() * one.main_grad.element_size() for one in trained)

        kept = KeptBytes({one.untyped_storage().data_ptr() for one in parameters})
        ids = np.arange(TOKENS + 1, dtype=np.int32) % VOCAB
        row = to_device(
            build_thd_batch([SequenceView(ids, np.ones(TOKENS + 1, np.uint8))]), CPU, mtp_layers=model.mtp_layers
        )
        with kept.counted():
            run_row(step.chunks[0], row).sum().backward()
        assert planned.activations == pytest.approx(kept.peak, rel=0.01)

        step.optimizer.step()
        state = [value for one in step.optimizer.optimizer.state.values() for value in one.values()]
        moments = sum(value.numel() * value.element_size() for value in state if value.numel() > 1)
        copies = 0 if model.number == "float32" else 4 * sum(one.numel() for one in trained)
        assert planned.optimizer == moments + copies


@pytest.mark.parametrize(("share", "gradients"), [(1.0, "float32"), (0.4, "bfloat16")])
def test_memory_of_an_optimizer_on_the_host_is_what_its_tensors_take(share, gradients) -> None:
    model, optimizer = model_of(dtype="bfloat16"), OptimizerConfig(offload=share)
    parallel = ParallelConfig(distributed_optimizer=True, gradient_dtype=gradients)
    planned = plan_memory(model, parallel, vocab_size=VOCAB, dp_size=1, max_tokens_per_rank=1, optimizer=optimizer)
    with runtime.start("cpu"):
        step = MegatronStep(model, parallel, join(parallel, 1), device=CPU, vocab_size=VOCAB, optimizer=optimizer)
        ids = np.arange(9, dtype=np.int32)
        step.train([build_thd_batch([SequenceView(ids, np.ones(9, np.uint8))])])
        (part,) = step.optimizer.chained_optimizers
        found = [0, 0]
        buffers = {buffer.grad_data.untyped_storage().data_ptr() for buffer in part.buffers}
        for adam in part.optimizer.sub_optimizers:
            for main, state in adam.state.items():
                tensors = {one.data_ptr(): one for one in (main, main.grad, *state.values()) if one.dim()}
                own = [one for one in tensors.values() if one.untyped_storage().data_ptr() not in buffers]
                found[adam is part.optimizer.gpu_optimizer] += sum(one.nbytes for one in own)
        largest = max(weight.numel() for weight in step.chunks[0].parameters())
    # Whole weights are on the host, up to the one with which the share is reached.
    more = (found[0] - planned.host) / 16
    assert 0 <= more < (largest if share < 1 else 1)
    assert found[1] == pytest.approx(planned.optimizer - more * (16 if gradients == "bfloat16" else 12), abs=16)
    plain = plan_memory(model, parallel, vocab_size=VOCAB, dp_size=1, max_tokens_per_rank=1)
    assert planned.total - planned.optimizer == plain.total - plain.optimizer
    assert (plain.host, plain.optimizer) == (0, 6 * plain.weights)


@pytest.mark.parametrize("vocab_size", [None, 128256])
def test_a_run_that_no_vocabulary_makes_fit_is_refused_on_gpus_alone(vocab_size) -> None:
    settings = ["model=llama3_8b", f"model.vocab_size={vocab_size or 'null'}", "loader.global_batch_size=8"]
    for recipe, kind in (("sft", SftConfig), ("pretrain", PretrainConfig)):
        config = compose_config(recipe, kind, settings)
        # Two bytes of weights, four of gradients and twelve of optimizer state for seven billion weights of layers.
        check_memory(config, 8, gpu_gib=190)
        with pytest.raises(ConfigError, match=rf"{recipe} does not fit .* of 117.0 usable"):
            check_memory(config, 8, gpu_gib=130)
        config.trainer.device = "cpu"
        check_memory(config, 8, gpu_gib=1)
    rows = ["data.sequence_length=2048", "data.micro_batch_size=8", "parallel.pipeline_parallel_size=4"]
    # A row of a batch has all of its samples: the first stage keeps one row, and not four.
    check_memory(compose_config("pretrain", PretrainConfig, [*settings, *rows]), 4, gpu_gib=100)


def test_the_weights_of_a_published_mixture_of_experts_are_exact_and_most_of_them_idle() -> None:
    model = compose_config("sft", SftConfig, ["model=qwen3_30b_a3b"]).model
    assert count_weights(model, ONE, stage=0, vocab_size=151936).whole == 30_532_122_624  # of its published safetensors
    config = compose_config("sft", SftConfig, ["experiment=qwen3_30b_a3b_1node"])
    planned = plan_run(config, packs=AssumedPacks(1000, pack_size=8192, sequence_tokens=1024))
    assert (planned.weights, planned.active_weights) == (30_532_122_624, 3_353_032_704)
    # Eight expert-parallel ranks divide 28,991,029,248 weights of experts; the optimizer state of these has one copy.
    eight = ParallelConfig(expert_parallel_size=8, distributed_optimizer=True)
    memory = plan_memory(model, eight, vocab_size=151936, dp_size=8, max_tokens_per_rank=1)
    dense, experts = 30_532_122_624 - 28_991_029_248, 28_991_029_248 // 8
    assert memory.gradients == 4 * (dense + experts)
    assert memory.optimizer == 12 * dense // 8 + 12 * experts


@pytest.mark.nightly
def test_a_mixture_of_experts_has_the_tensors_that_transformers_makes_of_its_sizes() -> None:
    from transformers import AutoConfig, AutoModelForCausalLM

    model = compose_config("sft", SftConfig, ["model=qwen3_30b_a3b"]).model
    config = AutoConfig.for_model(**to_hf_config(model, vocab_size=151936))
    with torch.device("meta"):
        published = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    planned = plan_memory(model, ONE, vocab_size=151936, dp_size=1, max_tokens_per_rank=1)
    assert planned.weights == sum(one.numel() * one.element_size() for one in published.parameters())


@pytest.mark.parametrize(("schedule", "rows"), [("as_packed", 64), ("dp_balanced", 48)])
def test_a_plan_shows_the_padding_of_rows_that_have_one_length_by_default(schedule, rows) -> None:
    settings = compose_config("sft", SftConfig, ["experiment=llama3_70b_4nodes", f"schedule={schedule}"])
    settings.schedule.max_tokens_per_rank, settings.loader.global_batch_size = 8192, 64
    assert settings.parallel.static_rows is None
    packs = AssumedPacks(1024, pack_size=8192, sequence_tokens=6000)
    planned, console = plan_run(settings, packs=packs), Console(width=120, record=True, file=io.StringIO())
    assert planned.work.microbatches == rows
    assert planned.work.padding == pytest.approx(1 - 64 * 5999 / (rows * 8192))
    console.print(planned.render(gpu_bytes=None))
    assert f"{planned.work.padding:.1%} of the rows, which have one length" in console.export_text()
    settings.parallel.static_rows = False
    shorter = plan_run(settings, packs=packs)
    assert shorter.work == replace(planned.work, padding=0.0)
    assert shorter.parts["matrix products"] < planned.parts["matrix products"]


def test_a_run_is_planned_from_its_settings_and_its_data(tmp_path) -> None:
    with open_writer(tmp_path / "train", format="parquet", pack_size=64) as writer:
        for _ in range(6):
            writer.append(Pack([1, 2, 3, 4] * 16, [1] * 63 + [0], [0]))
    settings = compose_config(
        "sft", SftConfig, ["model.vocab_size=300", "loader.global_batch_size=4", "schedule.max_tokens_per_rank=63"]
    )
    settings.data.path = str(tmp_path)
    planned = plan_run(settings, ranks=2)
    assert planned.dp_size == 2
    assert planned.work is not None
    assert (planned.work.steps, planned.work.tokens, planned.work.microbatches) == (2, 189, 2)
    console = Console(width=100, record=True, file=io.StringIO())
    console.print(planned.render(gpu_bytes=2**20))
    text = console.export_text()
    assert "does NOT fit" in text
    assert "2 steps of 189 tokens" in text
    assert "an estimate" in text
    given = plan_run(settings, ranks=2, mfu=0.25, machine=Machine(peak_flops=1e9))
    assert given.step_s == pytest.approx(given.work.model_flops / 2 / 0.25e9)
    assert given.parts == {}

    settings.data.path = str(tmp_path / "nowhere")
    planned = plan_run(settings, ranks=2)
    assert (planned.work, planned.why_no_work) == (None, "there is no dataset")
    settings.parallel.pipeline_parallel_size = 3
    with pytest.raises(ConfigError, match="4 layers cannot be cut into 3"):
        plan_run(settings, ranks=2)


def test_the_media_of_the_data_count_in_time_and_in_the_memory_of_the_first_stage(tmp_path) -> None:
    sizes = {"d_model": 64, "encoder_layers": 2, "encoder_ffn_dim": 128, "encoder_attention_heads": 4}
    sizes |= {"num_mel_bins": 16, "max_source_positions": 50}
    encoder = json.dumps({"model_type": "qwen2_audio", "audio_token_index": 299, "audio_config": sizes})
    data = make_dataset(tmp_path, num_packs=8, encoder=encoder) / "train"
    reader = open_dataset(data)
    settings = compose_config(
        "sft", SftConfig, ["model.vocab_size=300", "loader.global_batch_size=4", "schedule.max_tokens_per_rank=255"]
    )
    settings.data.path, text = str(data), replace(settings.model, family="qwen2")
    one = encoder_work(encoder, text.hidden_size, np.ones(1))
    settings.model = text
    base, plans = plan_run(settings, ranks=2), {}
    for train_encoder in (False, True):
        settings.model = replace(text, encoder=encoder, train_encoder=train_encoder)
        plans[train_encoder] = plan_run(settings, ranks=2)
    frozen, trained = plans[False], plans[True]
    per_step = reader.count_media()["audio"] * one.flops[0] / base.work.steps
    assert (base.work.encoder_flops, base.memory.encoder, "encoder" in base.parts) == (0, 0, False)
    assert frozen.work.model_flops == pytest.approx(base.work.model_flops + per_step)
    assert trained.work.encoder_flops == pytest.approx(3 * per_step)
    assert trained.parts["encoder"] == pytest.approx(3 * frozen.parts["encoder"]) != 0
    # In bfloat16, on a GPU. All sounds are padded to one size.
    sounds = trained.memory.encoder / (2 * one.kept[0])
    assert frozen.memory.encoder == pytest.approx(sounds * 2 * one.once[0], abs=1)
    assert max(len(pack.media) for pack in reader) <= sounds < reader.count_media()["audio"]
    console = Console(width=100, record=True, file=io.StringIO())
    console.print(trained.render(gpu_bytes=2**30))
    assert "of them in the encoder" in (printed := console.export_text())
    assert "activations of the encoder" in printed
    settings.parallel = replace(settings.parallel, pipeline_parallel_size=2)
    divided = plan_run(settings, ranks=2)
    assert divided.memory.stage == 0
    assert divided.memory.encoder == pytest.approx(2 * trained.memory.encoder, abs=1)  # one more waits
    assumed = plan_run(settings, ranks=2, packs=AssumedPacks(8, 256, 64))
    assert "text alone" in " ".join(assumed.notes)


def test_data_that_does_not_exist_yet_is_planned_by_its_packs() -> None:
    settings = compose_config("sft", SftConfig, ["model.vocab_size=300", "schedule.max_tokens_per_rank=1024"])
    planned = plan_run(settings, packs=AssumedPacks(32, pack_size=1024, sequence_tokens=100))
    assert planned.ranks == 8
    assert planned.work is not None
    assert (planned.work.steps, planned.work.tokens, planned.work.microbatches) == (2, 16 * 10 * 99, 2)
    settings.schedule.max_tokens_per_rank = 4096
    settings.schedule.name = "as_packed"  # a row has one pack, whatever its size
    assert plan_run(settings, packs=AssumedPacks(32, pack_size=1024, sequence_tokens=100)).work == planned.work
    with pytest.raises(
        ConfigError, match="the longest sequence has 8,191 model tokens after padding, more than the 4,"
    ):
        plan_run(settings, packs=AssumedPacks(32, pack_size=8192, sequence_tokens=8192))
    with pytest.raises(ConfigError, match="sequences of 200 tokens in packs of 100"):
        AssumedPacks(1, pack_size=100, sequence_tokens=200)


@pytest.mark.parametrize(
    ("overrides", "warning"),
    [
        (["trainer.steps=10", "optimizer.warmup_steps=9"], []),
        (["trainer.steps=1", "optimizer.warmup_steps=0"], []),
        (["trainer.steps=10", "optimizer.warmup_steps=100"], ["trainer.steps is 10: the warm-up ends at step 9"]),
        (["optimizer.decay_steps=7", "optimizer.warmup_steps=7"], ["decay_steps is 7: the warm-up ends at step 6"]),
    ],
)
def test_a_warm_up_longer_than_the_run_is_named(overrides, warning):
    found = compose_config("sft", SftConfig, overrides).warnings()
    assert [one.endswith(expected) for one, expected in zip(found, warning, strict=True)] == [True] * len(warning)


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        ([], ["the learning rate stays at optimizer.lr"]),
        (["optimizer.decay_steps=100"], []),
        (["optimizer.decay=constant"], []),
        (["trainer.steps=10", "optimizer.warmup_steps=2"], []),
        (["optimizer.decay_steps=100", "trainer.checkpoint_interval=0"], ["no chunk is released"]),
        (["optimizer.decay_steps=100", "trainer.checkpoint_interval=0", "data.live.completed=read"], []),
        (["optimizer.decay_steps=100", "data.path=data/mine"], ["data.path=data/mine is ignored"]),
    ],
)
def test_a_live_run_warns_of_a_rate_and_of_chunks_that_stay_and_of_data_that_is_not_read(overrides, words):
    warnings = compose_config("sft", SftConfig, ["data=live", "schedule=as_packed", *overrides]).warnings()
    assert len(warnings) == len(words)
    assert all(word in warning for word, warning in zip(words, warnings, strict=True))


@pytest.mark.parametrize("seed", [-1, 2**32])
def test_a_seed_that_the_shuffle_of_megatron_cannot_take_is_refused(seed):
    with pytest.raises(ConfigError, match="seed is") as error:
        compose_config("pretrain", PretrainConfig, [f"loader.seed={seed}"])
    assert error.value.where == "loader.seed"


def test_a_sequence_of_one_token_is_refused_as_training_refuses_it(tmp_path) -> None:
    with open_writer(tmp_path / "train", format="parquet", pack_size=64) as writer:
        writer.append(Pack([1, 2, 3, 4, 5], [1, 1, 1, 0, 0], [0, 4]))
    config = compose_config("sft", SftConfig, ["model.vocab_size=300", f"data.path={tmp_path}"])
    with pytest.raises(ConfigError, match="a sequence has one token"):
        plan_run(config, ranks=1)


def test_an_epoch_of_ages_is_printed(harness) -> None:
    code, printed, _ = harness("plan", "llama3_8b_1node", "packs=100000", "mfu=1e-12")
    assert (code, re.search(r"time of an epoch +[\d,]+ d", printed) is not None) == (0, True)


def test_a_tied_matrix_is_in_one_place_in_8_bits_and_in_a_checkpoint() -> None:
    settings = ["model=llama3_8b", "model.vocab_size=128256", "model.fp8=tensorwise", "model.tie_embeddings=true"]
    packs = AssumedPacks(1000, pack_size=8192, sequence_tokens=1024)
    one, two = (
        plan_run(
            compose_config("sft", SftConfig, [*settings, f"parallel.pipeline_parallel_size={stages}"]), packs=packs
        )
        for stages in (1, 2)
    )
    # Of all weights, the layers' and the last norm are in 8 bits; each stage has a half of the layers.
    layers = one.weights - 128256 * 4096
    assert one.memory.fp8 == 4 * layers // 2
    assert two.memory.fp8 == pytest.approx(one.memory.fp8 / 2, rel=1e-4)
    assert two.checkpoint.total_bytes == one.checkpoint.total_bytes == 14 * one.weights
    # Two bytes of weights and twelve of optimizer state a parameter, each written once.
    assert one.checkpoint.own_bytes == pytest.approx(one.checkpoint.total_bytes / one.ranks, rel=1e-4)
