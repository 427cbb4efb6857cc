"""Counts of what became of records, each kind with the places where it came first, and samples of trained text."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, fields

import numpy as np

from harness.formats.inspect import Decoder, text_runs
from harness.prep.chat import Conversation
from harness.prep.media import draw_medium
from harness.records import SequenceView

_MAX_EXAMPLES = 3
_MAX_PICTURES = 4
# Sequences of a conversation that a report keeps, and characters of each.
_MAX_SEQUENCES, _MAX_CHARACTERS = 6, 6000


@dataclass
class Counts:
    """Counts of records and conversations.

    Attributes:
        records: number of records read; each one is kept as a conversation, bad or dropped.
        dropped: conversations left out for their length, as duplicates or by a function, by reason.
        partial: conversations of which some sequences are kept and others left out for their length.
        split: conversations that were divided because they are longer than a pack.
        lost_tokens: trained tokens that were cut off or left out because their conversation is longer than a pack.
        repeated_tokens: tokens beside those of the longest sequence of each conversation: turns that are served
            differently repeat what is before them.
        media: kept conversations whose images, audio and videos were left out (`source.drop_media`).
        placeholders: places of these in their text that were removed.
        media_by_kind, media_tokens: media of kept conversations, and their placeholder tokens.
        user_last: kept conversations that end with a user turn, which is read and never answered.
        tagged_calls: kept conversations with tool calls or results as tags in their text, which templates write too.
        examples: first places by kind: `bad REASON`, `dropped REASON`, `partial`, `truncated` and so on.
    """

    records: int = 0
    bad: Counter[str] = field(default_factory=Counter)
    dropped: Counter[str] = field(default_factory=Counter)
    partial: int = 0
    truncated: int = 0
    split: int = 0
    lost_tokens: int = 0
    repeated_tokens: int = 0
    media: int = 0
    placeholders: int = 0
    media_by_kind: Counter[str] = field(default_factory=Counter)
    media_tokens: int = 0
    audio_seconds: float = 0.0
    user_last: int = 0
    tagged_calls: int = 0
    examples: dict[str, list[str]] = field(default_factory=dict)

    def count(self, kind: str, place: str, *, reason: str = "") -> None:
        """Count one more of a kind (a field), by `reason` if it has any; keep its place if it is among the first."""
        if reason:
            getattr(self, kind)[reason] += 1
        else:
            setattr(self, kind, getattr(self, kind) + 1)
        self._keep(f"{kind} {reason}".rstrip(), place)

    def _keep(self, kind: str, place: str) -> None:
        places = self.examples.setdefault(kind, [])
        if len(places) < _MAX_EXAMPLES:
            places.append(place)

    def add(self, other: Counts) -> None:
        for name in (entry.name for entry in fields(Counts) if entry.name != "examples"):
            setattr(self, name, getattr(self, name) + getattr(other, name))
        for kind, places in other.examples.items():
            for place in places:
                self._keep(kind, place)


@dataclass(frozen=True, slots=True)
class SequenceSample:
    """The runs of text of one sequence, each with whether it is trained, and the token counts of the whole sequence."""

    num_tokens: int
    num_trained: int
    runs: list[tuple[str, bool]]
    is_whole: bool = True


@dataclass(frozen=True, slots=True)
class Sample:
    """One conversation.

    Attributes:
        num_messages: of the conversation; 0 for plain text.
        sequences: the first of them.
        pictures: of the first media of the first sequence, as data URIs.
    """

    where: str
    num_messages: int
    num_sequences: int
    sequences: list[SequenceSample]
    pictures: list[str] = field(default_factory=list)

    @property
    def title(self) -> str:
        turns = f"{self.num_messages} turn{'s' * (self.num_messages != 1)}" if self.num_messages else "text"
        return f"{self.where}: {turns}, {self.num_sequences} sequence{'s' * (self.num_sequences != 1)}"


def make_sample(
    conversation: Conversation, pieces: Sequence[SequenceView], tokenizer: Decoder, *, is_whole: bool = False
) -> Sample:
    """Decode the sequences of a conversation, all of them as a whole or the beginnings of the first."""
    sequences = []
    max_sequences, max_characters = (len(pieces), 1 << 40) if is_whole else (_MAX_SEQUENCES, _MAX_CHARACTERS)
    for piece in pieces[:max_sequences]:
        # With the first placeholder token of each medium alone.
        kept = np.ones(len(piece), np.bool_)
        for one in piece.media:
            kept[one.start + 1 : one.start + one.tokens] = False
        runs, left = [], max_characters
        for text, trained in text_runs(SequenceView(piece.input_ids[kept], piece.loss_mask[kept]), tokenizer):
            if left > 0:
                runs.append((text[:left], trained))
            left -= len(text)
            if left < 0:
                break
        sequences.append(SequenceSample(len(piece), int(np.count_nonzero(piece.loss_mask)), runs, left >= 0))
    pictures = [draw_medium(one.kind, one.data) for piece in pieces[:1] for one in piece.media[:_MAX_PICTURES]]
    return Sample(conversation.where, len(conversation.messages), len(pieces), sequences, pictures)
