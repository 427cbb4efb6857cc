"""Tokens and features of media equal those of transformers' processors."""

from __future__ import annotations

import base64
import contextlib
import io
import json
import os
import shutil
import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from harness.errors import ConfigError, FormatError, PrepError
from harness.prep import ChatTokenizer, TokenizerConfig
from harness.prep.chat import BadRecord, RecordReader
from harness.prep.media import AudioSize, MediaLimits, MediaRules, check_medium, measure, read_medium
from harness.prep.media.files import ImageSize, decode_audio
from harness.records import Medium
from tests.samples.loopback_hub import cache_model
from tests.samples.media_models import picture, save_media_model, sound

AUDIO = ["qwen2_audio", "qwen3_omni_moe"]


def audio_processor(family: str, folder: Path) -> Any:
    """Return the processor of a family; that of Qwen3-Omni without its parts for images and video."""
    import transformers

    extractor = transformers.WhisperFeatureExtractor.from_pretrained(folder)
    if family == "qwen2_audio":
        return transformers.Qwen2AudioProcessor(extractor, transformers.AutoTokenizer.from_pretrained(folder))
    processor = object.__new__(transformers.Qwen3OmniMoeProcessor)
    processor.feature_extractor, processor.audio_token = extractor, "<|audio_pad|>"
    return processor


def process(family: str, processor: Any, samples: np.ndarray) -> dict[str, Any]:
    if family == "qwen2_audio":
        kwargs: dict[str, Any] = {"sampling_rate": 16000, "return_tensors": "np"}
    else:
        kwargs = {**processor.audio_kwargs, "return_tensors": "np"}
    made, replaced = processor._process_audio([samples], **kwargs)
    token = "<|AUDIO|>" if family == "qwen2_audio" else "<|audio_pad|>"
    return {**made, "count": replaced[0].count(token)}


@pytest.mark.parametrize("family", AUDIO)
@pytest.mark.parametrize("count", [150, pytest.param(1000, marks=pytest.mark.nightly)])
def test_durations_have_as_many_tokens_as_the_processor_writes(family: str, count: int, tmp_path: Path) -> None:
    folder = save_media_model(tmp_path, family, mel=8, chunk_length=2)
    rules, processor = MediaRules.of(str(folder)), audio_processor(family, folder)
    assert rules is not None
    lengths = {*range(481, 700), *(160 * n + d for n in range(3, 200) for d in (-1, 0, 1))}
    lengths |= set(np.random.default_rng(0).integers(481, 32000, 400).tolist())
    lengths = np.random.default_rng(1).permutation(sorted(one for one in lengths if one < 32000))[: count - 1].tolist()
    assert len(lengths) == count - 1
    for length in (*lengths, 32000):
        written = process(family, processor, np.zeros(length, np.float32))["count"]
        assert rules.count_tokens("audio", AudioSize(length, 16000)) == written, length


def test_the_processor_of_qwen2_audio_is_read_as_transformers_saves_it(tmp_path: Path) -> None:
    folder = save_media_model(tmp_path, "qwen2_audio")
    audio_processor("qwen2_audio", folder).save_pretrained(tmp_path / "whole")
    shutil.copy(folder / "config.json", tmp_path / "whole")
    assert not (tmp_path / "whole" / "preprocessor_config.json").exists()
    assert MediaRules.of(str(tmp_path / "whole")) == MediaRules.of(str(folder))


@pytest.mark.parametrize("family", AUDIO)
def test_features_of_sounds_equal_those_of_the_processor(family: str, tmp_path: Path) -> None:
    folder = save_media_model(tmp_path, family)
    rules, processor = MediaRules.of(str(folder)), audio_processor(family, folder)
    assert rules is not None
    lengths = [16000, 12345, 77777]
    media = [Medium("audio", 0, 1, sound(length, seed=length, format="WAV", subtype="FLOAT")) for length in lengths]
    found = rules.features(media)
    assert found["input_features"].dtype == np.float32
    assert found["feature_attention_mask"].dtype == np.int32
    for number, (one, length) in enumerate(zip(media, lengths, strict=True)):
        samples = (np.random.default_rng(length).standard_normal((length, 1)).astype(np.float32) * 0.1)[:, 0]
        expected = process(family, processor, samples)
        frames = expected["input_features"].shape[2]
        assert np.array_equal(found["input_features"][number, :, :frames], expected["input_features"][0])
        assert np.array_equal(found["feature_attention_mask"][number, :frames], expected["feature_attention_mask"][0])
        assert not found["feature_attention_mask"][number, frames:].any()
        tokens = rules.count_tokens("audio", measure("audio", one.data))
        assert tokens == expected["count"]
    alone = rules.features(media[1:2])
    own = alone["input_features"].shape[2]
    assert np.array_equal(alone["input_features"][0], found["input_features"][1, :, :own])


@pytest.mark.parametrize(
    ("rate", "channels"), [(8000, 1), (44100, 2), (22050, 1), (48000, 6), (4000, 1), (384000, 1), (15999, 1)]
)
def test_sounds_of_other_rates_and_channels_have_the_samples_of_their_header(rate: int, channels: int) -> None:
    for length in (701, 10_000, 33_333):
        data = sound(length, rate=rate, channels=channels, format="WAV")
        size = measure("audio", data)
        assert size == AudioSize(length, rate)
        assert decode_audio(data, 16000).shape == (size.samples_at(16000),)


def test_a_sound_whose_codec_cannot_be_read_from_its_middle_is_read_whole() -> None:
    assert check_medium("audio", sound(20_480, format="WAV", subtype="GSM610")) == AudioSize(20_480, 16000)


def test_channels_are_averaged() -> None:
    data = sound(500, channels=2, format="WAV", subtype="FLOAT")
    samples = np.random.default_rng(0).standard_normal((500, 2)).astype(np.float32) * 0.1
    assert np.array_equal(decode_audio(data), samples.mean(axis=1))


@pytest.mark.parametrize("siglip", [False, True])
def test_images_of_a_thousand_sizes_are_those_of_the_processor(siglip: bool, tmp_path: Path) -> None:
    import transformers
    from PIL import Image

    folder = save_media_model(tmp_path, "llava", image=56, siglip=siglip)
    rules = MediaRules.of(str(folder))
    assert rules is not None
    images = transformers.AutoImageProcessor.from_pretrained(folder, backend="pil")
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    extra = {"num_additional_image_tokens": 0 if siglip else 1}
    strategy = "full" if siglip else "default"
    processor = transformers.LlavaProcessor(
        images, tokenizer, patch_size=14, vision_feature_select_strategy=strategy, **extra
    )
    # As transformers saves a whole processor, with those of its parts inside.
    processor.save_pretrained(tmp_path / "whole")
    assert not (tmp_path / "whole" / "preprocessor_config.json").exists()
    shutil.copy(folder / "config.json", tmp_path / "whole")
    assert MediaRules.of(str(tmp_path / "whole")) == rules
    generator = np.random.default_rng(0)
    for width, height in generator.integers(1, 300, (1000, 2)).tolist():
        expected = processor._get_num_multimodal_tokens([(height, width)])["num_image_tokens"] if not siglip else [16]
        assert [rules.count_tokens("image", ImageSize(width, height))] == expected
    files = [picture(70, 40), picture(30, 300, format="JPEG"), picture(56, 56, mode="P"), picture(9, 9, mode="L")]
    found = rules.features([Medium("image", 0, 16, data) for data in files])["pixel_values"]
    assert (found.dtype, found.shape) == (np.float32, (4, 3, 56, 56))
    for data, pixels in zip(files, found, strict=True):
        made = processor(text="<image>", images=Image.open(io.BytesIO(data)).convert("RGB"), return_tensors="np")
        assert np.array_equal(pixels, made["pixel_values"][0])
        ids = made["input_ids"][0]
        assert (ids == rules.tokens["image"]).sum() == rules.count_tokens("image", measure("image", data))


@pytest.mark.parametrize("family", [*AUDIO, "llava"])
def test_rules_come_back_from_their_text(family: str, tmp_path: Path) -> None:
    rules = MediaRules.of(str(save_media_model(tmp_path, family)))
    assert rules is not None
    assert MediaRules.from_text(rules.to_text()) == rules
    whole = json.loads(rules.to_text())
    numbers = whole["numbers"]
    for change in (
        {"family": "llama"},
        {"tokens": [1]},
        {"numbers": 3},
        {"numbers": {**numbers, "processor": "pipeline"}},
        {"numbers": {**numbers, "n_fft": 10**9}},
    ):
        with pytest.raises(FormatError, match="the rules of media are not those of a model family"):
            MediaRules.from_text(json.dumps(whole | change))
    with pytest.raises(FormatError):
        MediaRules.from_text("[" * 100_000)


def test_a_model_of_text_has_no_rules(tmp_path: Path) -> None:
    assert MediaRules.of(str(tmp_path)) is None
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    assert MediaRules.of(str(tmp_path)) is None


def test_a_model_of_the_hub_is_read_from_its_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from huggingface_hub import constants

    made = save_media_model(tmp_path / "made", "qwen2_audio")
    cache_model(tmp_path / "cache", made)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    monkeypatch.chdir(tmp_path)
    rules = MediaRules.of(str(made))
    assert rules is not None
    assert MediaRules.of("org/model") == rules
    assert MediaRules.of("org/text") is None


def test_a_known_model_without_its_processor_is_refused(tmp_path: Path) -> None:
    folder = save_media_model(tmp_path, "qwen2_audio")
    (folder / "preprocessor_config.json").unlink()
    with pytest.raises(ConfigError, match="processor's files of a qwen2_audio model cannot be read"):
        MediaRules.of(str(folder))


def test_a_medium_is_read_from_each_of_its_forms(tmp_path: Path) -> None:
    data = sound(1000)
    (tmp_path / "a b.wav").write_bytes(data)
    spelled = base64.b64encode(data).decode()
    sources = [data, spelled, f"data:audio/wav;base64,{spelled}", "a b.wav", str(tmp_path / "a b.wav")]
    (tmp_path / "a#1?.wav").write_bytes(data)
    hosts = [f"file://localhost{tmp_path}/a%20b.wav", f"FILE://{tmp_path}/a#1?.wav"]
    for source in [*sources, f"file://{tmp_path}/a%20b.wav", *hosts]:
        assert read_medium(source, str(tmp_path)) == data


@pytest.mark.parametrize(
    ("source", "reason"),
    [
        ("nothing.wav", "No such file"),
        ("https://example.com/a.wav", "is on the web"),
        ("data:audio/wav,abc", "not base64"),
        (3, "is a int, expected"),
        ("UklGRiQAAABXQVZF" + "!" * 30, "is not valid base64"),
        ("pipe", "is not a file"),
        ("big.wav", "more than 100"),
        ("file://server/big.wav", "is on the host server"),
        ("file:///nothing/big.wav?x#y", r"/nothing/big\.wav\?x#y cannot be read"),
    ],
)
def test_what_is_no_medium_is_named(source: object, reason: str, tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "big.wav").write_bytes(bytes(101))
    with pytest.raises(PrepError, match=reason):
        read_medium(source, str(tmp_path), MediaLimits(num_bytes=100))


def test_damaged_media_are_named() -> None:
    flac, mp3, png = sound(9000, format="FLAC"), sound(40000, format="MP3"), picture(90, 90)
    wav = sound(9000)
    cut = [("audio", data[: len(data) // 2]) for data in (flac, mp3, wav)]
    for kind, data in (*cut, ("audio", wav[:-2]), ("image", png[:-400])):
        with pytest.raises(PrepError, match="is damaged"):
            check_medium(kind, data)
    with pytest.raises(PrepError, match="is an image, not an audio"):
        check_medium("audio", png)
    with pytest.raises(PrepError, match="of no format that is read"):
        check_medium("image", b"%PDF-1.7 and so on")
    with pytest.raises(PrepError, match="not numbers"):
        check_medium("audio", _of_nothing())
    for size in (2**32 - 1, 0x7FFFF000):  # of a program that wrote to a pipe
        streamed = wav[:4] + struct.pack("<I", size) + wav[8:40] + struct.pack("<I", size) + wav[44:]
        assert check_medium("audio", streamed) == AudioSize(9000, 16000)


def without_length(flac: bytes) -> bytes:
    """Return a FLAC as a program writes it that does not know its length yet."""
    return flac[:21] + bytes([flac[21] & 0xF0]) + bytes(4) + flac[26:]


def test_a_flac_without_its_length_is_measured_by_its_samples() -> None:
    flac = sound(150_000, format="FLAC", channels=2)
    unknown = without_length(flac)
    assert unknown != flac
    assert check_medium("audio", unknown) == AudioSize(150_000, 16000)
    assert np.array_equal(decode_audio(unknown), decode_audio(flac))
    long = without_length(sound(4000 * 1900, rate=4000, format="FLAC"))
    assert check_medium("audio", long, MediaLimits(seconds=2000)) == AudioSize(4000 * 1900, 4000)
    with pytest.raises(PrepError, match=r"has more than 9\.00 s or"):
        measure("audio", unknown, MediaLimits(seconds=9))
    with pytest.raises(PrepError, match="is damaged"):
        check_medium("audio", unknown[: len(unknown) // 2])


@pytest.mark.parametrize(("rate", "channels"), [(8000, 1), (11025, 2), (16000, 1), (24000, 2), (44100, 2), (48000, 1)])
def test_an_mp3_without_its_length_is_measured_by_its_frames(rate: int, channels: int) -> None:
    """Without the frame that names their number, soundfile takes all frames to be as large as the first one."""
    import soundfile

    samples = np.random.default_rng(0).standard_normal((3 * rate, channels)) * np.linspace(0, 0.2, 3 * rate)[:, None]
    file = io.BytesIO()
    soundfile.write(file, samples, rate, format="MP3", bitrate_mode="VARIABLE", compression_level=0.5)
    whole, written = decode_audio(file.getvalue()), file.getvalue()
    with pytest.raises(PrepError, match=r"has \d+ MP3 frames, and counts \d+; divide it"):
        measure("audio", 2 * written)
    frames = written[written.index(written[:2], 4) :]
    size = measure("audio", frames)
    assert isinstance(size, AudioSize)
    assert abs(soundfile.info(io.BytesIO(frames)).frames - size.num_samples) > rate / 2
    assert len(whole) < size.num_samples < len(whole) + 2500
    found = decode_audio(frames)
    assert len(found) == size.num_samples
    # The delay of an encoder, which the frame had.
    assert np.abs(found[576:][: len(whole) - 2000] - whole[:-2000]).max() < 1e-3
    tagged = b"ID3\4\0\0\0\0\2\20" + bytes(272) + frames + b"TAG" + bytes(125)
    assert np.array_equal(decode_audio(tagged), found)
    with pytest.raises(PrepError, match="is damaged: there is no MP3 frame at byte"):
        measure("audio", frames + b"what is this")


@pytest.mark.parametrize("subtype", ["VORBIS", "OPUS"])
def test_an_ogg_that_soundfile_reads_in_part_is_refused(subtype: str) -> None:
    ogg = sound(40_000, format="OGG", subtype=subtype)
    assert check_medium("audio", ogg + bytes(100)) == AudioSize(40_000, 16000)
    last = ogg.rindex(b"OggS")
    check_medium("audio", ogg[:last])  # a recording that no program ended
    for cut in (ogg[:-1], ogg[: last + 20], ogg[:last] + b"junk" + ogg[last:]):
        with pytest.raises(PrepError, match="is damaged: there is no whole Ogg page at byte"):
            measure("audio", cut)
    with pytest.raises(PrepError, match="has a stream after its first one"):
        measure("audio", ogg + sound(40_000, format="OGG", subtype=subtype, seed=1))


def test_limits_above_the_usual_ones_hold_wherever_a_medium_is_measured(tmp_path: Path) -> None:
    name = str(save_media_model(tmp_path, "qwen3_omni_moe", mel=8))
    data = base64.b64encode(sound(1801 * 4000, rate=4000, subtype="PCM_U8")).decode()
    turns = [{"role": "user", "content": "<audio>What?"}, {"role": "assistant", "content": "Nothing."}]
    record = {"messages": turns, "audios": [data]}
    refused = RecordReader(media=MediaLimits()).parse(record, "here")
    assert isinstance(refused, BadRecord)
    assert "has 1,801.00 s and 1 channels, more than 1,800.00 s" in refused.detail
    parsed = RecordReader(media=MediaLimits(seconds=2000)).parse(record, "here")
    (encoded,) = ChatTokenizer(TokenizerConfig(kind="huggingface", name=name)).encode_each([parsed])
    assert isinstance(encoded, list)
    assert [one.tokens for one in encoded[0].view.media] == [1801 * 13]


def _of_nothing() -> bytes:
    import soundfile

    file = io.BytesIO()
    soundfile.write(file, np.full(800, np.nan, np.float32), 16000, format="WAV", subtype="FLOAT")
    return file.getvalue()


def test_a_bomb_is_refused_by_its_header() -> None:
    png = bytearray(picture(8, 8))
    png[16:24] = struct.pack(">II", 100_000, 100_000)
    png[29:33] = struct.pack(">I", __import__("zlib").crc32(png[12:29]))
    with pytest.raises(PrepError, match="pixels"):
        measure("image", bytes(png))
    with pytest.raises(PrepError, match=r"has 2\.00 s and 1 channels, more than 1\.00 s or"):
        measure("audio", sound(32000), MediaLimits(seconds=1))
    for rate in (3_999, 384_001):
        with pytest.raises(PrepError, match=rf"has {rate:,} samples a second, expected 4,000 to 384,000"):
            measure("audio", sound(500, rate=rate))


def qwen_processor(family: str, folder: Path) -> Any:
    import transformers

    images = transformers.AutoImageProcessor.from_pretrained(folder, backend="pil")
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    kind = {"qwen2_5_vl": transformers.Qwen2_5_VLProcessor, "qwen3_vl": transformers.Qwen3VLProcessor}[family]
    processor = object.__new__(kind)  # without its part for video
    processor.image_processor, processor.tokenizer, processor.image_token = images, tokenizer, "<|image_pad|>"
    return processor


@pytest.mark.parametrize("family", ["qwen2_5_vl", "qwen3_vl"])
def test_images_of_a_thousand_sizes_have_the_grids_of_the_processor(family: str, tmp_path: Path) -> None:
    from PIL import Image

    folder = save_media_model(tmp_path, family, patch=4)
    rules, processor = MediaRules.of(str(folder)), qwen_processor(family, folder)
    assert rules is not None
    generator, images = np.random.default_rng(0), processor.image_processor
    sizes = [*generator.integers(1, 300, (1080, 2)).tolist(), *generator.integers(300, 4000, (20, 2)).tolist()]
    sizes = [(width, height) for width, height in sizes if max(width, height) <= 200 * min(width, height)]
    assert len(sizes) >= 1000
    patches = [images.get_number_of_image_patches(height, width) for width, height in sizes]
    assert [rules.count_tokens("image", ImageSize(*size)) for size in sizes] == [count // 4 for count in patches]
    with pytest.raises(PrepError, match=r"has 804 x 4 pixels, one side more than 200 times the other"):
        rules.count_tokens("image", ImageSize(804, 4))
    files = [picture(70, 40), picture(30, 300, format="JPEG"), picture(16, 16, mode="P"), picture(9, 9, mode="L")]
    media = [Medium("image", 0, 1, data) for data in [*files, turned(90, 30)]]
    found = rules.features(media)
    assert np.array_equal(rules.grids(media)["image_grid_thw"], found["image_grid_thw"])
    ends = np.cumsum(found["image_grid_thw"].prod(axis=1))
    assert found["pixel_values"].dtype == np.float32
    for number, (data, pixels) in enumerate(zip(files, np.split(found["pixel_values"], ends), strict=False)):
        made = images(Image.open(io.BytesIO(data)).convert("RGB"), return_tensors="np")
        assert np.array_equal(pixels, made["pixel_values"])
        assert np.array_equal(found["image_grid_thw"][number], made["image_grid_thw"][0])
        tokens = rules.count_tokens("image", measure("image", data))
        assert processor.replace_image_token(made, 0) == "<|image_pad|>" * tokens
    assert found["image_grid_thw"][4].tolist() == [1, 22, 8]  # 30 wide and 90 high, as it is shown
    assert MediaRules.from_text(rules.to_text()) == rules


def turned(width: int, height: int) -> bytes:
    """Return an image that EXIF data turn by a quarter."""
    from PIL import Image

    file, exif = io.BytesIO(), Image.Exif()
    exif[0x0112] = 6
    Image.open(io.BytesIO(picture(width, height))).save(file, "JPEG", exif=exif)
    return file.getvalue()


@pytest.mark.parametrize("format", ["JPEG", "PNG", "WEBP"])
@pytest.mark.filterwarnings("ignore::UserWarning:PIL")
def test_damaged_exif_data_are_read_or_named(format: str) -> None:
    from PIL import Image

    head, tail = b"MM\0*\0\0\0\x08\0\x01\x01\x12", bytes(4)
    turns = {b"\0\3\0\0\0\1\0\6\0\0": (30, 90), b"\0\3\0\0\0\1\0\x09\0\0": (90, 30)}
    texts = [kind + b"\0\0\0\1" + b"6\0\0\0" for kind in (b"\0\1", b"\0\2", b"\0\7")]
    for exif in (b"MM\1\1", head, *(head + one + tail for one in (*turns, *texts, b"\0\x0c\0\0\0\7\0\0\0\x08"))):
        file = io.BytesIO()
        Image.open(io.BytesIO(picture(90, 30))).save(file, format, exif=b"Exif\0\0" + exif)
        context = contextlib.suppress(PrepError) if exif[12:-4] not in turns else contextlib.nullcontext()
        with context:
            assert check_medium("image", file.getvalue()) == ImageSize(*turns.get(exif[12:-4], (90, 30)))


def test_an_image_that_is_turned_after_its_pixels_is_refused() -> None:
    data, exif = picture(90, 30), b"MM\0*\0\0\0\x08\0\x01\x01\x12\0\x03\0\0\0\x01\0\x06" + bytes(6)
    chunk = b"eXIf" + exif
    late = struct.pack(">I", len(exif)) + chunk + struct.pack(">I", __import__("zlib").crc32(chunk))
    end = data.rindex(b"IEND") - 4
    with pytest.raises(PrepError, match="is turned by EXIF data after its pixels"):
        check_medium("image", data[:end] + late + data[end:])
    assert check_medium("image", data[:33] + late + data[33:]) == ImageSize(30, 90)
    assert check_medium("image", turned(90, 30)) == ImageSize(30, 90)


def test_a_configuration_with_impossible_numbers_is_refused_by_name(tmp_path: Path) -> None:
    folder = save_media_model(tmp_path, "llava")
    config = json.loads((folder / "config.json").read_text())
    config["vision_config"]["patch_size"] = 0
    (folder / "config.json").write_text(json.dumps(config))
    for file in folder.glob("*processor_config.json"):
        values = json.loads(file.read_text())
        file.write_text(json.dumps({name: value for name, value in values.items() if name != "patch_size"}))
    with pytest.raises(ConfigError, match="ZeroDivisionError"):
        MediaRules.of(str(folder))
