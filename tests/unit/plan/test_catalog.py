"""`harness models`: what can be trained by family, and whether a model can, from its config.json alone."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from harness.config import compose_config
from harness.plan import SftConfig
from harness.plan.catalog import describe_model, list_families, list_missing
from harness.plan.encoders import MEDIA_MODELS, read_encoder
from harness.plan.families import FAMILIES, MISSING
from harness.settings import CONFIGS

PUBLISHED = Path(__file__).parents[2] / "golden" / "hf_configs"


def folder_of(tmp_path: Path, preset: str, **changes: object) -> Path:
    values = json.loads((PUBLISHED / f"{preset}.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**values, **changes}))
    return tmp_path


def test_every_family_and_every_preset_is_listed_and_every_refused_family_with_its_reason(harness):
    code, printed, _ = harness("models", "--json")
    listed = json.loads(printed)
    assert code == 0
    assert [family["name"] for family in listed["families"]] == [*FAMILIES, *MEDIA_MODELS]
    presets = [preset for family in list_families() for preset in family["presets"]]
    assert sorted(presets) == sorted(path.stem for path in (CONFIGS / "model").glob("*.yaml"))
    assert {name: need for need, names in list_missing().items() for name in names} == MISSING
    code, printed, _ = harness("models")
    row = next(line for line in printed.splitlines() if line.startswith("qwen3_moe "))
    assert row.split()[1:4] == ["Qwen3MoeForCausalLM", "qwen3_235b_a22b,", "qwen3_30b_a3b"]
    assert "quantized weights" in printed


@pytest.mark.parametrize(
    ("preset", "parameters", "active"),
    [
        ("llama3_8b", 8.03, 8.03),
        ("qwen3_8b", 8.19, 8.19),
        ("mistral_7b", 7.25, 7.25),
        ("olmoe_1b_7b", 6.92, 1.28),
        ("qwen3_30b_a3b", 30.53, 3.35),
        ("moonlight_16b_a3b", 15.96, 2.91),
    ],
)
def test_a_published_model_has_the_parameters_of_its_weights(tmp_path, preset, parameters, active):
    report = describe_model(str(folder_of(tmp_path, preset)))
    assert report.refusals == []
    assert round(report.parameters / 1e9, 2) == parameters
    assert round(report.active_parameters / 1e9, 2) == active


def test_a_model_that_cannot_be_trained_is_printed_with_every_reason(harness, tmp_path):
    odd = {
        "hidden_act": "gelu",
        "attention_bias": True,
        "quantization_config": {"quant_method": "fp8"},
        "rope_scaling": {"rope_type": "dynamic", "factor": 2},
    }
    code, printed, _ = harness("models", folder_of(tmp_path, "qwen3_8b", **odd))
    assert code == 1
    assert [line.strip() for line in printed.splitlines()][1:-1] == [
        "weights quantized by fp8 are not supported: save them in bfloat16 with transformers",
        "hidden_act 'gelu' is not supported ('silu' is)",
        "attention_bias True is not supported (False is)",
        "rope scaling 'dynamic' is not supported (llama3, linear and yarn are)",
    ]


@pytest.mark.parametrize(
    ("preset", "changes", "reason"),
    [
        ("qwen3_8b", {"model_type": "jamba"}, "they need layers with a recurrent state"),
        ("qwen3_8b", {"model_type": "bert"}, "models of type 'bert' are not supported"),
        ("mistral_7b", {"sliding_window": 4096}, "a window of 4,096 tokens (sliding_window) is not supported"),
        ("qwen3_30b_a3b", {"decoder_sparse_step": 2}, "decoder_sparse_step 2 is not supported (1 is)"),
        ("qwen3_8b", {"vocab_size": 0}, "vocab_size"),
        ("qwen3_8b", {"num_key_value_heads": 5}, "5"),
    ],
)
def test_each_kind_of_refusal_is_exit_code_1(harness, tmp_path, preset, changes, reason):
    code, printed, _ = harness("models", folder_of(tmp_path, preset, **changes))
    assert (code, "cannot be trained" in printed, reason in printed) == (1, True, True)


@pytest.mark.parametrize("text", ["", "[]", "{", "7", '{"architectures": 5}'])
def test_a_config_that_cannot_be_read_is_an_error(harness, tmp_path, text):
    (tmp_path / "config.json").write_text(text)
    code, _, error = harness("models", tmp_path)
    assert (code, "Traceback" in error, "fix:" in error) == (2, False, True)


@pytest.mark.parametrize("preset", [file.stem for file in sorted(PUBLISHED.glob("*.json"))])
def test_a_model_that_can_be_trained_is_printed_with_settings_that_compose_to_it(harness, tmp_path, preset):
    folder = folder_of(tmp_path, preset)
    code, printed, _ = harness("models", folder)
    assert (code, f"can be trained: model.init_from={tmp_path}\n" in printed) == (0, True)
    lines = [line.strip() for line in printed.splitlines() if line.startswith("  model.")]
    composed, found = compose_config("sft", SftConfig, lines).model, describe_model(str(folder)).settings
    assert {name: getattr(composed, name) for name in found} == found


PATCHES = {"hidden_size": 64, "intermediate_size": 64, "depth": 2}
IMAGES = {"model_type": "qwen3_vl", "image_token_id": 5, "vision_config": PATCHES}
TEXT = {"model_type": "qwen3_vl_text", "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 4}
TEXT |= {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "vocab_size": 300}
TEXT |= {"max_position_embeddings": 512, "rms_norm_eps": 1e-5}


@pytest.mark.parametrize("section", [[24], [], [-3, 9, 2], [10**12, 0, 0], [10**12, -(10**12), 8]])
def test_sections_of_positions_that_no_head_has_are_refused_at_once(harness, tmp_path, section):
    def check(section: list[int]) -> tuple[int, str]:
        text = {**TEXT, "rope_scaling": {"rope_type": "default", "mrope_section": section}}
        (tmp_path / "config.json").write_text(json.dumps({**IMAGES, "text_config": text}))
        return harness("models", tmp_path)[:2]

    assert check([3, 3, 2])[0] == 0
    code, printed = check(section)
    assert (code, "cannot be trained" in printed) == (1, True)


@pytest.mark.parametrize("preset", ["gpt_oss_20b", "qwen3_5_9b", "llama3_8b", "deepseek_v3"])
def test_more_layers_than_any_model_has_are_refused_before_they_are_listed(harness, tmp_path, preset):
    values = json.loads((PUBLISHED / f"{preset}.json").read_text())
    changes = {"num_hidden_layers": 10**12, "layer_types": None}
    changes |= {"text_config": {**values["text_config"], **changes}} if "text_config" in values else {}
    code, printed, _ = harness("models", folder_of(tmp_path, preset, **changes))
    assert (code, "num_hidden_layers 1,000,000,000,000 is not supported" in printed) == (1, True)


@pytest.mark.parametrize("window", [0, "a"])
def test_an_encoder_whose_work_cannot_be_counted_is_refused(window):
    sizes = {"d_model": 64, "num_mel_bins": 16, "downsample_hidden_size": 8, "encoder_layers": 2, "encoder_ffn_dim": 64}
    values = {"model_type": "qwen3_omni_moe_thinker", "audio_token_id": 5, "audio_config": sizes}
    read_encoder(json.dumps(values))
    with pytest.raises(ValueError, match=r"not the config\.json of an encoder"):
        read_encoder(json.dumps({**values, "audio_config": {**sizes, "n_window": window}}))
