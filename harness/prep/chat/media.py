"""Leave the media of a record out, so that its text alone can be trained on (`source.drop_media`)."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from harness.prep.chat.turns import LISTS_OF_TURNS, MEDIA_FIELDS, is_media_column, is_media_part
from harness.prep.chat.values import is_empty

_KINDS = ("image", "audio", "video")
_OTHER_NAMES = {"img": "image", "picture": "image", "photo": "image"}
# As LLaVA, ms-swift and most templates write them: <image>, <|audio|>, <video_1>, <audio></audio>, with the line end
# after it.
_PLACEHOLDER = {kind: re.compile(rf"<\|?{kind}(?:_\d+)?\|?>(?:</{kind}>)?\n?") for kind in _KINDS}


def without_media(record: Mapping[str, Any]) -> tuple[Mapping[str, Any], int]:
    """Return a record without media and the placeholders of their kinds, and how many of these were removed.

    Text is changed only where the record holds media, and only placeholders of these kinds: an HTML tag `<video>` in
    a record with images stays.

    Returns:
        the record itself, and 0, where it holds no media. Parts of a turn that are media count as placeholders.
    """
    removal = _Removal()
    kept: dict[str, Any] = {}
    for name, value in record.items():
        if isinstance(name, str) and is_media(name, value):
            removal.kinds |= _kinds_of(name)
        elif name in LISTS_OF_TURNS and isinstance(value, list):
            kept[name] = [removal.without_media(turn) for turn in value]
        else:
            kept[name] = value
    if not removal.kinds:
        return record, 0
    for name, value in kept.items():
        if isinstance(value, str) or (name in LISTS_OF_TURNS and isinstance(value, list)):
            kept[name] = removal.without_placeholders(value)
    return kept, removal.count


def is_media(name: str, value: object) -> bool:
    """Return whether a field of a record holds media, or names them."""
    # Tables give True for a media column that a row has a value in; other numbers and flags are no media.
    if name in MEDIA_FIELDS:
        return not is_empty(value)
    return is_media_column(name) and not is_empty(value) and not isinstance(value, bool | int | float)


def _kinds_of(name: str) -> set[str]:
    lower = name.lower()
    kinds = {kind for kind in _KINDS if kind in lower}
    return kinds | {kind for other, kind in _OTHER_NAMES.items() if other in lower} or set(_KINDS)


@dataclass
class _Removal:
    """Takes media and placeholders out of turns, and keeps the kinds of media and the count of what was removed."""

    kinds: set[str] = field(default_factory=set)
    count: int = 0

    def without_media(self, turn: object) -> object:
        """Return a turn without its media fields and parts."""
        if not isinstance(turn, Mapping):
            return turn
        held = {name for name in MEDIA_FIELDS.intersection(turn) if not is_empty(turn[name])}
        kept = {name: value for name, value in turn.items() if name not in held}
        self.kinds = self.kinds.union(*map(_kinds_of, held))
        for name in ("content", "value", "parts", "output"):
            parts = kept.get(name)
            if isinstance(parts, list):
                # What a tool returns may be parts, too.
                nested = [isinstance(part, Mapping) and isinstance(part.get("content"), list) for part in parts]
                parts = [self.without_media(part) if has else part for part, has in zip(parts, nested, strict=True)]
                media = [part for part in parts if isinstance(part, Mapping) and is_media_part(part)]
                kept[name] = [part for part in parts if not any(part is one for one in media)]
                named = (" ".join(map(str, (part.get("type", ""), *part))) for part in media)
                self.kinds = self.kinds.union(*map(_kinds_of, named))
                self.count += len(media)
        return kept

    def without_placeholders(self, value: Any) -> Any:
        """Return a text, or the texts of a turn or of a list, without the placeholders of the kinds."""
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
                # A placeholder may enclose text, whose end tag is left: <audio>What is said?</audio>.
                value = value.replace(f"</{kind}>", "")
        return value
