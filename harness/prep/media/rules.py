"""Placeholder tokens and features of media, for the model families that support media.

Counts come from the size in a file's header and the settings of the model's processor. Features come from the
processor's own extractor, one medium at a time, so that they do not depend on the other media in a batch.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import lru_cache, partial
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from harness.errors import ConfigError, FormatError, PrepError
from harness.prep.media.files import AudioSize, ImageSize, decode_audio, decode_image, measure
from harness.records import Medium

# Saved next to the tokenizer of a dataset.
RULES_FILE = "media_rules.json"
# Errors that a family raises for numbers of another family.
_NOT_RULES = (ArithmeticError, LookupError, TypeError, ValueError)
_AUDIO_NUMBERS = ("feature_size", "sampling_rate", "hop_length", "chunk_length", "n_fft", "padding_value")
_IMAGE_PROCESSORS = ("CLIPImageProcessor", "SiglipImageProcessor", "Qwen2VLImageProcessor")
_GRID_NUMBERS = {"patch_size": 14, "temporal_patch_size": 2, "merge_size": 2}  # as transformers assumes
_IMAGE_NUMBERS = (
    *("do_resize", "size", "resample", "do_center_crop", "crop_size", "do_rescale", "rescale_factor"),
    *("do_normalize", "image_mean", "image_std", "do_convert_rgb"),
)


@dataclass(frozen=True, slots=True)
class MediaRules:
    """Processor settings of one model, and its placeholder token ids by kind of media; plain values."""

    family: str
    tokens: Mapping[str, int]
    numbers: Mapping[str, Any]

    @classmethod
    def of(cls, name: str) -> MediaRules | None:
        """Return the rules of a model's folder or hub id, or of a tokenizer that was saved with a dataset.

        Returns None for a model without media or of an unsupported family. Raises ConfigError if the processor's files
        are missing or damaged, or contain unsupported settings.
        """
        if saved := _read_json(name, RULES_FILE):
            return cls.from_text(json.dumps(saved), where=f"{name}/{RULES_FILE}")
        config = _read_json(name, "config.json")
        family = _TYPES.get(str(config.get("model_type")))
        if family is None:
            return None
        try:
            return FAMILIES[family].read(name, config)
        except (AttributeError, *_NOT_RULES) as error:
            what = f"the processor's files of a {family} model cannot be read: {type(error).__name__}: {error}"
            fix = "use a folder with the model's config.json, preprocessor_config.json and processor_config.json"
            raise ConfigError(what, where=name, fix=fix) from error

    @classmethod
    def from_text(cls, text: str, where: str = "manifest.json, mask, media") -> MediaRules:
        """Return the rules written by `to_text`; raise FormatError for any other text, which may be untrusted."""
        try:
            values = json.loads(text)
            numbers = values["numbers"]
            rules = cls(values["family"], {str(kind): int(token) for kind, token in values["tokens"].items()}, numbers)
            size = AudioSize(1 << 14, 1 << 14) if "audio" in rules.tokens else ImageSize(64, 64)
            if not 0 <= (count := FAMILIES[rules.family].count(numbers, size)) < 1 << 14:
                raise ValueError(f"a medium has {count} tokens")
            if numbers.get("processor", _IMAGE_PROCESSORS[0]) not in _IMAGE_PROCESSORS:
                raise ValueError(f"the processor is {numbers['processor']}")
            if most := [name for name, one in numbers.items() if isinstance(one, int | float) and not 0 <= one < 1e6]:
                raise ValueError(f"{most[0]} is {numbers[most[0]]}")
        except (PrepError, AttributeError, RecursionError, *_NOT_RULES) as error:
            what = f"the rules of media are not those of a model family that is known: {type(error).__name__}: {error}"
            raise FormatError(what, where=where, fix="use the version that wrote the dataset") from error
        return rules

    def to_text(self) -> str:
        return json.dumps(asdict(self), sort_keys=True)

    def save(self, folder: Path, name: str) -> None:
        """Write the rules, and the processor of `name` (a folder or hub id) for programs that generate text."""
        (folder / RULES_FILE).write_text(self.to_text())
        for file in (f"{kind}processor_config.json" for kind in ("pre", "", "video_pre")):
            if values := _read_json(name, file):
                (folder / file).write_text(json.dumps(values, indent=2))

    def count_tokens(self, kind: str, size: AudioSize | ImageSize) -> int:
        """Count a medium's placeholder tokens as the model's processor does; PrepError if it is too short or long."""
        if kind not in self.tokens:
            what = f"is an {kind}, and a {self.family} model is trained with {' and '.join(self.tokens)} only"
            raise PrepError(what, where="a medium", fix="repair the record, or remove it")
        try:
            count = FAMILIES[self.family].count(self.numbers, size)
        except _NOT_RULES as error:
            what = f"cannot be counted by the rules of its dataset: {type(error).__name__}: {error}"
            raise PrepError(what, where="a medium", fix="use the version that wrote the dataset") from error
        if count < 1:
            raise PrepError("is too short for a token", where="a medium", fix="repair the record, or remove it")
        return count

    def features(self, media: Sequence[Medium]) -> dict[str, npt.NDArray[Any]]:
        """Return the inputs of the model's encoder for media, in their order; PrepError for a damaged medium.

        For sounds: `input_features` float32 [n, mel, frames] and `feature_attention_mask` int32 [n, frames], with the
        number of frames of the longest sound unless the model fixes it. For images: `pixel_values` float32
        [n, 3, H, W]; or [patches of all images, values per patch] and `image_grid_thw` int64 [n, 3], the number of
        patches in time, height and width. Empty without media.
        """
        return FAMILIES[self.family].features(self, media) if media else {}

    @property
    def has_grids(self) -> bool:
        """True if the positions of tokens depend on the sizes of images."""
        return "merge_size" in self.numbers

    def features_at(self, *, is_first_stage: bool) -> Callable[[Sequence[Medium]], dict[str, npt.NDArray[Any]]] | None:
        """Return the function that computes media arrays on a pipeline stage; None for a stage that needs none."""
        if is_first_stage:
            return self.features
        return self.grids if self.has_grids else None

    def grids(self, media: Sequence[Medium]) -> dict[str, npt.NDArray[np.int64]]:
        """Return the `image_grid_thw` of `features` from only the headers of images."""
        sides = [_patches(self.numbers, measure(one.kind, one.data)) for one in media]
        return {"image_grid_thw": np.array([(1, *pair) for pair in sides], np.int64).reshape(-1, 3)}


@dataclass(frozen=True, slots=True)
class MediaFamily:
    """Functions of a model family: read its rules from a folder, count tokens, and compute features."""

    read: Callable[[str, Mapping[str, Any]], MediaRules]
    count: Callable[[Mapping[str, Any], Any], int]
    features: Callable[[MediaRules, Sequence[Medium]], dict[str, npt.NDArray[Any]]]


def _read_json(name: str, file: str) -> dict[str, Any]:
    """Return the JSON object in a file of a folder or hub id; empty if there is no such file."""
    folder = Path(name).expanduser()
    if folder.is_dir():
        path = folder / file
    else:
        from huggingface_hub import hf_hub_download, try_to_load_from_cache

        try:
            cached = try_to_load_from_cache(name, file)
            # No more requests for a text-only tokenizer: its config.json is in the cache once it is loaded.
            if not isinstance(cached, str) and file in (RULES_FILE, "config.json"):
                return {}
            path = Path(cached if isinstance(cached, str) else hf_hub_download(name, file))
        except Exception:  # also network errors, from a library that differs between versions
            return {}
    if not path.is_file():
        return {}
    try:
        values = json.loads(path.read_bytes())
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{file} is damaged: {error}", where=str(path), fix="download it again") from error
    return values if isinstance(values, dict) else {}


def _processor(name: str, part: str) -> dict[str, Any]:
    """Return the settings of a processor; settings of `part` override the common ones."""
    whole = _read_json(name, "processor_config.json")
    return {**whole, **_read_json(name, "preprocessor_config.json"), **(whole.get(part) or {})}


def _read_audio(name: str, config: Mapping[str, Any], family: str, n_window: int = 0) -> MediaRules:
    found = _processor(name, "feature_extractor")
    if found.get("feature_extractor_type", "WhisperFeatureExtractor") != "WhisperFeatureExtractor":
        raise ValueError(f"its feature extractor is {found['feature_extractor_type']}, not WhisperFeatureExtractor")
    if found.get("dither") or found.get("do_normalize"):
        raise ValueError("its feature extractor adds noise or normalizes samples, which is not supported")
    numbers = {key: found[key] for key in _AUDIO_NUMBERS}
    if n_window:
        numbers["n_window"] = n_window
    token = config["audio_token_id"] if "audio_token_id" in config else config["audio_token_index"]
    return MediaRules(family, {"audio": int(token)}, numbers)


def _count_qwen2_audio(numbers: Mapping[str, Any], size: AudioSize) -> int:
    """Count tokens as Qwen2AudioProcessor does, but refuse sounds that it would cut at `chunk_length`."""
    samples = size.samples_at(numbers["sampling_rate"])
    if samples > numbers["chunk_length"] * numbers["sampling_rate"]:
        what = f"has {samples / numbers['sampling_rate']:,.2f} s, more than the {numbers['chunk_length']} s that a "
        raise PrepError(f"{what}model of this family processes", where="a medium", fix="cut it into shorter ones")
    frames = -(-samples // int(numbers["hop_length"]))
    return ((frames - 1) // 2 + 1 - 2) // 2 + 1


def _count_qwen3_omni(numbers: Mapping[str, Any], size: AudioSize) -> int:
    """Count tokens as Qwen3OmniMoeProcessor does for a single sound: 13 tokens per window of 100 frames."""
    samples = size.samples_at(numbers["sampling_rate"])
    frames = samples // int(numbers["hop_length"])
    if frames < 1 or samples <= numbers["n_fft"] // 2:  # the transform reflects half a window at the ends
        return 0
    windows, rest = divmod(frames, 2 * int(numbers["n_window"]))
    return (((rest - 1) // 2 + 1 - 1) // 2 + 1 - 1) // 2 + 1 + windows * 13


def _audio_features(rules: MediaRules, media: Sequence[Medium]) -> dict[str, npt.NDArray[Any]]:
    numbers = {name: rules.numbers[name] for name in _AUDIO_NUMBERS}
    extractor = _extractor("WhisperFeatureExtractor", json.dumps(numbers))
    rate = numbers["sampling_rate"]
    form = {"padding": "max_length"} if rules.family == "qwen2_audio" else {"padding": True, "truncation": False}
    form |= {"sampling_rate": rate, "return_attention_mask": True, "return_tensors": "np"}
    made = [extractor(decode_audio(one.data, rate), **form) for one in media]
    frames = max(one["input_features"].shape[2] for one in made)
    features = np.zeros((len(made), numbers["feature_size"], frames), np.float32)
    mask = np.zeros((len(made), frames), np.int32)
    for number, one in enumerate(made):
        own = one["input_features"].shape[2]
        features[number, :, :own], mask[number, :own] = one["input_features"][0], one["attention_mask"][0]
    return {"input_features": features, "feature_attention_mask": mask}


def _image_numbers(name: str, known: Sequence[str]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return all settings of an image processor, and the settings for its rules."""
    found = _processor(name, "image_processor")
    kind = str(found.get("image_processor_type", "")).removesuffix("Fast").removesuffix("Pil")
    if kind not in known:
        raise ValueError(f"its image processor is {kind or 'not named'}, expected one of {', '.join(known)}")
    return found, {"processor": kind, **{key: found[key] for key in _IMAGE_NUMBERS if found.get(key) is not None}}


def _read_llava(name: str, config: Mapping[str, Any]) -> MediaRules:
    (found, numbers), vision = _image_numbers(name, _IMAGE_PROCESSORS[:2]), config.get("vision_config") or {}
    has_crop = numbers.get("do_center_crop", numbers["processor"].startswith("CLIP"))
    size = numbers["crop_size" if has_crop else "size"]
    square = {"height": size, "width": size} if isinstance(size, int) else size
    patch = found.get("patch_size") or vision["patch_size"]
    # Older processors lack these: take them from the model's configuration, and count the class token of a CLIP tower.
    extra = found.get("num_additional_image_tokens", int(vision.get("model_type") == "clip_vision_model"))
    select = found.get("vision_feature_select_strategy") or config["vision_feature_select_strategy"]
    tokens = (int(square["height"]) // patch) * (int(square["width"]) // patch) + extra - (select == "default")
    token = config["image_token_id"] if "image_token_id" in config else config["image_token_index"]
    return MediaRules("llava", {"image": int(token)}, {**numbers, "tokens": tokens})


def _read_qwen_vl(name: str, config: Mapping[str, Any], family: str) -> MediaRules:
    found, numbers = _image_numbers(name, _IMAGE_PROCESSORS[2:])
    if not numbers.get("do_resize", True):
        raise ValueError("its image processor does not resize, and images have any number of pixels")
    size = {"shortest_edge": 56 * 56, "longest_edge": 28 * 28 * 1280, **(numbers.get("size") or {})}
    for edge, older in (("shortest_edge", "min_pixels"), ("longest_edge", "max_pixels")):
        size[edge] = int(found.get(older) or size[edge])
    numbers |= {key: int(found.get(key) or value) for key, value in _GRID_NUMBERS.items()}
    return MediaRules(family, {"image": int(config["image_token_id"])}, {**numbers, "size": size})


def _patches(numbers: Mapping[str, Any], size: Any) -> tuple[int, int]:
    """Return the number of patches in height and width of an image, as transformers' `smart_resize` does."""
    factor, edges = numbers["patch_size"] * numbers["merge_size"], numbers["size"]
    sides, pixels = (size.height, size.width), size.height * size.width
    if max(sides) > 200 * min(sides):
        what = f"has {size.width:,} x {size.height:,} pixels, one side more than 200 times the other"
        raise PrepError(what, where="a medium", fix="cut it")
    made = [round(side / factor) * factor for side in sides]
    if made[0] * made[1] > edges["longest_edge"]:
        scale = math.sqrt(pixels / edges["longest_edge"])
        made = [max(factor, math.floor(side / scale / factor) * factor) for side in sides]
    elif made[0] * made[1] < edges["shortest_edge"]:
        scale = math.sqrt(edges["shortest_edge"] / pixels)
        made = [math.ceil(side * scale / factor) * factor for side in sides]
    height, width = (side // numbers["patch_size"] for side in made)
    return height, width


def _image_features(rules: MediaRules, media: Sequence[Medium]) -> dict[str, npt.NDArray[Any]]:
    numbers = {name: value for name, value in rules.numbers.items() if name not in ("processor", "tokens")}
    processor = _extractor(rules.numbers["processor"], json.dumps(numbers))
    made = [processor(decode_image(one.data), return_tensors="np") for one in media]
    found = {name: np.concatenate([one[name] for one in made]) for name in made[0]}
    return {**found, "pixel_values": found["pixel_values"].astype(np.float32, copy=False)}


@lru_cache(maxsize=4)
def _extractor(kind: str, numbers: str) -> Any:
    """Return a transformers extractor; images use Pillow, so that results do not depend on other installed packages."""
    import transformers

    return (getattr(transformers, f"{kind}Pil", None) or getattr(transformers, kind))(**json.loads(numbers))


FAMILIES = {
    "qwen2_audio": MediaFamily(partial(_read_audio, family="qwen2_audio"), _count_qwen2_audio, _audio_features),
    "qwen3_omni_moe": MediaFamily(
        lambda name, config: _read_audio(name, config.get("thinker_config") or config, "qwen3_omni_moe", n_window=50),
        _count_qwen3_omni,
        _audio_features,
    ),
    **{
        family: MediaFamily(
            partial(_read_qwen_vl, family=family),
            lambda numbers, size: math.prod(_patches(numbers, size)) // int(numbers["merge_size"]) ** 2,
            _image_features,
        )
        for family in ("qwen2_5_vl", "qwen3_vl")
    },
    "llava": MediaFamily(_read_llava, lambda numbers, size: int(numbers["tokens"]), _image_features),
}
_TYPES = {**{name: name for name in FAMILIES}, "qwen3_omni_moe_thinker": "qwen3_omni_moe", "qwen3_vl_moe": "qwen3_vl"}
