"""`model.init_from` alone is enough: sizes come from the weights' config.json, and settings against it are refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml
from huggingface_hub import constants

from harness.config import compose_config, compose_run
from harness.errors import ConfigError
from harness.plan import ModelConfig, SftConfig
from harness.settings import to_yaml
from tests.samples.loopback_hub import LoopbackHub, cache_model

QWEN3 = {"model_type": "qwen3", "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "head_dim": 16}
QWEN3 |= {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 1024, "vocab_size": 300}
QWEN3 |= {"tie_word_embeddings": True, "rms_norm_eps": 1e-6, "rope_theta": 500, "initializer_range": 0.5}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text(json.dumps(QWEN3))
    return tmp_path / "model"


@pytest.fixture
def offline(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return the cache of a hub that cannot be reached."""
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    return tmp_path / "hub"


def model(*overrides: Any) -> ModelConfig:
    return compose_config("sft", SftConfig, [*map(str, overrides)]).model


def test_a_folder_of_weights_alone_gives_every_size_and_no_training_choice(folder: Path) -> None:
    found = compose_config("sft", SftConfig, [f"model.init_from={folder}"])
    sizes = {"hidden_size": 32, "ffn_hidden_size": 48, "num_layers": 2, "num_attention_heads": 4, "head_dim": 16}
    sizes |= {"num_query_groups": 2, "max_sequence_length": 1024, "vocab_size": 300, "rotary_base": 500}
    others = {"family": "qwen3", "tie_embeddings": True, "norm_epsilon": 1e-6}
    assert found.model == ModelConfig(init_from=str(folder), **sizes, **others)
    recorded = yaml.safe_load(to_yaml(found))["model"]
    assert (recorded["num_layers"], recorded["vocab_size"], recorded["dtype"]) == (2, 300, "auto")


def test_experts_are_taken_and_their_losses_are_not(folder: Path) -> None:
    experts = {"num_experts": 4, "num_experts_per_tok": 1, "moe_intermediate_size": 24, "router_aux_loss_coef": 0.5}
    values = {**QWEN3, **experts, "model_type": "qwen3_moe", "norm_topk_prob": False}
    (folder / "config.json").write_text(json.dumps(values))
    found = model(f"model.init_from={folder}")
    assert (found.family, found.num_experts, found.experts_per_token, found.expert_size) == ("qwen3_moe", 4, 1, 24)
    assert (found.router_normalize, found.aux_loss) == (False, 0)


def test_sizes_that_agree_and_training_choices_may_be_set(folder: Path) -> None:
    found = model(
        f"model.init_from={folder}", "model.num_layers=2", "model.max_sequence_length=64", "model.lora_rank=4"
    )
    assert (found.num_layers, found.max_sequence_length, found.lora_rank, found.hidden_size) == (2, 64, 4, 32)


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("model.num_layers=4", "num_layers 4 of model.num_layers=4 (the weights have 2)"),
        ("model={num_layers: 4}", "num_layers 4 of model={num_layers: 4} (the weights have 2)"),
        ("model.num_attention_heads=3", "num_attention_heads 3 of model.num_attention_heads=3 (the weights have 4)"),
        ("model.vocab_size=301", "vocab_size 301 of model.vocab_size=301 (the weights have 300)"),
        ("model.head_dim=8", "head_dim 8 of model.head_dim=8 (the weights have 16)"),
        ("model.max_sequence_length=2048", "max_sequence_length is 2,048, and the weights were trained for"),
        ("model=qwen3_0_6b", "num_layers 28 of model=qwen3_0_6b (the weights have 2)"),
        ("model=tiny", "num_layers 4 of model=tiny (the weights have 2)"),
        ("experiment=sft_tiny", "num_layers 4 of model=tiny (the weights have 2)"),
        ("experiment=qwen3_8b_1node", "vocab_size 151936 of experiment=qwen3_8b_1node (the weights have 300)"),
    ],
)
def test_a_setting_against_the_weights_is_refused_with_both_values(folder: Path, override: str, message: str) -> None:
    with pytest.raises(ConfigError) as refused:
        model(override, f"model.init_from={folder}")
    assert message in refused.value.what


def test_an_experiment_of_ones_own_that_names_no_model_takes_the_sizes(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "own" / "experiment").mkdir(parents=True)
    mine = tmp_path / "own" / "experiment" / "mine.yaml"
    mine.write_text(f"# @package _global_\nname: mine\nmodel: {{init_from: {folder}}}\n")
    # As `harness plan mine` and `harness submit mine` compose it.
    composed = compose_run("mine", [], config_dir=tmp_path / "own").config.model
    assert (composed.num_layers, composed.vocab_size) == (2, 300)
    mine.write_text(f"# @package _global_\nname: mine\nmodel: {{init_from: {folder}, num_layers: 4}}\n")
    with pytest.raises(ConfigError, match=r"num_layers 4 of experiment=mine \(the weights have 2\)"):
        compose_run("mine", [], config_dir=tmp_path / "own")


def test_a_hub_that_cannot_be_reached_is_one_error_and_no_matter_to_an_experiment_or_a_cached_model(
    folder: Path, offline: Path
) -> None:
    with pytest.raises(ConfigError, match="no folder 'org/model', and HF_HUB_OFFLINE disables the hub") as refused:
        model("model.init_from=org/model")
    assert refused.value.where == "model.init_from"
    assert "hf download org/model" in refused.value.fix
    assert model("experiment=qwen3_8b_1node").num_layers == 36
    cache_model(offline, folder)  # only config.json is needed
    assert model("model.init_from=org/model").vocab_size == 300


def test_a_hub_that_fails_is_asked_once_and_a_cached_model_is_used(
    folder: Path, offline: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    server = LoopbackHub({})
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(constants, "ENDPOINT", server.url)
    monkeypatch.setenv("HF_ENDPOINT", server.url)
    with pytest.raises(ConfigError, match="and the hub has no model of this name"):
        model("model.init_from=org/model")
    server.faults = {"": 503}
    with pytest.raises(ConfigError, match="and the hub cannot be reached: "):
        model("model.init_from=org/model")
    assert [request for request in server.requests if "org/model" in request] == ["GET /api/models/org/model"] * 2
    cache_model(offline, folder)
    assert model("model.init_from=org/model").vocab_size == 300
    server.close()
