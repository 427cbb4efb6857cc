"""Models that also read audio or images: the config.json, weight names and work of their encoders."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np

from harness.records import Float64Array, Int64Array

# Rotary embedding values of models with three-dimensional positions.
MROPE = ("mrope_section", "mrope_interleaved")
# Limit for half of a head's size; no model comes close.
_MOST_SECTIONS = 1_000_000
# Values of a text model that a nested config.json omits, because they are the defaults of its class.
_LLAMA: dict[str, Any] = {"hidden_size": 4096, "num_hidden_layers": 32, "num_attention_heads": 32}
_LLAMA |= {"intermediate_size": 11008, "vocab_size": 32000, "max_position_embeddings": 2048, "rms_norm_eps": 1e-6}
_DEFAULTS = {
    "qwen2_5_vl": {"rms_norm_eps": 1e-5, "num_key_value_heads": 8},
    "qwen3_vl": {"rms_norm_eps": 1e-6},
    "qwen3_vl_moe": {"rms_norm_eps": 1e-6, "num_key_value_heads": 16},
    "qwen3_omni_moe_thinker": {"rms_norm_eps": 1e-6, "norm_topk_prob": True, "rope_theta": 1e6},
}


@dataclass(frozen=True, eq=False)
class EncoderWork:
    """Work of encoding each medium separately.

    Attributes:
        flops: float64 [media], FLOPs of the forward pass.
        kept: float64 [media], numbers kept for the backward pass.
        once: float64 [media], numbers of the largest layer, the peak if nothing is kept.
        weights: number of weights of the encoder.
    """

    flops: Float64Array
    kept: Float64Array
    once: Float64Array
    weights: int

    def __add__(self, other: EncoderWork) -> EncoderWork:
        once, weights = np.maximum(self.once, other.once), self.weights + other.weights
        return EncoderWork(self.flops + other.flops, self.kept + other.kept, once, weights)

    def by_sequence(self, sequences: Int64Array, count: int) -> EncoderWork:
        """Return the sums over the media of each of `count` sequences, given the sequence number of each medium."""
        arrays = {name: getattr(self, name) for name in ("flops", "kept", "once")}
        sums: dict[str, Any] = {name: np.bincount(sequences, one, count) for name, one in arrays.items()}
        return replace(self, **{name: one.astype(np.float64, copy=False) for name, one in sums.items()})


@dataclass(frozen=True)
class MediaModel:
    """A type of published model that encodes audio or images in front of a text model.

    Attributes:
        name: `model_type` of its config.json.
        architecture: its class in transformers.
        rules: `family` of the `harness.prep.media.MediaRules` for its data.
        token: name of the config.json value that contains the id of its placeholder token.
        kept: names of the config.json values that describe the encoder.
        parts: modules of the encoder, which are the prefixes of its weight names.
        text_types: family of its text model, by the text model's `model_type`.
        prefix: prefix of the text model's weight names.
        is_nested: the encoder's weights are in `model.visual`, and the text model's weights in `model.language_model`.
        stacks_experts: the experts of a layer are in one tensor [experts, inputs, outputs], gate before up.
        left_out: name prefixes of weights that are neither trained nor run.
        copied: prefixes in `left_out` whose weights an export copies from the initial weights.
        work: returns the work of media, given the encoder's values, the text model's hidden size, and the number of
            placeholder tokens of each medium, float64 [media].
    """

    name: str
    architecture: str
    rules: str
    token: str
    kept: tuple[str, ...]
    parts: tuple[str, ...]
    text_types: Mapping[str, str]
    work: Callable[[Mapping[str, Any], int, Float64Array], EncoderWork]
    prefix: str = ""
    is_nested: bool = False
    stacks_experts: bool = False
    left_out: tuple[str, ...] = ()
    copied: tuple[str, ...] = ()

    @property
    def kind(self) -> str:
        """Kind of its media, see `harness.records.MEDIA_KINDS`."""
        return self.token.partition("_")[0]

    def count(self, values: Mapping[str, Any], hidden: int) -> int:
        """Return the number of weights of an encoder with these values, for a text model of this hidden size."""
        return self.work(values, hidden, np.zeros(0)).weights

    def encoder_name(self, name: str) -> str:
        """Return the name of an encoder tensor in published weights."""
        return f"model.{name}" if self.is_nested else name

    def text_name(self, name: str) -> str:
        """Return the name of a text model tensor in published weights."""
        return name.replace("model.", "model.language_model.", 1) if self.is_nested else self.prefix + name


def deep_layers(values: Mapping[str, Any]) -> int:
    """Return the number of leading layers after which image features are added, for the values of `model.encoder`."""
    named = values["model_type"].startswith("qwen3_vl")
    return len(values["vision_config"].get("deepstack_visual_indexes", range(3))) if named else 0


def _product(
    places: Float64Array, inputs: int, outputs: int, kernel: int = 1, *, weights: int | None = None
) -> EncoderWork:
    """Return the work of a matrix (input and output kept) or a convolution of `kernel` places (output kept twice).

    `weights` overrides the number of weights, which includes biases by default.
    """
    numbers = places * ((inputs if kernel == 1 else outputs) + outputs)
    weights = (inputs * kernel + 1) * outputs if weights is None else weights
    return EncoderWork(2 * places * inputs * kernel * outputs, numbers, numbers, weights)


def _layers(
    count: int, size: int, inner: int, places: Float64Array, *, kept: float, window: int = 0, is_gated: bool = False
) -> EncoderWork:
    """Return the work of transformer layers with attention over all places of a medium, or within windows.

    Outside the MLP, PyTorch saves `kept` * `size` numbers per place.
    """
    whole, rest = np.divmod(places, window) if window else (0, places)
    matrices = (4 * size + (2 + is_gated) * inner) * size
    once = places * (kept * size + (2 + 2 * is_gated) * inner) * bool(count)
    flops = 2 * matrices * places + 4 * size * (whole * window**2 + rest**2)
    weights = matrices + (1 + is_gated) * inner + (7 if is_gated else 9) * size  # with two norms; all have biases
    return EncoderWork(count * flops, count * once, once, count * weights)


def _work_of_whisper(values: Mapping[str, Any], hidden: int, tokens: Float64Array) -> EncoderWork:
    """Return the work of audio clips, which are all padded to the encoder's maximum length."""
    audio = values["audio_config"]
    size, mels, longest = (int(audio[name]) for name in ("d_model", "num_mel_bins", "max_source_positions"))
    places = np.full(tokens.shape, float(longest))
    heard = _product(2 * places, mels, size, 3) + _product(places, size, size, 3)
    count, inner = int(audio["encoder_layers"]), int(audio["encoder_ffn_dim"])
    made = heard + _layers(count, size, inner, places, kept=9) + _product(places // 2, size, hidden)
    # Positions and the final norm are added; keys have no biases.
    return replace(made, weights=made.weights + (longest + 2 - count) * size)


def _work_of_omni(values: Mapping[str, Any], hidden: int, tokens: Float64Array) -> EncoderWork:
    """Return the work of audio clips, whose last window is padded if there is more than one."""
    audio = {"n_window": 50, "n_window_infer": 800, **values["audio_config"]}
    size, channels = int(audio["d_model"]), int(audio["downsample_hidden_size"])
    frames, mels = [2 * int(audio["n_window"])], [int(audio["num_mel_bins"])]
    for _ in range(3):
        frames, mels = [*frames, -(-frames[-1] // 2)], [*mels, -(-mels[-1] // 2)]
    windows = np.where(tokens < frames[3], tokens / frames[3], np.ceil(tokens / frames[3]))
    joined = channels * mels[3]
    work = _product(windows * frames[3], joined, size, weights=(joined + 2) * size)  # with the final norm, no biases
    for number, inputs in enumerate((1, channels, channels), 1):
        work += _product(windows * frames[number] * mels[number], inputs, channels, 9)
    window = frames[3] * (int(audio["n_window_infer"]) // frames[0])
    work += _layers(int(audio["encoder_layers"]), size, int(audio["encoder_ffn_dim"]), tokens, kept=9, window=window)
    return work + _product(tokens, size, size) + _product(tokens, size, hidden)


def _work_of_llava(values: Mapping[str, Any], hidden: int, tokens: Float64Array) -> EncoderWork:
    """Return the work of images, which are all resized to one size."""
    vision = values["vision_config"]
    size, inner, patch = (int(vision[name]) for name in ("hidden_size", "intermediate_size", "patch_size"))
    is_siglip, places = "siglip" in vision["model_type"], (int(vision["image_size"]) // patch) ** 2
    patches = np.full(tokens.shape, float(places))
    # In addition to the final norm, SigLIP has a patch bias, and a head with keys and values of all places that the
    # features do not use. CLIP has a class token with a position, and a norm before its layers.
    seen = _product(patches, 3 * patch**2, size, weights=(3 * patch**2 + places + (3 if is_siglip else 6)) * size)
    head = (4 * size + 2 * inner + 8) * size + inner
    seen += _product(patches * is_siglip, size, 2 * size, weights=head * is_siglip)
    kept = 8 if is_siglip else 8 + inner / size  # CLIP's activation also keeps its sigmoid
    layers = _layers(int(vision["num_hidden_layers"]), size, inner, patches + (not is_siglip), kept=kept)
    projector = (size + hidden + 2 * bool(values.get("multimodal_projector_bias", True))) * hidden
    joined = _product(tokens, size, hidden, weights=projector) + _product(tokens, hidden, hidden, weights=0)
    return seen + layers + joined


def _work_of_patches(values: Mapping[str, Any], hidden: int, tokens: Float64Array) -> EncoderWork:
    """Return the work of images of any size; all windows count as full, although windows at an edge are smaller.

    The layers of Qwen2.5-VL have windows and gates; the layers of Qwen3-VL have neither.
    """
    is_gated, deep = values["model_type"] == "qwen2_5_vl", deep_layers(values)
    vision: dict[str, Any] = {"in_channels": 3, "spatial_merge_size": 2, "temporal_patch_size": 2, "window_size": 112}
    vision |= {"patch_size": 14 if is_gated else 16, "fullatt_block_indexes": (7, 15, 23, 31)}
    vision |= {"num_position_embeddings": 2304}
    vision |= values["vision_config"]
    names = "spatial_merge_size hidden_size intermediate_size patch_size depth"
    merge, size, inner, patch, depth = (int(vision[name]) for name in names.split())
    patches, merged, made = tokens * merge**2, size * merge**2, tokens * (1 + deep)
    windowed = depth - sum(index in range(depth) for index in set(vision["fullatt_block_indexes"])) if is_gated else 0
    numbers = int(vision["in_channels"] * vision["temporal_patch_size"] * vision["patch_size"] ** 2)
    # With the norms of the patch mergers, and in Qwen3-VL a patch bias and positions.
    places = 0 if is_gated else int(vision["num_position_embeddings"])
    weights = (numbers + 1) * size if is_gated else (numbers + 3 + places) * size + 2 * deep * merged
    work = _product(patches, numbers, size, weights=weights)
    # The norms of the gated layers compute in float32, in several steps.
    layers = partial(_layers, size=size, inner=inner, kept=15 if is_gated else 11, is_gated=is_gated)
    work += layers(depth - windowed, places=patches)
    work += layers(windowed, places=patches, window=(int(vision["window_size"]) // patch) ** 2)
    work += _product(made, merged, merged, weights=(1 + deep) * (merged + 1) * (merged + hidden))
    return work + _product(made, merged, hidden, weights=0)


_VISION = ("vision_config", "video_token_id", "vision_start_token_id", "vision_end_token_id", *MROPE)
_OMNI = MediaModel(
    "qwen3_omni_moe_thinker",
    "Qwen3OmniMoeThinkerForConditionalGeneration",
    "qwen3_omni_moe",
    "audio_token_id",
    ("audio_config",),
    ("audio_tower",),
    {"qwen3_omni_moe_text": "qwen3_moe"},
    _work_of_omni,
    left_out=("visual.", "talker.", "code2wav."),
    copied=("visual.",),
)
MEDIA_MODELS = {
    model.name: model
    for model in (
        MediaModel(
            "qwen2_audio",
            "Qwen2AudioForConditionalGeneration",
            "qwen2_audio",
            "audio_token_index",
            ("audio_config",),
            ("audio_tower", "multi_modal_projector"),
            {"qwen2": "qwen2"},
            _work_of_whisper,
            prefix="language_model.",
        ),
        _OMNI,
        MediaModel(
            "llava",
            "LlavaForConditionalGeneration",
            "llava",
            "image_token_index",
            (
                "vision_config",
                "projector_hidden_act",
                "vision_feature_layer",
                "vision_feature_select_strategy",
                "multimodal_projector_bias",
            ),
            ("vision_tower", "multi_modal_projector"),
            {name: name for name in ("llama", "mistral", "qwen2")},
            _work_of_llava,
            prefix="language_model.",
        ),
        *(
            MediaModel(
                name,
                architecture,
                name.removesuffix("_moe"),
                "image_token_id",
                _VISION,
                ("visual",),
                {f"{name}_text": family},
                _work_of_patches,
                is_nested=name.startswith("qwen3_vl"),
                stacks_experts=name == "qwen3_vl_moe",
            )
            for name, architecture, family in (
                ("qwen2_5_vl", "Qwen2_5_VLForConditionalGeneration", "qwen2"),
                ("qwen3_vl", "Qwen3VLForConditionalGeneration", "qwen3"),
                ("qwen3_vl_moe", "Qwen3VLMoeForConditionalGeneration", "qwen3_moe"),
            )
        ),
    )
}


def of_whole(values: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the config.json of the text-generating part (the thinker) of a model that also speaks."""
    if values.get("model_type") != "qwen3_omni_moe":
        return values
    return {**values["thinker_config"], "model_type": _OMNI.name}


def encoder_text(values: Mapping[str, Any]) -> str | None:
    """Return `model.encoder` for a config.json, or None for a text model; raise KeyError if a value is missing."""
    values = of_whole(values)
    model = MEDIA_MODELS.get(str(values.get("model_type")))
    if model is None:
        return None
    text = values.get("text_config") or values
    found = {**values, **(text.get("rope_scaling") or text.get("rope_parameters") or {})}
    # Images have three-dimensional positions, whose sections are required.
    kept = {name: found[name] for name in model.kept if name in found or name == MROPE[0]}
    return json.dumps({"model_type": model.name, model.token: int(values[model.token]), **kept}, sort_keys=True)


def text_of(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return the config.json of the text model of a model that reads media, with the text family's `model_type`."""
    values = of_whole(values)
    model = MEDIA_MODELS[values["model_type"]]
    # Older files contain the text model's values at the top level, next to the encoder's.
    nested = values.get("text_config") or {**values, "model_type": f"{model.name}_text"}
    outer = {"tie_word_embeddings": False, "quantization_config": values.get("quantization_config")}
    text = {**_DEFAULTS.get(model.name, _LLAMA), **outer, **nested}
    if "visual" in model.parts:
        # For Qwen3-VL, transformers reads only the outer value.
        places = (values, nested)[: 1 if model.is_nested else 2]
        text["tie_word_embeddings"] = any(place.get("tie_word_embeddings") for place in places)
    text |= {"norm_topk_prob": True} if model.stacks_experts else {}  # whatever the file contains
    return {**text, "model_type": model.text_types.get(text["model_type"], text["model_type"])}


def read_encoder(text: str) -> tuple[MediaModel, dict[str, Any]]:
    """Return the model type and the values of `model.encoder`; raise ValueError if it is invalid."""
    try:
        values = json.loads(text)
        model = MEDIA_MODELS[values["model_type"]]
        with np.errstate(all="raise"):  # each term raises for an invalid value
            sum((int(values[model.token]), model.work(values, 1, np.ones(1)).weights, *rope_axes(values)))
    except (ValueError, LookupError, TypeError, AttributeError, ArithmeticError, RecursionError) as error:
        known = ", ".join(MEDIA_MODELS)
        raise ValueError(f"not the config.json of an encoder (model_type {known}): {error}") from None
    return model, values


def encoder_work(encoder: str, hidden_size: int, tokens: Float64Array) -> EncoderWork:
    """Return the work of media with these numbers of placeholder tokens, for a valid `model.encoder`."""
    model, values = read_encoder(encoder)
    return model.work(values, hidden_size, tokens)


def is_part_of(part: str | None, whole: str | None) -> bool:
    """Return True if another `model.encoder` contains all values of this one; both must be valid."""

    def holds(some: Any, others: Any) -> bool:
        if isinstance(some, dict) and isinstance(others, dict):
            return all(name in others and holds(value, others[name]) for name, value in some.items())
        return bool(some == others)

    return bool(part and whole) and holds(json.loads(str(part)), json.loads(str(whole)))


def with_encoder(text: dict[str, Any], encoder: str) -> dict[str, Any]:
    """Return the config.json of a model that reads media, given its text model's config.json and `model.encoder`."""
    model, values = read_encoder(encoder)
    types = {family: name for name, family in model.text_types.items()}
    nested = {**text, "model_type": types[text["model_type"]]}
    nested.pop("architectures", None)
    if rope := {name: values.pop(name) for name in MROPE if name in values}:
        nested["rope_scaling"] = {"rope_type": "default", **rope}
    outer = {"tie_word_embeddings": text["tie_word_embeddings"]} if "visual" in model.parts else {}
    return {"architectures": [model.architecture], **values, **outer, "text_config": nested}


def rope_axes(values: Mapping[str, Any]) -> tuple[int, ...]:
    """Return `ModelConfig.rope_axes` for the values of `model.encoder`: contiguous sections, or interleaved axes."""
    sections = [int(size) for size in values.get("mrope_section", ())]
    if min(sections, default=0) < 0 or sum(sections) > _MOST_SECTIONS:
        raise ValueError(f"mrope_section is {sections}")
    if str(values.get("model_type")).startswith("qwen3_vl"):  # whatever `mrope_interleaved` is
        half = [axis if number < 3 * sections[axis] else 0 for number in range(sum(sections)) for axis in [number % 3]]
    else:
        half = [axis % 3 for axis, size in enumerate(sections) for _ in range(size)]
    return tuple(half * 2)
