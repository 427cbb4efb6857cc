"""Conversations of a live chunk, tokenised while training goes on."""

from __future__ import annotations

import numpy as np

from harness.errors import ConfigError, FormatError
from harness.loader.live.chunk import LiveChunk
from harness.loader.live.config import LiveConfig
from harness.loader.live.position import Place
from harness.prep import BadRecord, ChatTokenizer, Conversation, Member, fit_to_pack
from harness.records import SequenceView
from harness.thd import padded_lengths


class ConversationReader:
    """Makes members of packs from rows of chunks.

    Args:
        pad_to_multiple: every sequence is padded to a multiple of this many tokens, in a row as in a pack.

    Attributes:
        left_out: conversations that were left out, and why.
    """

    def __init__(self, config: LiveConfig, tokenizer: ChatTokenizer | None, *, pad_to_multiple: int) -> None:
        self._config = config
        self._tokenizer = tokenizer
        self._pad_to_multiple = pad_to_multiple
        self.left_out: dict[str, int] = {}

    def members(self, chunk: LiveChunk, index: int, rows: range) -> list[Member[Place] | None]:
        """The conversations of these rows, tokenised; None for one that is left out."""
        if self._tokenizer is None:
            raise ConfigError(
                "the chunk holds conversations, and no tokenizer is named",
                where=str(chunk.path),
                fix="name a tokenizer folder or a hub id: data.live.tokenizer.name",
            )
        parsed = [chunk.conversation(row) for row in rows]
        wanted = [one for one in parsed if isinstance(one, Conversation)]
        encoded = iter(self._tokenizer.encode(wanted) if wanted else [])
        members: list[Member[Place] | None] = []
        for row, one in zip(rows, parsed, strict=True):
            made = next(encoded) if isinstance(one, Conversation) else one
            members.append(None if made is None else self._member((index, row), made))
        return members

    def _member(self, place: Place, made: SequenceView | BadRecord) -> Member[Place] | None:
        if isinstance(made, BadRecord):
            if self._config.on_bad == "refuse":
                raise FormatError(
                    f"the conversation cannot be used ({made.reason}): {made.detail}",
                    where=made.where,
                    fix="mend what makes them, or set data.live.on_bad=skip to leave such out",
                )
            self._leave_out(str(made.reason))
            return None
        sequence, what = fit_to_pack(made, pack_size=self._config.pack_size, over_long=self._config.over_long)
        if sequence is None:
            self._leave_out(what)
            return None
        size = max(len(sequence), int(padded_lengths(np.array([len(sequence)]), self._pad_to_multiple)[0]))
        if size > self._config.pack_size:
            self._leave_out("over_long")
            return None
        return Member(place, sequence, size)

    def _leave_out(self, why: str) -> None:
        self.left_out[why] = self.left_out.get(why, 0) + 1
