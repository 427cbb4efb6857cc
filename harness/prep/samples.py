"""Conversations as they are trained: the text of each sequence, with the trained parts marked."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from harness.formats.inspect import Decoder, text_runs
from harness.prep.chat import Conversation
from harness.records import SequenceView

# Sequences of a conversation that a report keeps, and characters of each.
_MAX_SEQUENCES, _MAX_CHARACTERS = 6, 6000


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
        num_sequences: made from it.
        sequences: the first of them.
    """

    where: str
    num_messages: int
    num_sequences: int
    sequences: list[SequenceSample]

    @property
    def title(self) -> str:
        """Place, turns and sequences in words."""
        turns = f"{self.num_messages} turn{'s' * (self.num_messages != 1)}" if self.num_messages else "text"
        return f"{self.where}: {turns}, {self.num_sequences} sequence{'s' * (self.num_sequences != 1)}"


def make_sample(
    conversation: Conversation, pieces: Sequence[SequenceView], tokenizer: Decoder, *, is_whole: bool = False
) -> Sample:
    """Decode the sequences of a conversation, all of them as a whole or the beginnings of the first."""
    sequences = []
    max_sequences, max_characters = (len(pieces), 1 << 40) if is_whole else (_MAX_SEQUENCES, _MAX_CHARACTERS)
    for piece in pieces[:max_sequences]:
        runs, left = [], max_characters
        for text, trained in text_runs(piece, tokenizer):
            if left > 0:
                runs.append((text[:left], trained))
            left -= len(text)
        num_trained = int(np.count_nonzero(piece.loss_mask))
        sequences.append(SequenceSample(len(piece), num_trained, runs, left >= 0))
    return Sample(conversation.where, len(conversation.messages), len(pieces), sequences)
