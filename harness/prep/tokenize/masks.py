"""Find the text of a conversation that the model has to generate.

A `Masker` renders a conversation by its chat template and returns one `Rendered` for each sequence to train on. Three
rules, in this order of preference:

- `marks`: what the template writes inside `{% generation %}`;
- `stock`: for the published template of a model family, known by its hash: what follows the header of each turn
  (`harness.prep.tokenize.stock`);
- `served`: what each turn adds to the generation prompt that a server renders for it. A turn whose text does not have
  the end of that prompt is refused: the model would never generate it.

Templates disagree on how they take a turn (text or parts, arguments as text or object), and drop what they do not
know. Before a shape of conversation is rendered for the first time, the same shape is rendered with unique words in
place of its texts, in each form, until every word is written; if none does, the conversation is refused by name. Every
rendering is then checked against the texts themselves (`harness.prep.tokenize.written`).
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import pairwise, product
from typing import TYPE_CHECKING, Any

from harness.errors import ConfigError
from harness.prep.chat import BadReason, BadRecordError, Conversation, Message, ToolCall
from harness.prep.tokenize.config import TokenizerConfig
from harness.prep.tokenize.forms import FORMS, REASONING_KEYS, Form, pieces_of, shape_of, with_unique_words
from harness.prep.tokenize.offsets import Span
from harness.prep.tokenize.stock import StockRule, stock_rule
from harness.prep.tokenize.written import unwritten_reasoning, unwritten_text

if TYPE_CHECKING:
    from harness.prep.tokenize.rendering import Template

_INLINE_REASONING = re.compile(r"<think>.*?</think>\s*", re.DOTALL)
# Variables by which templates switch a model's thinking on and off, and those that keep earlier reasoning.
_THINKING_SWITCHES = ("enable_thinking", "thinking")
_KEEPING_SWITCHES: tuple[tuple[str, bool], ...] = (
    ("preserve_thinking", True),
    ("keep_past_thinking", True),
    ("clear_thinking", False),
    ("truncate_history_thinking", False),
    ("drop_thinking", False),
)
# What a conversation is still one without, and the fields of records that hold it.
_OPTIONAL = {"tools": ("tools",), "reasoning": REASONING_KEYS}
_MAX_SHAPES = 8192
# A word of `with_unique_words`; after \" the template has written JSON text as a JSON string of that text.
_WORD = re.compile(r'(\\")?(zq\d+wz)')
# Conversations that templates are tried with.
_ASK, _ANSWER = Message("user", "a"), Message("assistant", "b")
_OTHER_ANSWER = Message("assistant", "zq0wz")
_CALL = (ToolCall("f", {"a": "b"}, id="call00001"),)
_TOOLS = ({"type": "function", "function": {"name": "f", "description": "d", "parameters": {}}},)

Turns = Sequence[Mapping[str, Any]]


@dataclass(frozen=True, slots=True)
class Rendered:
    """One sequence to train on.

    Attributes:
        text: as the chat template writes it.
        spans: first and past-the-end character of each trained part, in order.
    """

    text: str
    spans: list[Span]


@dataclass(frozen=True, slots=True)
class _Known:
    """The form in which a template takes the conversations of one shape, and what it makes of them.

    Attributes:
        form: in which it writes all of them.
        is_ordered: it writes the texts and arguments in the order of the turns.
        has_tags: their contents have marks that the template looks for.
    """

    form: Form
    is_ordered: bool = False
    has_tags: bool = False


class Masker:
    """Renders conversations and finds their trained spans.

    Args:
        template: chat template.
        config: mask rule and what to train.
        special: texts of the tokenizer's special tokens.
        where: name of the template, for errors.

    Attributes:
        rule: `marks`, `stock`, `served`, `assistant_turns` or `all`.
        why: reason for the rule, in words.

    Raises:
        ConfigError: the template does not fit the rule that the settings name.
    """

    def __init__(self, template: Template, config: TokenizerConfig, special: Sequence[str], *, where: str) -> None:
        self._template, self._config = template, config
        self._special = re.compile("|".join(map(re.escape, special))) if special else re.compile(r"(?!)")
        self._special_texts = tuple(special)
        self._forms: dict[Any, _Known | BadRecordError] = {}
        self._stock: StockRule | None = stock_rule(template.text)
        self.rule, self.why = self._choose(config.mask, where)
        self._keeping = self._keeping_switch(where) if config.history == "kept" else {}

    def _choose(self, mask: str, where: str) -> tuple[str, str]:
        if mask in ("assistant_turns", "all"):
            return mask, f"tokenizer.mask={mask}"
        if self._template.is_marked:
            return "marks", "the chat template marks what the model writes with {% generation %}"
        if mask == "generation":
            what = "the chat template has no {% generation %} that marks the assistant's tokens"
            fix = "set tokenizer.mask=auto, or name a template with the tag with tokenizer.chat_template"
            raise ConfigError(what, where=where, fix=fix)
        if self._stock is not None and self._stock.has_own_spans:
            return "stock", f"the chat template is the published one of {self._stock.name}"
        why = "each turn is trained from the generation prompt that a server renders for it"
        if self._stock is not None:
            return "served", f"the chat template is the published one of {self._stock.name}: {why}"
        return "served", f"the chat template has no marks and is not a known one: {why}"

    def sequences(self, conversation: Conversation) -> list[Rendered]:
        """Return the sequences of a chat, in the order of their trained turns.

        Raises:
            BadRecordError: it cannot be trained on with this template.
        """
        known = self._known(conversation)
        chat = _Chat(self._template, conversation, known.form, self._keeping)
        if self.rule == "all":
            if (untrained := _first_untrained(conversation)) is not None:
                detail = f"turn {untrained + 1} is not to be trained (a weight of 0, or a part of a prompt), and "
                detail += "tokenizer.mask=all trains every token; tokenizer.mask=auto leaves it out"
                raise BadRecordError(BadReason.BAD_WEIGHT, detail)
            text = chat.whole
            self._check_written(chat, known)
            return [Rendered(text, [(0, len(text))])]
        trained = self._trained_turns(conversation)
        if not trained:
            raise BadRecordError(BadReason.NOTHING_TRAINED, "no turn of it is marked as trained")
        if self.rule == "assistant_turns":
            found = [Rendered(chat.whole, [self._added_span(chat, turn) for turn in trained])]
        elif self.rule == "marks":
            found = self._marked_sequences(chat, trained, has_tags=known.has_tags)
        else:
            found = self._served_sequences(chat, trained)
        self._check_written(chat, known)
        return found

    def _check_written(self, chat: _Chat, known: _Known) -> None:
        messages = chat.conversation.messages
        if missing := unwritten_text(chat.whole, messages, chat.upto, is_ordered=known.is_ordered):
            raise self._not_written(missing)

    def _not_written(self, missing: str, ignorable: Sequence[str] = ()) -> BadRecordError:
        detail = f"the chat template does not write {missing}; name one that does with tokenizer.chat_template"
        # One that has a place for each of them leaves this out for another reason, as qwen3 may.
        if not all(field in self._template.text for field in ("tools", "tool_calls", "reasoning_content")):
            detail += " (qwen3 writes tools, calls and reasoning)"
        elif missing.endswith("(developer)"):
            detail += " (the built-in qwen3 writes it as a system prompt)"
        if ignorable:
            detail += f", or leave it out with source.ignore_fields=[{','.join(ignorable)}]"
        return BadRecordError(BadReason.NOT_WRITTEN, detail)

    def _trained_turns(self, conversation: Conversation) -> list[int]:
        turns = [number for number, message in enumerate(conversation.messages) if message.role == "assistant"]
        if self._config.train_on == "marked":
            weights = [conversation.messages[number].trained for number in turns]
            if all(weight is None for weight in weights):
                detail = "no assistant turn has a weight, and tokenizer.train_on=marked trains those that have"
                raise BadRecordError(BadReason.NOTHING_TRAINED, detail)
            return [number for number, weight in zip(turns, weights, strict=True) if weight]
        if self._config.train_on == "last_turn":
            turns = turns[-1:]
        # A weight of 0 is the record's own word; a weight of 1 adds nothing to turns that are trained anyway.
        return [number for number in turns if conversation.messages[number].trained is not False]

    # ---- forms -------------------------------------------------------------------------------------------------

    def _known(self, conversation: Conversation) -> _Known:
        """Return how the template takes conversations of this shape; raise BadRecordError if it does not."""
        tags = self._template.tags
        # A template with marks is used as it is.
        is_as_given = self.rule in ("marks", "assistant_turns", "all") and _is_plain(conversation, tags)
        shape: Any = (
            tuple((turn.role, bool(turn.text.strip())) for turn in conversation.messages)
            if is_as_given
            else shape_of(conversation, tags)
        )
        known = self._forms.get(shape)
        if known is None:
            known = self._probe(conversation, FORMS[:1] if is_as_given else FORMS)
            if is_as_given and isinstance(known, BadRecordError):
                known = _Known(FORMS[0])
            if len(self._forms) >= _MAX_SHAPES:
                self._forms.clear()
            self._forms[shape] = known
        if isinstance(known, BadRecordError):
            raise BadRecordError(known.reason, known.detail)
        return known

    def _probe(self, conversation: Conversation, forms: Sequence[Form]) -> _Known | BadRecordError:
        for name in conversation.template_kwargs:
            if name not in self._template.reads:
                return BadRecordError(
                    BadReason.NOT_WRITTEN,
                    f"the chat template does not read `{name}` of chat_template_kwargs; "
                    "source.ignore_fields=[chat_template_kwargs] leaves it out",
                )
        first: BadRecordError | None = None
        probe, words = with_unique_words(conversation, self._template.tags)
        tried = set()
        has_tags = _has_tags(conversation, self._template.tags)
        for form in forms:
            turns = [form.turn(message) for message in probe.messages]
            if (key := json.dumps(turns)) in tried:
                continue
            tried.add(key)
            chat = _Chat(self._template, probe, form, {})
            refused = self._try_form(chat, words)
            if refused is None:
                is_ordered = not unwritten_text(chat.whole, probe.messages, chat.upto, is_ordered=True)
                return _Known(form, is_ordered=is_ordered, has_tags=has_tags)
            # What a template leaves out is more to the point than its failure on another form.
            if first is None or (first.reason == BadReason.TEMPLATE_FAILED != refused.reason):
                first = refused
        assert first is not None
        return first

    def _try_form(self, chat: _Chat, words: list[tuple[int | None, str, str]]) -> BadRecordError | None:
        """Return why a template cannot take a conversation in this form; None if it writes every word of it."""
        try:
            text = chat.whole
            if any(message["content"] is None for message in chat.messages) and "None" in text:
                empty = _Chat(self._template, chat.conversation, Form("text", chat.form.arguments), {}).whole
                if text.count("None") > empty.count("None"):
                    raise ValueError("it writes None for a turn without content")
            if "{'type': 'text'" in text:
                raise ValueError("it writes a list of text parts as Python spells it")
            written, answers = _words_in(text), dict[int, set[str]]()
            for number, word, name in words:
                if word in written:
                    continue
                message = chat.messages[number] if number is not None else None
                # Templates may leave the reasoning of earlier turns out, but not that of the turn being generated.
                if message is not None and message["role"] == "assistant" and number is not None:
                    if number not in answers:
                        answers[number] = _words_in(chat.upto(number))
                    if word in answers[number]:
                        continue
                turn = "" if message is None or number is None else f" of turn {number + 1} ({message['role']})"
                return self._not_written(f"the {name}{turn}", _OPTIONAL.get(name, ()))
        except Exception as error:  # a template is a user's program and can raise anything
            return _failure(error)
        return None

    # ---- rules -------------------------------------------------------------------------------------------------

    def _added_span(self, chat: _Chat, turn: int) -> Span:
        before, after = chat.prompt(turn), chat.upto(turn)
        if not after.startswith(before) or not chat.whole.startswith(after):
            detail = f"it writes turn {turn + 1} differently once later turns follow; use tokenizer.mask=auto"
            raise BadRecordError(BadReason.TEMPLATE_FAILED, f"the chat template failed: {detail}")
        return len(before), len(after)

    def _marked_sequences(self, chat: _Chat, trained: list[int], *, has_tags: bool) -> list[Rendered]:
        text, spans = chat.marked(len(chat.messages))
        config = self._config
        every = len(trained) == chat.num_assistant_turns
        plain = every and config.train_reasoning and config.train_tool_calls and config.train_end_of_turn
        is_usual = not (chat.has_reasoning or chat.has_late_system or chat.has_answers_in_a_row)
        if plain and is_usual and not has_tags and self._keeps_turns:
            return [Rendered(text, spans)]
        return self._sequences_of_turns(chat, trained, lambda turn: self._marked_turn(chat, turn))

    @cached_property
    def _keeps_turns(self) -> bool:
        """A turn without reasoning is marked and written alike at the end of a conversation and inside it."""
        called = Message("assistant", "", tool_calls=_CALL)
        result = Message("tool", "c", tool_call_id=_CALL[0].id, name="f")
        probes = [
            Conversation((_ASK, _ANSWER, _ASK, _ANSWER), ""),
            Conversation((_ASK, called, result, _ANSWER, _ASK, _ANSWER), "", tools=_TOOLS),
        ]
        for probe in probes:
            chat = _Chat(self._template, probe, FORMS[0], {})
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

    def _served_sequences(self, chat: _Chat, trained: list[int]) -> list[Rendered]:
        return self._sequences_of_turns(chat, trained, lambda turn: [self._served_turn(chat, turn)])

    def _marked_turn(self, chat: _Chat, turn: int) -> list[Span]:
        """Return the marked spans of one turn in the text of the conversation up to and with it."""
        text, spans = chat.marked(turn + 1)
        before = [number for number in range(turn) if chat.messages[number]["role"] == "assistant"]
        num_before = len(chat.marked(before[-1] + 1)[1]) if before else 0
        if turn and turn - 1 in before and not text.startswith(chat.prompt(turn)):
            chat.begin_as_served(turn, len)
        moved = len(chat.served(turn)) - len(text)
        return [(start + moved, end + moved) for start, end in spans[num_before:]]

    def _served_turn(self, chat: _Chat, turn: int) -> Span:
        """Return the span of one turn in the text as it is served, including its end of turn."""
        text = chat.upto(turn)
        start = self._start_of_stock_turn(chat, turn) if self.rule == "stock" else None
        if start is None:
            prompt = next((prompt for prompt in chat.prompts(turn) if text.startswith(prompt)), None)
            start = len(prompt) if prompt is not None else chat.begin_as_served(turn, self._trained_from)
            if start is None:
                shown = chat.prompt(turn)[-24:]
                raise BadRecordError(
                    BadReason.NOT_AS_SERVED,
                    f"turn {turn + 1} does not begin with the chat template's generation prompt (which ends in "
                    f"{shown!r}), so a model that is served with it would not generate this text",
                )
            text = chat.served(turn)
        end = len(text.rstrip())
        if self._stock is not None:
            start += next((len(header) for header in self._stock.skips if text.startswith(header, start)), 0)
            if self._stock.untrained_end and text.endswith(self._stock.untrained_end, 0, end):
                end -= len(self._stock.untrained_end)
        return start, end

    def _trained_from(self, prompt: str) -> int:
        """Return the character of a prompt from which on a turn is trained."""
        start = self._stock.start(prompt) if self._stock is not None else None
        return len(prompt) if start is None else start

    def _start_of_stock_turn(self, chat: _Chat, turn: int) -> int | None:
        assert self._stock is not None
        text = chat.upto(turn)
        for prompt in (chat.prompt(turn), chat.bare_prompt(turn)):
            start = self._stock.start(prompt)
            if start is not None and text.startswith(prompt[:start]):
                return start
        # The template continues the turn before, as after the result of a tool: what is new is what it adds.
        before = chat.upto(turn - 1) if turn else ""
        shared = _shared_length(before, text)
        return shared if self._core_end(before, shared, len(before)) == shared else None

    # ---- sequences ---------------------------------------------------------------------------------------------

    def _sequences_of_turns(
        self, chat: _Chat, trained: list[int], spans_of: Callable[[int], list[Span]]
    ) -> list[Rendered]:
        """Put turns into as few sequences as show each of them as it is served, the last turn first."""
        text, found = chat.whole, []
        spans: list[Span] = []
        for turn in reversed(trained):
            turn_spans = spans_of(turn)
            own = chat.served(turn)
            if missing := unwritten_reasoning(own, turn, chat.conversation.messages[turn]):
                raise self._not_written(missing)
            turn_spans = self._switched(chat, turn, turn_spans)
            if not turn_spans:
                continue
            placed = self._placed(own, turn_spans, text)
            if placed is None:
                if self._config.history == "kept":
                    detail = f"the chat template writes turn {turn + 1} differently once later turns follow"
                    raise BadRecordError(BadReason.NOT_AS_SERVED, f"{detail}; use tokenizer.history=as_served")
                if spans:
                    found.append(Rendered(text, spans))
                text, spans, placed = own, [], turn_spans
            spans = placed + spans
        if spans:
            found.append(Rendered(text, spans))
        return found[::-1]

    def _placed(self, own: str, spans: list[Span], text: str) -> list[Span] | None:
        """Return a turn's spans in a longer text; None if the turn is written differently there."""
        if text is own or text.startswith(own.rstrip()):
            return self._with_stock_end(spans, text)
        *others, (start, end) = spans
        # The end of the last turn may differ: some templates close the conversation after it.
        core = self._core_end(own, start, end)
        if not text.startswith(own[:core]):
            return None
        ends = self._special.match(own, core, end), self._special.match(text, core)
        if ends[0] is None and ends[1] is None:
            return [*others, (start, core)]
        stops = self._stock.ends if self._stock is not None else ()
        if ends[1] is not None and (ends[1].group() in stops or (ends[0] and ends[0].group() == ends[1].group())):
            return [*others, (start, ends[1].end())]
        return None

    def _with_stock_end(self, spans: list[Span], text: str) -> list[Span]:
        """Add the end of turn of templates that write none: the header of the next turn."""
        *others, (start, end) = spans
        if self._stock is None or not self._stock.ends or not self._config.train_end_of_turn:
            return spans
        following = next((stop for stop in self._stock.ends if text.startswith(stop, end)), "")
        return [*others, (start, end + len(following))]

    def _switched(self, chat: _Chat, turn: int, spans: list[Span]) -> list[Span]:
        """Take out of a turn's spans what the settings leave untrained."""
        config, message, text = self._config, chat.conversation.messages[turn], chat.served(turn)
        left_out: list[Span] = []
        if not config.train_reasoning and (message.reasoning or "</think>" in message.text):
            bare = replace(message, reasoning="", content=_without_reasoning(message.content))
            left_out.append(_part_before(text, chat.served_with(turn, bare), spans[0][0]))
        if not config.train_tool_calls and message.tool_calls:
            bare = replace(message, tool_calls=(), content=message.content or "")
            left_out.append(self._difference(text, chat.served_with(turn, bare)))
        if not config.train_end_of_turn:
            start, end = spans[-1]
            core = self._core_end(text, start, end)
            if message.tool_calls:
                # The delimiters of a call may be special tokens too: only the last token ends the turn.
                core = max((match.start() for match in self._special.finditer(text, core, end)), default=end)
            else:
                # White space and other special tokens before it are the answer's own.
                found = self._special.finditer(text, core, end)
                core = next((match.start() for match in found if match.group() in self.end_tokens), core)
            left_out.append((core, end))
        return _without(spans, left_out)

    def _core_end(self, text: str, start: int, end: int) -> int:
        """Return where the special tokens and white space at the end of `text[start:end]` begin."""
        while True:
            while end > start and text[end - 1].isspace():
                end -= 1
            token = next((token for token in self._special_texts if text.endswith(token, start, end)), None)
            if token is None:
                return end
            end -= len(token)

    def _difference(self, text: str, other: str) -> Span:
        """Return the span of `text` that `other` lacks."""
        start = _shared_length(text, other)
        end = len(text) - _shared_length(text[start:][::-1], other[start:][::-1])
        # "<call>..</call><|end|>" without the call begins with "<", too: the span may as well begin one earlier.
        shift = 0
        while shift < start and text[start - shift - 1] == text[end - shift - 1]:
            shift += 1
            if self._special.match(text, end - shift):
                return start - shift, end - shift
        return start, end

    # ---- facts -------------------------------------------------------------------------------------------------

    def _keeping_switch(self, where: str) -> dict[str, Any]:
        """Return the variable that makes the template keep earlier reasoning; nothing if it keeps it anyway."""
        reasoned = replace(_ANSWER, reasoning="earlierreasoning")
        probe = Conversation((_ASK, reasoned, replace(_ASK, content="c"), replace(reasoned, content="d")), "")
        try:
            form = self._known(probe).form
        except BadRecordError:
            return {}
        for switch in ({}, *({name: value} for name, value in _KEEPING_SWITCHES if name in self._template.reads)):
            if _Chat(self._template, probe, form, switch).whole.count("earlierreasoning") == 2:
                return switch
        raise ConfigError(
            "the chat template leaves out the reasoning of earlier turns and has no switch that keeps it",
            where=where,
            fix="set tokenizer.history=as_served",
        )

    @cached_property
    def end_tokens(self) -> tuple[str, ...]:
        """Special tokens that end a turn of the assistant: those that it writes after an answer and after a call.

        A template that writes none may rely on the header of the next turn (`StockRule.ends`).
        """
        return self._written_ends or (self._stock.ends if self._stock else ())

    @cached_property
    def _written_ends(self) -> tuple[str, ...]:
        probes = [
            Conversation((_ASK, _ANSWER), ""),
            Conversation((_ASK, Message("assistant", None, tool_calls=_CALL)), "", tools=_TOOLS),
        ]
        found: dict[str, None] = {}
        for probe in probes:
            try:
                text = _Chat(self._template, probe, self._known(probe).form, self._keeping).whole
            except BadRecordError:
                continue
            tokens = self._special.findall(text, self._core_end(text, 0, len(text)))
            found |= dict.fromkeys(tokens if probe.messages[-1].content else tokens[-1:])
        return tuple(found)

    def warning(self) -> str:
        """Return what a user of this template should know; empty if there is nothing."""
        if self._written_ends or self.rule == "all":
            return ""
        return (
            "the chat template ends no conversation with a special token, so the last turn does not teach the model to "
            "stop"
        )


class _Chat:
    """One conversation in one form; renders each of its beginnings once."""

    def __init__(
        self, template: Template, conversation: Conversation, form: Form, variables: Mapping[str, Any]
    ) -> None:
        self._template, self.conversation, self.form = template, conversation, form
        self._variables = {**variables, **conversation.template_kwargs}
        self.messages: list[dict[str, Any]] = [form.turn(message) for message in conversation.messages]
        self._texts: dict[int, str] = {}
        self._prompts: dict[int, str] = {}
        self._marked: dict[int, tuple[str, list[Span]]] = {}
        # Of turns that begin as they are served: that beginning, and the length of what it replaces.
        self._beginnings: dict[int, tuple[str, int]] = {}

    @property
    def whole(self) -> str:
        return self.upto(len(self.messages) - 1)

    @property
    def num_assistant_turns(self) -> int:
        return sum(message.role == "assistant" for message in self.conversation.messages)

    @property
    def has_reasoning(self) -> bool:
        return any(message.reasoning or "</think>" in message.text for message in self.conversation.messages)

    @property
    def has_late_system(self) -> bool:
        """A system prompt follows other turns; templates may write it before them."""
        return any(message.role in ("system", "developer") for message in self.conversation.messages[1:])

    @property
    def has_answers_in_a_row(self) -> bool:
        roles = [message.role for message in self.conversation.messages]
        return ("assistant", "assistant") in pairwise(roles)

    def upto(self, turn: int) -> str:
        """Return the text of the conversation up to and with a turn."""
        if turn not in self._texts:
            self._texts[turn] = self._render(self.messages[: turn + 1])
        return self._texts[turn]

    def served(self, turn: int) -> str:
        """Return the text up to and with a turn, which a server has prompted for: `begin_as_served`, else `upto`."""
        return self._as_served(turn, self.upto(turn))

    def served_with(self, turn: int, message: Message) -> str:
        """Return `served` with another message in place of the turn."""
        return self._as_served(turn, self._with_last(turn, message))

    def _with_last(self, turn: int, message: Message) -> str:
        return self._render([*self.messages[:turn], self.form.turn(message)])

    def _as_served(self, turn: int, text: str) -> str:
        beginning, replaced = self._beginnings.get(turn, ("", 0))
        return beginning + text[replaced:]

    def begin_as_served(self, turn: int, trained_from: Callable[[str], int]) -> int | None:
        """Begin a turn with its prompt where the template writes earlier turns differently once the turn follows.

        For example, Qwen3 writes the empty reasoning of the last answer alone, also in the prompt of a second answer.

        Args:
            trained_from: returns the character of a prompt from which on a turn is trained.

        Returns:
            first character of the turn in `served`; None if its text does not have the end of any prompt.
        """
        before = self._render(self.messages[:turn])
        shared = _shared_length(self.upto(turn), self._with_last(turn, _OTHER_ANSWER))
        for prompt in self.prompts(turn):
            start = trained_from(prompt)
            header = prompt[len(before) : start] if prompt.startswith(before) else ""
            place = self.upto(turn).rfind(header, 0, shared) if header.strip() else -1
            if place >= 0:
                self._beginnings[turn] = prompt[:start], place + len(header)
                return start
        return None

    def prompt(self, turn: int) -> str:
        """Return the prompt from which a server generates a turn."""
        if turn not in self._prompts:
            try:
                self._prompts[turn] = self._render(self.messages[:turn], prompt=True)
            except BadRecordError as refused:
                if turn:
                    raise
                detail = "turn 1 is the assistant's, and the chat template has no prompt without a turn before it"
                detail += "; a weight of 0 leaves the turn untrained"
                raise BadRecordError(BadReason.NOT_AS_SERVED, detail) from refused
        return self._prompts[turn]

    def prompts(self, turn: int) -> Iterator[str]:
        """Yield the prompt of a turn as the record asks for it, then with thinking switched on and off."""
        yield self.prompt(turn)
        for name, value in product(_THINKING_SWITCHES, (True, False)):
            if name in self._template.reads:
                yield self._render(self.messages[:turn], prompt=True, **{name: value})

    def bare_prompt(self, turn: int) -> str:
        """Return the prompt of a turn as if earlier turns had not reasoned, nor spoken beside their tool calls."""
        bare = [
            replace(message, reasoning="", content="" if message.tool_calls else message.content)
            for message in self.conversation.messages[:turn]
        ]
        return self._render([self.form.turn(message) for message in bare], prompt=True)

    def marked(self, num_turns: int) -> tuple[str, list[Span]]:
        if num_turns not in self._marked:
            try:
                self._marked[num_turns] = self._template.render_marked(
                    self.messages[:num_turns], tools=self.conversation.tools, variables=self._variables
                )
            except Exception as error:
                raise _failure(error) from error
            self._texts[num_turns - 1] = self._marked[num_turns][0]
        return self._marked[num_turns]

    def _render(self, messages: Turns, *, prompt: bool = False, **variables: Any) -> str:
        try:
            return self._template.render(
                messages, tools=self.conversation.tools, variables={**self._variables, **variables}, prompt=prompt
            )
        except Exception as error:  # a template is a user's program and can raise anything
            raise _failure(error) from error


def _failure(error: Exception) -> BadRecordError:
    if isinstance(error, BadRecordError):
        return error
    return BadRecordError(BadReason.TEMPLATE_FAILED, f"the chat template failed: {type(error).__name__}: {error}")


def _words_in(text: str) -> set[str]:
    """Return the unique words of a rendering, without those that are written as JSON inside JSON."""
    found = _WORD.findall(text)
    return {word for _, word in found} - {word for quoted, word in found if quoted}


def _first_untrained(conversation: Conversation) -> int | None:
    return next((number for number, message in enumerate(conversation.messages) if message.trained is False), None)


def _is_plain(conversation: Conversation, tags: tuple[str, ...]) -> bool:
    """Return whether a conversation has nothing but roles and texts, no reasoning in these, and no template's tags."""
    if conversation.tools or conversation.template_kwargs:
        return False
    has_texts = all(
        type(turn.content) is str and not turn.reasoning and not turn.tool_calls for turn in conversation.messages
    )
    return has_texts and not _has_tags(conversation, tags)


def _has_tags(conversation: Conversation, tags: tuple[str, ...]) -> bool:
    return any(len(pieces_of(turn.text, tags)) > 1 for turn in conversation.messages)


def _without_reasoning(content: str | tuple[str, ...] | None) -> str | tuple[str, ...] | None:
    if isinstance(content, tuple):
        return tuple(_INLINE_REASONING.sub("", part) for part in content)
    return _INLINE_REASONING.sub("", content) if content else content


def _shared_length(first: str, second: str) -> int:
    """Return the number of characters with which both texts begin."""
    low, high = 0, min(len(first), len(second))
    while low < high:
        middle = (low + high + 1) // 2
        if first[low:middle] == second[low:middle]:
            low = middle
        else:
            high = middle - 1
    return low


def _part_before(text: str, other: str, start: int) -> Span:
    """Return the span from `start` on that `other` lacks, where what follows it may begin like it."""
    back = _shared_length(text[start:][::-1], other[start:][::-1])
    end = len(text) - back
    return start + _shared_length(text[start:end], other[start : len(other) - back]), end


def _without(spans: list[Span], left_out: list[Span]) -> list[Span]:
    for first, last in left_out:
        spans = [
            piece
            for start, end in spans
            for piece in ((start, min(end, first)), (max(start, last), end))
            if piece[0] < piece[1]
        ]
    return spans
