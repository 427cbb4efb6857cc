"""Small datasets for the runs of a matrix: sequences with a pattern to learn, optionally with audio or images."""

from __future__ import annotations

import io
import wave
from pathlib import Path
from typing import Any

import numpy as np

from harness.formats import Provenance, open_writer
from harness.plan.encoders import read_encoder
from harness.prep.media import MediaRules, measure
from harness.records import Medium, Pack

VOCABULARY = 300
_SAMPLES_PER_S = 16_000


def make_dataset(folder: Path, *, pack_size: int = 256, num_packs: int = 160, encoder: str | None = None) -> Path:
    """Make a dataset of short sequences, with 9 packs for validation. An existing one is kept.

    With an `encoder`, the `model.encoder` of the models, a sequence has up to two media.
    """
    splits = {"train": num_packs, "validation": 9}
    if all((folder / split / "manifest.json").exists() for split in splits):
        return folder
    rng, rules = np.random.default_rng(0), None if encoder is None else _rules_of(encoder)
    provenance = Provenance(
        tokenizer="none",
        tokenizer_hash="0" * 16,
        counts={"vocab_size": VOCABULARY},
        mask={} if rules is None else {"media": rules.to_text()},
    )
    options: dict[str, Any] = {"format": "parquet", "pack_size": pack_size, "provenance": provenance, "overwrite": True}
    for split, count in splits.items():
        with open_writer(folder / split, **options) as writer:
            for _ in range(count):
                lengths = rng.integers(5, pack_size // 3, size=rng.integers(1, 4))
                starts = np.concatenate([[0], np.cumsum(lengths)[:-1]])
                ids = np.concatenate([rng.integers(0, 290) + np.arange(size, dtype=np.int32) % 7 for size in lengths])
                mask = np.minimum(rng.integers(0, 4, size=ids.shape[0], dtype=np.uint8), 1)
                mask[np.append(starts[1:], ids.shape[0]) - 1] = 0
                media: tuple[Medium, ...] = ()
                if rules is not None:
                    media = _place(rng, rules, starts, lengths)
                    for one in media:
                        ids[one.start : one.start + one.tokens] = rules.tokens[one.kind]
                        mask[one.start - 1 : one.start + one.tokens - 1] = 0
                writer.append(Pack(ids, mask, starts, media))
    return folder


def _rules_of(encoder: str) -> MediaRules:
    """Return the media rules of a small model, whose feature extractor truncates audio after 1 s."""
    model, values = read_encoder(encoder)
    if model.kind == "image":
        vision = values["vision_config"]
        patch, side = vision["patch_size"], vision.get("image_size")
        if side is None:
            size = {"shortest_edge": (2 * patch) ** 2, "longest_edge": 16 * (2 * patch) ** 2}
            numbers = {"patch_size": patch, "merge_size": 2, "temporal_patch_size": 2}
            numbers |= {"processor": "Qwen2VLImageProcessor", "size": size}
        else:
            size = {"height": side, "width": side}
            numbers = {"processor": "CLIPImageProcessor", "size": size, "crop_size": size, "do_center_crop": True}
            numbers["tokens"] = (side // patch) ** 2
    else:
        audio = values["audio_config"]
        numbers = {"feature_size": audio["num_mel_bins"], "sampling_rate": _SAMPLES_PER_S, "hop_length": 160}
        numbers |= {"chunk_length": 1, "n_fft": 400, "padding_value": 0.0, "n_window": audio.get("n_window", 50)}
    return MediaRules(model.rules, {model.kind: int(values[model.token])}, numbers)


def _place(rng: Any, rules: MediaRules, starts: Any, lengths: Any) -> tuple[Medium, ...]:
    """Return media that fit the sequences of a pack, after the first token and before the last two of each."""
    (kind,), media = rules.tokens, []
    for start, length in zip(starts.tolist(), lengths.tolist(), strict=True):
        at, end = start + 1, start + length - 2
        for _ in range(rng.integers(0, 3)):
            data = _sound(rng) if kind == "audio" else _image(rng)
            tokens = rules.count_tokens(kind, measure(kind, data))
            if at + tokens <= end:
                media.append(Medium(kind, at, tokens, data))
                # For models whose images have a grid, templates write a token between two images.
                at += tokens + max(int(rng.integers(0, 2)), rules.has_grids)
    return tuple(media)


def _sound(rng: Any) -> bytes:
    samples = int(rng.integers(_SAMPLES_PER_S // 20, _SAMPLES_PER_S))
    tone = np.sin(np.arange(samples) * rng.uniform(0.02, 0.5)) + 0.1 * rng.standard_normal(samples)
    file = io.BytesIO()
    with wave.open(file, "wb") as writer:
        writer.setnchannels(1)
        writer.setsampwidth(2)
        writer.setframerate(_SAMPLES_PER_S)
        writer.writeframes((tone * 8000).astype("<i2").tobytes())
    return file.getvalue()


def _image(rng: Any) -> bytes:
    from PIL import Image

    file, width = io.BytesIO(), int(rng.integers(20, 60))
    Image.fromarray(rng.integers(0, 256, (40, width, 3), dtype=np.uint8)).save(file, "PNG")
    return file.getvalue()
