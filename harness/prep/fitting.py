"""Fit conversations that are longer than a pack: drop them, cut them, or split them between turns."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from harness.checks import require_choice
from harness.prep.chat import BadRecord, Conversation, Message
from harness.prep.packing import OVER_LONG
from harness.prep.tokenize import ChatTokenizer, Encoded
from harness.records import SequenceView

Messages = tuple[Message, ...]

# Splitting repeats the leading turns of these roles in every part.
_SYSTEM = ("system", "developer")


@dataclass(frozen=True, slots=True)
class Fitted:
    """Stored sequences of one conversation, each at most one pack long, with tokens to train on.

    If there are none, `reason` is `over_long`, `over_long_media` (media are neither cut nor split), or `untrained` if
    the part that fits has no trained token. `is_cut` means that a piece ends in the middle of a turn and the rest of
    the turn is left out. `num_lost` is the number of trained tokens that no piece trains.
    """

    pieces: tuple[SequenceView, ...]
    reason: str = ""
    is_cut: bool = False
    is_split: bool = False
    is_partial: bool = False
    num_lost: int = 0


def fit_conversation(
    conversation: Conversation,
    sequences: Sequence[Encoded],
    tokenizer: ChatTokenizer,
    *,
    pack_size: int,
    over_long: str,
) -> Fitted:
    """Fit the sequences that `tokenizer` made from a conversation into packs of `pack_size` tokens.

    `drop` and `cut` treat each sequence separately. `split` makes shorter conversations of as many exchanges (a user
    turn and the turns that follow it) as fit, each with the system prompt and tools of the whole, and encodes them
    again. An exchange that is too long by itself is divided before assistant turns, and each part starts with the
    question, without the calls and results of earlier parts; an answer too long with its question is cut. Turns after
    the last answer are left out. Text without turns is divided every `pack_size` tokens.
    """
    require_choice(over_long, OVER_LONG, setting="over_long")
    views = [one.view for one in sequences]
    if all(len(view) <= pack_size for view in views):
        return Fitted(tuple(views))
    asked = over_long
    # Media cannot be cut or assigned to turns.
    over_long = "drop" if any(view.media for view in views) else over_long
    if over_long == "split" and conversation.text is None:
        splitter = _Splitter(conversation, tokenizer, pack_size)
        splitter.split()
        pieces, is_cut = splitter.pieces, splitter.is_cut
    else:
        fitted = [_fit(view, pack_size, over_long) for view in views]
        pieces = [piece for parts in fitted for piece in parts]
        is_cut = any(len(parts) == 1 and len(parts[0]) < len(view) for parts, view in zip(fitted, views, strict=True))
    trained = [sum(int(np.count_nonzero(one.loss_mask)) for one in some) for some in (views, pieces)]
    num_lost = max(0, trained[0] - trained[1])
    if not pieces:
        reason = "untrained" if over_long != "drop" else "over_long" if asked == "drop" else "over_long_media"
        return Fitted((), reason, num_lost=num_lost)
    return Fitted(
        tuple(pieces),
        is_cut=is_cut,
        is_split=over_long == "split",
        is_partial=over_long != "split" and not all(fitted),
        num_lost=num_lost,
    )


def _fit(sequence: SequenceView, pack_size: int, over_long: str) -> list[SequenceView]:
    """Drop or cut one sequence, or divide a sequence without turns."""
    if len(sequence) <= pack_size:
        return [sequence]
    if over_long == "drop":
        return []
    ends = range(pack_size, len(sequence) + pack_size, pack_size) if over_long == "split" else [pack_size]
    pieces = []
    for end in ends:
        piece = slice(end - pack_size, end)
        mask = sequence.loss_mask[piece].copy()
        # The label of the last token is in the next piece.
        mask[-1] = 0
        if mask.any():
            pieces.append(SequenceView(sequence.input_ids[piece], mask))
    return pieces


@dataclass
class _Splitter:
    """Splitter of one conversation; collects the sequences of its parts in `pieces`."""

    conversation: Conversation
    tokenizer: ChatTokenizer
    pack_size: int
    pieces: list[SequenceView] = field(default_factory=list)
    is_cut: bool = False
    _trains_all: bool = False
    _trains_last: bool = False

    def split(self) -> None:
        facts = self.tokenizer.mask_facts()
        self._trains_all = facts.get("rule") == "all"
        self._trains_last = facts.get("train_on") == "last_turn"
        messages = self.conversation.messages
        system = tuple(itertools.takewhile(lambda message: message.role in _SYSTEM, messages))
        # Each user turn that follows a turn of another role starts an exchange.
        turns = messages[len(system) :]
        pairs = enumerate(itertools.pairwise(turns), start=1)
        starts = [number for number, (before, after) in pairs if after.role == "user" != before.role]
        exchanges = [turns[start:end] for start, end in itertools.pairwise([0, *starts, len(turns)])]
        self._fill(system, exchanges, is_exchange=True)

    def _fill(self, prefix: Messages, units: list[Messages], *, is_exchange: bool) -> None:
        """Store groups of as many units as fit, each after the prefix; divide units that do not fit by themselves."""
        alone = self._encode([prefix + unit for unit in units])
        lengths = [_longest(sequences) for sequences in alone]
        # Estimate of the tokens written once per group, for any number of units; it saves most trial encodings.
        shared = max(0, lengths[0] + lengths[1] - _longest(self._together(prefix, units[:2]))) if len(units) > 1 else 0
        order = -1 if self._trains_last else 1  # then store only the last group, grown from its end
        units, alone, lengths = units[::order], alone[::order], lengths[::order]
        first = 0
        while first < (1 if self._trains_last else len(units)):
            end = first + 1
            if lengths[first] > self.pack_size:
                self._divide(prefix, units[first], alone[first], is_exchange=is_exchange)
                first = end
                continue
            made, total = alone[first], lengths[first]
            while end < len(units) and total + lengths[end] - shared <= self.pack_size:
                total += lengths[end] - shared
                end += 1
            while end - first > 1:
                made = self._together(prefix, units[first:end][::order])
                is_lost = not made and any(alone[first:end])
                excess = _longest(made) - self.pack_size
                if not is_lost and excess <= 0:
                    break
                # Removing a unit removes at most its length: no group fits until the lengths add up to the excess.
                while end - first > 1 and (excess > 0 or is_lost):
                    end -= 1
                    excess -= lengths[end] or excess  # a refused unit has length 0
                    is_lost = False
                made = alone[first]
            self._store([one.view for one in made])
            first = end

    def _divide(self, prefix: Messages, unit: Messages, sequences: Sequence[Encoded], *, is_exchange: bool) -> None:
        """Store a unit that is too long by itself: divide an exchange between its answers, or cut a single answer."""
        # An answer includes the results of its tool calls.
        starts = [number for number, message in enumerate(unit) if message.role == "assistant"]
        question = unit[: starts[0]] if starts else unit
        answers = [unit[start:end] for start, end in itertools.pairwise([*starts, len(unit)])]
        if is_exchange and len(answers) > 1:
            self._fill(prefix + question, answers, is_exchange=False)
            return
        cut = [piece for one in sequences for piece in _fit(one.view, self.pack_size, "cut")]
        self.is_cut |= bool(cut)
        self._store(cut)

    def _encode(self, parts: Sequence[Messages]) -> list[list[Encoded]]:
        """Encode parts of the conversation up to their last answers; a part that is refused yields no sequences."""
        turns = ([number for number, one in enumerate(part, start=1) if one.role == "assistant"] for part in parts)
        answered = [part[: max(numbers, default=0)] for part, numbers in zip(parts, turns, strict=True)]
        made = iter(self.tokenizer.encode_each([replace(self.conversation, messages=one) for one in answered if one]))
        results = [next(made) if one else [] for one in answered]
        return [[] if isinstance(result, BadRecord) else result for result in results]

    def _together(self, prefix: Messages, units: Sequence[Messages]) -> list[Encoded]:
        return self._encode([prefix + tuple(itertools.chain(*units))])[0]

    def _store(self, views: Sequence[SequenceView]) -> None:
        for view in views:
            mask = view.loss_mask.copy()
            if self._trains_all:  # except the beginning that an earlier piece contains, too
                for piece in self.pieces:
                    count = min(len(view), len(piece))
                    differs = np.append(view.input_ids[:count] != piece.input_ids[:count], True)
                    mask[: max(0, int(differs.argmax()) - 1)] = 0
            if mask.any():
                self.pieces.append(replace(view, loss_mask=mask))


def _longest(sequences: Sequence[Encoded]) -> int:
    return max((len(one.view) for one in sequences), default=0)
