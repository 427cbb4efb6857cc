"""Read images and sounds of chats within limits, count their placeholder tokens, and compute their features.

    data = read_medium("audio/hello.wav", folder="data")          base64, data URIs, bytes, paths and URIs
    rules = MediaRules.of("Qwen2-Audio-7B-Instruct")              None for a text-only model
    rules.count_tokens("audio", measure("audio", data))           750 for 30 seconds
    rules.features(media)                                         inputs of the model's encoder, as from its processor

Pillow, soundfile and soxr (the extra `media`) and transformers are imported when they are first needed.
"""

from harness.prep.media.files import AudioSize, MediaLimits, check_medium, draw_medium, measure, read_medium
from harness.prep.media.rules import MediaRules

__all__ = [
    "AudioSize",
    "MediaLimits",
    "MediaRules",
    "check_medium",
    "draw_medium",
    "measure",
    "read_medium",
]
