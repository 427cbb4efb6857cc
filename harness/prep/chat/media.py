"""Leave the media of a record out, so that its text alone can be trained on (`source.drop_media`)."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from harness.prep.chat.turns import MEDIA_FIELDS, is_media_column, is_media_part
from harness.prep.chat.values import is_empty

_KINDS = ("image", "audio", "video")
_OTHER_NAMES = {"img": "image", "picture": "image", "photo": "image"}
# As LLaVA, ms-swift and most templates write them: <image>, <|audio|>, <video_1>, <audio></audio>, with the line end
# after it.
_PLACEHOLDER = {kind: re.compile(rf"<\|?{kind}(?:_\d+)?\|?>(?:</{kind}>)?\n?") for kind in _KINDS}


def without_media(record: Mapping[str, Any], lists: tuple[str, ...]) -> tuple[Mapping[str, Any], int]:
    """Return a record without media and the placeholders of their kinds, and how many of these were removed.

    Text is changed only where the record holds media, and only placeholders of these kinds: an HTML tag `<video>` in
    a record with images stays.

    Args:
        lists: names of the lists of turns.

    Returns:
        the record itself, and 0, where it holds no media. Parts of a turn that are media count as placeholders.
    """
    kinds: set[str] = set()
    kept: dict[str, Any] = {}
    for name, value in record.items():
        if isinstance(name, str) and _is_media(name, value):
            kinds |= _kinds_of(name)
        else:
            kept[name] = value
    removed = 0
    for name in lists:
        if isinstance(kept.get(name), list):
            turns = []
            for turn in kept[name]:
                plain, parts, found = _turn_without_media(turn)
                turns.append(plain)
                removed += parts
                kinds |= found
            kept[name] = turns
    if not kinds:
        return record, 0
    for name, value in kept.items():
        if name in lists and isinstance(value, list):
            changed: Any = []
            for turn in value:
                plain, count = _fields_without_placeholders(turn, kinds)
                changed.append(plain)
                removed += count
        else:
            changed, count = _without_placeholders(value, kinds)
            removed += count
        kept[name] = changed
    return kept, removed


def _is_media(name: str, value: object) -> bool:
    # Tables give True for a media column that a row has a value in; other numbers and flags are no media.
    if name in MEDIA_FIELDS:
        return not is_empty(value)
    return is_media_column(name) and not is_empty(value) and not isinstance(value, bool | int | float)


def _kinds_of(name: str) -> set[str]:
    lower = name.lower()
    kinds = {kind for kind in _KINDS if kind in lower}
    return kinds | {kind for other, kind in _OTHER_NAMES.items() if other in lower} or set(_KINDS)


def _turn_without_media(turn: object) -> tuple[object, int, set[str]]:
    """Return a turn without media fields and parts, the number of these parts, and the kinds of media in it."""
    if not isinstance(turn, Mapping):
        return turn, 0, set()
    held = {name for name in MEDIA_FIELDS.intersection(turn) if not is_empty(turn[name])}
    kinds = set().union(*map(_kinds_of, held)) if held else set()
    kept = {name: value for name, value in turn.items() if name not in held}
    removed = 0
    for name in ("content", "value"):
        if isinstance(kept.get(name), list):
            media = [part for part in kept[name] if isinstance(part, Mapping) and is_media_part(part)]
            for part in media:
                kinds |= _kinds_of(" ".join(map(str, (part.get("type", ""), *part))))
            kept[name] = [part for part in kept[name] if part not in media]
            removed += len(media)
    return kept, removed, kinds


def _fields_without_placeholders(item: object, kinds: set[str]) -> tuple[object, int]:
    """Return a turn, or a part of one, with its texts cleaned."""
    if not isinstance(item, Mapping):
        return _without_placeholders(item, kinds)
    kept, removed = dict(item), 0
    for name in ("content", "value", "text"):
        value = kept.get(name)
        if isinstance(value, list):
            cleaned = [_fields_without_placeholders(part, kinds) for part in value]
            kept[name], count = [part for part, _ in cleaned], sum(count for _, count in cleaned)
        elif isinstance(value, str):
            kept[name], count = _without_placeholders(value, kinds)
        else:
            continue
        removed += count
    return kept, removed


def _without_placeholders(value: Any, kinds: set[str]) -> tuple[Any, int]:
    removed = 0
    if isinstance(value, str):
        for kind in sorted(kinds):
            value, count = _PLACEHOLDER[kind].subn("", value)
            removed += count
            if count:
                # A placeholder may enclose text, whose end tag is left: <audio>What is said?</audio>.
                value = value.replace(f"</{kind}>", "")
    return value, removed
