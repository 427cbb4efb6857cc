"""Render a chat template in a sandbox, with limits on work and size that do not depend on the machine's speed.

The template sees what transformers shows it: `messages`, `tools`, `add_generation_prompt`, the special tokens, and
`tojson`, `raise_exception`, `strftime_now`, loop controls and `{% generation %}`.
"""

from __future__ import annotations

import json
import re
import threading
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

from harness.prep.tokenize.offsets import Span

# Passes of a loop, calls and items of a range in one rendering: some seconds. A hundred turns take a few hundred.
MAX_STEPS = 5_000_000
# Characters of a rendered conversation and of any text on the way.
MAX_CHARACTERS = 64 << 20
# Text methods and filters whose result can be far longer than their input.
_GROWING = {"center", "ljust", "rjust", "zfill", "expandtabs", "indent", "format", "format_map"}
_DICT_METHODS = frozenset(dir(dict))
# What loops and templates keep, and the values in it that are no functions.
_STATES = (jinja2.runtime.LoopContext, jinja2.utils.Namespace)
_VALUES = frozenset((str, bool, int, list, tuple, dict))
_JSON = json.JSONEncoder(ensure_ascii=False)
_TICK, _CONCATENATE = "count_a_pass", "bounded_concatenation"
_DIGITS = re.compile(r"\d{6,}")


# Methods of texts whose first argument a template looks for.
_SEARCHING = {
    "startswith",
    "endswith",
    "split",
    "rsplit",
    "partition",
    "rpartition",
    "find",
    "rfind",
    "replace",
    "count",
}
# A text that is likely a mark inside a content, as `<tool_response>` and `/no_think` are, and no name of a field.
_TAG = re.compile(r"(?=\S*[^\w\s])\S{2,}")


class TemplateLimitError(jinja2.TemplateError):
    """A template works or writes too much."""


class _Environment(ImmutableSandboxedEnvironment):
    """Counts loop passes and calls, and bounds the texts that operators make."""

    intercepted_binops = frozenset({"+", "*", "**", "%"})

    def __init__(self) -> None:
        super().__init__(trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, jinja2.ext.loopcontrols])
        self.steps = 0
        # First character and text of each marked part.
        self.marked: list[tuple[int, str]] | None = None
        self.written = 0
        self.now: datetime | None = None
        # Of each tool of the conversation in hand, by identity: its JSON once it was written.
        self.tools: Sequence[Any] = ()
        self.tool_texts: dict[int, str] = {}
        self.filters.update(
            tojson=self._to_json,
            # Filters, because calls go through the sandbox, which takes longer than the work itself.
            **{_TICK: self._count_pass(), _CONCATENATE: self.concatenate},
            join=self._limited_join(self.filters["join"]),
            replace=self._limited_replace(self.filters["replace"]),
            **{name: self._limited_width(self.filters[name]) for name in ("center", "indent", "format")},
        )
        self.globals.update(
            raise_exception=_raise,
            strftime_now=self._format_now,
            range=self._range,
        )

    def tick(self, steps: int = 1) -> str:
        self.steps += steps
        if self.steps > MAX_STEPS:
            raise TemplateLimitError(f"it takes more than {MAX_STEPS:,} steps")
        return ""

    def _count_pass(self) -> Any:
        # It takes the context so that jinja2 does not compute it once, when it compiles.
        @jinja2.pass_context
        def count(_context: Any, _value: Any) -> str:
            return self.tick()

        return count

    def bounded(self, characters: int) -> None:
        if characters > MAX_CHARACTERS:
            raise TemplateLimitError(f"it makes a text of more than {MAX_CHARACTERS:,} characters")

    def concatenate(self, *values: Any) -> str:
        texts = [str(value) for value in values]
        self.bounded(sum(map(len, texts)))
        return "".join(texts)

    def call(self, context: Any, function: Any, *args: Any, **kwargs: Any) -> Any:
        self.tick()
        owner = getattr(function, "__self__", None)
        if isinstance(owner, str):
            name = function.__name__
            if name in _GROWING:
                self._check_widths(owner, args, kwargs)
            elif name == "replace" and len(args) >= 2:
                self._check_replace(owner, *args[:2])
            elif name == "join" and args:
                args = (self._joinable(owner, args[0]),)
        elif type(function) is jinja2.runtime.Macro:  # safe to call, being the template's own
            return context.call(function, *args, **kwargs)
        return super().call(context, function, *args, **kwargs)

    def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
        if operator == "+":
            if isinstance(left, (str, list, tuple)) and isinstance(right, (str, list, tuple)):
                self.bounded(len(left) + len(right))
            return left + right
        if operator == "*":
            for times, value in ((left, right), (right, left)):
                if isinstance(times, int) and isinstance(value, (str, list, tuple)):
                    self.bounded(times * len(value))
        elif operator == "**":
            self.bounded(abs(right) if isinstance(right, int) else 0)
        elif isinstance(left, str):
            self._check_widths(left, (right,), {})
        return super().call_binop(context, operator, left, right)

    def _format_now(self, form: str) -> str:
        return (self.now or datetime.now()).strftime(form)

    def getattr(self, obj: Any, attribute: str) -> Any:
        # The turns of a conversation, of which everything is asked again and again.
        if type(obj) is dict:
            if attribute not in _DICT_METHODS:
                return obj[attribute] if attribute in obj else self.undefined(obj=obj, name=attribute)
        elif type(obj) in _STATES and attribute[:1] != "_":
            value = getattr(obj, attribute, None)
            # The sandbox has nothing to check in these.
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

    def _range(self, *args: int) -> range:
        numbers = range(*args)
        self.tick(len(numbers))
        return numbers

    def _check_widths(self, text: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        for value in (*args, *kwargs.values()):
            if isinstance(value, int):
                self.bounded(abs(value))
        if number := _DIGITS.search(text):
            self.bounded(int(number.group()))

    def _check_replace(self, text: str, old: Any, new: Any) -> None:
        self.bounded(len(text) + (text.count(str(old)) if old else len(text)) * len(str(new)))

    def _joinable(self, separator: str, values: Any) -> list[Any]:
        items = list(values)
        self.bounded(sum(len(item) if isinstance(item, str) else 8 for item in items) + len(separator) * len(items))
        return items

    def _limited_width(self, original: Any) -> Any:
        if getattr(original, "jinja_pass_arg", None):
            return original

        def limited(value: Any, *args: Any, **kwargs: Any) -> Any:
            self._check_widths(value if isinstance(value, str) else "", args, kwargs)
            return original(value, *args, **kwargs)

        return limited

    def _limited_join(self, original: Any) -> Any:
        @jinja2.pass_eval_context
        def limited(context: Any, values: Any, d: Any = "", attribute: Any = None) -> Any:
            items = values if attribute is not None else self._joinable(str(d), values)
            return original(context, items, d, attribute)

        return limited

    def _limited_replace(self, original: Any) -> Any:
        @jinja2.pass_eval_context
        def limited(context: Any, text: Any, old: Any, new: Any, count: Any = None) -> Any:
            self._check_replace(str(text), old, new)
            return original(context, text, old, new, count)

        return limited

    def _parse(self, source: str, name: str | None, filename: str | None) -> jinja2.nodes.Template:
        """Parse, then make every loop count its passes and every `~` bound its text."""
        template = super()._parse(source, name, filename)
        for loop in template.find_all(jinja2.nodes.For):
            tick = jinja2.nodes.Filter(jinja2.nodes.Const(None), _TICK, [], [], None, None)
            loop.body.insert(0, jinja2.nodes.ExprStmt(tick).set_lineno(loop.lineno))
        _replace_concatenations(template)
        return template


def _replace_concatenations(node: jinja2.nodes.Node) -> None:
    for name, value in list(node.iter_fields()):
        if isinstance(value, list):
            setattr(node, name, [_bounded_concatenation(item) for item in value])
        elif isinstance(value, jinja2.nodes.Node):
            setattr(node, name, _bounded_concatenation(value))


def _bounded_concatenation(node: Any) -> Any:
    if not isinstance(node, jinja2.nodes.Node):
        return node
    _replace_concatenations(node)
    if isinstance(node, jinja2.nodes.Concat):
        first, *rest = node.nodes
        return jinja2.nodes.Filter(first, _CONCATENATE, rest, [], None, None).set_lineno(node.lineno)
    return node


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
        if environment.marked is not None:
            environment.marked.append((environment.written, text))
        return text


def _raise(message: str) -> None:
    raise jinja2.TemplateError(message)


def _looked_for(program: jinja2.nodes.Template) -> Iterator[str]:
    """Yield the marks that a template compares texts with, searches them for, or gives a name."""
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
    """A chat template.

    Args:
        text: Jinja.
        variables: texts that the template may read by name, such as `bos_token`.
        today: date that `strftime_now` gives; None is the date of each rendering.

    Raises:
        jinja2.TemplateSyntaxError: it is not valid.
    """

    def __init__(self, text: str, variables: Mapping[str, Any], *, today: date | None = None) -> None:
        self.text = text
        self._variables, self._today = dict(variables), today
        # A rendering counts and marks in its environment, so each thread has one.
        self._of_thread = threading.local()
        environment, _ = self._environment_and_program()
        program = environment.parse(text)
        self.reads = frozenset(jinja2.meta.find_undeclared_variables(program))
        # Texts by which it may tell contents apart; reasoning is looked for everywhere.
        self.tags = tuple(sorted({"<think>", "</think>", *_looked_for(program)}))
        self.is_marked = "{% generation" in re.sub(r"\{%[-+]?\s*", "{% ", text)

    def _environment_and_program(self) -> tuple[_Environment, jinja2.Template]:
        made: tuple[_Environment, jinja2.Template] | None = getattr(self._of_thread, "made", None)
        if made is None:
            environment = _Environment()
            if self._today is not None:
                environment.now = datetime(self._today.year, self._today.month, self._today.day)
            made = self._of_thread.made = environment, environment.from_string(self.text)
        return made

    @property
    def uses_date(self) -> bool:
        return "strftime_now" in self.reads or "strftime_now" in self.text

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]] = (),
        variables: Mapping[str, Any] | None = None,
        prompt: bool = False,
    ) -> str:
        """Return the text of a conversation; with `prompt`, up to where the assistant's next turn begins."""
        return self._write(messages, tools, variables or {}, prompt)

    def render_marked(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]] = (),
        variables: Mapping[str, Any] | None = None,
    ) -> tuple[str, list[Span]]:
        """Return the text of a conversation and the spans that the template marks.

        Raises:
            jinja2.TemplateError: it marks text that it moves afterwards, for example inside a macro.
        """
        environment, _ = self._environment_and_program()
        marked: list[tuple[int, str]] = []
        environment.marked = marked
        try:
            text = self._write(messages, tools, variables or {}, False)
        finally:
            environment.marked = None
        if any(not text.startswith(mark, start) for start, mark in marked):
            raise jinja2.TemplateError("it marks text with {% generation %} inside a block whose text it moves")
        return text, [(start, start + len(mark)) for start, mark in marked]

    def _write(self, messages: Sequence[Any], tools: Sequence[Any], variables: Mapping[str, Any], prompt: bool) -> str:
        environment, program = self._environment_and_program()
        environment.steps = environment.written = 0
        if tools is not environment.tools:
            environment.tools = tools
            environment.tool_texts = {id(tool): "" for tool in tools}
        context = program.new_context(
            {
                **self._variables,
                "messages": messages,
                "tools": list(tools) or None,
                "documents": None,
                "add_generation_prompt": prompt,
                **variables,
            }
        )
        pieces = []
        # As `Template.generate` does, without its layers of generators, which take a tenth of the time.
        for piece in program.root_render_func(context):
            pieces.append(piece)
            environment.written += len(piece)
            environment.bounded(environment.written)
        return "".join(pieces)
