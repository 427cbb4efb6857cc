"""List the models that can be trained, and report, from a config.json alone, every reason why one cannot."""

from __future__ import annotations

import json
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import yaml

from harness.errors import ConfigError
from harness.plan.encoders import MEDIA_MODELS, MediaModel, read_encoder
from harness.plan.families import FAMILIES, MISSING
from harness.plan.families.base import Family
from harness.plan.hf_config import find_config, list_odd_features, read_hf_config
from harness.plan.layout import ParallelConfig
from harness.plan.memory import count_weights
from harness.plan.model import ModelConfig
from harness.settings import CONFIGS

_FEATURES = {
    "pattern_letters": "layers of several kinds, such as scans and attention (`model.layer_pattern`)",
    "has_output_gate": "gated attention",
    "norms_add_one": "norms whose weights are relative to 1",
    "experts": "mixture of experts",
    "has_latents": "latent attention",
    "has_qkv_bias": "biases of queries, keys and values",
    "has_head_norms": "norms of queries and keys",
    "has_sinks": "attention sinks",
    "has_windows": "sliding-window attention in every other layer",
    "predicts_further": "multi-token prediction (MTP)",
}
# Refused in models of every family except as noted; errors about a config.json name each of them.
REFUSED_FEATURES = (
    "quantized weights (mxfp4 of gpt_oss is supported)",
    "activations other than silu (relu2 of nemotron_h is supported)",
    "biases that models of the family do not have, dropout, attention that is not causal",
    "sliding windows shorter than the positional encoding (supported in gpt_oss)",
    "rope scaling other than llama3, linear and yarn",
)


@dataclass(frozen=True)
class ModelReport:
    """One model, as its config.json describes it.

    Attributes:
        refusals: each reason why it cannot be trained; empty if it can.
        settings: fields of `ModelConfig` that its weights determine; empty if it is refused.
        parameters, active_parameters: number of parameters, and number that one token uses; 0 if it is refused.
        mtp_layers: number of multi-token prediction layers.
    """

    model: str
    model_type: str
    architecture: str
    refusals: list[str]
    settings: dict[str, Any] = field(default_factory=dict)
    parameters: int = 0
    active_parameters: int = 0
    mtp_layers: int = 0


def list_families() -> list[dict[str, Any]]:
    """Return the name, architecture, presets and features of each family that can be trained."""
    presets: dict[str, list[str]] = {}
    for file in sorted((CONFIGS / "model").glob("*.yaml")):
        values = yaml.safe_load(file.read_text())
        encoder = values.get("encoder")
        family = read_encoder(encoder)[0].name if encoder else values.get("family", ModelConfig.family)
        presets.setdefault(family, []).append(file.stem)
    features = {name: [text for has, text in _FEATURES.items() if getattr(FAMILIES[name], has)] for name in FAMILIES}
    for name, one in MEDIA_MODELS.items():
        features[name] = [f"{one.kind} encoder for {', '.join(one.text_types.values())}"]
    families: dict[str, Family | MediaModel] = {**FAMILIES, **MEDIA_MODELS}
    return [
        {"name": name, "architecture": of.architecture, "presets": presets.get(name, []), "features": features[name]}
        for name, of in families.items()
    ]


def list_missing() -> dict[str, list[str]]:
    """Return each missing feature that refused families need, with the names of the families."""
    needs: dict[str, list[str]] = {}
    for name, need in MISSING.items():
        needs.setdefault(need, []).append(name)
    return needs


def describe_model(model: str) -> ModelReport:
    """Describe a model from only its config.json, in a folder or on the hub; raise ConfigError if it is unreadable."""
    folder = find_config(model)
    try:
        stored = read_hf_config(folder)
        sizes = {**stored.settings, "vocab_size": stored.vocab_size, "max_sequence_length": stored.max_positions}
        config = ModelConfig(**sizes)
    except ConfigError as error:
        try:
            values = json.loads((folder / "config.json").read_text())
            model_type, architecture = str(values.get("model_type")), str((values.get("architectures") or [""])[0])
        except (OSError, LookupError, TypeError, ValueError, AttributeError, RecursionError):
            raise error from None
        refusals: list[str] = []
        with suppress(LookupError, TypeError, ValueError, AttributeError):  # `error` names it
            refusals.extend(list_odd_features(values, FAMILIES[model_type]))
        return ModelReport(model, model_type, architecture, list(dict.fromkeys([*refusals, error.what])))
    kind, weights = (
        config.media or config.traits,
        count_weights(config, ParallelConfig(), stage=0, vocab_size=stored.vocab_size),
    )
    counts = weights.whole, weights.used_by_token(config), stored.mtp_layers
    return ModelReport(model, kind.name, kind.architecture, [], sizes, *counts)
