"""Folders of small models that take media: configuration, tokenizer, template and processor; and sounds and images."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

for name in ("soundfile", "soxr", "PIL"):
    pytest.importorskip(name)  # the image has the nightly tests' packages only

QWEN2_AUDIO = (
    "{% set audio_count = namespace(value=0) %}{% for message in messages %}"
    "{% if loop.first and message['role'] != 'system' %}"
    "<|im_start|>system\nYou are a helpful assistant.<|im_end|>\n{% endif %}"
    "<|im_start|>{{ message['role'] }}\n"
    "{% if message['content'] is string %}{{ message['content'] }}<|im_end|>\n"
    "{% else %}{% for content in message['content'] %}"
    "{% if 'audio' in content or 'audio_url' in content or message['type'] == 'audio' or content['type'] == 'audio' %}"
    "{% set audio_count.value = audio_count.value + 1 %}"
    "Audio {{ audio_count.value }}: <|audio_bos|><|AUDIO|><|audio_eos|>\n"
    "{% elif 'text' in content %}{{ content['text'] }}{% endif %}"
    "{% endfor %}<|im_end|>\n{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
QWEN3_OMNI = (
    "{%- for message in messages %}{{- '<|im_start|>' + message.role + '\\n' }}"
    "{%- if message.content is string %}{{- message.content }}{%- else %}{%- for item in message.content %}"
    "{%- if item.type == 'audio' or 'audio' in item or 'audio_url' in item %}"
    "{{- '<|audio_start|><|audio_pad|><|audio_end|>' }}"
    "{%- elif 'text' in item %}{{- item.text }}{%- endif %}{%- endfor %}{%- endif %}"
    "{{- '<|im_end|>\\n' }}{%- endfor %}"
    "{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}"
)
LLAVA = (
    "{% for message in messages %}"
    "{% if message['role'] != 'system' %}{{ message['role'].upper() + ': '}}{% endif %}"
    "{% for content in message['content'] | selectattr('type', 'equalto', 'image') %}{{ '<image>\n' }}{% endfor %}"
    "{% if message['role'] != 'assistant' %}"
    "{% for content in message['content'] | selectattr('type', 'equalto', 'text') %}{{ content['text'] + ' '}}"
    "{% endfor %}{% else %}"
    "{% for content in message['content'] | selectattr('type', 'equalto', 'text') %}"
    "{% generation %}{{ content['text'] + '</s>'}}{% endgeneration %}{% endfor %}{% endif %}"
    "{% endfor %}{% if add_generation_prompt %}{{ 'ASSISTANT:' }}{% endif %}"
)
QWEN_VL = (
    "{% for message in messages %}{% if loop.first and message['role'] != 'system' %}"
    "<|im_start|>system\nYou are a helpful assistant.<|im_end|>\n{% endif %}<|im_start|>{{ message['role'] }}\n"
    "{% if message['content'] is string %}{{ message['content'] }}<|im_end|>\n"
    "{% else %}{% for content in message['content'] %}"
    "{% if content['type'] == 'image' or 'image' in content or 'image_url' in content %}"
    "<|vision_start|><|image_pad|><|vision_end|>"
    "{% elif 'text' in content %}{{ content['text'] }}{% endif %}"
    "{% endfor %}<|im_end|>\n{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
_TEMPLATES = {"qwen2_audio": QWEN2_AUDIO, "qwen3_omni_moe": QWEN3_OMNI, "llava": LLAVA, "qwen2_5_vl": QWEN_VL}
_TEMPLATES["qwen3_vl"] = _TEMPLATES["qwen3_vl_moe"] = QWEN_VL
_TOKENS = {
    "qwen2_audio": ["<|im_start|>", "<|im_end|>", "<|AUDIO|>", "<|audio_bos|>", "<|audio_eos|>"],
    "qwen3_omni_moe": ["<|im_start|>", "<|im_end|>", "<|audio_pad|>", "<|audio_start|>", "<|audio_end|>"],
    "llava": ["<s>", "</s>", "<image>"],
    "qwen2_5_vl": ["<|im_start|>", "<|im_end|>", "<|vision_start|>", "<|vision_end|>", "<|image_pad|>"],
}
PLACEHOLDER = {"qwen2_audio": "<|AUDIO|>", "qwen3_omni_moe": "<|audio_pad|>", "llava": "<image>"}
_TOKENS["qwen3_vl"] = _TOKENS["qwen3_vl_moe"] = _TOKENS["qwen2_5_vl"]
PLACEHOLDER |= dict.fromkeys(("qwen2_5_vl", "qwen3_vl", "qwen3_vl_moe"), "<|image_pad|>")


def save_media_model(
    folder: Path,
    family: str,
    *,
    texts: list[str] | None = None,
    mel: int = 128,
    chunk_length: int = 30,
    image: int = 28,
    patch: int = 14,
    siglip: bool = False,
) -> Path:
    """Save the files that a tokenizer's folder of such a model has: all but the weights."""
    import transformers
    from tokenizers import Tokenizer

    from harness.prep.tokenize import train_bpe

    words = ["The quick brown fox jumps over the lazy dog.\n", "What is being said? user assistant system Audio 1: "]
    train_bpe(texts or words * 20, folder, vocab_size=320)
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    tokenizer.add_special_tokens(_TOKENS[family])
    tokenizer.save(str(folder / "tokenizer.json"))
    end = "</s>" if family == "llava" else "<|im_end|>"
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": end, "pad_token": end}
    settings |= {"clean_up_tokenization_spaces": False, "chat_template": _TEMPLATES[family]}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    token = tokenizer.token_to_id(PLACEHOLDER[family])
    config: dict[str, Any] = {"model_type": family}
    if family == "llava":
        vision = {"model_type": "siglip_vision_model" if siglip else "clip_vision_model", "patch_size": patch}
        strategy = "full" if siglip else "default"
        config |= {"image_token_index": token, "vision_config": vision, "vision_feature_select_strategy": strategy}
        processor: Any
        if siglip:
            processor = transformers.SiglipImageProcessorPil(size={"height": image, "width": image})
        else:
            crop = {"height": image, "width": image}
            processor = transformers.CLIPImageProcessorPil(size={"shortest_edge": image}, crop_size=crop)
        processor.save_pretrained(folder)
        extra = {"patch_size": patch, "vision_feature_select_strategy": strategy}
        extra |= {"num_additional_image_tokens": int(not siglip)}
        (folder / "processor_config.json").write_text(json.dumps({"processor_class": "LlavaProcessor", **extra}))
    elif family in ("qwen2_5_vl", "qwen3_vl", "qwen3_vl_moe"):
        config["image_token_id"] = token
        edges = {"shortest_edge": 4 * patch**2, "longest_edge": 400 * patch**2}
        transformers.Qwen2VLImageProcessorPil(size=edges, patch_size=patch).save_pretrained(folder)
    else:
        config |= (
            {"audio_token_index": token} if family == "qwen2_audio" else {"thinker_config": {"audio_token_id": token}}
        )
        extractor = transformers.WhisperFeatureExtractor(feature_size=mel, chunk_length=chunk_length)
        extractor.save_pretrained(folder)
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def sound(
    num_samples: int, *, rate: int = 16000, seed: int = 0, channels: int = 1, format: str = "WAV", subtype: str = ""
) -> bytes:
    """Return a file of random samples."""
    import soundfile

    samples = np.random.default_rng(seed).standard_normal((num_samples, channels)).astype(np.float32) * 0.1
    file = io.BytesIO()
    soundfile.write(file, samples, rate, format=format, subtype=subtype or None)
    return file.getvalue()


def picture(width: int, height: int, *, seed: int = 0, format: str = "PNG", mode: str = "RGB") -> bytes:
    """Return a file of random pixels."""
    from PIL import Image

    pixels = np.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=np.uint8)
    file = io.BytesIO()
    Image.fromarray(pixels).convert(mode).save(file, format=format)
    return file.getvalue()
