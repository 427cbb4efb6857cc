"""Read media files within limits, recognize them by their first bytes, measure them by their headers, and decode."""

from __future__ import annotations

import base64
import binascii
import importlib
import io
import math
import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import unquote

import numpy as np
import numpy.typing as npt

from harness.checks import CheckedSettings, bounded
from harness.errors import ConfigError, FormatError, HarnessError, PrepError, is_of_disk
from harness.storage import is_uri, join_path, parse_place, stamp_of
from harness.storage.bucket import MISSING_OBJECT
from harness.storage.inputs import open_stream

_IMAGES = ("PNG", "JPEG", "WEBP", "GIF", "BMP")
_ORIENTATION = 0x0112  # EXIF tag; for values 5 to 8, width and height are swapped
# Matched against the first 12 bytes.
_MAGIC = (
    *((re.compile(magic, re.DOTALL), "audio") for magic in (rb"RIFF....WAVE", rb"fLaC", rb"OggS", rb"ID3")),
    (re.compile(rb"\xff[\xe2\xe3\xf2\xf3\xfa\xfb]"), "audio"),  # MP3 without tags
    *((re.compile(magic, re.DOTALL), "image") for magic in (rb"\x89PNG\r\n", rb"\xff\xd8\xff", rb"RIFF....WEBP")),
    *((re.compile(magic, re.DOTALL), "image") for magic in (rb"GIF8[79]a", rb"BM....\0\0\0\0")),
)
_FORMATS = "WAV, FLAC, Ogg, MP3, PNG, JPEG, WebP, GIF and BMP"
# Supported samples per second, and maximum number of samples of all channels to decode: 1 GiB.
_RATES, _MAX_SAMPLES = (4_000, 384_000), 1 << 28
# Kilobits per second of MP3 frames by header bits, for MPEG 1 (True) and MPEG 2 and 2.5; and samples per second.
_BIT_RATES = {
    True: (0, 32, 40, 48, 56, 64, 80, 96, 112, 128, 160, 192, 224, 256, 320),
    False: (0, 8, 16, 24, 32, 40, 48, 56, 64, 80, 96, 112, 128, 144, 160),
}
_MP3_RATES = {3: (44_100, 48_000, 32_000), 2: (22_050, 24_000, 16_000), 0: (11_025, 12_000, 8_000)}
_AFTER_MP3 = re.compile(rb"\0*(?:TAG|APETAGEX|LYRICS|$)")
_BASE64 = re.compile(r"[A-Za-z0-9+/]{16}[A-Za-z0-9+/=\s]*")


@dataclass
class MediaLimits(CheckedSettings, section="source.media"):
    """Limits on one image or sound, checked before it is decoded.

    Attributes:
        num_bytes: maximum size of a media file in bytes.
        num_pixels: maximum number of pixels of an image.
        seconds: maximum length of an audio clip in seconds.
    """

    num_bytes: int = bounded(256 << 20, lowest=1, highest=2**31)
    num_pixels: int = bounded(64 << 20, lowest=1, highest=2**31)
    seconds: float = bounded(1800.0, above=0, highest=86400)


# Limits for media that were checked before, possibly with limits above the defaults.
_HIGHEST = MediaLimits(num_bytes=2**31, num_pixels=2**31, seconds=86400.0)


@dataclass(frozen=True, slots=True)
class AudioSize:
    """Number of samples per channel and per second, from the header of a sound."""

    num_samples: int
    rate: int

    def samples_at(self, rate: int) -> int:
        """Return the number of samples per channel at another rate, equal to soxr's output."""
        return (2 * self.num_samples * rate + self.rate) // (2 * self.rate)


@dataclass(frozen=True, slots=True)
class ImageSize:
    """Width and height of an image as it is displayed, in pixels, from its header."""

    width: int
    height: int


def read_medium(source: object, folder: str | None = "", limits: MediaLimits | None = None) -> bytes:
    """Return the bytes of a medium given as bytes, base64, a data URI, a path, `file://` or the URI of an object.

    Relative paths refer to `folder`; None refuses all paths and URIs. Raises PrepError if the source is none of these,
    cannot be read, or exceeds the limit on bytes, and FormatError if object storage does not answer or refuses.
    """
    most = (limits or MediaLimits()).num_bytes
    if isinstance(source, (bytes, bytearray, memoryview)):
        return _bounded(bytes(source), most)
    if not isinstance(source, str) or not source.strip():
        raise _problem(f"is a {type(source).__name__}, expected base64, a data URI, a path or a URI")
    source = source.strip()
    if source[:5].lower() == "data:":
        head, comma, body = source.partition(",")
        if not comma or not head.lower().endswith(";base64"):
            raise _problem("is a data URI that is not base64")
        return _bounded(_of_base64(body, most), most)
    if _BASE64.match(source[:64]) and kind_of(_head(source)) is not None:
        return _bounded(_of_base64(source, most), most)
    if folder is None and len(source) <= 4096:
        raise _problem("is not in the record itself, as base64")
    if source[:7].lower() == "file://":
        # Not cut at ? or #, which file names may contain: the rest would be the name of another file.
        source = unquote(source[7:].removeprefix("localhost"))
        if not source.startswith("/"):
            raise _problem(f"is on the host {source.partition('/')[0]}; specify its path on this one")
    elif re.match(r"https?://", source, re.IGNORECASE):
        raise _problem("is on the web, where it can change; download it, and specify its path")
    elif len(source) > 4096 or "\0" in source or "\n" in source:
        raise _problem(f"is neither a path nor base64 of a format that is read: {_FORMATS}")
    return _read_file(source, folder or "", most)


def _read_file(path: str, folder: str, most: int) -> bytes:
    path = path if is_uri(path) or path.startswith("/") or not folder else join_path(folder, path)
    try:
        place = parse_place(path)
        if isinstance(place, Path) and place.exists() and not place.is_file():
            raise _problem(f"{path} is not a file")
        size = stamp_of(place).num_bytes
        if size > most:
            raise _problem(f"{path} has {size:,} bytes, more than {most:,}")
        with open_stream(place) as file:
            return _bounded(file.read(most + 1), most)
    except (OSError, ValueError) as error:
        if isinstance(error, OSError) and is_of_disk(error):
            raise
        raise _problem(f"{path} cannot be read: {getattr(error, 'strerror', None) or error}") from error
    except HarnessError as error:
        if isinstance(error, FormatError) and error.what != MISSING_OBJECT:
            raise  # object storage that does not answer is no problem of the record
        raise _problem(error.what if path in error.what else f"{path}: {error.what}") from error


def _head(text: str) -> bytes:
    try:
        return base64.b64decode(re.sub(r"\s", "", text[:64])[:16])
    except binascii.Error:
        return b""


def _of_base64(text: str, most: int) -> bytes:
    if len(text) > most * 3 // 2 + 1024:
        raise _problem(f"has more than {most:,} bytes")
    try:
        text = "".join(text.split())
        return base64.b64decode(text + "=" * (-len(text) % 4), validate=True)
    except (binascii.Error, ValueError) as error:
        raise _problem(f"is not valid base64: {error}") from error


def _bounded(data: bytes, most: int) -> bytes:
    if len(data) > most:
        raise _problem(f"has {len(data):,} bytes, more than {most:,}")
    return data


def kind_of(data: bytes) -> str | None:
    """Return the kind of a file (one of `MEDIA_KINDS`) by its first bytes; None for an unsupported format."""
    return next((kind for magic, kind in _MAGIC if magic.match(data[:12])), None)


def measure(kind: str, data: bytes, limits: MediaLimits | None = None) -> AudioSize | ImageSize:
    """Return the size of a medium from its header; raise PrepError if it is of another kind, damaged or too large."""
    limits = limits or _HIGHEST
    if (found := kind_of(data)) != kind:
        what = f"an {found}" if found else f"of no format that is read ({_FORMATS})"
        raise _problem(f"is {what}, not an {kind}")
    if kind == "image":
        with _opened_image(data) as image:
            size = ImageSize(*image.size)
            # For a PNG, Pillow's override would decode the image before its size is checked.
            if _library("PIL.Image").Image.getexif(image).get(_ORIENTATION) in (5, 6, 7, 8):
                size = ImageSize(size.height, size.width)
        if size.width * size.height > limits.num_pixels:
            raise _problem(f"has {size.width:,} x {size.height:,} pixels, more than {limits.num_pixels:,}")
        return size
    soundfile = _library("soundfile")
    if data[:4] == b"OggS":
        _check_pages(data)
    try:
        info = soundfile.info(io.BytesIO(_with_length(data, limits.seconds)))
    except (soundfile.SoundFileError, TypeError) as error:
        raise _problem(f"is damaged: {error}") from error
    if info.frames < 1:
        raise _problem("has no samples")
    # A program that does not know the length in advance declares about 2 or 4 GB.
    if (cut := re.search(r"\ndata : (\d+) \(should be", info.extra_info)) and int(cut[1]) < 0x7FFF0000:
        raise _problem(f"is damaged: its samples have fewer than the {int(cut[1]):,} bytes of its header")
    if not _RATES[0] <= info.samplerate <= _RATES[1]:
        raise _problem(f"has {info.samplerate:,} samples a second, expected {_RATES[0]:,} to {_RATES[1]:,}")
    seconds = info.frames / info.samplerate
    if seconds > limits.seconds or info.frames * info.channels > _MAX_SAMPLES:
        what = f"{seconds:,.2f} s and {info.channels} channels"
        raise _problem(f"has {what}, more than {limits.seconds:,.2f} s or {_MAX_SAMPLES:,} samples")
    return AudioSize(int(info.frames), int(info.samplerate))


def check_medium(kind: str, data: bytes, limits: MediaLimits | None = None) -> AudioSize | ImageSize:
    """Return the size of a medium after decoding all of it; raise PrepError as `measure` does, and if it is damaged."""
    size = measure(kind, data, limits or MediaLimits())
    if isinstance(size, AudioSize):
        decode_audio(data)
    elif decode_image(data).size != (size.width, size.height):
        raise _problem("is turned by EXIF data after its pixels, not by its header")
    return size


def decode_image(data: bytes) -> Any:
    """Return a Pillow image in RGB, rotated according to its EXIF data."""
    from PIL import ImageOps

    with _opened_image(data) as image:
        return (ImageOps.exif_transpose(image) or image).convert("RGB")


def draw_medium(kind: str, data: bytes) -> str:
    """Return a small picture of a medium as a data URI: a thumbnail of an image, or a sound's loudness over time."""
    if kind == "image":
        image, file = decode_image(data), io.BytesIO()
        image.thumbnail((160, 96))
        image.save(file, "PNG")
        return "data:image/png;base64," + base64.b64encode(file.getvalue()).decode()
    peaks = [float(np.abs(part).max(initial=0)) for part in np.array_split(decode_audio(data), 80)]
    highest = max(*peaks, 1e-9)
    heights = [23 * peak / highest for peak in peaks]
    bars = "".join(f"M{2 * at},{24 - height:.1f}v{2 * height:.1f}" for at, height in enumerate(heights))
    lines = f"<svg xmlns='http://www.w3.org/2000/svg' viewBox='0 0 160 48' width='160' height='48'><path d='{bars}'"
    return "data:image/svg+xml;base64," + base64.b64encode(f"{lines} stroke='#0b78b8'/></svg>".encode()).decode()


def decode_audio(data: bytes, rate: int = 0) -> npt.NDArray[np.float32]:
    """Return a sound as float32 [samples], with channels averaged, at `rate` samples per second; 0 keeps its rate."""
    soundfile = _library("soundfile")
    try:
        with soundfile.SoundFile(io.BytesIO(_with_length(data))) as file:
            size = AudioSize(file.frames, file.samplerate)
            samples = file.read(size.num_samples, dtype="float32", always_2d=True)
    except (soundfile.SoundFileError, TypeError, MemoryError) as error:
        raise _problem(f"is damaged: {error}") from error
    if len(samples) != size.num_samples:
        raise _problem(f"is damaged: it has {len(samples):,} samples of the {size.num_samples:,} in its header")
    mono: npt.NDArray[np.float32] = samples[:, 0] if samples.shape[1] == 1 else samples.mean(axis=1)
    if not np.isfinite(mono).all():
        raise _problem("is damaged: it has samples that are not numbers")
    if rate in (0, size.rate):
        return mono
    resampled: npt.NDArray[np.float32] = _library("soxr").resample(mono, size.rate, rate)
    assert len(resampled) == size.samples_at(rate), (len(resampled), size, rate)
    return resampled


def _with_length(data: bytes, seconds: float = math.inf) -> bytes:
    """Return a sound with its length in the header: soundfile guesses it for MP3, and lacks it for some FLAC files.

    Raises PrepError if an MP3 has other bytes between its frames, or a FLAC is damaged or longer than `seconds`.
    """
    if data[:4] == b"fLaC" and len(data) > 26 and not data[21] & 15 and not any(data[22:26]):
        count = _count_flac(data, seconds)
        return data[:21] + bytes([data[21] | count >> 32]) + (count & 0xFFFFFFFF).to_bytes(4, "big") + data[26:]
    at = 0
    while data[at : at + 3] == b"ID3" and len(data) > at + 10:
        seven = [byte & 127 for byte in data[at + 6 : at + 10]]
        at += 10 + (seven[0] << 21 | seven[1] << 14 | seven[2] << 7 | seven[3]) + 10 * (data[at + 5] >> 4 & 1)
    if (first := _mp3_frame(data, at)) is None:
        return data
    is_version_1, is_mono = data[at + 1] & 24 == 24, data[at + 3] >> 6 == 3
    side = (17 if is_mono else 32) if is_version_1 else (9 if is_mono else 17)
    frames, end, size = 0, at, first
    while size and end + size <= len(data):
        frames, end = frames + 1, end + size
        size = _mp3_frame(data, end) or 0
    places = at + 4 + side, at + 6 + side, at + 36
    named = [place for place in places if data[place : place + 4] in (b"Xing", b"Info", b"VBRI")]
    if named:
        name, flags, number = (data[named[0] + by : named[0] + by + 4] for by in (0, 4, 8))
        has_count = name != b"VBRI" and int.from_bytes(flags, "big") & 1
        count = int.from_bytes(number, "big") if has_count else frames
        if frames > count + 2:  # the header's own frame, and one that some encoders leave out
            raise _problem(f"has {frames - 1:,} MP3 frames, and counts {count:,}; divide it into several files")
        return data
    if not size and not _AFTER_MP3.match(data, end):
        raise _problem(f"is damaged: there is no MP3 frame at byte {end:,}")
    # The header frame that other programs write: 64 kilobits per second, without padding.
    head = bytes([data[at], data[at + 1] | 1, (0x50 if is_version_1 else 0x80) | data[at + 2] & 12, data[at + 3]])
    tag = head + bytes(side) + b"Xing\0\0\0\1" + frames.to_bytes(4, "big")
    return tag.ljust(_mp3_frame(head, 0) or 0, b"\0") + data[at:end]


def _check_pages(data: bytes) -> None:
    """Raise PrepError for an Ogg that is truncated or has a second stream, which soundfile does not read to the end."""
    at, has_ended = 0, False
    while data[at : at + 4] == b"OggS" and len(data) > at + 27:
        if has_ended and data[at + 5] & 2:
            raise _problem("has a stream after its first one; divide it into several files")
        has_ended |= bool(data[at + 5] & 4)
        sizes = data[at + 27 : at + 27 + data[at + 26]]
        at += 27 + len(sizes) + sum(sizes)
    if at > len(data) or (not has_ended and at < len(data)):
        raise _problem(f"is damaged: there is no whole Ogg page at byte {min(at, len(data)):,}")


def _mp3_frame(data: bytes, at: int) -> int | None:
    """Return the size in bytes of the MP3 frame at offset `at`, from its header; None if there is none."""
    head = data[at : at + 4]
    if len(head) < 4 or head[0] != 255 or head[1] & 0xE6 != 0xE2:
        return None
    version, bits, rate = head[1] >> 3 & 3, head[2] >> 4, head[2] >> 2 & 3
    if version == 1 or bits in (0, 15) or rate == 3:
        return None
    words = 144_000 if version == 3 else 72_000
    return words * _BIT_RATES[version == 3][bits] // _MP3_RATES[version][rate] + (head[2] >> 1 & 1)


def _count_flac(data: bytes, seconds: float) -> int:
    """Count the samples per channel of a FLAC whose header lacks the number; raise PrepError if it is damaged."""
    soundfile, count = _library("soundfile"), 0
    try:
        with soundfile.SoundFile(io.BytesIO(data)) as file:
            file.seekable = lambda: False  # else it seeks after each block, which fails without the number
            while found := len(file.read(1 << 16, dtype="int16")):
                count += found
                if count > seconds * file.samplerate or count * file.channels > _MAX_SAMPLES:
                    raise _problem(f"has more than {seconds:,.2f} s or {_MAX_SAMPLES:,} samples")
    except soundfile.SoundFileError as error:
        raise _problem(f"is damaged: {error}") from error
    return count


@contextmanager
def _opened_image(data: bytes) -> Iterator[Any]:
    pillow = _library("PIL.Image")
    try:
        with pillow.open(io.BytesIO(data), formats=_IMAGES) as image:
            yield image
    except pillow.DecompressionBombError as error:
        raise _problem(f"has too many pixels: {error}") from error
    except Exception as error:  # untrusted EXIF data raise struct.error, TypeError and others
        what = f"is damaged: {error}".replace(" <_io.BytesIO object", " the image").split(" at 0x")[0]
        raise _problem(what) from error


def _library(name: str) -> Any:
    try:
        return importlib.import_module(name)
    except (ImportError, OSError) as error:
        fix = "pip install 'megatron-sft-harness[media]'"
        raise ConfigError(f"media require `{name.partition('.')[0]}`: {error}", where="media", fix=fix) from error


def _problem(what: str) -> PrepError:
    return PrepError(what, where="a medium", fix="repair the record, or remove it")
