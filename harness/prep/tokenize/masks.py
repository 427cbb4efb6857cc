"""Find the text of a conversation that the model has to generate.

A `Masker` renders a conversation with its chat template and returns one `Rendered` for each sequence to train on. It
uses one of three rules, in this order of preference:

- `marks`: the text that the template writes inside `{% generation %}`;
- `stock`: for the published template of a model family, identified by hash, the text after the header of each turn
  (`harness.prep.tokenize.stock`);
- `served`: the text that each turn adds to the generation prompt that a server renders for it. A turn whose text does
  not contain the end of that prompt is refused: the model would never generate it. If the prompt opens a reasoning
  block and the turn has no reasoning, an empty block is closed and trained.

Templates expect turns in different forms and drop unknown fields: `harness.prep.tokenize.known_forms` finds the form
in which a template writes all of a conversation, or refuses it with a reason, and checks that each text was written.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from itertools import accumulate, chain, pairwise
from typing import TYPE_CHECKING, Any

from harness.errors import ConfigError
from harness.prep.chat import BadReason, BadRecordError, Conversation, Message, ToolCall
from harness.prep.tokenize.chats import FORMS, RenderedChat, shared_length
from harness.prep.tokenize.config import MAX_CHARACTERS, TokenizerConfig
from harness.prep.tokenize.known_forms import KnownForm, KnownForms, not_written, unwritten_reasoning, unwritten_text
from harness.prep.tokenize.offsets import Span
from harness.prep.tokenize.stock import StockRule, stock_rule
from harness.records import HUNDREDTHS

if TYPE_CHECKING:
    from harness.prep.tokenize.rendering import Template

# Maximum number of characters in all sequences of a conversation together.
_MAX_IN_ALL = 2 * MAX_CHARACTERS
_INLINE_REASONING = re.compile(r"<think>.*?</think>\s*", re.DOTALL)
# Variables that make templates keep the reasoning of earlier turns.
_KEEPING_SWITCHES: tuple[tuple[str, bool], ...] = (
    ("preserve_thinking", True),
    ("keep_past_thinking", True),
    ("clear_thinking", False),
    ("truncate_history_thinking", False),
    ("drop_thinking", False),
)
# Parts of the conversations that templates are tried with.
_ASK, _ANSWER = Message("user", "a"), Message("assistant", "b")
_CALL = (ToolCall("f", {"a": "b"}, id="call00001"),)
_TOOLS = ({"type": "function", "function": {"name": "f", "description": "d", "parameters": {}}},)


@dataclass(frozen=True, slots=True)
class Rendered:
    """One sequence to train on: its text, and the first and past-the-end characters of each trained part, in order.

    `weights` are the loss weights of the parts, in hundredths; empty if `tokenizer.train_on` is not `weighted`. The
    text contains the first `num_turns` turns of its conversation; None for all.
    """

    text: str
    spans: list[Span]
    weights: Sequence[int] = ()
    num_turns: int | None = None


class Masker:
    """Renderer of conversations that finds trained spans by `rule`: a rule above, `assistant_turns` or `all`."""

    def __init__(self, template: Template, config: TokenizerConfig, special: Sequence[str], *, where: str) -> None:
        self._template, self._config = template, config
        self._special = re.compile("|".join(map(re.escape, special)) or r"(?!)")
        self._special_texts = tuple(special)
        self._stock = stock_rule(template.text) or StockRule("")
        self.rule, self.why = self._choose(config.mask, where)
        # A template with marks is trusted with plain conversations.
        self._forms = KnownForms(template, trusts_plain=self.rule in ("marks", "assistant_turns", "all"))
        self._has_weights = config.train_on == "weighted"
        self._keeping = self._keeping_switch() if config.history == "kept" else {}

    def _choose(self, mask: str, where: str) -> tuple[str, str]:
        if mask in ("assistant_turns", "all"):
            return mask, f"tokenizer.mask={mask}"
        if self._template.is_marked:
            return "marks", "the chat template marks what the model writes with {% generation %}"
        if mask == "generation":
            what = "the chat template has no {% generation %} that marks the assistant's tokens"
            fix = "set tokenizer.mask=auto, or set tokenizer.chat_template to a template with the tag"
            raise ConfigError(what, where=where, fix=fix)
        name, why = self._stock.name, "each turn is trained from the generation prompt that a server renders for it"
        what = f"is the published one of {name}" if name else "has no marks and is not a known one"
        if self._stock.opens or self._stock.skips:
            return "stock", f"the chat template {what}"
        return "served", f"the chat template {what}: {why}"

    def sequences(self, conversation: Conversation) -> list[Rendered]:
        """Return the sequences of a chat in the order of their trained turns; BadRecordError if it has none."""
        turns = enumerate(conversation.messages, start=1)
        weighted = (number for number, turn in turns if turn.part_weights or (turn.weight or 0) % HUNDREDTHS)
        if not self._has_weights and (number := next(weighted, None)) is not None:
            detail = f"turn {number} has a weight between 0 and 1, or weights of its parts; "
            raise BadRecordError(BadReason.BAD_WEIGHT, f"{detail}tokenizer.train_on=weighted trains with weights")
        known = self._forms.find(conversation)
        chat = RenderedChat(self._template, conversation, known.form, self._keeping)
        if self.rule == "all":
            if untrained := [number for number, turn in enumerate(conversation.messages, start=1) if turn.weight == 0]:
                detail = f"turn {untrained[0]} is not to be trained (a weight of 0, or a part of a prompt), and "
                detail += "tokenizer.mask=all trains every token; use tokenizer.mask=auto"
                raise BadRecordError(BadReason.BAD_WEIGHT, detail)
            self._check_written(chat, known)
            last, spans = len(chat.messages) - 1, [(0, len(chat.whole))]
            spans = self._with_end(chat, last, spans) if conversation.messages[-1].role == "assistant" else spans
            return [Rendered(chat.served(last), spans)]
        trained = self._trained_turns(conversation)
        if not trained:
            raise BadRecordError(BadReason.NOTHING_TRAINED, "no turn is marked as trained")
        if self.rule == "assistant_turns":
            spans, last = [self._added_span(chat, turn) for turn in trained], len(chat.messages) - 1
            if trained[-1] == last:
                spans[-1:] = self._with_end(chat, last, spans[-1:])
            text = chat.served(last)
            parts = [self._weighed(text, chat, turn, [span]) for turn, span in zip(trained, spans, strict=True)]
            all_spans, weights = map(list, map(chain.from_iterable, zip(*parts, strict=True)))
            found = [Rendered(text, all_spans, weights)]
        elif self.rule == "marks":
            found = self._marked_sequences(chat, trained, has_tags=known.has_tags)
        else:
            found = self._sequences_of_turns(chat, trained, lambda turn: [self._served_turn(chat, turn)])
        self._check_written(chat, known)
        return found

    def _check_written(self, chat: RenderedChat, known: KnownForm) -> None:
        messages = chat.conversation.messages
        if missing := unwritten_text(chat.whole, messages, chat.upto, is_ordered=known.is_ordered):
            raise not_written(missing)

    def _trained_turns(self, conversation: Conversation) -> list[int]:
        turns = [number for number, message in enumerate(conversation.messages) if message.role == "assistant"]
        if self._config.train_on == "marked":
            weights = [conversation.messages[number].weight for number in turns]
            if all(weight is None for weight in weights):
                detail = "no assistant turn has a weight, which tokenizer.train_on=marked requires"
                raise BadRecordError(BadReason.NOTHING_TRAINED, detail)
            return [number for number, weight in zip(turns, weights, strict=True) if weight]
        if self._config.train_on == "last_turn":
            turns = turns[-1:]
        # A weight of 0 in the record excludes a turn; a weight of 1 changes nothing for turns that are trained anyway.
        return [number for number in turns if conversation.messages[number].weight != 0]

    def _added_span(self, chat: RenderedChat, turn: int) -> Span:
        before, after = chat.prompt(turn), chat.upto(turn)
        if not after.startswith(before) or not chat.whole.startswith(after):
            detail = f"it writes turn {turn + 1} differently once later turns follow; use tokenizer.mask=auto"
            raise BadRecordError(BadReason.TEMPLATE_FAILED, f"the chat template failed: {detail}")
        return len(before), len(after)

    def _marked_sequences(self, chat: RenderedChat, trained: list[int], *, has_tags: bool) -> list[Rendered]:
        text, spans = chat.marked(len(chat.messages))
        config = self._config
        messages = chat.conversation.messages
        roles = [message.role for message in messages]
        every = len(trained) == roles.count("assistant")
        plain = every and config.train_reasoning and config.train_tool_calls and config.train_end_of_turn
        # A template may move a later system prompt ahead of other turns.
        is_usual = {"system", "developer"}.isdisjoint(roles[1:]) and ("assistant", "assistant") not in pairwise(roles)
        is_usual &= not any(message.reasoning or "</think>" in message.text for message in messages)
        has_end = bool(spans) and self._has_end(text, *spans[-1])
        if plain and not self._has_weights and is_usual and has_end and not has_tags and self._keeps_turns:
            return [Rendered(text, spans)]
        return self._sequences_of_turns(chat, trained, lambda turn: self._marked_turn(chat, turn))

    @cached_property
    def _keeps_turns(self) -> bool:
        """True if a turn without reasoning is marked and written alike at the end of a conversation and inside it."""
        called = Message("assistant", "", tool_calls=_CALL)
        result = Message("tool", "c", tool_call_id=_CALL[0].id, name="f")
        probes = [
            Conversation((_ASK, _ANSWER, _ASK, _ANSWER), ""),
            Conversation((_ASK, called, result, _ANSWER, _ASK, _ANSWER), "", tools=_TOOLS),
        ]
        for probe in probes:
            chat = RenderedChat(self._template, probe, FORMS[0], {})
            turns = [number for number, turn in enumerate(probe.messages[:-1]) if turn.role == "assistant"]
            try:
                whole, marks = chat.marked(len(probe.messages))
                alone = [chat.marked(number + 1) for number in turns]
            except BadRecordError:
                continue
            for text, spans in alone:
                if not spans or spans != marks[: len(spans)] or not whole.startswith(text[: spans[-1][1]]):
                    return False
        return True

    def _marked_turn(self, chat: RenderedChat, turn: int) -> list[Span]:
        """Return the marked spans of one turn in the text of the conversation up to and including it."""
        text, spans = chat.marked(turn + 1)
        before = [number for number in range(turn) if chat.messages[number]["role"] == "assistant"]
        num_before = len(chat.marked(before[-1] + 1)[1]) if before else 0
        if turn and turn - 1 in before and not text.startswith(chat.prompt(turn)):
            chat.begin_as_served(turn)
        moved = len(chat.served(turn)) - len(text)
        return [(start + moved, end + moved) for start, end in spans[num_before:]]

    def _served_turn(self, chat: RenderedChat, turn: int) -> Span:
        """Return the span of one turn, including its end of turn, in the text as it is served."""
        text = chat.upto(turn)
        start = self._start_of_stock_turn(chat, turn) if self.rule == "stock" else None
        if start is None:
            prompt = next((prompt for prompt in chat.prompts(turn) if text.startswith(prompt)), None)
            start = len(prompt) if prompt is not None else chat.begin_as_served(turn)
            start = chat.begin_with_empty_reasoning(turn) if start is None else start
            if start is None:
                shown = chat.prompt(turn)[-24:]
                detail = f"turn {turn + 1} does not begin with the chat template's generation prompt (which ends in "
                detail += f"{shown!r}), so a served model would not generate this text; set another template with "
                detail += "tokenizer.chat_template"
                raise BadRecordError(BadReason.NOT_AS_SERVED, detail)
            text = chat.served(turn)
        end = len(text.rstrip())
        start += next((len(header) for header in self._stock.skips if text.startswith(header, start)), 0)
        return start, end

    def _start_of_stock_turn(self, chat: RenderedChat, turn: int) -> int | None:
        text = chat.upto(turn)
        for prompt in (chat.prompt(turn), chat.bare_prompt(turn)):
            start = self._stock.start(prompt)
            if start is not None and text.startswith(prompt[:start]):
                return start
        # The template continues the previous turn, as after a tool result: the turn is the text that it adds.
        before = chat.upto(turn - 1)
        shared = shared_length(before, text)
        return shared if self._core_end(before, shared, len(before)) == shared else None

    def _sequences_of_turns(
        self, chat: RenderedChat, trained: list[int], spans_of: Callable[[int], list[Span]]
    ) -> list[Rendered]:
        """Put turns, last first, into the fewest sequences in which each turn is written as it is served."""
        text, found, in_all = chat.whole, [], 0
        spans: list[Span] = []
        weights: list[int] = []
        num_turns: int | None = None
        # The text starts like the conversation up to this turn.
        shown_at = len(chat.messages) - 1
        for turn in reversed(trained):
            turn_spans = spans_of(turn)
            if turn_spans and self._config.train_end_of_turn:
                turn_spans = self._with_end(chat, turn, turn_spans)
            own = chat.served(turn)
            if turn == len(chat.messages) - 1 and turn in chat.added_ends:
                text = own
            if missing := unwritten_reasoning(own, turn, chat.conversation.messages[turn]):
                raise not_written(missing)
            turn_spans = self._switched(chat, turn, turn_spans)
            turn_spans, turn_weights = self._weighed(own, chat, turn, turn_spans)
            if not turn_spans:
                continue
            placed = self._placed(own, turn_spans, text)
            if placed is None and self._config.history == "kept":
                text, placed, moved = self._kept(chat, turn, turn_spans, text, shown_at)
                spans = [(start + moved, end + moved) for start, end in spans]
                shown_at = turn
            elif placed is None:
                if spans:
                    found.append(Rendered(text, spans, weights, num_turns))
                text, spans, weights, placed, num_turns = own, [], [], turn_spans, turn + 1
                in_all += len(own)
                if in_all > _MAX_IN_ALL:
                    detail = f"its {len(trained):,} trained turns have more than {_MAX_IN_ALL:,} characters: the chat "
                    detail += "template writes each differently once others follow; set tokenizer.history=kept or "
                    detail += "tokenizer.train_on=last_turn, or divide the record"
                    raise BadRecordError(BadReason.TEMPLATE_FAILED, detail)
            spans, weights = placed + spans, turn_weights[: len(placed)] + weights
        if spans:
            found.append(Rendered(text, spans, weights, num_turns))
        return found[::-1]

    def _placed(self, own: str, spans: list[Span], text: str) -> list[Span] | None:
        """Return a turn's spans in a longer text; None if the turn is written differently there."""
        if text is own or text.startswith(own):
            return spans
        if text.startswith(shown := own.rstrip()):  # white space that the template writes only after the last turn
            return [(start, min(end, len(shown))) for start, end in spans if start < len(shown)]
        *others, (start, end) = spans
        # The end of the last turn may differ: some templates close the conversation after it.
        core = self._core_end(own, start, end)
        if not text.startswith(own[:core]):
            return None
        ends = self._special.match(own, core, end), self._special.match(text, core)
        if ends[0] is None and ends[1] is None:
            return [*others, (start, core)]
        known = (*self._stock.ends, ends[0].group() if ends[0] else "")
        return [*others, (start, ends[1].end())] if ends[1] and ends[1].group() in known else None

    def _kept(
        self, chat: RenderedChat, turn: int, spans: list[Span], text: str, shown_at: int
    ) -> tuple[str, list[Span], int]:
        """Replace the template's version of a turn in a longer text with the turn as it is generated.

        The start of `text` is the rendering up to the turn `shown_at`; `spans` refer to the text up to `turn`. Returns
        the new text, the spans in it, and the number of characters that the following text has moved.
        """
        own, shown = chat.served(turn), chat.upto(shown_at)
        end = self._special.search(shown, len(shown) - chat.shared_after(turn, shown_at))
        written = own.rstrip()
        if end is None or not written.endswith(end.group()) or not text.startswith(shown[: end.end()]):
            detail = f"the chat template writes turn {turn + 1} differently once later turns follow"
            raise BadRecordError(BadReason.NOT_AS_SERVED, f"{detail}; use tokenizer.history=as_served")
        spans = [(start, min(stop, len(written))) for start, stop in spans]
        return written + text[end.end() :], spans, len(written) - end.end()

    def _has_end(self, text: str, start: int, end: int) -> bool:
        written = text[start:end].rstrip()
        # An empty turn trains nothing.
        return not written or written.endswith(self._special_texts)

    def _with_end(self, chat: RenderedChat, turn: int, spans: list[Span]) -> list[Span]:
        """Return the spans of a turn including its end token, which is added if the template writes none."""
        own, message = chat.served(turn), chat.conversation.messages[turn]
        *others, (start, end) = spans
        if self._has_end(own, start, end):
            return spans
        stock = self._stock.last_ends or ("", "")
        token = self._config.end_of_last_turn or stock[bool(message.tool_calls)]
        following = own[end:].strip()
        if token and following.startswith(token):
            return [*others, (start, own.index(token, end) + len(token))]
        if following or not token:
            written = self._special.match(following)
            example = written.group() if written else self._template.end_of_sequence
            detail = f"turn {turn + 1} is trained without an end token, so the model would not learn to stop; "
            setting = f"tokenizer.end_of_last_turn=\"'{example}'\"" if example else "tokenizer.end_of_last_turn"
            detail += f"set {setting}, or set "
            raise BadRecordError(BadReason.NO_END, f"{detail}tokenizer.train_end_of_turn=false")
        chat.added_ends[turn] = token
        return [*others, (start, len(chat.served(turn)))]

    def _switched(self, chat: RenderedChat, turn: int, spans: list[Span]) -> list[Span]:
        """Return a turn's spans without the parts that the settings leave untrained."""
        if not spans:  # a template with marks may leave a turn without spans
            return []
        config, message, text = self._config, chat.conversation.messages[turn], chat.served(turn)
        left_out: list[Span] = []
        if not config.train_reasoning and (message.reasoning or "</think>" in message.text):
            bare = replace(message.with_texts(partial(_INLINE_REASONING.sub, "")), reasoning="")
            left_out.append(_part_before(text, chat.served(turn, bare), spans[0][0]))
        if not config.train_tool_calls and message.tool_calls:
            bare = replace(message, tool_calls=(), content=message.content or "")
            left_out.append(self._difference(text, chat.served(turn, bare)))
        if not config.train_end_of_turn:
            start, end = spans[-1]
            core = self._core_end(text, start, end)
            if message.tool_calls:
                # The delimiters of a call may also be special tokens: only the last token ends the turn.
                core = max((match.start() for match in self._special.finditer(text, core, end)), default=end)
            else:
                # White space and other special tokens before the end token belong to the answer.
                found = self._special.finditer(text, core, end)
                core = next((match.start() for match in found if match.group() in self.end_tokens), core)
            left_out.append((core, end))
        return _without(spans, left_out)

    def _weighed(self, text: str, chat: RenderedChat, turn: int, spans: list[Span]) -> tuple[list[Span], list[int]]:
        """Divide a turn's spans at the parts with their own weights; return the spans and their weights."""
        message = chat.conversation.messages[turn]
        if not self._has_weights:
            return spans, []
        own = HUNDREDTHS if message.weight is None else message.weight
        if not message.part_weights or not spans:
            return spans, [own] * len(spans)
        content, (first, *_), (*_, last) = message.text.strip(), spans[0], spans[-1]
        at = text.find(content, first, last)
        if at < 0 or text.find(content, at + 1, last) >= 0:
            detail = f"the chat template does not write the parts of turn {turn + 1}, which have weights, exactly once"
            raise BadRecordError(BadReason.BAD_WEIGHT, f"{detail} one after the other")
        pieces: list[Span] = []
        weights: list[int] = []
        # White space around the whole text may be left out.
        unwritten = len(message.text) - len(message.text.lstrip())
        ends = accumulate(map(len, message.texts), initial=0)
        edges = [first, *(at + min(max(end - unwritten, 0), len(content)) for end in ends), last]
        for (start, end), weight in zip(pairwise(edges), (own, *message.part_weights, own), strict=True):
            inside = [(max(start, low), min(end, high)) for low, high in spans if max(start, low) < min(end, high)]
            pieces += inside
            weights += [own if weight is None else weight] * len(inside)
        return pieces, weights

    def _core_end(self, text: str, start: int, end: int) -> int:
        """Return the start of the special tokens and white space at the end of `text[start:end]`."""
        while True:
            while end > start and text[end - 1].isspace():
                end -= 1
            token = next((token for token in self._special_texts if text.endswith(token, start, end)), None)
            if token is None:
                return end
            end -= len(token)

    def _difference(self, text: str, other: str) -> Span:
        """Return the span of `text` that `other` lacks."""
        start = shared_length(text, other)
        end = len(text) - shared_length(text[start:][::-1], other[start:][::-1])
        # "<call>..</call><|end|>" without the call begins with "<", too: the span may as well start earlier.
        shift = 0
        while shift < start and text[start - shift - 1] == text[end - shift - 1]:
            shift += 1
            if self._special.match(text, end - shift):
                return start - shift, end - shift
        return start, end

    def _keeping_switch(self) -> dict[str, Any]:
        """Return the variable that makes the template keep earlier reasoning; empty if it always or never keeps it.

        If empty, turns are written into the rendering as they are generated (`_kept`).
        """
        reasoned = replace(_ANSWER, reasoning="earlierreasoning")
        probe = Conversation((_ASK, reasoned, _ASK, reasoned), "")
        try:
            form = self._forms.find(probe).form
        except BadRecordError:
            return {}
        for switch in ({}, *({name: value} for name, value in _KEEPING_SWITCHES if name in self._template.reads)):
            if RenderedChat(self._template, probe, form, switch).whole.count("earlierreasoning") == 2:
                return switch
        return {}

    @cached_property
    def end_tokens(self) -> tuple[str, ...]:
        """Special tokens that end an assistant turn, after an answer or a call, or else `StockRule.ends`."""
        probes = [
            Conversation((_ASK, _ANSWER), ""),
            Conversation((_ASK, Message("assistant", None, tool_calls=_CALL)), "", tools=_TOOLS),
        ]
        found: dict[str, None] = {}
        for probe in probes:
            try:
                text = RenderedChat(self._template, probe, self._forms.find(probe).form, self._keeping).whole
            except BadRecordError:
                continue
            tokens = self._special.findall(text, self._core_end(text, 0, len(text)))
            found |= dict.fromkeys(tokens if probe.messages[-1].content else tokens[-1:])
        given = [self._config.end_of_last_turn] if self._config.end_of_last_turn else []
        return tuple(dict.fromkeys([*(found or self._stock.ends), *given]))


def _part_before(text: str, other: str, start: int) -> Span:
    """Return the span from `start` that `other` lacks; the text after the span may begin like the span."""
    back = shared_length(text[start:][::-1], other[start:][::-1])
    end = len(text) - back
    return start + shared_length(text[start:end], other[start : len(other) - back]), end


def _without(spans: list[Span], left_out: list[Span]) -> list[Span]:
    for first, last in left_out:
        spans = [
            piece
            for start, end in spans
            for piece in ((start, min(end, first)), (max(start, last), end))
            if piece[0] < piece[1]
        ]
    return spans
