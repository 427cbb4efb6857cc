"""`harness models`: what can be trained by family, and whether a model can, from its config.json alone."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from harness.plan.catalog import describe_model, list_families, list_missing
from harness.plan.encoders import MEDIA_MODELS
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
    presets = [preset for family in list_families() for preset in family.presets]
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


def test_a_model_that_can_be_trained_is_printed_with_its_sizes(harness, tmp_path):
    code, printed, _ = harness("models", folder_of(tmp_path, "qwen3_30b_a3b"))
    lines = [line.strip() for line in printed.splitlines()]
    assert code == 0
    assert lines[0].endswith(f"can be trained: model.init_from={tmp_path}")
    assert lines[1] == "30.53 B parameters, 3.35 B of them for each token"
    assert {"model.family=qwen3_moe", "model.num_layers=48", "model.vocab_size=151936"} <= set(lines)


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
