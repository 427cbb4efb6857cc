"""The presets of published models have the sizes of their config.json."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from harness.config import CONFIGS, compose_config
from harness.plan.hf_config import check_model, read_hf_config, to_hf_config
from harness.plan.settings import SftConfig

# Kept as published, but for what is not read.
PUBLISHED = Path(__file__).parents[2] / "golden" / "hf_configs"
PRESETS = sorted(path.stem for path in PUBLISHED.glob("*.json"))


def test_every_preset_of_a_published_model_is_checked() -> None:
    assert sorted(path.stem for path in (CONFIGS / "model").glob("*.yaml")) == sorted([*PRESETS, "tiny"])


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
