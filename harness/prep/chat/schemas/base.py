"""The interface of a schema."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from harness.prep.chat.records import Conversation


@dataclass(frozen=True, slots=True)
class Schema:
    """One form of chat records.

    Attributes:
        fields: of a record that `parse` reads.
        fits: tells, from a record's fields, if it is of this schema.
        parse: makes the conversation of a record and its place; raises BadRecordError.
        use: `detected`; `last`, where no other schema fits; or `asked`, only by name.
    """

    fields: frozenset[str]
    fits: Callable[[Mapping[str, Any]], bool]
    parse: Callable[[Mapping[str, Any], str], Conversation]
    use: str = "detected"
