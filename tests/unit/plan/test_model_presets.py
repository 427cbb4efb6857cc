"""The presets of published models have the sizes of their config.json."""

from __future__ import annotations

import json
import random
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from harness.config import CONFIGS, compose_config
from harness.errors import ConfigError
from harness.plan.families import FAMILIES
from harness.plan.hf_config import HfModel, check_exported, check_model, read_hf_config, to_hf_config
from harness.plan.model import ModelConfig
from harness.plan.settings import SftConfig

# Kept as published, but for what is not read.
PUBLISHED = Path(__file__).parents[2] / "golden" / "hf_configs"
PRESETS = sorted(path.stem for path in PUBLISHED.glob("*.json"))


def test_every_preset_of_a_published_model_is_checked() -> None:
    assert sorted(path.stem for path in (CONFIGS / "model").glob("*.yaml")) == sorted(
        [*PRESETS, "qwen3_omni_30b_a3b", "tiny"]
    )


@pytest.mark.parametrize("name", PRESETS)
def test_a_preset_has_the_published_sizes_and_gives_them_back(name: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text((PUBLISHED / f"{name}.json").read_text())
    found = read_hf_config(tmp_path)
    model = compose_config("sft", SftConfig, [f"model={name}"]).model
    check_model(model, found, where=name)
    assert model.dtype == "bfloat16"

    (tmp_path / "config.json").write_text(json.dumps(to_hf_config(model, vocab_size=found.vocab_size)))
    again = read_hf_config(tmp_path)
    assert (again.settings, again.vocab_size) == (found.settings, found.vocab_size)


EXPERTS = {"num_experts": 8, "expert_ffn_hidden_size": 48}
LATENT = {**EXPERTS, "family": "deepseek_v3", "kv_lora_rank": 8, "num_attention_heads": 4, "num_query_groups": 4}
SIGMOID = {"router_score": "sigmoid", "expert_bias": True}
SCANS = {"scan_num_heads": 8, "scan_head_dim": 8}
DELTA = {**EXPERTS, **SCANS, "layer_pattern": "DD*D", "shared_ffn_hidden_size": 48}


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({**DELTA, "family": "qwen3_next", "router_score": "sigmoid"}, "router_score sigmoid .*softmax"),
        ({**EXPERTS, "family": "mixtral", "router_score": "sigmoid"}, "mixtral cannot express router_score sigmoid"),
        ({**EXPERTS, "family": "mixtral", "router_normalize": False}, "router_normalize false .read back as true"),
        ({**EXPERTS, "family": "mixtral", "dense_layers": 1}, "mixtral cannot express dense_layers 1"),
        ({**EXPERTS, "family": "qwen3_moe", "router_scale": 2.5}, "qwen3_moe cannot express router_scale 2.5"),
        ({**EXPERTS, "family": "qwen3_moe", "shared_ffn_hidden_size": 48}, "express shared_ffn_hidden_size 48"),
        ({**EXPERTS, "family": "qwen3_moe", "mtp_layers": 1, "tie_embeddings": False}, "express mtp_layers 1"),
        (EXPERTS, "llama cannot express num_experts 8"),
        (LATENT, "express router_score softmax .read back as sigmoid., expert_bias false"),
        ({**LATENT, **SIGMOID, "shared_ffn_hidden_size": 64}, "shared_ffn_hidden_size 64 .read back as 48"),
        ({**LATENT, **SIGMOID, "rope_scaling": "yarn", "rope_mscale": 0.7}, "rope_mscale 0.7 .read back as 1.0"),
        ({**LATENT, **SIGMOID, "head_dim": 24}, "head_dim 24"),
        ({"family": "nemotron_h", **SCANS, "layer_pattern": "M*-M", "norm_epsilon": 1e-6}, "norm_epsilon 1e-06"),
        ({"scan_num_heads": 8}, "llama cannot express scan_num_heads 8"),
    ],
)
def test_a_run_whose_model_would_be_exported_otherwise_is_refused(settings: dict[str, Any], message: str) -> None:
    config = SftConfig(model=ModelConfig(**{"tie_embeddings": False, **settings}))
    with pytest.raises(ConfigError, match=message):
        config.check(1)


# Settings that make up a model, and values of them.
DRAWN: dict[str, tuple[Any, ...]] = {
    "num_experts": (0, 8),
    "experts_per_token": (2, 4),
    "expert_ffn_hidden_size": (None, 48),
    "shared_ffn_hidden_size": (0, 48, 64, 96),
    "dense_layers": (0, 1),
    "router_score": ("softmax", "sigmoid"),
    "router_normalize": (True, False),
    "router_groups": (None, 2),
    "router_top_groups": (None, 1, 2),
    "router_scale": (1.0, 2.5),
    "expert_bias": (False, True),
    "head_dim": (None, 16, 32),
    "num_query_groups": (2, 4),
    "tie_embeddings": (True, False),
    "rope_scaling": ("none", "llama3", "linear", "yarn"),
    "rope_scaling_factor": (1.0, 4.0),
    "rope_mscale": (1.0, 0.7),
    "rope_mscale_all_dim": (0.0, 0.7),
    "rope_original_positions": (4096, 64),
    "norm_epsilon": (1e-5, 1e-6),
    "rotary_base": (10_000, 1_000_000),
    "kv_lora_rank": (0, 8),
    "q_lora_rank": (None, 16),
    "sliding_window": (None, 8),
    "qk_norm": (None, True, False),
    "layer_pattern": (None, "DD*D", "M*-E", "M*-M"),
    "scan_num_heads": (0, 8),
    "scan_state_dim": (128, 16),
    "mtp_layers": (0, 1),
}


def base_of(family: str) -> dict[str, Any]:
    """Return settings of a small model that has what its family requires."""
    traits, letters = FAMILIES[family], FAMILIES[family].pattern_letters
    settings: dict[str, Any] = {"family": family, "tie_embeddings": False, "num_query_groups": 4}
    settings |= {"kv_lora_rank": 8} if traits.has_latents else {}
    settings |= {"sliding_window": 8} if traits.has_windows else {}
    settings |= {"qk_norm": True} if traits.chooses_head_norms else {}
    settings |= {**SCANS, "layer_pattern": "M*-E" if "E" in letters else "DD*D"} if letters else {}
    if traits.experts is not None:
        settings |= {**EXPERTS, "shared_ffn_hidden_size": 48 if traits.experts.shared else 0}
        settings |= SIGMOID if traits.experts.bias else {"router_normalize": family != "deepseek_v2"}
    return settings


@pytest.mark.submission
@pytest.mark.parametrize("family", FAMILIES)
def test_a_generated_model_is_refused_or_is_read_back_from_its_config(family: str, tmp_path: Path) -> None:
    draw, accepted = random.Random(30), Counter[bool]()
    check_exported(ModelConfig(**base_of(family)))
    for _ in range(400):
        changed = draw.sample(sorted(DRAWN), draw.choice((1, 2, 3)))
        try:
            model = ModelConfig(**base_of(family) | {name: draw.choice(DRAWN[name]) for name in changed})
            check_exported(model)
        except ConfigError:
            accepted[False] += 1
            continue
        accepted[True] += 1
        (tmp_path / "config.json").write_text(json.dumps(to_hf_config(model, vocab_size=300)))
        found = read_hf_config(tmp_path)
        again = ModelConfig(**found.settings, max_sequence_length=found.max_positions, mtp_layers=found.mtp_layers)
        same = {"head_size", "rotated_size", "has_head_norms", "attention_sizes", "traits", *DRAWN}
        same ^= {"expert_ffn_hidden_size", "head_dim", *(["expert_size"] if model.num_experts else [])}
        assert {name: getattr(again, name) for name in same} == {name: getattr(model, name) for name in same}
    assert min(accepted[False], accepted[True]) > 50


@pytest.mark.parametrize("family", FAMILIES)
def test_what_a_config_leaves_out_is_what_transformers_assumes(family: str, tmp_path: Path) -> None:
    from transformers import AutoConfig

    def read(values: dict[str, Any]) -> HfModel | str:
        (tmp_path / "config.json").write_text(json.dumps(values))
        try:
            return replace(read_hf_config(tmp_path), mtp_layers=0)  # of weights that transformers does not read
        except ConfigError as error:
            return error.what

    latent = FAMILIES[family].has_latents
    model = ModelConfig(**{**base_of(family), "num_query_groups": 4 if latent else 1, "rotary_base": 20_000})
    whole = to_hf_config(model, vocab_size=300)
    # Latent attention has no groups. Names of dense layers differ between versions.
    exceptions = {"model_type", "mlp_layer_types", *(["num_key_value_heads"] if latent else [])}
    for name in ["", *sorted(set(whole) - exceptions)]:
        values = {key: value for key, value in whole.items() if key != name}
        found = read(values)
        if name == "" or isinstance(found, HfModel):
            assert (name, read(AutoConfig.for_model(**values).to_dict())) == (name, found)
