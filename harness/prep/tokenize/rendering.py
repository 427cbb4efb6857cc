"""Render a chat template in Jinja's sandbox, inside the process of `harness.prep.tokenize.renderer`.

The template can use the same names as in transformers: `messages`, `tools`, `add_generation_prompt`, the special
tokens, `tojson`, `raise_exception`, `strftime_now`, loop controls and `{% generation %}`.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from datetime import date, datetime
from typing import Any

import jinja2
import jinja2.ext
import jinja2.meta
import jinja2.nodes
import jinja2.runtime
import jinja2.utils
from jinja2.sandbox import ImmutableSandboxedEnvironment

from harness.prep.tokenize.config import MAX_CHARACTERS, OUT_OF_CHARACTERS, OUT_OF_MEMORY
from harness.prep.tokenize.offsets import Span

_DICT_METHODS = frozenset(dir(dict))
# Objects in which loops and templates keep state, and the types of their values that are not functions.
_STATES = (jinja2.runtime.LoopContext, jinja2.utils.Namespace)
_VALUES = frozenset((str, bool, int, list, tuple, dict))
_JSON = json.JSONEncoder(ensure_ascii=False)
# String methods that search a text for their first argument.
_SEARCHING = {
    *("startswith", "endswith", "split", "rsplit", "partition", "rpartition"),
    *("find", "rfind", "replace", "count"),
}
# Text that is likely a mark inside content, such as `<tool_response>` and `/no_think`, and not a field name.
_TAG = re.compile(r"(?=\S*[^\w\s])\S{2,}")


class _Environment(ImmutableSandboxedEnvironment):
    """Environment with the names that templates use, and shortcuts for frequent operations."""

    def __init__(self, now: datetime | None) -> None:
        super().__init__(trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, jinja2.ext.loopcontrols])
        # Start and text of each marked part.
        self.marked: list[tuple[int, str]] = []
        self.written = 0
        # JSON of each tool of the current conversation, by identity; empty until it is written.
        self.tools: Sequence[Any] = ()
        self.tool_texts: dict[int, str] = {}
        self.filters["tojson"] = self._to_json
        self.globals["raise_exception"] = _raise
        self.globals["strftime_now"] = lambda form: datetime.strftime(now or datetime.now(), form)

    def getattr(self, obj: Any, attribute: str) -> Any:
        # Turns of a conversation, whose fields are read frequently.
        if type(obj) is dict:
            if attribute not in _DICT_METHODS:
                return obj[attribute] if attribute in obj else self.undefined(obj=obj, name=attribute)
        elif type(obj) in _STATES and attribute[:1] != "_":
            value = getattr(obj, attribute, None)
            # The sandbox has nothing to check in such values.
            if type(value) in _VALUES:
                return value
        return super().getattr(obj, attribute)

    def _to_json(
        self,
        value: Any,
        ensure_ascii: bool = False,
        indent: int | None = None,
        separators: tuple[str, str] | None = None,
        sort_keys: bool = False,
    ) -> str:
        # Jinja's own filter escapes HTML.
        if ensure_ascii or sort_keys or indent is not None or separators is not None:
            return json.dumps(
                value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
            )
        # Each tool is written in every rendering of a conversation.
        if id(value) not in self.tool_texts:
            return _JSON.encode(value)
        self.tool_texts[id(value)] = text = self.tool_texts[id(value)] or _JSON.encode(value)
        return text


class _Generation(jinja2.ext.Extension):
    """The tag `{% generation %}`, which marks text that the model writes."""

    tags = {"generation"}  # noqa: RUF012 - jinja2 declares it so

    def parse(self, parser: Any) -> Any:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return jinja2.nodes.CallBlock(self.call_method("_mark"), [], [], body).set_lineno(line)

    def _mark(self, caller: Any) -> str:
        text = str(caller())
        environment = self.environment
        assert isinstance(environment, _Environment)
        environment.marked.append((environment.written, text))
        return text


def _raise(message: str) -> None:
    raise jinja2.TemplateError(message)


def _looked_for(program: jinja2.nodes.Template) -> Iterator[str]:
    """Yield the marks that a template compares texts to, searches them for, or assigns to a name."""
    given: list[jinja2.nodes.Node] = [node.node for node in program.find_all(jinja2.nodes.Assign)]
    for call in program.find_all(jinja2.nodes.Call):
        if isinstance(call.node, jinja2.nodes.Getattr) and call.node.attr in _SEARCHING:
            given += call.args[:1]
    for comparison in program.find_all(jinja2.nodes.Compare):
        given += [comparison.expr, *(operand.expr for operand in comparison.ops)]
    for node in given:
        if isinstance(node, jinja2.nodes.Const) and isinstance(node.value, str) and _TAG.fullmatch(node.value.strip()):
            yield node.value.strip()


class Template:
    """A chat template, with variables that it may read, such as `bos_token`, and a date (None for the current date)."""

    def __init__(self, text: str, variables: Mapping[str, Any], *, today: date | None = None) -> None:
        self.text, self._variables = text, dict(variables)
        # The tokenizer's end-of-sequence token; empty if it has none.
        self.end_of_sequence = str(variables.get("eos_token") or "")
        self.uses_date = "strftime_now" in text
        self._environment = _Environment(datetime(today.year, today.month, today.day) if today is not None else None)
        self._program = self._environment.from_string(text)
        program = self._environment.parse(text)
        self.reads = frozenset(jinja2.meta.find_undeclared_variables(program))
        # Marks that can change how it writes content; reasoning tags are always included.
        self.tags = tuple(sorted({"<think>", "</think>", *_looked_for(program)}))
        self.is_marked = "{% generation" in re.sub(r"\{%[-+]?\s*", "{% ", text)

    def render_marked(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]] = (),
        variables: Mapping[str, Any] | None = None,
    ) -> tuple[str, list[Span]]:
        """Return the text of a conversation and the spans that the template marks."""
        text, marked = self.render(messages, tools=tools, variables=variables), self._environment.marked
        if any(not text.startswith(mark, start) for start, mark in marked):
            raise jinja2.TemplateError("it marks text with {% generation %} inside a block whose text is moved")
        return text, [(start, start + len(mark)) for start, mark in marked]

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]] = (),
        variables: Mapping[str, Any] | None = None,
        prompt: bool = False,
    ) -> str:
        """Return the text of a conversation; with `prompt`, up to the start of the assistant's next turn."""
        environment, program = self._environment, self._program
        environment.written, environment.marked = 0, []
        if tools is not environment.tools:
            environment.tools = tools
            environment.tool_texts = {id(tool): "" for tool in tools}
        context = {
            **self._variables,
            "messages": messages,
            "tools": list(tools) or None,
            "documents": None,
            "add_generation_prompt": prompt,
            **(variables or {}),
        }
        pieces = []
        try:
            for piece in program.generate(context):
                pieces.append(piece)
                environment.written += len(piece)
        except MemoryError:
            raise SystemExit(OUT_OF_MEMORY) from None
        if environment.written > MAX_CHARACTERS:
            raise SystemExit(OUT_OF_CHARACTERS)
        return "".join(pieces)
