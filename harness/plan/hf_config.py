"""Convert a Hugging Face model's config.json to `ModelConfig` and back, and refuse what is not supported."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from harness.checks import show_value
from harness.errors import ConfigError
from harness.paths import explain_path
from harness.plan.encoders import encoder_text, is_part_of, text_of, with_encoder
from harness.plan.families import FAMILIES, MISSING
from harness.plan.families.base import Family, Refuse, read_rope
from harness.plan.model import ModelConfig
from harness.storage.inputs import ask_hub
from harness.storage.local_copies import local_copy

# Settings of a model's initialization and training, which its config.json does not contain.
_OF_TRAINING = (
    "init_from encoder train_encoder vocab_size init_std dtype fp8 recompute recompute_modules recompute_layers "
    "attention fuse_swiglu fuse_cross_entropy fuse_weight_gradient fuse_permutation fuse_router seed lora_rank "
    "lora_alpha lora_targets aux_loss aux_loss_scope z_loss expert_bias_rate freeze_router grouped_gemm mtp_loss"
)
# Defaults of transformers for values missing from a config.json, by family, where they differ from Llama's.
_WINDOW = {"sliding_window": 4096}
_DEEPSEEK = {"num_key_value_heads": 128, "first_k_dense_replace": 3, "n_group": 8, "topk_group": 4}
_UNSCALED, _LITE = {"routed_scaling_factor": 1.0}, {"routed_scaling_factor": 1.8}
_DEFAULTS: dict[str, dict[str, Any]] = {
    "mistral": {"num_key_value_heads": 8, **_WINDOW},
    "qwen2": {"num_key_value_heads": 32, **_WINDOW},
    "qwen3": {"num_key_value_heads": 32, "head_dim": 128, **_WINDOW},
    "qwen3_moe": {"num_key_value_heads": 4, **_WINDOW},
    "mixtral": {"num_key_value_heads": 8, "rope_theta": 1e6},
    "olmoe": {"rms_norm_eps": 1e-5},
    "deepseek_v2": {"n_shared_experts": 2, "q_lora_rank": 1536, **_UNSCALED},
    "deepseek_v3": {"n_shared_experts": 1, "q_lora_rank": 1536, "routed_scaling_factor": 2.5, **_DEEPSEEK},
    "glm4_moe": {"num_key_value_heads": 8, "n_shared_experts": 1, "first_k_dense_replace": 1, **_UNSCALED},
    "glm4_moe_lite": {"num_key_value_heads": 20, "n_shared_experts": 1, "q_lora_rank": 768, **_LITE},
    "gpt_oss": {"num_key_value_heads": 8, "head_dim": 64, "rope_theta": 150_000},
    "nemotron_h": {"num_key_value_heads": 8, "head_dim": 128, **_UNSCALED},
    "qwen3_next": {"num_key_value_heads": 2, "head_dim": 256},
    "qwen3_5_text": {"num_key_value_heads": 4, "head_dim": 256},
    "qwen3_5_moe_text": {"num_key_value_heads": 2, "head_dim": 256},
}
_SIZES = {"num_layers": "num_hidden_layers", "hidden_size": "hidden_size", "ffn_hidden_size": "intermediate_size"}
_SIZES |= {"num_attention_heads": "num_attention_heads"}
# Constants of Megatron's `llama3` position scaling; every published Llama 3 has these.
_LLAMA3: dict[str, Any] = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
# Defaults of transformers for yarn.
_OF_YARN: dict[str, Any] = {"beta_fast": 32, "beta_slow": 1, "truncate": True}
# The only supported values: with others, transformers builds a different model from Megatron-Core, in every family.
_KNOWN = {"hidden_act": "silu", "mlp_bias": False, "is_causal": True, "per_layer_config": None, "clip_qkv": None}
_KNOWN |= dict.fromkeys(("attention_dropout", "hidden_dropout", "router_jitter_noise"), 0)
# Names of the number of MTP layers, in published models and in transformers.
MTP_SETTINGS = ("num_nextn_predict_layers", "num_mtp_layers")
# Maximum of `model.num_layers`.
_MOST_LAYERS = 10_000
# Model types that also encode images and whose text model is a supported family.
_WITH_IMAGES = ("qwen3_5", "qwen3_5_moe")


class _Values(dict[str, Any]):
    """Values of a config.json; null values count as missing."""

    def __getitem__(self, name: str) -> Any:
        if (value := super().__getitem__(name)) is None:
            raise KeyError(name)
        return value


@dataclass(frozen=True)
class HfModel:
    """A config.json under the names of `ModelConfig`.

    Attributes:
        max_positions: maximum sequence length of the positional encoding, in tokens.
        mtp_layers: number of multi-token prediction layers, which `model.mtp_layers` trains.
    """

    settings: dict[str, Any]
    vocab_size: int
    max_positions: int
    mtp_layers: int = 0


def read_hf_config(folder: Path) -> HfModel:
    """Read `folder`/config.json; raise ConfigError if it is missing, or its family or a feature is not supported."""
    path = folder / "config.json"
    if not path.is_file() and (explained := explain_path(folder, expected="a model's folder")):
        raise ConfigError(explained[0], where=str(folder), fix=explained[1])
    try:
        return _convert(json.loads(path.read_text()), path)
    except (OSError, ValueError, TypeError, AttributeError, ArithmeticError, RecursionError) as error:
        fix = "specify a folder with config.json and *.safetensors, as written by save_pretrained"
        raise ConfigError(f"the model's config.json cannot be read: {error}", where=str(path), fix=fix) from None
    except KeyError as error:
        raise ConfigError(f"config.json has no {error}", where=str(path), fix="download the model again") from None


def _convert(values: dict[str, Any], path: Path) -> HfModel:
    def refuse(what: str) -> ConfigError:
        return ConfigError(what, where=str(path), fix=f"use a model of one of these families: {', '.join(FAMILIES)}")

    encoder, values = encoder_text(values), text_config(values)
    name = values.get("model_type")
    if name not in FAMILIES:
        missing = f": they need {MISSING[name]}" if name in MISSING else ""
        raise refuse(f"models of type {name!r} are not supported{missing}")
    family = FAMILIES[name]
    values = _Values(family.standard({**_DEFAULTS.get(family.name, {}), **values}))
    if (layers := int(values["num_hidden_layers"])) > _MOST_LAYERS:  # families build lists of this length
        raise refuse(f"num_hidden_layers {layers:,} is not supported ({_MOST_LAYERS:,} is)")
    for odd in list_odd_features(values, family):
        raise refuse(odd)
    rope = _Values(read_rope(values))
    kind = rope["rope_type"]
    if rope["rope_theta"] % 1:
        raise refuse(f"rope_theta {rope['rope_theta']} is not supported: Megatron-Core has whole numbers")
    heads = int(values["num_attention_heads"])
    head_dim = int(values.get("head_dim") or values["hidden_size"] // heads)
    return HfModel(
        settings={
            "family": family.name,
            **{ours: int(values[theirs]) for ours, theirs in _SIZES.items()},
            "num_query_groups": int(values.get("num_key_value_heads") or heads),
            "head_dim": None if head_dim * heads == values["hidden_size"] else head_dim,
            "tie_embeddings": bool(values.get("tie_word_embeddings", False)),
            "rotary_base": int(rope["rope_theta"]),
            "rope_scaling": "none" if kind == "default" else kind,
            "rope_scaling_factor": 1.0 if kind == "default" else float(rope["factor"]),
            **(_read_yarn(rope, refuse) if kind == "yarn" else {}),
            "norm_epsilon": float(values["rms_norm_eps"]),
            "num_experts": 0,
            **({} if encoder is None else {"encoder": encoder}),
            **family.read(values, refuse),
        },
        vocab_size=int(values["vocab_size"]),
        max_positions=int(values["max_position_embeddings"]),
        mtp_layers=max(int(values.get(name) or 0) for name in MTP_SETTINGS),
    )


def text_config(values: dict[str, Any]) -> dict[str, Any]:
    """Return the config.json of the text model, for a model that may also read media."""
    if encoder_text(values) is not None:
        return text_of(values)
    if values.get("model_type") not in _WITH_IMAGES:
        return values
    kept = ("tie_word_embeddings", "quantization_config")
    return {**{name: values[name] for name in kept if name in values}, **values["text_config"]}


def list_odd_features(values: Mapping[str, Any], family: Family) -> Iterator[str]:
    """Yield each unsupported feature, of the features that models of any family can have."""
    quantized = (values.get("quantization_config") or {}).get("quant_method", "unknown means")
    is_read = quantized == "mxfp4" and family.experts is not None and family.experts.are_stacked
    if values.get("quantization_config") and not is_read:
        yield f"weights quantized by {quantized} are not supported: save them in bfloat16 with transformers"
    for name, known in _KNOWN.items() if family.has_qkv_bias else (*_KNOWN.items(), ("attention_bias", False)):
        if values.get(name) not in (None, known):
            yield f"{name} {values[name]!r} is not supported ({known!r} is)"
    window = values.get("sliding_window")
    is_windowed = not family.window_setting or values.get(family.window_setting)
    if is_windowed and window is not None and window < int(values["max_position_embeddings"]):
        yield f"attention with a window of {window:,} tokens (sliding_window) is not supported"
    rope = read_rope(values)
    kind = rope["rope_type"]
    for name, value in rope.items():
        if isinstance(value, dict):
            yield f"rope_parameters of the layers of type {name} are not supported"
        elif name == "original_max_position_embeddings" and values.get(name) not in (None, value):
            yield f"{name} {value} of the rope scaling and {values[name]} beside it are not supported"
    for name, known in {"attention_factor": None, **_rope_constants(kind, family)}.items():
        if (value := rope.get(name, _OF_YARN.get(name))) != known:
            yield f"rope scaling {kind} with {name} {value} is not supported ({known} is)"
    if kind not in ("default", "linear", "llama3", "yarn"):
        yield f"rope scaling {kind!r} is not supported (llama3, linear and yarn are)"


def _read_yarn(rope: dict[str, Any], refuse: Refuse) -> dict[str, Any]:
    mscale, all_dim = float(rope.get("mscale") or 0), float(rope.get("mscale_all_dim") or 0)
    if all_dim and not mscale:
        raise refuse(f"rope scaling yarn with mscale_all_dim {all_dim} and without mscale is not supported")
    return {
        "rope_original_positions": int(rope["original_max_position_embeddings"]),
        # Without both, transformers scales the angles as for an mscale of 1.
        "rope_mscale": mscale if all_dim else 1.0,
        "rope_mscale_all_dim": all_dim,
    }


def _rope_constants(kind: str, family: Family) -> dict[str, Any]:
    """Return the constants of a scaling in all published models of a family, and in Megatron-Core."""
    if kind == "yarn":
        return {**_OF_YARN, "truncate": family.yarn_truncates}
    return _LLAMA3 if kind == "llama3" else {}


def complete_model(
    values: Mapping[str, Any], stored: HfModel, set_by: Mapping[str, str], *, where: str
) -> dict[str, Any]:
    """Return the fields of `ModelConfig` that the weights determine and that are not set explicitly.

    `set_by` gives the source of each field that is set, such as `model=qwen3_8b`. Raises ConfigError, with both values
    and the source, if a field differs from the weights.
    """
    known = stored.settings | {"vocab_size": stored.vocab_size, "max_sequence_length": stored.max_positions}
    chosen = {name: values[name] for name in known if name in set_by and values[name] is not None}
    if is_part_of(chosen.get("encoder"), known.get("encoder")):
        del chosen["encoder"]  # a preset has only the sizes, and the weights have all values
    _refuse_other(chosen, stored, set_by, where=where)
    return {name: value for name, value in known.items() if name not in chosen}


def check_model(model: ModelConfig, stored: HfModel, *, where: str) -> None:
    """Raise ConfigError, with both values and the settings that fit, if the weights do not match `model`."""
    names = [*stored.settings, "max_sequence_length", *(["vocab_size"] if model.vocab_size is not None else [])]
    _refuse_other({name: getattr(model, name) for name in names}, stored, {}, where=where)


def _refuse_other(values: Mapping[str, Any], stored: HfModel, set_by: Mapping[str, str], *, where: str) -> None:
    """Raise ConfigError for values that differ from the weights; a smaller `max_sequence_length` is accepted."""
    sizes, known = stored.settings, stored.settings | {"vocab_size": stored.vocab_size}
    given = dict(values)
    if (given.get("head_dim") or 0) * sizes["num_attention_heads"] == sizes["hidden_size"]:
        given["head_dim"] = None  # as in the settings of the weights
    wrong = {name: value for name, value in known.items() if name in given and value != given[name]}
    if wrong:
        of = {name: f" of {set_by[name]}" if name in set_by else "" for name in wrong}
        both = ", ".join(f"{name} {values[name]}{of[name]} (the weights have {value})" for name, value in wrong.items())
        places = list(dict.fromkeys(set_by[name] for name in wrong if name in set_by))
        fix = f"leave these settings out of the run ({', '.join(places)}): model.init_from alone has all sizes"
        if not places:
            fix = " ".join(f"model.{n}={v if isinstance(v, str) else json.dumps(v)}" for n, v in wrong.items())
        what = f"the settings of the model do not match its weights: {both}"
        raise ConfigError(what, where=f"model.init_from={where}", fix=fix)
    if (longest := given.get("max_sequence_length", 0)) > (most := stored.max_positions):
        what = f"max_sequence_length is {longest:,}, and the weights were trained for positions up to {most:,}"
        fix = f"model.max_sequence_length={most} or less"
        raise ConfigError(what, where=f"model.init_from={where}", fix=fix)


def to_hf_config(model: ModelConfig, *, vocab_size: int) -> dict[str, Any]:
    """Return the config.json of this model for transformers 4.45 or later."""
    config: dict[str, Any] = {
        "architectures": [model.traits.architecture],
        "model_type": model.family,
        **{theirs: getattr(model, ours) for ours, theirs in _SIZES.items()},
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
        "torch_dtype": model.number,
        "use_cache": True,
    }
    family = model.traits
    config = {name: value for name, value in config.items() if name not in family.unwritten} | family.write(model)
    if model.rope_scaling != "none":
        config["rope_scaling"] = scaling = {"rope_type": model.rope_scaling, "factor": model.rope_scaling_factor}
        scaling |= _rope_constants(model.rope_scaling, family)
        if model.rope_scaling == "yarn":
            scaling["original_max_position_embeddings"] = model.rope_original_positions
            if model.rope_mscale_all_dim:
                scaling |= {"mscale": model.rope_mscale, "mscale_all_dim": model.rope_mscale_all_dim}
    return config if model.encoder is None else with_encoder(config, model.encoder)


def check_exported(model: ModelConfig) -> None:
    """Raise ConfigError if a config.json of the model's family cannot express all of its settings."""
    found = _convert(to_hf_config(model, vocab_size=model.vocab_size or 1), Path("config.json"))
    back = found.settings | {"max_sequence_length": found.max_positions, "mtp_layers": found.mtp_layers}
    names = [one.name for one in fields(model) if one.name not in _OF_TRAINING.split()]
    own = {name: getattr(model, name) for name in names}
    read = {name: back.get(name, getattr(type(model), name)) for name in names}
    for values in (own, read):
        if model.num_experts:
            values["expert_ffn_hidden_size"] = values["expert_ffn_hidden_size"] or values["ffn_hidden_size"]
        if model.num_experts and model.traits.has_experts_everywhere:
            del values["ffn_hidden_size"]
        if (values["head_dim"] or 0) * model.num_attention_heads == model.hidden_size:
            values["head_dim"] = None
    if lost := [name for name, value in own.items() if value != read[name]]:
        both = ", ".join(f"{name} {show_value(own[name])} (read back as {show_value(read[name])})" for name in lost)
        what = f"a config.json of the family {model.family} cannot express {both}, so the model could not be exported"
        fix = " ".join(f"model.{name}={show_value(read[name])}" for name in lost) + ", or another family"
        raise ConfigError(what, where=", ".join(f"model.{name}" for name in [*lost, "family"]), fix=fix)


def find_config(init_from: str) -> Path:
    """Return a folder with the config.json of `init_from`; for a model on the hub, only this file is downloaded."""
    return find_weights(init_from, ["config.json"])


def find_weights(init_from: str, files: Sequence[str] = ("*.json", "*.safetensors")) -> Path:
    """Return the folder of `init_from`: the folder itself, its copy on this node, or a download from the hub.

    Ranks of a node that call this at the same time share one download.
    """
    if Path(init_from).is_dir():
        return Path(local_copy(init_from))
    if Path(init_from).is_file():
        fix = "specify its folder, which also contains config.json, or a model of the hub"
        what, fix = explain_path(Path(init_from), expected="a model's folder") or ("a file, not a model's folder", fix)
        raise ConfigError(what, where=f"model.init_from={init_from}", fix=fix)
    from huggingface_hub import constants, snapshot_download

    problem = ""
    try:
        problem = "HF_HUB_OFFLINE disables the hub" if constants.HF_HUB_OFFLINE else ask_hub(init_from)
        return Path(snapshot_download(init_from, allow_patterns=[*files], local_files_only=bool(problem)))
    except Exception as error:  # the hub's client raises many types
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
        fix = "specify a folder with config.json and *.safetensors; for a model of the hub, run "
        fix += f"`hf download {init_from}` where there is a network, and use that folder"
        what = f"there is no folder {init_from!r}, and {problem or f'the hub has no usable model: {reason}'}"
        raise ConfigError(what, where="model.init_from", fix=fix) from None
