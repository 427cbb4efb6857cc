"""Renderings of one conversation in one form: in whole, up to each turn, and the generation prompts."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import product
from typing import TYPE_CHECKING, Any

from harness.prep.chat import BadReason, BadRecordError, Conversation, Message
from harness.prep.chat.records import part_for_template
from harness.prep.chat.turns import REASONING_FIELDS
from harness.prep.chat.values import json_or
from harness.prep.tokenize.offsets import Span

if TYPE_CHECKING:
    from harness.prep.tokenize.rendering import Template

# Variables that switch a model's thinking on and off in templates.
_THINKING_SWITCHES = ("enable_thinking", "thinking")
_OTHER_ANSWER = Message("assistant", "zq0wz")

# Maximum number of cached renderings of a conversation; one turn needs fewer.
_MAX_KEPT = 32

Turns = Sequence[Mapping[str, Any]]


@dataclass(frozen=True, slots=True)
class Form:
    """One way to pass conversations to a template.

    `content` is `given`, `text` (parts joined, no content as empty text), `null` (empty content of tool calls as null)
    or `parts`; `arguments` of tool calls are `given`, `object` or `text`.
    """

    content: str = "given"
    arguments: str = "given"

    def turn(self, message: Message) -> dict[str, Any]:
        turn = message.as_dict()
        if message.reasoning:
            turn |= dict.fromkeys(REASONING_FIELDS, message.reasoning)
        if self.content == "parts" or (self.content == "text" and message.media):
            turn["content"] = [part_for_template(part) for part in message.parts]
        elif self.content == "text":
            turn["content"] = message.text
        elif self.content == "null" and message.tool_calls and not message.text:
            turn["content"] = None
        if message.tool_calls and self.arguments != "given":
            convert = as_object if self.arguments == "object" else _as_text
            converted = (replace(call, arguments=convert(call.arguments)) for call in message.tool_calls)
            turn["tool_calls"] = [call.as_dict() for call in converted]
        return turn


FORMS = tuple(
    Form(content, arguments)
    for arguments, content in product(("given", "object", "text"), ("given", "text", "null", "parts"))
)


def as_object(arguments: str | Mapping[str, Any]) -> str | Mapping[str, Any]:
    decoded = json_or(arguments, None) if isinstance(arguments, str) else None
    return decoded if isinstance(decoded, dict) else arguments


def _as_text(arguments: str | Mapping[str, Any]) -> str:
    return arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)


class RenderedChat:
    """One conversation in one form, with cached renderings; `variables` are added to the record's own."""

    def __init__(
        self, template: Template, conversation: Conversation, form: Form, variables: Mapping[str, Any]
    ) -> None:
        self._template, self.conversation, self.form = template, conversation, form
        self._variables = {**variables, **conversation.template_kwargs}
        self.messages: list[dict[str, Any]] = [form.turn(message) for message in conversation.messages]
        # Renderings by kind and turn, least recently used first.
        self._kept: dict[tuple[str, int], Any] = {}
        # For the turn last started as it is served: its new start, and the length of the text replaced by it.
        self._beginnings: dict[int, tuple[str, int]] = {}
        # End tokens for turns that the template writes without one.
        self.added_ends: dict[int, str] = {}

    @property
    def whole(self) -> str:
        return self.upto(len(self.messages) - 1)

    def upto(self, turn: int) -> str:
        """Return the text of the conversation up to and including a turn."""
        return str(self._once("text", turn, lambda: self._render(self.messages[: turn + 1])))

    def _once(self, kind: str, turn: int, make: Callable[[], Any]) -> Any:
        """Return the result of `make`, cached for recent turns only, since each is as long as the conversation."""
        made = self._kept.pop((kind, turn), None)
        self._kept[kind, turn] = made = make() if made is None else made
        while len(self._kept) > _MAX_KEPT:
            del self._kept[next(iter(self._kept))]
        return made

    def _with(self, turn: int, message: Message, last: int) -> str:
        """Return the text up to turn `last` with a message in place of another turn."""
        return self._render([*self.messages[:turn], self.form.turn(message), *self.messages[turn + 1 : last + 1]])

    def served(self, turn: int, message: Message | None = None) -> str:
        """Return the text up to and including a turn (or a message in its place), started and ended as it is served."""
        text = self.upto(turn) if message is None else self._with(turn, message, turn)
        beginning, replaced = self._beginnings.get(turn, ("", 0))
        end = self.added_ends.get(turn, "")
        return beginning + (text[replaced:].rstrip() + end if end else text[replaced:])

    def begin_as_served(self, turn: int) -> int | None:
        """Start a turn with its prompt if the template writes earlier turns differently once the turn follows.

        For example, Qwen3 writes empty reasoning only for the last answer, even in the prompt of a second answer.
        Returns the first character of the turn in `served`; None if its text does not contain the end of any prompt.
        """
        before = self._render(self.messages[:turn])
        shared = shared_length(self.upto(turn), self._with(turn, _OTHER_ANSWER, turn))
        for prompt in self.prompts(turn):
            header = prompt[len(before) :] if prompt.startswith(before) else ""
            place = self.upto(turn).rfind(header, 0, shared) if header.strip() else -1
            # A header with an opened reasoning block may belong to an earlier turn: then it is not the last header.
            if place >= 0 and place == self.upto(turn).rfind(header.partition("<think>")[0], 0, shared):
                self._beginnings = {turn: (prompt, place + len(header))}
                return len(prompt)
        return None

    def begin_with_empty_reasoning(self, turn: int) -> int | None:
        """Start a turn without reasoning with its prompt, and close the reasoning block that the prompt opens.

        For example, MiniMax-M2's prompt ends with an opened block, and its turns without reasoning have no block: a
        server can get such an answer from the model only after the end of an empty block. Returns the first character
        in `served` that the model generates; None if no prompt of the turn opens a reasoning block.
        """
        for prompt in self.prompts(turn):
            header, tag, space = prompt.rpartition("<think>")
            if tag and not space.strip() and self.upto(turn).startswith(header):
                # Qwen3 and MiniMax-M2 write an empty reasoning block on separate lines.
                begun = prompt + ("\n</think>\n\n" if space else "</think>")
                self._beginnings = {turn: (begun, len(header))}
                return len(prompt)
        return None

    def shared_after(self, turn: int, last: int) -> int:
        """Return the number of characters after the answer of a turn in the text up to turn `last`."""
        try:
            other = self._with(turn, _OTHER_ANSWER, last)
        except BadRecordError:  # some templates refuse a tool result without a call
            calling = replace(_OTHER_ANSWER, tool_calls=self.conversation.messages[turn].tool_calls)
            other = self._with(turn, calling, last)
        return shared_length(self.upto(last)[::-1], other[::-1])

    def prompt(self, turn: int) -> str:
        """Return the prompt from which a server generates a turn."""
        try:
            return str(self._once("prompt", turn, lambda: self._render(self.messages[:turn], prompt=True)))
        except BadRecordError as refused:
            if turn:
                raise
            detail = "turn 1 is an assistant turn, but the chat template has no prompt without an earlier turn"
            detail += "; with a weight of 0, the turn is not trained"
            raise BadRecordError(BadReason.NOT_AS_SERVED, detail) from refused

    def prompts(self, turn: int) -> Iterator[str]:
        """Yield the prompt of a turn as the record requests it, then with thinking switched on and off."""
        yield self.prompt(turn)
        for name, value in product(_THINKING_SWITCHES, (True, False)):
            if name in self._template.reads:
                yield self._render(self.messages[:turn], prompt=True, **{name: value})

    def bare_prompt(self, turn: int) -> str:
        """Return the prompt of a turn, with earlier turns stripped of reasoning and of text next to tool calls."""
        bare = [
            replace(message, reasoning="", content="" if message.tool_calls else message.content)
            for message in self.conversation.messages[:turn]
        ]
        return self._render([self.form.turn(message) for message in bare], prompt=True)

    def marked(self, num_turns: int) -> tuple[str, list[Span]]:
        render = partial(self._template.render_marked, tools=self.conversation.tools, variables=self._variables)
        try:
            made: tuple[str, list[Span]] = self._once("marked", num_turns, lambda: render(self.messages[:num_turns]))
        except Exception as error:
            raise template_failure(error) from error
        self._kept["text", num_turns - 1] = made[0]
        return made

    def _render(self, messages: Turns, *, prompt: bool = False, **variables: Any) -> str:
        try:
            return self._template.render(
                messages, tools=self.conversation.tools, variables={**self._variables, **variables}, prompt=prompt
            )
        except Exception as error:  # a template is a user's program and can raise anything
            raise template_failure(error) from error


def template_failure(error: Exception) -> BadRecordError:
    if isinstance(error, BadRecordError):
        return error
    return BadRecordError(BadReason.TEMPLATE_FAILED, f"the chat template failed: {type(error).__name__}: {error}")


def shared_length(first: str, second: str) -> int:
    """Return the length of the common prefix of two texts."""
    low, high = 0, min(len(first), len(second))
    while low < high:
        middle = (low + high + 1) // 2
        if first[low:middle] == second[low:middle]:
            low = middle
        else:
            high = middle - 1
    return low
