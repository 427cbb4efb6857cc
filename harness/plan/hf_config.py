"""A Hugging Face model's config.json and ours: what of it the model can do, and what it says otherwise."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from harness.errors import ConfigError
from harness.plan.model import ModelConfig

ARCHITECTURES = {
    "llama": "LlamaForCausalLM",
    "mistral": "MistralForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
}
# What Megatron's `llama3` scaling of positions is built for; every published Llama 3 has these.
_LLAMA3 = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}


@dataclass(frozen=True)
class HfModel:
    """What a config.json says, in the names of `ModelConfig`.

    Attributes:
        settings: fields of `ModelConfig` that the weights fix.
        vocab_size: rows of the embedding.
        max_positions: the longest sequence that positions are meant for, in tokens.
    """

    settings: dict[str, Any]
    vocab_size: int
    max_positions: int


def read_hf_config(folder: Path) -> HfModel:
    """Read `folder`/config.json.

    Raises:
        ConfigError: no such file, or a model that is of no known family or uses what is not offered.
    """
    path = folder / "config.json"
    try:
        values = json.loads(path.read_text())
        return _understand(values, path)
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"the model's config.json cannot be read: {error}",
            where=str(path),
            fix="name a folder with config.json and *.safetensors, as save_pretrained writes it",
        ) from None
    except KeyError as error:
        raise ConfigError(
            f"config.json does not say {error}", where=str(path), fix="download the model again"
        ) from None


def _understand(values: dict[str, Any], path: Path) -> HfModel:
    def refuse(what: str) -> ConfigError:
        return ConfigError(
            what, where=str(path), fix=f"dense models of these families are known: {', '.join(ARCHITECTURES)}"
        )

    family = values.get("model_type")
    if family not in ARCHITECTURES:
        raise refuse(f"a model of type {family!r} cannot be trained here")
    if values.get("quantization_config"):
        raise refuse("the weights are quantized")
    if values.get("hidden_act", "silu") != "silu":
        raise refuse(f"the activation {values['hidden_act']!r} is not offered (silu is)")
    for name in ("attention_bias", "mlp_bias"):
        if values.get(name):
            raise refuse(f"{name} is set, and is not offered")
    positions = int(values["max_position_embeddings"])
    window = values.get("sliding_window")
    is_windowed = family == "mistral" or values.get("use_sliding_window")
    if is_windowed and window is not None and window < positions:
        raise refuse(f"attention is limited to a window of {window:,} tokens, which is not offered")
    rope = values.get("rope_parameters") or {
        "rope_theta": values.get("rope_theta", 10000.0),
        **(values.get("rope_scaling") or {}),
    }
    kind = rope.get("rope_type") or rope.get("type") or "default"
    if kind == "llama3":
        for name, known in _LLAMA3.items():
            if rope.get(name) != known:
                raise refuse(f"rope scaling llama3 with {name} {rope.get(name)}: Megatron-Core has it with {known}")
    elif kind not in ("default", "linear"):
        raise refuse(f"rope scaling {kind!r} is not offered (llama3 and linear are)")
    heads = int(values["num_attention_heads"])
    head_dim = int(values.get("head_dim") or values["hidden_size"] // heads)
    return HfModel(
        settings={
            "family": family,
            "num_layers": int(values["num_hidden_layers"]),
            "hidden_size": int(values["hidden_size"]),
            "ffn_hidden_size": int(values["intermediate_size"]),
            "num_attention_heads": heads,
            "num_query_groups": int(values.get("num_key_value_heads") or heads),
            "head_dim": None if head_dim * heads == values["hidden_size"] else head_dim,
            "tie_embeddings": bool(values.get("tie_word_embeddings", False)),
            "rotary_base": int(rope["rope_theta"]),
            "rope_scaling": "none" if kind == "default" else kind,
            "rope_scaling_factor": 1.0 if kind == "default" else float(rope["factor"]),
            "norm_epsilon": float(values["rms_norm_eps"]),
        },
        vocab_size=int(values["vocab_size"]),
        max_positions=positions,
    )


def check_model(model: ModelConfig, found: HfModel, *, where: str) -> None:
    """Refuse weights of another shape than `model` says, with both values and the settings that fit."""
    wrong = {
        name: value
        for name, value in found.settings.items()
        if value != (None if name == "head_dim" and _is_plain(model) else getattr(model, name))
    }
    if wrong:
        told = ", ".join(f"{name} {getattr(model, name)} (the weights have {value})" for name, value in wrong.items())
        raise ConfigError(
            f"the model's settings are not those of its weights: {told}",
            where=f"model.init_from={where}",
            fix=" ".join(f"model.{name}={_text(value)}" for name, value in wrong.items()),
        )
    if model.max_sequence_length > found.max_positions:
        raise ConfigError(
            f"max_sequence_length is {model.max_sequence_length:,}, and the weights were trained for positions up to "
            f"{found.max_positions:,}",
            where=f"model.init_from={where}",
            fix=f"model.max_sequence_length={found.max_positions} or less",
        )


def _is_plain(model: ModelConfig) -> bool:
    return model.head_size * model.num_attention_heads == model.hidden_size


def _text(value: object) -> str:
    return "null" if value is None else str(value).lower() if isinstance(value, bool) else str(value)


def to_hf_config(model: ModelConfig, *, vocab_size: int) -> dict[str, Any]:
    """The config.json of this model, which any transformers since 4.45 reads."""
    config: dict[str, Any] = {
        "architectures": [ARCHITECTURES[model.family]],
        "model_type": model.family,
        "num_hidden_layers": model.num_layers,
        "hidden_size": model.hidden_size,
        "intermediate_size": model.ffn_hidden_size,
        "num_attention_heads": model.num_attention_heads,
        "num_key_value_heads": model.num_query_groups,
        "head_dim": model.head_size,
        "hidden_act": "silu",
        "vocab_size": vocab_size,
        "max_position_embeddings": model.max_sequence_length,
        "rms_norm_eps": model.norm_epsilon,
        "rope_theta": float(model.rotary_base),
        "tie_word_embeddings": model.tie_embeddings,
        "attention_dropout": 0.0,
        "initializer_range": model.init_std,
        "torch_dtype": model.dtype,
        "use_cache": True,
    }
    if model.family == "mistral":
        config["sliding_window"] = None
    if model.family == "qwen2":
        config["use_sliding_window"] = False
    if model.family in ("llama", "qwen3"):
        config["attention_bias"] = False
    if model.rope_scaling != "none":
        config["rope_scaling"] = {
            "rope_type": model.rope_scaling,
            "factor": model.rope_scaling_factor,
            **(_LLAMA3 if model.rope_scaling == "llama3" else {}),
        }
    return config


def find_weights(init_from: str) -> Path:
    """The folder of `init_from`: itself, or where the hub's copy of that name lies, downloaded if need be."""
    if Path(init_from).is_dir():
        return Path(init_from)
    try:
        from huggingface_hub import snapshot_download

        # Ranks of a node that ask at the same time wait for one download.
        return Path(snapshot_download(init_from, allow_patterns=["*.json", "*.safetensors"]))
    except Exception as error:  # the hub's client raises many kinds
        told = str(error).strip().splitlines() or [type(error).__name__]
        raise ConfigError(
            f"there is no folder {init_from!r}, and the hub gives no model of that name: {told[0]}",
            where="model.init_from",
            fix="name a folder with config.json and *.safetensors, or a model's name where there is access to the hub",
        ) from None
