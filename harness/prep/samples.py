"""Conversations as they are trained: the text of each sequence, with the trained parts marked."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from rich.text import Text

from harness.formats import CONTEXT_STYLE, TRAINED_STYLE, Decoder, printable, text_runs
from harness.prep.chat import Conversation
from harness.records import SequenceView

# Characters of one sequence that a report keeps.
_MAX_CHARACTERS = 6000
# Around trained text where there are no colors.
_OPEN, _CLOSE = "[[", "]]"


@dataclass(frozen=True, slots=True)
class SequenceSample:
    """The text of one sequence.

    Attributes:
        num_tokens, num_trained: of the whole sequence.
        runs: pieces of text in order, each with whether it is trained.
        is_whole: nothing is left out of the text.
    """

    num_tokens: int
    num_trained: int
    runs: list[tuple[str, bool]]
    is_whole: bool = True


@dataclass(frozen=True, slots=True)
class Sample:
    """One conversation.

    Attributes:
        where: its file and line, or file and row.
        num_messages: of the conversation; 0 for plain text.
        sequences: made from it.
    """

    where: str
    num_messages: int
    sequences: list[SequenceSample]

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> Sample:
        """Return the sample that `dataclasses.asdict` made plain."""
        sequences = [SequenceSample(**sequence) for sequence in values["sequences"]]
        return cls(values["where"], values["num_messages"], sequences)


def make_sample(
    conversation: Conversation,
    pieces: Sequence[SequenceView],
    tokenizer: Decoder,
    *,
    max_characters: int = _MAX_CHARACTERS,
) -> Sample:
    """Decode the sequences of a conversation.

    Args:
        max_characters: of a sequence; the rest of a longer one is left out.
    """
    sequences = []
    for piece in pieces:
        runs, left = [], max_characters
        for text, trained in text_runs(piece, tokenizer):
            if left > 0:
                runs.append((text[:left], trained))
            left -= len(text)
        num_trained = int(np.count_nonzero(piece.loss_mask))
        sequences.append(SequenceSample(len(piece), num_trained, runs, left >= 0))
    return Sample(conversation.where, len(conversation.messages), sequences)


def render_runs(sequence: SequenceSample, *, has_color: bool) -> Text:
    """Return the text of a sequence with its trained parts in color, or in brackets."""
    text = Text()
    for run, trained in sequence.runs:
        shown = printable(run)
        if trained and not has_color:
            shown = f"{_OPEN}{shown}{_CLOSE}"
        text.append(shown, style=TRAINED_STYLE if trained else CONTEXT_STYLE)
    if not sequence.is_whole:
        text.append(" ...")
    return text
