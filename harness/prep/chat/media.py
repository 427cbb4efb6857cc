"""Put the media of a record in their places, or leave them out to train only on its text."""

from __future__ import annotations

import re
from collections import Counter, deque
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from harness.errors import PrepError
from harness.prep.chat.records import BadReason, MediaPart
from harness.prep.chat.schemas.messages import LIST_FIELDS, list_field
from harness.prep.chat.turns import LISTS_OF_TURNS, is_media_column, is_media_part, list_of_turns
from harness.prep.chat.values import MEDIA_FIELDS, SYSTEM_FIELDS, BadRecordError, first_name, ignoring, is_empty
from harness.prep.media import MediaLimits, check_medium, read_medium
from harness.records import MEDIA_KINDS

_KINDS = ("image", "audio", "video")
_OTHER_NAMES = {"img": "image", "picture": "image", "photo": "image"}
# Placeholders as LLaVA, ms-swift and most templates write them: <image>, <|audio|>, <video_1>, <audio></audio>, with
# the line end that follows.
_PLACEHOLDER = {kind: re.compile(rf"<\|?{kind}(?:_\d+)?\|?>(?:</{kind}>)?\n?") for kind in _KINDS}

# Names of fields that contain a medium; bytes in a table take precedence over the path of their file.
_SOURCE_FIELDS = ("bytes", "data", "base64", "url", "path", "image", "audio", "image_url", "audio_url", "input_audio")
# Other fields of a media part: those that change nothing, and its index in the record's list.
_PART_FIELDS = ("type", "source", "cache_control", "format", "mime_type", "media_type", "detail", "index")


def without_media(record: Mapping[str, Any]) -> tuple[Mapping[str, Any], int | None]:
    """Return a record without media and their placeholders, and the number of placeholders removed.

    Text is changed only if the record contains media, and only placeholders of the same kinds are removed: an HTML tag
    `<video>` in a record with images stays. Media parts count, too. A record without media is returned with None.
    """
    removal = _Removal()
    kept: dict[str, Any] = {}
    for name, value in record.items():
        if isinstance(name, str) and is_media(name, value):
            removal.kinds |= _kinds_of(name)
        elif name in LISTS_OF_TURNS and isinstance(value, list):
            kept[name] = [removal.without_media(turn) for turn in value]
        elif name in SYSTEM_FIELDS:
            kept[name] = removal.without_media(value)
        else:
            kept[name] = value
    if not removal.kinds:
        return record, None
    for name, value in kept.items():
        if isinstance(value, str) or (name in LISTS_OF_TURNS and isinstance(value, list)):
            kept[name] = removal.without_placeholders(value)
    return kept, removal.count


def with_media(record: Mapping[str, Any], folder: str | None, limits: MediaLimits) -> Mapping[str, Any]:
    """Return a record with a `MediaPart` in its turns in place of each placeholder and part of an image or a sound.

    Media are given as parts of turns, as OpenAI, Anthropic and Hugging Face write them, or in `audios`, `images`,
    `audio` or `image` next to the turns, with one placeholder each: `<audio>` or `<image>` in text, or a part without a
    medium. A record without media, or without a list of turns, is returned unchanged.
    """
    lists = {name: value for name, value in record.items() if name in MEDIA_FIELDS and not is_empty(value)}
    kinds = {name.removesuffix("s") for name in lists}
    for kind in MEDIA_KINDS:  # an empty list has no medium for a placeholder
        if kind not in kinds and record.get(f"{kind}s") == []:
            lists[f"{kind}s"] = []
    if all(is_empty(record.get(name)) for name in LIST_FIELDS):
        return record
    name = list_field(record)
    turns = list_of_turns(record, name)
    values = (turn.get(field) for turn in turns if isinstance(turn, Mapping) for field in ("content", "value"))
    if not lists and not any(isinstance(value, list) for value in values):
        return record
    placer = _MediaPlacer(lists, folder, limits)
    made = [placer.turn(turn, number) for number, turn in enumerate(turns, start=1)]
    placer.check()
    return {**{key: value for key, value in record.items() if key not in lists}, name: made}


class _MediaPlacer:
    def __init__(self, lists: Mapping[str, Any], folder: str | None, limits: MediaLimits) -> None:
        self._folder, self._limits = folder, limits
        # Media that wait for a placeholder, by kind, with descriptions of their places.
        self._waiting: dict[str, deque[tuple[str, Any]]] = {}
        self._given, self._found = Counter[str](), Counter[str]()
        for name, value in lists.items():
            kind = name.removesuffix("s")
            if kind not in MEDIA_KINDS:
                raise _bad(f"the record has `{name}`, and videos cannot be trained on (source.drop_media=true)")
            if kind in self._waiting:
                raise _bad(f"the record has both `{kind}` and `{kind}s`; leave one of them out")
            sources = value if isinstance(value, list) else [value]
            self._waiting[kind] = deque((f"`{name}[{at}]`", one) for at, one in enumerate(sources))
            self._given[kind] = len(sources)
        kinds = "|".join(self._waiting)
        self._placeholder = re.compile(rf"<\|?({kinds})\|?>(?:</(?:{kinds})>)?\n?") if kinds else None

    def turn(self, turn: object, number: int) -> object:
        """Return a turn with its media placed among the parts of its content."""
        if not isinstance(turn, Mapping):
            return turn
        field = "value" if turn.get("from") is not None else "content"
        content, what = turn.get(field), f"turn {number}"
        if isinstance(content, str):
            parts = list(self._split(content, what))
            return turn if parts == [content] else {**turn, field: parts}
        if isinstance(content, list):
            places = ((part, f"part {place} of {what}") for place, part in enumerate(content, start=1))
            return {**turn, field: [made for part, place in places for made in self._parts(part, place)]}
        return turn

    def check(self) -> None:
        """Raise BadRecordError if media and placeholders differ in number."""
        for kind in {**self._given, **self._found}:
            if (found := self._found[kind]) != (given := self._given[kind]):
                raise _bad(f"the turns have {found:,} <{kind}> placeholders, and the record has {given:,} for them")

    def _split(self, text: str, what: str) -> Iterator[str | MediaPart]:
        pieces = self._placeholder.split(text) if self._placeholder is not None else [text]
        if len(pieces) == 1:
            yield text
            return
        # A placeholder may enclose text: <audio>What is said?</audio>.
        ends = re.compile(rf"</({'|'.join(set(pieces[1::2]))})>")
        for at, piece in enumerate(pieces):
            if at % 2:
                yield from self._next(piece, what)
                continue
            if text := ends.sub("", piece):
                yield text

    def _parts(self, part: object, what: str) -> Iterator[Any]:
        if isinstance(part, str):
            yield from self._split(part, what)
        elif isinstance(part, Mapping) and is_media_part(part):
            kinds = _kinds_of(" ".join(map(str, (part.get("type", ""), *part)))).intersection(_KINDS)
            if len(kinds) != 1 or not kinds.issubset(MEDIA_KINDS):
                raise _bad(f"{what} is a {' or '.join(sorted(kinds))}, and only images and sounds can be trained on")
            (kind,) = kinds
            if others := [key for key in part if key not in _SOURCE_FIELDS + _PART_FIELDS and not is_empty(part[key])]:
                detail = f"{what} has the field {first_name(others)}; to leave out: {ignoring(min(map(str, others)))}"
                raise BadRecordError(BadReason.UNKNOWN_FIELD, detail)
            source = _source_of(part)
            if source is None and part.get("index") not in (None, self._found[kind]):
                raise _bad(f"{what} has the index {part['index']}, and media are placed in the order of their list")
            yield from self._next(kind, what) if source is None else [self._read(kind, source, what)]
        elif isinstance(part, Mapping) and isinstance(part.get("text"), str):
            for piece in self._split(part["text"], what):
                yield {**part, "text": piece} if isinstance(piece, str) else piece
        else:
            yield part

    def _next(self, kind: str, what: str) -> Iterator[MediaPart]:
        """Yield the next medium in the record's list, or nothing if none is left, which `check` refuses."""
        self._found[kind] += 1
        if waiting := self._waiting.get(kind):
            place, source = waiting.popleft()
            yield self._read(kind, source, f"{place} ({what})")

    def _read(self, kind: str, source: object, place: str) -> MediaPart:
        try:
            data = read_medium(_source_of(source), self._folder, self._limits)
            check_medium(kind, data, self._limits)
        except PrepError as error:
            raise _bad(f"{place} {error.what}") from error
        return MediaPart(kind, data)


def _source_of(value: object) -> object:
    """Return the bytes or text inside the objects that contain a medium, or None if there are neither."""
    if not isinstance(value, Mapping):
        return value
    names = (*_SOURCE_FIELDS, "source")
    return next((_source_of(value[name]) for name in names if not is_empty(value.get(name))), None)


def _bad(detail: str) -> BadRecordError:
    return BadRecordError(BadReason.MEDIA, detail)


def is_media(name: str, value: object) -> bool:
    """Return True if a field of a record contains media or names them."""
    # Tables give True for a media column with a value in the row; other numbers and flags are not media.
    if name in MEDIA_FIELDS:
        return not is_empty(value)
    return is_media_column(name) and not is_empty(value) and not isinstance(value, bool | int | float)


def _kinds_of(name: str) -> set[str]:
    lower = name.lower()
    kinds = {kind for kind in _KINDS if kind in lower}
    return kinds | {kind for other, kind in _OTHER_NAMES.items() if other in lower} or set(_KINDS)


@dataclass
class _Removal:
    """Removal of media and placeholders from turns; records the kinds of media and the number removed."""

    kinds: set[str] = field(default_factory=set)
    count: int = 0

    def without_media(self, turn: object) -> object:
        if not isinstance(turn, Mapping):
            return turn
        held = {name for name in MEDIA_FIELDS.intersection(turn) if not is_empty(turn[name])}
        kept = {name: value for name, value in turn.items() if name not in held}
        self.kinds = self.kinds.union(*map(_kinds_of, held))
        for name in ("content", "value", "parts", "output"):
            if isinstance(kept.get(name), list):
                given, kept[name] = kept[name], []
                for part in given:
                    # A tool result may also be a list of parts.
                    is_nested = isinstance(part, Mapping) and isinstance(part.get("content"), list)
                    made = self.without_media(part) if is_nested else part
                    if isinstance(made, Mapping) and is_media_part(made):
                        self.kinds |= _kinds_of(" ".join(map(str, (made.get("type", ""), *made))))
                        self.count += 1
                    else:
                        kept[name].append(made)
        return kept

    def without_placeholders(self, value: Any) -> Any:
        """Return a text, turn or list without the placeholders of the recorded kinds."""
        if isinstance(value, list):
            return [self.without_placeholders(item) for item in value]
        if isinstance(value, Mapping):
            fields = ("content", "value", "text", "parts", "output")
            names = [name for name in fields if isinstance(value.get(name), str | list)]
            return {**value, **{name: self.without_placeholders(value[name]) for name in names}}
        for kind in sorted(self.kinds) if isinstance(value, str) else ():
            value, count = _PLACEHOLDER[kind].subn("", value)
            self.count += count
            if count:
                # Remove the closing tag of media that enclose text: <audio>What is said?</audio>.
                value = value.replace(f"</{kind}>", "")
        return value
