"""Weights from Hugging Face give the same logits on any layout, and come back bit by bit."""

from __future__ import annotations

import json
import random
import re
import shutil
from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import yaml

from harness.config import compose_config
from harness.errors import HarnessError
from harness.megatron.export.folder import export_checkpoint
from harness.megatron.hf_files import INDEX_FILE, HfWeights
from harness.megatron.job import runtime
from harness.megatron.job.runtime import join
from harness.megatron.model.gpt import build_chunks
from harness.megatron.pretrained import find_pretrained
from harness.megatron.weights import TensorShard, check_weights, fill_model, global_parameters, hf_tensors
from harness.parity.running import free_ports
from harness.plan import SftConfig
from harness.plan.hf_config import MTP_SETTINGS, read_hf_config, to_hf_config
from harness.plan.layout import ParallelConfig
from harness.plan.model import ModelConfig
from harness.recipes import sft
from harness.settings import to_plain, to_yaml

from .conftest import forked, overrides_of, run_command, run_here, run_jobs, train

SIZES = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
# Megatron pads the vocabulary to 384: a second rank has both tokens and padding.
SIZES |= {"num_key_value_heads": 2, "max_position_embeddings": 1024, "vocab_size": 300, "initializer_range": 0.2}
LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
LLAMA3 |= {"original_max_position_embeddings": 8192, "rope_theta": 500000.0}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24}
MODELS = {
    "llama": ("Llama", {"tie_word_embeddings": False}),
    "llama3_tied": ("Llama", {"tie_word_embeddings": True, "rope_parameters": LLAMA3}),
    "llama_linear": ("Llama", {"rope_parameters": {"rope_type": "linear", "factor": 4.0, "rope_theta": 10000.0}}),
    "mistral": ("Mistral", {"sliding_window": None, "head_dim": 16}),
    "qwen2": ("Qwen2", {"tie_word_embeddings": False}),
    "qwen3": ("Qwen3", {"head_dim": 16, "tie_word_embeddings": True}),
    "qwen3_moe": ("Qwen3Moe", {**EXPERTS, "mlp_only_layers": [0], "norm_topk_prob": True, "head_dim": 16}),
    "qwen3_moe_unnormalized": ("Qwen3Moe", {**EXPERTS, "norm_topk_prob": False, "tie_word_embeddings": True}),
    "olmoe": ("Olmoe", {"num_experts": 4, "num_experts_per_tok": 2, "tie_word_embeddings": False}),
    "mixtral": ("Mixtral", {"sliding_window": None, "num_local_experts": 4, "num_experts_per_tok": 2}),
}
LATENT = {"num_key_value_heads": 4, "kv_lora_rank": 16, "q_lora_rank": 24, "qk_nope_head_dim": 8, "qk_rope_head_dim": 6}
LATENT |= {"v_head_dim": 10, "n_routed_experts": 8, "num_experts_per_tok": 4, "moe_intermediate_size": 24}
LATENT |= {"n_shared_experts": 2, "first_k_dense_replace": 1, "tie_word_embeddings": False}
GROUPED = {**LATENT, "n_group": 4, "topk_group": 2, "routed_scaling_factor": 2.5}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16, "beta_fast": 32, "beta_slow": 1}
YARN |= {"rope_theta": 10000.0, "mscale": 0.707, "mscale_all_dim": 1.0}
MODELS |= {
    "deepseek_v3": ("DeepseekV3", {**GROUPED, "rope_parameters": YARN, "num_mtp_layers": 0}),
    # Moonlight: no groups, and queries made of the hidden states.
    "moonlight": (
        "DeepseekV3",
        {**LATENT, "q_lora_rank": None, "n_group": 1, "topk_group": 1, "rms_norm_eps": 1e-2, "num_mtp_layers": 0},
    ),
    "glm4_moe_lite": ("Glm4MoeLite", {**LATENT, "v_head_dim": 14, "mlp_layer_types": ["dense", "sparse"]}),
    "deepseek_v2": ("DeepseekV2", {**LATENT, "rope_parameters": {**YARN, "mscale": 0.707, "mscale_all_dim": 0.707}}),
}
MODELS["qwen2_tied"] = ("Qwen2", {"tie_word_embeddings": True, "rope_parameters": YARN})
GROUPED_HEADS = {name: value for name, value in GROUPED.items() if "_lora_" not in name and "_head_dim" not in name}
GROUPED_HEADS |= {"num_key_value_heads": 2, "head_dim": 16, "attention_bias": True, "use_qk_norm": True}
MODELS["glm4_moe"] = ("Glm4Moe", {**GROUPED_HEADS, "num_mtp_layers": 0})
UNCUT = {name: value for name, value in YARN.items() if not name.startswith("mscale")} | {"truncate": False}
WINDOWS = {"head_dim": 16, "sliding_window": 5, "rope_parameters": UNCUT}
MODELS["gpt_oss"] = ("GptOss", {"num_local_experts": 4, "num_experts_per_tok": 2, **WINDOWS})
SCANS = {"num_hidden_layers": None, "head_dim": 16, "mamba_num_heads": 4, "mamba_head_dim": 12, "ssm_state_size": 8}
# The lowest step of a head in transformers; kernels and Megatron-Core have none.
SCANS |= {"n_groups": 2, "time_step_min": 1e-9, "tie_word_embeddings": False}
ROUTED = {"n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24, "routed_scaling_factor": 2.5}
NEMOTRON3 = {**SCANS, **ROUTED, "hybrid_override_pattern": "MEM*EM", "moe_shared_expert_intermediate_size": 40}
MODELS |= {
    "nemotron_h": ("NemotronH", {**SCANS, "hybrid_override_pattern": "M-M*M-"}),
    "nemotron3": ("NemotronH", NEMOTRON3),
    "nemotron3_super": ("NemotronH", {**NEMOTRON3, "moe_latent_size": 20}),
}
DELTAS = {"num_hidden_layers": 4, "head_dim": 16, "linear_key_head_dim": 8, "linear_value_head_dim": 12}
DELTAS |= {"linear_num_key_heads": 2, "linear_num_value_heads": 4, "tie_word_embeddings": False}
DELTAS |= {"layer_types": ["linear_attention", "full_attention", "linear_attention", "linear_attention"]}
# A norm of a head whose output is almost zero would amplify rounding errors.
DELTAS |= {"rms_norm_eps": 1e-2}
GATED_EXPERTS = {**EXPERTS, "shared_expert_intermediate_size": 40}
MODELS |= {
    "qwen3_next": ("Qwen3Next", {**DELTAS, **GATED_EXPERTS}),
    "qwen3_5": ("Qwen3_5Text", DELTAS),
    "qwen3_5_moe": ("Qwen3_5MoeText", {**DELTAS, **GATED_EXPERTS}),
}
# The first model of each family.
FIRST = list({family: name for name, (family, _) in reversed(MODELS.items())}.values())
# Sizes of tensor, pipeline, expert and expert tensor parallelism; the last two are of models with experts.
LAYOUTS = {"tp1": (1, 1, 1, 1), "tp2": (2, 1, 1, 1), "pp2": (1, 2, 1, 1), "ep2": (1, 1, 2, 1), "etp2": (2, 1, 1, 2)}
# Of the layers of deepseek_v3: one layout of each number of ranks is enough.
TWINS = ("moonlight", "glm4_moe_lite", "deepseek_v2")
# The learning rate is too small to move a weight: loss, optimizer and checkpoint are real.
STILL = ("optimizer.lr=1e-30", "optimizer.min_lr_ratio=0", "optimizer.weight_decay=0", "optimizer.warmup_steps=0")
# Sequences of one row; the test compares the logits of all but the last token of each.
SEQUENCES = [list(range(3, 40)), [299, 5, 7, 11], list(range(280, 260, -1))]


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A small random model of each kind, saved by transformers."""
    import transformers

    place = tmp_path_factory.mktemp("models")
    for name, (family, settings) in MODELS.items():
        torch.manual_seed(len(name))
        config = getattr(transformers, f"{family}Config")(**{**SIZES, **settings})
        model = transformers.AutoModelForCausalLM.from_config(config)
        with torch.no_grad():
            for parameter_name, parameter in [*model.named_parameters(), *model.named_buffers()]:
                kinds = ("norm", "bias", "gate.weight", "sinks", "router.weight", "A_log")
                if any(part in parameter_name for part in kinds):
                    parameter.add_(0.3 * torch.randn_like(parameter))  # initially ones and zeros, which hide a mistake
        # Several files with an index, as for large models.
        model.save_pretrained(place / name, max_shard_size="40KB")
    return {name: place / name for name in MODELS}


def expected(folder: Path) -> np.ndarray:
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder).eval()
    with torch.no_grad():
        return torch.cat([model(torch.tensor([ids[:-1]])).logits[0] for ids in SEQUENCES]).numpy()


def nightly(*case: object) -> Any:
    return pytest.param(*case, marks=pytest.mark.nightly)


@pytest.mark.parametrize(
    ("ranks", "share"), [pytest.param(2, 3, marks=pytest.mark.submission), nightly(1, 1), nightly(2, 1)]
)
def test_logits_of_a_packed_row_are_those_of_transformers_on_every_layout(models, tmp_path, ranks, share) -> None:
    layouts = {name: sizes for name, sizes in LAYOUTS.items() if max(sizes) == ranks}
    jobs = [
        [f"{name}-{layout}", str(folder), *sizes, SEQUENCES]
        for name, folder in models.items()
        for layout, sizes in layouts.items()
        if name != "gpt_oss" or sizes[3] == 1  # biases
        if max(sizes[2:]) == 1 or "_experts" in json.dumps(MODELS[name])
        if name not in TWINS or layout.startswith("tp")
    ]
    # By default a seeded third, in which every model and every layout is.
    random.Random(31).shuffle(jobs)
    first = {job[1]: job for job in jobs}
    jobs = [*first.values(), *(job for job in jobs if job not in first.values())][: max(len(first), len(jobs) // share)]
    assert {tuple(job[2:6]) for job in jobs} == set(layouts.values())
    run_jobs(ranks, "weights_ranks", tmp_path, jobs, tmp_path)
    right = {name: expected(folder) for name, folder in models.items()}
    for name, layout in (job[0].split("-") for job in jobs):
        assert right[name].std() > 0.3
        found = np.load(tmp_path / f"{name}-{layout}.npy")
        np.testing.assert_allclose(found, right[name], atol=1e-4, rtol=0, err_msg=f"{name} on {layout}")


def settings_of(folder: Path) -> list[str]:
    found = read_hf_config(folder)
    texts = {name: json.dumps(value).strip('"') for name, value in found.settings.items()}
    return [
        f"model.init_from={folder}",
        "model.max_sequence_length=1024",
        *(f"model.{name}={text}" for name, text in texts.items()),
    ]


def tensors(folder: Path) -> dict[str, torch.Tensor]:
    from safetensors.torch import load_file

    return {k: v for file in sorted(folder.glob("*.safetensors")) for k, v in load_file(file).items()}


def check(weights: HfWeights, model: ModelConfig, vocab_size: int, mtp_layers: int = 0) -> None:
    with runtime.start("cpu"):
        join(ParallelConfig(), 1)
        chunks = build_chunks(model, ParallelConfig(), vocab_size=vocab_size, device=torch.device("cpu"))
        check_weights(chunks, weights, model, TensorShard(), vocab_size, mtp_layers)


@pytest.mark.parametrize("name", MODELS)
def test_every_weight_comes_back_bit_by_bit(models, name) -> None:
    model = ModelConfig(**{**to_plain(ModelConfig()), **read_hf_config(models[name]).settings})
    with runtime.start("cpu"), HfWeights(models[name]) as weights:
        join(ParallelConfig(), 1)
        chunks = build_chunks(model, ParallelConfig(), vocab_size=300, device=torch.device("cpu"))
        check_weights(chunks, weights, model, TensorShard(), 300)
        fill_model(chunks, weights, model, TensorShard())
        parameters = dict(global_parameters(chunks[0]))
        back = dict(hf_tensors(chunks[0], model, 300))
        # No row of another tensor, and no token: the padding of the vocabulary is zero.
        assert not parameters["embedding.word_embeddings.weight"][300:].any()
    right = tensors(models[name])
    assert set(back) == set(right)
    assert all(torch.equal(back[key], right[key]) for key in right)


@pytest.mark.parametrize("name", ["deepseek_v3", "glm4_moe"])
def test_weights_of_layers_that_predict_further_tokens_come_back_bit_by_bit(models, tmp_path, name) -> None:
    from safetensors.torch import save_file

    model = ModelConfig(**{**to_plain(ModelConfig()), **read_hf_config(models[name]).settings, "mtp_layers": 1})
    right = tensors(models[name])
    # The layer is like the model's last one, with what joins it to the others.
    last, further, torch_seed = "model.layers.1.", "model.layers.2.", torch.manual_seed(2)
    right |= {
        further + key.removeprefix(last): torch.randn(tensor.shape, generator=torch_seed).to(tensor.dtype)
        for key, tensor in right.items()
        if key.startswith(last)
    }
    for key, size in (("enorm", (32,)), ("hnorm", (32,)), ("shared_head.norm", (32,)), ("eh_proj", (32, 64))):
        right[f"{further}{key}.weight"] = torch.randn(size, generator=torch_seed)
    copies = {"embed_tokens": "model.embed_tokens", "shared_head.head": "lm_head"}
    right |= {f"{further}{copy}.weight": right[f"{own}.weight"].clone() for copy, own in copies.items()}
    save_file(right, tmp_path / "model.safetensors")
    with runtime.start("cpu"), HfWeights(tmp_path) as weights:
        join(ParallelConfig(), 1)
        chunks = build_chunks(model, ParallelConfig(), vocab_size=300, device=torch.device("cpu"))
        check_weights(chunks, weights, model, TensorShard(), 300)
        fill_model(chunks, weights, model, TensorShard())
        back = dict(hf_tensors(chunks[0], model, 300))
    assert set(back) == set(right)
    assert all(torch.equal(back[key], right[key]) for key in right)

    right[f"{further}embed_tokens.weight"][7] += 1
    save_file(right, tmp_path / "model.safetensors")
    with (
        HfWeights(tmp_path) as weights,
        pytest.raises(HarnessError, match=r"2.embed_tokens.weight differs from model.embed"),
    ):
        fill_model(chunks, weights, model, TensorShard())


@pytest.mark.parametrize(
    ("name", "ranks", "parallel"),
    [
        nightly("qwen3", 2, "tp2"),
        nightly("llama3_tied", 2, "pp2"),
        nightly("llama3_tied", 2, "pp2 parallel.pipeline_layout=E|t*2L"),
        ("deepseek_v3", 2, "pp2 parallel.pipeline_layout=Et*2|L"),
        nightly("qwen2", 2, "tp2"),
        nightly("mistral", 1, "data"),
        nightly("nemotron3_super", 2, "tp2_sp"),
        nightly("nemotron_h", 2, "cp2"),
        nightly("qwen3_5", 2, "cp2"),
    ],
)
def test_weights_come_back_bit_by_bit_after_a_step_that_changes_nothing(
    models, dataset, tmp_path, harness, name, ranks, parallel
) -> None:
    from transformers import AutoModelForCausalLM

    still = [*STILL, *(["model.expert_bias_rate=0"] if name in ("nemotron3_super", "deepseek_v3") else [])]
    settings = overrides_of(dataset, tmp_path / "run", "trainer.steps=1", *f"parallel={parallel}".split(), *still)
    train(tmp_path / "run", [*settings, *settings_of(models[name])], ranks=ranks, start=forked)
    code, output, _ = harness("export", tmp_path / "run", tmp_path / "out")
    assert code == 0, output
    assert "not written: " in output  # the tokenizer, which random weights do not have

    before, after = tensors(models[name]), tensors(tmp_path / "out")
    assert set(after) == set(before)
    assert all(torch.equal(after[key], before[key]) for key in before)
    config = json.loads((models[name] / "config.json").read_text())
    assert json.loads((tmp_path / "out" / "config.json").read_text()) == config | {"torch_dtype": "float32"}
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "out").eval()
    with torch.no_grad():
        logits = torch.cat([again(torch.tensor([ids[:-1]])).logits[0] for ids in SEQUENCES]).numpy()
    np.testing.assert_array_equal(logits, expected(models[name]))


@pytest.mark.parametrize("name", ["qwen3", "llama", "qwen2_tied", "qwen3_moe"])
def test_init_from_alone_gives_the_settings_of_every_size_by_hand(models, name) -> None:
    alone = compose_config("sft", SftConfig, [f"model.init_from={models[name]}"])
    assert alone == compose_config("sft", SftConfig, settings_of(models[name]))
    # The field of its default preset, which nobody chose, is not kept either.
    recorded = yaml.safe_load(to_yaml(alone))["model"]
    sizes = {**read_hf_config(models[name]).settings, "vocab_size": 300, "max_sequence_length": 1024, "init_std": 0.02}
    assert {key: recorded[key] for key in sizes} == sizes


def test_weights_that_do_not_fit_are_refused_with_both_values(models) -> None:
    found = read_hf_config(models["qwen3"])
    model = ModelConfig(**{**to_plain(ModelConfig()), **found.settings, "init_from": str(models["qwen3"])})
    model.max_sequence_length = 512
    assert find_pretrained(model) is not None
    for name, value, message in (
        ("num_layers", 3, "num_layers 3 (the weights have 2)"),
        ("head_dim", None, "head_dim None (the weights have 16)"),
        ("rotary_base", 500, "rotary_base 500 (the weights have 10000)"),
        ("family", "qwen2", "family qwen2 (the weights have qwen3)"),
        ("max_sequence_length", 4096, "the weights were trained for positions up to 1,024"),
        ("vocab_size", 301, "vocab_size 301 (the weights have 300)"),
    ):
        with pytest.raises(HarnessError) as refused:
            find_pretrained(ModelConfig(**{**to_plain(model), name: value}))
        assert message in str(refused.value)

    pretrained = find_pretrained(model)
    with pytest.raises(HarnessError, match="dataset's tokenizer has 301 tokens, but the weights have 300"):
        pretrained.check_data(vocab_size=301, dataset_tokenizer="", where="data")
    with HfWeights(models["qwen3"]) as weights:
        check(weights, model, 300)
        with pytest.raises(HarnessError, match=r"model.embed_tokens.weight is \[300, 32\], and config.json requires"):
            check(weights, model, 400)
        model.family = "llama"
        with pytest.raises(HarnessError, match=r"have unknown model.layers.0.self_attn.k_norm.weight and 3 more"):
            check(weights, model, 300)
    model.num_layers = 3
    with HfWeights(models["llama"]) as weights, pytest.raises(HarnessError, match="the weights lack"):
        check(weights, model, 300)


# Family, values of its config, and what the refusal says; of values that no family is trained with, one of each kind.
UNSUPPORTED: tuple[tuple[str, dict[str, Any], str], ...] = (
    ("gpt_oss", {"layer_types": ["full_attention", "sliding_attention"]}, "than every second one"),
    ("gpt_oss", {"swiglu_limit": 5.0, "layer_types": None}, "swiglu_limit 5.0 is not supported"),
    ("glm4_moe", {"attention_bias": True, "partial_rotary_factor": 0.25}, "factor 0.25 is not supported (0.5 is)"),
    ("qwen3_moe", {"num_experts": 4, "mlp_only_layers": [1]}, "dense layers [1] that are not the"),
    ("olmoe", {"num_experts": 4, "num_experts_per_tok": 2, "clip_qkv": 8.0}, "clip_qkv 8.0 is not supported"),
    ("deepseek_v32", {}, "'deepseek_v32' are not supported: they need sparse attention"),
    ("deepseek_v2", {**GROUPED, "topk_method": "group_limited_greedy"}, "'group_limited_greedy' are"),
    ("deepseek_v3", {**GROUPED, "num_experts_per_tok": 6}, "6 experts per token of 2 of 4 groups are"),
    ("deepseek_v3", {**GROUPED, "n_group": 1, "num_experts_per_tok": 1}, "num_experts_per_tok 1 is not"),
    ("deepseek_v3", {**GROUPED, "norm_topk_prob": False}, "norm_topk_prob False is not supported (True is)"),
    ("deepseek_v3", {**GROUPED, "rope_parameters": {**YARN, "beta_fast": 16}}, "with beta_fast 16"),
    ("glm4_moe_lite", {**LATENT, "mlp_layer_types": ["sparse", "dense"]}, "that are not the first"),
    ("nemotron_h", {**NEMOTRON3, "layer_norm_epsilon": 1e-5, "time_step_min": 0.1}, "step_min 0.1 is"),
    ("nemotron_h", {**NEMOTRON3, "layer_norm_epsilon": 1e-5, "time_step_limit": [0.0, 0.1]}, "limit [0.0, 0.1] is"),
    ("nemotron_h", {**NEMOTRON3, "layer_norm_epsilon": 1e-5, "mamba_dt_limit": [1e-4, 1e9]}, "limit [0.0001, 1"),
    ("qwen3", {"rope_parameters": {**YARN, "truncate": False}}, "yarn with truncate False is not supported (True is)"),
    ("qwen3", {"rope_parameters": {**YARN, "attention_factor": 1.0}}, "attention_factor 1.0 is not supported"),
    ("qwen3", {"rope_parameters": {**LLAMA3, "low_freq_factor": 2.0}}, "with low_freq_factor 2.0 is not supported"),
    ("qwen3", {"rope_parameters": {"rope_type": "default", "rope_theta": 500.5}}, "rope_theta 500.5 is not supported"),
    ("qwen3", {"rope_parameters": {"full_attention": {"rope_theta": 500}}}, "of the layers of type full"),
    ("qwen3", {"rope_parameters": YARN, "original_max_position_embeddings": 64}, "16 of the rope scaling and 64"),
    ("qwen3", {"hidden_size": None}, "hidden_size"),
    ("qwen3", {"is_causal": False}, "is_causal False is not supported"),
    ("qwen3", {"attention_dropout": 0.1}, "attention_dropout 0.1 is not supported"),
    ("qwen3", {"hidden_act": "gelu"}, "hidden_act 'gelu' is not supported"),
    ("qwen3", {"per_layer_config": {"0": {}}}, "per_layer_config {'0': {}} is not supported"),
)


@pytest.mark.parametrize(("family", "change", "message"), UNSUPPORTED)
def test_unsupported_models_are_refused_by_name(models, tmp_path, family, change, message) -> None:
    config = json.loads((models["qwen3"] / "config.json").read_text()) | {"model_type": family, **change}
    (tmp_path / "config.json").write_text(json.dumps({k: v for k, v in config.items() if v is not None}))
    with pytest.raises(HarnessError) as refused:
        read_hf_config(tmp_path)
    assert message in str(refused.value)


@pytest.mark.parametrize("name", FIRST)
def test_a_config_written_from_settings_alone_gives_the_logits_of_the_one_that_was_read(models, tmp_path, name) -> None:
    shutil.copytree(models[name], tmp_path, dirs_exist_ok=True)
    found = read_hf_config(tmp_path)
    settings = ModelConfig(**found.settings, max_sequence_length=found.max_positions)
    (tmp_path / "config.json").write_text(json.dumps(to_hf_config(settings, vocab_size=300)))
    np.testing.assert_array_equal(expected(tmp_path), expected(models[name]))


def edits_of(config: dict[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield each value's name with a config.json that lacks it or has null, and all places of a rotary embedding."""
    for name in config.keys() - {"model_type"}:
        yield name, {key: value for key, value in config.items() if key != name}
        yield name, {**config, name: None}
    plain, linear = {"rope_type": "default"}, {"rope_type": "linear", "factor": 4.0}
    uncut = {"type": "yarn", "truncate": False, "factor": 4.0, "original_max_position_embeddings": 16}
    rest = {key: value for key, value in config.items() if key != "rope_parameters"}
    for rope in ({}, None, plain, linear, {**YARN, "rope_theta": 700.0}, uncut, {**plain, "rope_theta": 700.0}):
        for beside in ({}, {"rope_theta": 500.0, "partial_rotary_factor": 0.5, "original_max_position_embeddings": 16}):
            yield "rope_scaling", {**rest, **beside, "rope_scaling": rope}
            yield "rope_parameters", {**rest, **beside, "rope_parameters": rope}
            yield "rope_scaling", {**config, **beside, "rope_scaling": rope}


@pytest.mark.parametrize("name", FIRST)
def test_an_accepted_config_has_the_settings_of_what_transformers_makes_of_it(models, tmp_path, name) -> None:
    from transformers import AutoConfig

    accepted, unnamed = 0, {}
    for value, edited in edits_of(json.loads((models[name] / "config.json").read_text())):
        (tmp_path / "config.json").write_text(json.dumps(edited))
        try:
            found = read_hf_config(tmp_path)
        except HarnessError as error:
            unnamed |= {value: error.what} if "cannot be read" in error.what else {}
            continue
        try:
            made = AutoConfig.from_pretrained(tmp_path).to_dict()
        except Exception:  # transformers refuses it
            continue
        (tmp_path / "config.json").write_text(json.dumps(made))
        # Without layers that predict further tokens, of which transformers assumes one and uses none.
        right = replace(read_hf_config(tmp_path), mtp_layers=found.mtp_layers)
        assert (value, right) == (value, found)
        accepted += 1
    assert accepted > 40
    assert not unnamed


def test_experts_quantized_to_mxfp4_have_the_weights_that_transformers_makes_of_them(models, tmp_path) -> None:
    from safetensors.torch import save_file
    from transformers.integrations.mxfp4 import convert_moe_packed_tensors

    generator = torch.Generator().manual_seed(3)
    quantized, expected = tensors(models["gpt_oss"]), {}
    for name in [name for name in quantized if name.endswith("_proj") and ".experts." in name]:
        experts, inputs, outputs = quantized.pop(name).shape
        groups = -(-inputs // 32)
        blocks = torch.randint(256, (experts, outputs, groups, 16), dtype=torch.uint8, generator=generator)
        scales = torch.randint(120, 130, (experts, outputs, groups), dtype=torch.uint8, generator=generator)
        quantized |= {f"{name}_blocks": blocks, f"{name}_scales": scales}
        expected[name] = convert_moe_packed_tensors(blocks, scales)
    assert len(expected) == 4
    save_file(quantized, tmp_path / "model.safetensors")
    with HfWeights(tmp_path) as weights:
        assert weights.names == set(tensors(models["gpt_oss"]))
        for name, right in expected.items():
            assert weights.shape(name) == tuple(right.shape)
            assert torch.equal(weights.rows(name, 1, 3), right[1:3])

    config = json.loads((models["gpt_oss"] / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, "quantization_config": {"quant_method": "mxfp4"}}))
    assert read_hf_config(tmp_path) == read_hf_config(models["gpt_oss"])


def test_layers_that_predict_further_tokens_are_left_out_with_a_warning(models, tmp_path) -> None:
    from safetensors.torch import save_file

    shutil.copytree(models["deepseek_v3"], tmp_path / "model")
    (tmp_path / "model" / INDEX_FILE).unlink()  # then every file counts
    save_file({"model.layers.2.eh_proj.weight": torch.zeros(32, 64)}, tmp_path / "model" / "mtp.safetensors")
    config = json.loads((tmp_path / "model" / "config.json").read_text())
    for name, layers in (("num_nextn_predict_layers", 1), ("num_mtp_layers", 1), ("num_nextn_predict_layers", 0)):
        kept = {key: value for key, value in config.items() if key not in MTP_SETTINGS}
        (tmp_path / "model" / "config.json").write_text(json.dumps({**kept, name: layers}))
        found = read_hf_config(tmp_path / "model")
        model = ModelConfig(max_sequence_length=64, init_from=str(tmp_path / "model"), **found.settings)
        pretrained = find_pretrained(model)
        with HfWeights(tmp_path / "model") as weights:
            if layers:
                check(weights, model, 300, pretrained.mtp_layers)
                assert "MTP) layers of the weights, 1, are neither loaded nor trained" in pretrained.warnings[0]
            else:
                assert not pretrained.warnings
                with pytest.raises(HarnessError, match=r"have unknown model.layers.2.eh_proj.weight"):
                    check(weights, model, 300, pretrained.mtp_layers)


def test_ranks_whose_folders_have_other_tensors_all_refuse_them(models, tmp_path) -> None:
    from safetensors.torch import save_file

    for rank in range(2):
        shutil.copytree(models["llama"], tmp_path / f"model-{rank}")
        (tmp_path / f"model-{rank}" / INDEX_FILE).unlink()  # then every file counts
    save_file({"model.layers.9.own.weight": torch.zeros(1)}, tmp_path / "model-1/own.safetensors")
    jobs = tmp_path / "jobs.json"
    jobs.write_text(json.dumps([[*free_ports(1), "differ", f"{tmp_path}/model-{{rank}}", 1, 1, 1, 1, SEQUENCES]]))
    code, output = run_command([*forked(2), "tests.distributed.weights_ranks", str(jobs), str(tmp_path)])
    assert code != 0
    assert "FormatError: the weights have other tensors on another rank" in output
    assert all(f"where: {tmp_path}/model-{rank}" in output for rank in range(2))


@pytest.mark.submission
@pytest.mark.parametrize("kind", ["Qwen3_5", "Qwen3_5Moe"])
def test_the_text_model_of_one_that_encodes_images_is_read_trained_and_exported(dataset, tmp_path, kind) -> None:
    import transformers
    from safetensors.torch import save_file

    text = {**SIZES, **DELTAS, **(GATED_EXPERTS if kind == "Qwen3_5Moe" else {})}
    images = {"depth": 1, "hidden_size": 16, "intermediate_size": 16, "num_heads": 2, "out_hidden_size": 32}
    config = getattr(transformers, f"{kind}Config")(text_config=text, vision_config=images, tie_word_embeddings=False)
    model = getattr(transformers, f"{kind}ForConditionalGeneration")(config)
    model.save_pretrained(tmp_path / "whole")
    right = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "whole")
    right.save_pretrained(tmp_path / "text")
    assert read_hf_config(tmp_path / "whole") == read_hf_config(tmp_path / "text")
    # As its authors publish it: the experts of a layer in two tensors.
    held, together = tensors(tmp_path / "whole"), tensors(tmp_path / "whole")
    for layer in range(4 if kind == "Qwen3_5Moe" else 0):
        place = f"model.language_model.layers.{layer}.mlp.experts"
        gate, up, down = (
            torch.stack([together.pop(f"{place}.{number}.{part}_proj.weight") for number in range(4)])
            for part in ("gate", "up", "down")
        )
        together |= {f"{place}.gate_up_proj": torch.cat((gate, up), dim=1), f"{place}.down_proj": down}
    save_file(together, tmp_path / "whole" / "model.safetensors")
    stored = read_hf_config(tmp_path / "whole")
    settings = ModelConfig(init_from=str(tmp_path / "whole"), max_sequence_length=64, **stored.settings)
    (warning,) = find_pretrained(settings).warnings
    number = sum(name.startswith("model.visual.") for name in held)
    assert warning == f"some weights are neither trained nor exported: model.visual.* ({number} tensors)"
    with HfWeights(tmp_path / "whole") as weights:
        check(weights, settings, 300)
        for stored_name, tensor in tensors(tmp_path / "text").items():
            name = stored_name.replace("language_model.", "")
            assert torch.equal(weights.rows(name), tensor)
            assert weights.shape(name) == tuple(tensor.shape)
            assert torch.equal(weights.rows(name, 1, 3), tensor[1:3])
            assert tensor.dim() != 2 or torch.equal(weights.columns(name, 1, 3), tensor[:, 1:3])
    # Its code is not in an export.
    config = json.loads((tmp_path / "whole" / "config.json").read_text())
    config["text_config"]["auto_map"] = {"AutoModelForCausalLM": "modeling_own.Own"}
    (tmp_path / "whole" / "config.json").write_text(json.dumps(config))
    others = [text for text in overrides_of(dataset, tmp_path / "run") if not text.startswith("model.")]
    run_here(sft, SftConfig, [*others, *STILL, "trainer.steps=1", f"model.init_from={tmp_path / 'whole'}"])
    export_checkpoint(tmp_path / "run", tmp_path / "out")
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert (config["architectures"], config.get("auto_map")) == ([f"{kind}ForCausalLM"], None)
    np.testing.assert_array_equal(expected(tmp_path / "out"), expected(tmp_path / "text"))


def test_tensors_that_transformers_leaves_out_are_left_out_with_a_warning(models, tmp_path) -> None:
    from safetensors.torch import save_file

    shutil.copytree(models["qwen3_next"], tmp_path / "model")
    model = ModelConfig(
        max_sequence_length=64, init_from=str(tmp_path / "model"), **read_hf_config(tmp_path / "model").settings
    )
    assert find_pretrained(model).warnings == []
    (tmp_path / "model" / INDEX_FILE).unlink()  # then every file counts
    save_file({"mtp.fc.weight": torch.zeros(32, 64)}, tmp_path / "model" / "mtp.safetensors")
    with HfWeights(tmp_path / "model") as weights:
        check(weights, model, 300)
    (warning,) = find_pretrained(model).warnings
    assert warning == (
        "some weights are neither trained nor exported: mtp.* (1 tensor); `harness export --mtp` copies mtp.*"
    )


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("kind", "prefix"), [("deepseek_v3", "model.layers.2."), ("qwen3_next", "mtp."), ("nemotron_h", "mtp.")]
)
def test_an_export_keeps_the_layers_that_predict_further_tokens_as_they_were(
    kind, prefix, models, dataset, tmp_path
) -> None:
    from safetensors.torch import save_file

    base = tmp_path / "model"
    shutil.copytree(models[kind], base)
    (base / INDEX_FILE).unlink()
    kept = {f"{prefix}{name}.weight": torch.randn(32, size) for name, size in (("eh_proj", 64), ("enorm", 1))}
    save_file(kept, base / "mtp.safetensors")
    config = json.loads((base / "config.json").read_text())
    config = {**{key: value for key, value in config.items() if key not in MTP_SETTINGS}, MTP_SETTINGS[0]: 1}
    (base / "config.json").write_text(json.dumps(config))
    run_here(sft, SftConfig, [*overrides_of(dataset, tmp_path / "run", "trainer.steps=1"), *settings_of(base)])
    export_checkpoint(tmp_path / "run", tmp_path / "with", keep_mtp=True)
    export_checkpoint(tmp_path / "run", tmp_path / "without")
    with_them, without = tensors(tmp_path / "with"), tensors(tmp_path / "without")
    assert set(with_them) - set(without) == set(kept)
    assert all(torch.equal(with_them[name], kept[name]) for name in kept)
    for name, layers in (("with", 1), ("without", 0)):
        assert json.loads((tmp_path / name / "config.json").read_text())[MTP_SETTINGS[0]] == layers

    (base / "mtp.safetensors").unlink()
    with pytest.raises(HarnessError, match="have no MTP layers"):
        export_checkpoint(tmp_path / "run", tmp_path / "again", keep_mtp=True)
    with pytest.raises(HarnessError, match="the run trained all weights"):
        export_checkpoint(tmp_path / "run", tmp_path / "again", keep_mtp=True, adapters_only=True)


def test_a_tensor_with_two_values_is_refused_by_name(models, tmp_path) -> None:
    from safetensors.torch import save_file

    shutil.copytree(models["qwen3"], tmp_path, dirs_exist_ok=True)
    own = "model.embed_tokens.weight"
    whole = tensors(tmp_path)[own]
    other = whole.flip(0).contiguous()
    save_file({own: other}, tmp_path / "model.safetensors")
    with pytest.raises(HarnessError, match=r"model.safetensors holds a different model than the files that it lists"):
        HfWeights(tmp_path)  # where transformers reads this file alone
    (tmp_path / INDEX_FILE).unlink()
    with pytest.raises(HarnessError, match=f"contains a duplicate of {own}"):
        HfWeights(tmp_path)
    model = ModelConfig(**{**to_plain(ModelConfig()), **read_hf_config(tmp_path).settings})
    for copy, message in ((other, f"lm_head.weight differs from {own}"), (whole, ""), (whole[1:], "is [299, 32]")):
        save_file({"lm_head.weight": copy}, tmp_path / "model.safetensors")
        refused = pytest.raises(HarnessError, match=re.escape(message)) if message else nullcontext()
        with runtime.start("cpu"), HfWeights(tmp_path) as weights, refused:
            join(ParallelConfig(), 1)
            chunks = build_chunks(model, ParallelConfig(), vocab_size=300, device=torch.device("cpu"))
            check_weights(chunks, weights, model, TensorShard(), 300)
            fill_model(chunks, weights, model, TensorShard())


def test_damaged_weights_are_an_error_that_names_the_folder(tmp_path) -> None:
    for name, content in (("model.safetensors", b"\x00" * 9), ("model.safetensors.index.json", b"{")):
        (tmp_path / name).write_bytes(content)
        with pytest.raises(HarnessError, match="the weights cannot be read") as refused:
            HfWeights(tmp_path)
        assert str(tmp_path) in str(refused.value)
    with pytest.raises(HarnessError, match=r"contains no \*.safetensors"):
        HfWeights(tmp_path / "nothing")
