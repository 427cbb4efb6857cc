"""Sequences of conversations, until tokenizers give several for one."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from harness.prep.chat import BadRecord, Conversation
from harness.prep.tokenize import ChatTokenizer
from harness.records import SequenceView


@dataclass(frozen=True, eq=False, slots=True)
class Encoded:
    """One sequence of a conversation, and the first token of each turn that it covers."""

    view: SequenceView
    turns: tuple[int, ...]


def encode_each(tokenizer: ChatTokenizer, conversations: Sequence[Conversation]) -> list[list[Encoded] | BadRecord]:
    results = tokenizer.encode(conversations)
    return [item if isinstance(item, BadRecord) else [Encoded(item, ())] for item in results]
