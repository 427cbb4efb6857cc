"""Find the form in which a template accepts conversations, by trying each form.

Templates expect turns in different forms (text or parts, arguments as text or object) and drop unknown fields. Before
a conversation shape is rendered for the first time, the same shape is rendered with unique words in place of its texts,
in each form, until every word is written; if no form works, the conversation is refused with a reason. The texts can
still change the output: a template may look for a word, cut text at a length, or leave out values of one type. So each
rendered conversation is also checked for the texts of its messages (`unwritten_text`).
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache, lru_cache, partial
from typing import TYPE_CHECKING, Any

from harness.prep.chat import BadReason, BadRecordError, Conversation, Message
from harness.prep.chat.tools import map_schemas
from harness.prep.chat.turns import REASONING_FIELDS
from harness.prep.chat.values import json_or
from harness.prep.tokenize.chats import FORMS, Form, RenderedChat, as_object, template_failure

if TYPE_CHECKING:
    from harness.prep.tokenize.rendering import Template

_MAX_SHAPES = 8192
_THINK_TAGS = re.compile(r"</?think>")
_SHOWN_CHARACTERS = 40
# Parts that a conversation can do without, and the record fields that contain them.
_OPTIONAL = {"tools": ("tools",), "reasoning": REASONING_FIELDS}
# A word of `with_unique_words`; a \" before it means that the template wrote JSON text as a JSON string.
_WORD = re.compile(r'(\\")?(zq\d+wz)')


@dataclass(frozen=True, slots=True)
class KnownForm:
    """The form in which a template accepts the conversations of one shape, and properties of its output."""

    form: Form
    is_ordered: bool = False  # the template writes texts and arguments in the order of the turns
    has_tags: bool = False  # the contents include marks that the template looks for


class KnownForms:
    """The forms in which one template accepts conversations, by shape.

    If `trusts_plain`, conversations with only roles and texts are passed to the template unchanged, even if it leaves
    out some of the words that it is tried with.
    """

    def __init__(self, template: Template, *, trusts_plain: bool) -> None:
        self._template, self._trusts_plain = template, trusts_plain
        # Keyed by hash: the shape of a long conversation, and the JSON of some tools, take many kilobytes.
        self._known: dict[int, KnownForm | BadRecordError] = {}  # by shape and tools
        self._forms: dict[int, KnownForm] = {}  # by shape, whatever its tools
        self._tools: tuple[object, int] = None, 0  # the last tools, which many conversations share, and their hash

    def find(self, conversation: Conversation) -> KnownForm:
        """Return the form for conversations of this shape; raise BadRecordError if the template accepts none."""
        tags = self._template.tags
        is_as_given = self._trusts_plain and _is_plain(conversation, tags)
        texts = ((turn.role, bool(turn.text.strip())) for turn in conversation.messages)
        shape = key = hash(tuple(texts) if is_as_given else shape_of(conversation, tags))
        if conversation.tools:
            if conversation.tools is not self._tools[0]:
                self._tools = conversation.tools, hash(json.dumps(conversation.tools))
            # A template may write tools only in some turns, or fail for some tools.
            key = hash((shape, self._tools[1]))
        if (known := self._known.get(key)) is None:
            known = self._forms.get(shape) or self._probe(conversation)
            if is_as_given and isinstance(known, BadRecordError):
                known = KnownForm(FORMS[0])
            if isinstance(known, KnownForm) and conversation.tools:
                _keep(self._forms, shape, known)
                probe, words = with_unique_words(conversation, tags)
                chat = RenderedChat(self._template, probe, known.form, {})
                known = self._try_form(chat, [word for word in words if word[0] is None]) or known
            # A failure may be due to a value, such as the id of a call, and not to the shape.
            if isinstance(known, KnownForm) or known.reason != BadReason.TEMPLATE_FAILED:
                _keep(self._known, key, known)
        if isinstance(known, BadRecordError):
            raise BadRecordError(known.reason, known.detail)
        return known

    def _probe(self, conversation: Conversation) -> KnownForm | BadRecordError:
        for name in conversation.template_kwargs:
            if name not in self._template.reads:
                detail = f"the chat template does not read `{name}` of chat_template_kwargs; "
                detail += "source.ignore_fields=[chat_template_kwargs] ignores it"
                return BadRecordError(BadReason.NOT_WRITTEN, detail)
        first: BadRecordError | None = None
        probe, words = with_unique_words(conversation, self._template.tags)
        words = [word for word in words if word[0] is not None]  # tools are not part of a shape: `find` tries them
        tried = set()
        has_tags = _has_tags(conversation, self._template.tags)
        for form in FORMS:
            chat = RenderedChat(self._template, probe, form, {})
            if (key := json.dumps(chat.messages)) in tried:
                continue
            tried.add(key)
            refused = self._try_form(chat, words)
            if refused is None:
                is_ordered = not unwritten_text(chat.whole, probe.messages, chat.upto, is_ordered=True)
                return KnownForm(form, is_ordered=is_ordered, has_tags=has_tags)
            # Text that a template leaves out is a better reason than its failure on another form.
            if first is None or (first.reason == BadReason.TEMPLATE_FAILED != refused.reason):
                first = refused
        assert first is not None
        return first

    def _try_form(self, chat: RenderedChat, words: list[tuple[int | None, str, str]]) -> BadRecordError | None:
        """Return the reason why a template does not accept this form, or None if it writes every word."""
        try:
            text = chat.whole
            if any(message["content"] is None for message in chat.messages) and "None" in text:
                empty = RenderedChat(self._template, chat.conversation, Form("text", chat.form.arguments), {}).whole
                if text.count("None") > empty.count("None"):
                    raise ValueError("it writes None for a turn without content")
            if "{'type': 'text'" in text:
                raise ValueError("it writes a list of text parts in Python notation")
            written, answers = _words_in(text), dict[int, set[str]]()
            for number, word, name in words:
                if word in written:
                    continue
                message = chat.messages[number] if number is not None else None
                # Templates may omit the reasoning of earlier turns, but not the reasoning of the turn being generated.
                if message is not None and message["role"] == "assistant" and number is not None:
                    if number not in answers:
                        answers[number] = _words_in(chat.upto(number))
                    if word in answers[number]:
                        continue
                turn = "" if message is None or number is None else f" of turn {number + 1} ({message['role']})"
                optional = _OPTIONAL["tools"] if number is None else _OPTIONAL.get(name, ())
                return not_written(f"the {name}{turn}", optional)
        except Exception as error:  # a template is a user's program and can raise anything
            return template_failure(error)
        return None


def _keep(known: dict[int, Any], key: int, value: object) -> None:
    if len(known) >= _MAX_SHAPES:
        known.clear()
    known[key] = value


def not_written(missing: str, ignorable: Sequence[str] = ()) -> BadRecordError:
    """Return the error for a part that the template leaves out; `ignorable` are the record fields that contain it."""
    detail = f"the chat template does not write {missing}; set one that does"
    if not ignorable:
        return BadRecordError(BadReason.NOT_WRITTEN, f"{detail} with tokenizer.chat_template")
    detail += f", such as tokenizer.chat_template=qwen3, or ignore it with source.ignore_fields=[{','.join(ignorable)}]"
    return BadRecordError(BadReason.NOT_WRITTEN, detail)


def _words_in(text: str) -> set[str]:
    """Return the unique words of a rendering, except words written as JSON inside JSON."""
    found = _WORD.findall(text)
    return {word for _, word in found} - {word for quoted, word in found if quoted}


def _is_plain(conversation: Conversation, tags: tuple[str, ...]) -> bool:
    """Return True if a conversation has only roles and texts, without reasoning or the template's tags."""
    if conversation.tools or conversation.template_kwargs:
        return False
    turns = conversation.messages
    has_texts = all(type(turn.content) is str and not turn.reasoning and not turn.tool_calls for turn in turns)
    return has_texts and not _has_tags(conversation, tags)


def _has_tags(conversation: Conversation, tags: tuple[str, ...]) -> bool:
    return any(len(pieces_of(turn.text, tags)) > 1 for turn in conversation.messages)


def pieces_of(text: str, tags: tuple[str, ...]) -> list[str]:
    """Split content at the marks that a template looks for (`Template.tags`): text, mark, text, ..., text.

    For Qwen3, a user's `<tool_response>...</tool_response>` is the result of a tool.
    """
    for tag in tags:
        if tag in text:
            return _pattern(tags).split(text)
    return [text]


@lru_cache(maxsize=8)
def _pattern(tags: tuple[str, ...]) -> re.Pattern[str]:
    # Longest first: a mark may start with another mark.
    return re.compile(f"({'|'.join(map(re.escape, sorted(tags, key=len, reverse=True)))})")


def _kinds(message: Message, tags: tuple[str, ...]) -> tuple[tuple[bool | str | None, ...], ...]:
    """Return the features of each part that a template can detect: marks, and text, white space or nothing between."""
    content = message.content
    return tuple(
        tuple(
            piece if number % 2 else bool(piece.strip()) if piece else None
            for number, piece in enumerate(pieces_of(part, tags))
        )
        if isinstance(part, str)
        else (part.kind,)
        for part in (content if isinstance(content, tuple) else (content or "",))
    )


def shape_of(conversation: Conversation, tags: tuple[str, ...] = ()) -> tuple[Any, ...]:
    """Return everything except texts that a template's use of fields can depend on; for `tags`, see `pieces_of`."""
    turns = tuple(
        (
            turn.role,
            type(turn.content),
            _kinds(turn, tags),
            bool(turn.reasoning.strip()),
            tuple(isinstance(call.arguments, str) for call in turn.tool_calls),
            bool(turn.tool_call_id),
            bool(turn.name),
        )
        for turn in conversation.messages
    )
    kwargs = conversation.template_kwargs
    return turns, len(conversation.tools), json.dumps(dict(kwargs), sort_keys=True, default=str) if kwargs else ""


def with_unique_words(
    conversation: Conversation, tags: tuple[str, ...] = ()
) -> tuple[Conversation, list[tuple[int | None, str, str]]]:
    """Return a conversation of the same shape with unique words as texts, between the same marks.

    Also returns, for each word, the index of its message (None for tools), the word, and the name of its field.
    """
    words: list[tuple[int | None, str, str]] = []

    def word(number: int | None, name: str) -> str:
        words.append((number, f"zq{len(words)}wz", name))
        return words[-1][1]

    def text(number: int, given: str) -> str:
        pieces = pieces_of(given, tags)
        is_answer = conversation.messages[number].role == "assistant"
        for place in range(0, len(pieces), 2):
            if pieces[place].strip():
                thought = is_answer and pieces[place + 1 : place + 2] == ["</think>"]
                pieces[place] = word(number, "reasoning inside <think>" if thought else "content")
        return "".join(pieces)

    def arguments(number: int, given: str | Mapping[str, Any]) -> str | Mapping[str, Any]:
        if isinstance(given, str) and not isinstance(as_object(given), dict):
            return given
        made = {word(number, "tool call's arguments"): word(number, "tool call's arguments")}
        return json.dumps(made) if isinstance(given, str) else made

    turns = []
    for number, message in enumerate(conversation.messages):
        reasoning = word(number, "reasoning") if message.reasoning.strip() else message.reasoning
        turn = message.with_texts(partial(text, number))
        calls = tuple(
            replace(call, name=word(number, "tool call's name"), arguments=arguments(number, call.arguments))
            for call in message.tool_calls
        )
        turns.append(replace(turn, reasoning=reasoning, tool_calls=calls))
    tools = tuple(_with_words(tool, lambda name: word(None, name)) for tool in conversation.tools)
    return replace(conversation, messages=tuple(turns), tools=tools), words


def _with_words(tool: Mapping[str, Any], word: Callable[[str], str]) -> Mapping[str, Any]:
    """Return a tool with unique words as its name and its parameters' names, one word per path."""
    of = f"of the tool {tool['function']['name']!r}"
    function = {**tool["function"], "name": word("tools")}
    if "parameters" in function:
        function["parameters"] = _renamed(function["parameters"], cache(lambda path: word(f"parameter {path!r} {of}")))
    return {**tool, "function": function}


def _renamed(schema: Any, word: Callable[[str], str], path: str = "") -> Any:
    """Return a JSON Schema with all properties renamed, at any depth; `path` is the path of the schema."""
    if not isinstance(schema, Mapping):
        return schema
    made = map_schemas(schema, lambda name, inner: _renamed(inner, word, f"{path}{name}." if name else path))
    names: dict[str, str] = {}
    for key in ("properties", "patternProperties"):
        if isinstance(made.get(key), Mapping):
            names |= {name: word(f"{path}{name}") for name, value in made[key].items() if value is not None}
            made[key] = {names.get(name, name): value for name, value in made[key].items()}
    if isinstance(made.get("required"), list):
        made["required"] = [names.get(str(name), name) for name in made["required"]]
    return made


def unwritten_text(
    text: str, messages: Sequence[Message], upto: Callable[[int], str], *, is_ordered: bool = False
) -> str:
    """Describe the text that a rendered conversation leaves out; empty if it contains every text.

    Texts must be written one after another, with any white space, possibly escaped as in JSON, so that a short missing
    text is not found inside another. The reasoning of a turn is checked where the turn is trained
    (`unwritten_reasoning`). `upto` renders the conversation up to and including a turn: an answer may be complete
    there, and shortened later. If `is_ordered`, all texts are in the order of turns, not only questions and answers.
    """
    place = 0
    for number, message in enumerate(messages):
        is_answer = message.role == "assistant"
        in_order = is_ordered or is_answer or message.role == "user"
        for piece in _contents(message):
            found = _find(text, piece, place if in_order else 0)
            if found < 0 and not (is_answer and _is_only_then(text, upto(number), piece)):
                # The search for an earlier, missing text may have matched this text.
                turns = f"turns 1 to {number + 1}" if _find(text, piece, 0) >= 0 else f"turn {number + 1}"
                return f"all of the content of {turns} ({message.role}): {_shown(piece)}"
            if in_order:
                place = max(place, found)
        end = place
        for call in message.tool_calls:
            found, missing = _find_arguments(text, call.arguments, place if is_ordered else 0)
            if missing and not _is_only_then(text, upto(number), call.arguments):
                return f"all of the tool call's arguments of turn {number + 1} ({message.role}): {_shown(missing)}"
            end = max(end, found)
        place = end if is_ordered else place
    return ""


def _is_only_then(text: str, own: str, wanted: Any) -> bool:
    """Return True if a turn's content or arguments are written when the turn is last (`own`), but not in `text`."""
    if text.startswith(own.rstrip()):
        return False
    return _find(own, wanted, 0) >= 0 if isinstance(wanted, str) else not _find_arguments(own, wanted, 0)[1]


def unwritten_reasoning(text: str, turn: int, message: Message) -> str:
    """Describe the reasoning of a turn that the text up to it leaves out; empty if all of it is written."""
    inside = [part for part in message.texts if "</think>" in part]
    pieces = [message.reasoning, *(piece for part in inside for piece in _THINK_TAGS.split(part))]
    for piece in pieces:
        if _find(text, piece.strip(), 0) < 0:
            return f"all of the reasoning of turn {turn + 1} ({message.role}): {_shown(piece.strip())}"
    return ""


def _contents(message: Message) -> Iterator[str]:
    """Yield the pieces of content that a template has to write; an answer's inline reasoning is left out."""
    for part in message.texts or ("",):
        if message.role == "assistant" and "</think>" in part:
            yield from (piece.strip() for piece in _THINK_TAGS.split(part.partition("</think>")[2]))
        else:
            yield part.strip()


def _find(text: str, piece: str, start: int) -> int:
    """Return the first end of a piece in a text, from `start`; -1 if it is not found."""
    plain = json.dumps(piece)[1:-1]
    # Nearly every text has only one spelling.
    spelled = {piece} if plain == piece else {piece, plain, json.dumps(piece, ensure_ascii=False)[1:-1]}
    if ends := [found + len(form) for form in spelled if (found := text.find(form, start)) >= 0]:
        return min(ends)
    for word in piece.split():
        found = text.find(word, start)
        if found < 0:
            return -1
        start = found + len(word)
    return start


def _find_arguments(text: str, arguments: Any, start: int) -> tuple[int, str]:
    """Return the end of a call's arguments in a text, from `start`, and the first argument that is not found."""
    if isinstance(arguments, str):
        if (found := text.find(arguments, start)) >= 0:
            return found + len(arguments), ""
        arguments = json_or(arguments, arguments)
    end = start
    for leaf in _leaves(arguments):
        found = _find(text, leaf.strip(), start)
        if found < 0:
            return start, leaf
        end = max(end, found)
    return end, ""


def _leaves(value: Any) -> Iterator[str]:
    """Yield the names, texts and numbers inside a JSON value; templates spell other values in several ways."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict):
        for key, item in value.items():
            yield str(key)
            yield from _leaves(item)
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from _leaves(item)
    elif isinstance(value, (int, float)) and not isinstance(value, bool):
        yield json.dumps(value)


def _shown(piece: str) -> str:
    return repr(piece if len(piece) <= _SHOWN_CHARACTERS else piece[:_SHOWN_CHARACTERS] + "...")
