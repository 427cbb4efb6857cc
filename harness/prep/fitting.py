"""Sequences that are longer than a pack: drop them, cut them, or split them at turn boundaries."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from harness.checks import require_choice
from harness.prep.adapter import Encoded
from harness.prep.chat import Conversation
from harness.prep.packing import MIN_SEQUENCE_TOKENS, OVER_LONG
from harness.records import Int32Array, SequenceView, UInt8Array

# A split repeats the turns of these roles that a conversation begins with.
_SYSTEM = ("system", "developer")


@dataclass(frozen=True, slots=True)
class Fitted:
    """The parts of a sequence that are stored.

    Attributes:
        pieces: each of at most a pack, with something to train; empty if the sequence is left out.
        outcome: `kept`, `cut` or `split`; or, without pieces, the reason: `over_long`, or `untrained` where the part
            that fits has no trained token.
        num_lost: trained tokens of the sequence that no piece trains.
    """

    pieces: tuple[SequenceView, ...]
    outcome: str
    num_lost: int = 0


def fit_to_pack(
    sequence: SequenceView, *, pack_size: int, over_long: str, turns: Sequence[int] = (), roles: Sequence[str] = ()
) -> Fitted:
    """Make a sequence fit into packs of `pack_size` tokens.

    `split` fills piece after piece with whole turns. Every piece begins with the tokens before the first turn that is
    not the system's or developer's (system prompt, tools, special tokens), which only the first piece trains. A piece
    ends before a user turn where one fits, so that the next one begins with a question; else before a tool's result;
    else before any turn. Stretches without a trained token are left out, except as much of them as fits before the
    next trained turn. A turn that is too long alone is cut at the end of its piece. Text without turns is divided every
    `pack_size` tokens.

    Args:
        over_long: one of `OVER_LONG`.
        turns: first token of each turn, for `split`; without turns that can be kept apart, it cuts.
        roles: of the turns; empty for text that has none.
    """
    require_choice(over_long, OVER_LONG, setting="over_long")
    if len(sequence) <= pack_size:
        return Fitted((sequence,), "kept")
    if over_long == "drop":
        return Fitted((), "over_long", int(np.count_nonzero(sequence.loss_mask)))
    if over_long != "split":
        return _fitted(sequence, [_Piece(0, 0, pack_size)], "cut")
    if not roles:
        starts = range(0, len(sequence), pack_size)
        pieces = [_Piece(0, start, min(start + pack_size, len(sequence))) for start in starts]
        return _fitted(sequence, pieces, "split")
    count = min(len(turns), len(roles))
    leading = next((number for number in range(count) if roles[number] not in _SYSTEM), count)
    head = _num_head_tokens(sequence.input_ids, turns[:count], roles, leading)
    if leading == count or head + MIN_SEQUENCE_TOKENS > pack_size:
        return _fitted(sequence, [_Piece(0, 0, pack_size)] if leading == count else [], "split")
    # A turn that a template leaves out takes no tokens.
    edges = np.maximum.accumulate(np.array([head, *turns[leading + 1 : count], len(sequence)], np.int64))
    turns_of = _Turns(edges, roles[leading:count], _token_mask(sequence.loss_mask), pack_size - head)
    return _fitted(sequence, [_Piece(head, start, end) for start, end in turns_of.pieces()], "split")


def fit_conversation(
    conversation: Conversation, sequences: Sequence[Encoded], *, pack_size: int, over_long: str
) -> list[Fitted]:
    """Make the sequences of one conversation fit into packs, each by itself."""
    roles = [message.role for message in conversation.messages]
    return [
        fit_to_pack(one.view, pack_size=pack_size, over_long=over_long, turns=one.turns, roles=roles)
        for one in sequences
    ]


@dataclass(frozen=True, slots=True)
class _Piece:
    """The first `head` tokens of a sequence, and those from `start` to before `end`."""

    head: int
    start: int
    end: int


def _fitted(sequence: SequenceView, pieces: list[_Piece], outcome: str) -> Fitted:
    """Build the pieces that have something to train."""
    trained = _token_mask(sequence.loss_mask)
    built, num_kept = [], 0
    for piece in pieces:
        head = trained[: piece.head]
        if piece.start > piece.head:
            head = np.zeros_like(head)
        mask = np.concatenate([head, trained[piece.start : piece.end]])
        # Nothing comes before the first token, from which it could be predicted.
        mask[0] = 0
        if mask.any():
            ids = np.concatenate([sequence.input_ids[: piece.head], sequence.input_ids[piece.start : piece.end]])
            built.append(SequenceView(ids, np.append(mask[1:], np.uint8(0))))
            num_kept += int(np.count_nonzero(mask))
    num_lost = int(np.count_nonzero(trained)) - num_kept
    if not built:
        return Fitted((), "untrained" if pieces else "over_long", num_lost)
    return Fitted(tuple(built), outcome if outcome == "cut" or len(built) > 1 or not num_lost else "cut", num_lost)


def _token_mask(loss_mask: UInt8Array) -> UInt8Array:
    """Return the mask of the trained tokens themselves, uint8 [L]."""
    return np.concatenate([np.zeros(1, np.uint8), loss_mask[:-1]])


@dataclass(frozen=True, eq=False, slots=True)
class _Turns:
    """Turns that are divided among pieces.

    Attributes:
        edges: int64 [turns + 1], first token of each turn, and the end of the last.
        roles: of the turns.
        trained: uint8 [L], the trained tokens.
        room: tokens of a piece.
    """

    edges: np.ndarray[tuple[int], np.dtype[np.int64]]
    roles: Sequence[str]
    trained: UInt8Array
    room: int

    def pieces(self) -> Iterator[tuple[int, int]]:
        """Yield the first and past-the-end token of every piece."""
        count = len(self.roles)
        first = 0
        while first < count:
            last = int(np.searchsorted(self.edges, self.edges[first] + self.room, side="right")) - 1
            if last <= first:
                yield int(self.edges[first]), int(self.edges[first]) + self.room
                first += 1
                continue
            last = last if last == count else self._cut_between(first, last)
            if self._is_trained(first, last):
                yield int(self.edges[first]), int(self.edges[last])
                first = last
                continue
            following = next((turn for turn in range(last, count) if self._is_trained(turn, turn + 1)), count)
            if following == count:
                return
            first = self._begin_before(first, following)

    def _is_trained(self, first: int, last: int) -> bool:
        return bool(self.trained[self.edges[first] : self.edges[last]].any())

    def _cut_between(self, first: int, last: int) -> int:
        """Return the turn before which a piece from `first` ends, at most `last`."""
        cuts = [turn for turn in range(last, first, -1) if self._is_trained(first, turn)]
        users = (turn for turn in cuts if self.roles[turn] == "user")
        others = (turn for turn in cuts if self.roles[turn] != "assistant")
        return next(users, None) or next(others, None) or last

    def _begin_before(self, first: int, trained: int) -> int:
        """Return the turn after `first` from which the most fits up to the end of the turn `trained`."""
        fitting = [
            turn for turn in range(first + 1, trained) if self.edges[trained + 1] - self.edges[turn] <= self.room
        ]
        users = (turn for turn in fitting if self.roles[turn] == "user")
        others = (turn for turn in fitting if self.roles[turn] != "assistant")
        return next(users, None) or next(others, None) or min(fitting, default=trained)


def _num_head_tokens(ids: Int32Array, turns: Sequence[int], roles: Sequence[str], leading: int) -> int:
    """Return the number of tokens before the first turn that is not the system's.

    Without a system turn the first turn's tokens include what a template writes before it: the tools, a system prompt
    of its own. The first turn then begins where the tokens are those that a later turn of its role begins with.
    """
    if leading:
        return int(turns[leading]) if leading < len(turns) else 0
    same = [turn for number, turn in enumerate(turns) if number and roles[number] == roles[0]]
    if not same:
        return 0
    first = ids[: turns[1]]
    header = ids[same[0] : same[0] + len(first)]
    places = np.flatnonzero(first == header[0])
    lengths = []
    for place in places.tolist():
        width = min(len(first) - place, len(header))
        differs = first[place : place + width] != header[:width]
        lengths.append(int(differs.argmax()) if differs.any() else width)
    return int(places[int(np.argmax(lengths))]) if lengths else 0
