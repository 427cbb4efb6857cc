"""Images and sounds of chats: read and bounded, their placeholder tokens counted from headers, and their features.

    data = read_medium("audio/hello.wav", folder="data")          base64, data URIs, bytes, paths and URIs
    rules = MediaRules.of("Qwen2-Audio-7B-Instruct")              None for a model of text
    rules.count_tokens("audio", measure("audio", data))           750 for 30 seconds
    rules.features(media)                                         what the model's encoder takes, as its processor gives

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
