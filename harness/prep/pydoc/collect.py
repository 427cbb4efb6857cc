"""Write questions and answers about Python's standard library as JSONL: `python collect.py OUTPUT`.

A script that imports nearly all of the standard library and nothing else, so it runs in a process of its own (see
`write_pydoc_corpus`).
"""

from __future__ import annotations

import importlib
import inspect
import json
import pkgutil
import re
import sys
import types
import warnings
import zlib
from collections.abc import Callable, Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

# Importing these opens a window or a browser, prints, or changes the terminal; or they are tests or demonstrations.
SKIPPED = {"__main__", "antigravity", "idlelib", "lib2to3", "pydoc_data", "readline", "rlcompleter", "test", "this"}
SKIPPED |= {"tkinter", "turtle", "turtledemo"}
SKIPPED_PARTS = {"test", "tests", "encodings"}

_KINDS = {
    "POSITIONAL_ONLY": "by position only",
    "POSITIONAL_OR_KEYWORD": "by position or keyword",
    "KEYWORD_ONLY": "by keyword only",
    "VAR_POSITIONAL": "any number of further positions",
    "VAR_KEYWORD": "any further keywords",
}

Turns = list[tuple[str, str]]

_ADDRESS = re.compile(r" at 0x[0-9a-fA-F]+")
_UNDERLINE = re.compile(r"[=*\-~^\"]{3,}")
_SYSTEM = "You answer questions about Python briefly and exactly."
_QUESTIONS = (
    "What does `{0}` do?",
    "Explain `{0}`.",
    "What is `{0}` for?",
    "I found `{0}` in some code. What is it?",
    "Tell me about the {1} `{0}` of Python's standard library.",
    "How would you describe the {1} `{0}`?",
)
_ARGUMENTS = ("Which arguments does `{0}` take?", "How do I call `{0}`?", "What can I pass to `{0}`?")
_WHICH = (
    "Which {1} fits this description? {2}",
    "I am looking for a {1} of the standard library: {2}",
    "What is the name of the {1} that is described so: {2}",
)
_AGAIN = ("And `{0}`?", "What about `{0}`?", "Does `{0}` do something similar?")


class Corpus:
    """Collects conversations; no text is an answer twice."""

    def __init__(self) -> None:
        self.lines: list[str] = []
        self._answers: set[str] = set()

    def unused(self, text: str) -> bool:
        return bool(text) and text not in self._answers

    def add(self, name: str, turns: Turns) -> None:
        if not self.unused(turns[0][1]):
            return
        turns = [turns[0], *(turn for turn in turns[1:] if self.unused(turn[1]) and turn[1] != turns[0][1])]
        messages = []
        if draw(name, 8, "system") == 0:
            messages.append({"role": "system", "content": _SYSTEM})
        for question, answer in turns:
            self._answers.add(answer)
            messages.append({"role": "user", "content": question})
            messages.append({"role": "assistant", "content": answer})
        self.lines.append(json.dumps({"about": name, "messages": messages}, ensure_ascii=False))


def draw(name: str, choices: int, salt: str) -> int:
    """Return a number below `choices` that depends on the name alone: the corpus is the same on every run."""
    return zlib.crc32(f"{salt} {name}".encode()) % choices


def pick(templates: tuple[str, ...], name: str, kind: str = "", summary: str = "") -> str:
    return templates[draw(name, len(templates), templates[0])].format(name, kind, summary)


def find_modules() -> Iterator[tuple[str, types.ModuleType]]:
    """Yield the public modules of the standard library that can be imported here, by name."""

    def walk(name: str) -> Iterator[tuple[str, types.ModuleType]]:
        try:
            module = importlib.import_module(name)
        except (Exception, SystemExit):  # for another operating system, or an optional library is missing
            return
        yield name, module
        paths = getattr(module, "__path__", None)
        for info in sorted(pkgutil.iter_modules(paths), key=lambda info: info.name) if paths else []:
            if not info.name.startswith("_") and not SKIPPED_PARTS & {info.name, name}:
                yield from walk(f"{name}.{info.name}")

    for name in sorted(sys.stdlib_module_names):
        if not name.startswith(("_", "xx")) and name not in SKIPPED:
            yield from walk(name)


def documentation(thing: Any) -> str:
    """Return the object's own docstring, never an inherited one."""
    text = getattr(thing, "__doc__", None)
    if not isinstance(text, str):
        return ""
    text = inspect.cleandoc(text).strip()
    # Examples of codecs hold half surrogate pairs, which are not text.
    return _ADDRESS.sub("", text).encode("utf-8", "replace").decode() if len(text) > 20 else ""


def parameters_of(thing: Callable[..., Any]) -> list[inspect.Parameter]:
    try:
        return [p for p in inspect.signature(thing).parameters.values() if p.name not in ("self", "cls")]
    except Exception:  # a module's own descriptors may raise anything
        return []


def arguments(name: str, parameters: list[inspect.Parameter]) -> str:
    """Describe the arguments of a call; empty for fewer than two."""
    lines = []
    for parameter in parameters:
        how = _KINDS[parameter.kind.name]
        if parameter.default is not parameter.empty:
            how += f", {default(parameter.default)} if left out"
        elif parameter.kind in (parameter.POSITIONAL_ONLY, parameter.POSITIONAL_OR_KEYWORD):
            how += ", required"
        lines.append(f"- `{parameter.name}`: {how}")
    return f"`{name}` takes {len(parameters)} arguments:\n" + "\n".join(lines) if len(lines) > 1 else ""


def default(value: Any) -> str:
    """Describe a default; only names and plain values, because sets and objects print differently on every run."""
    if isinstance(value, (type, types.FunctionType, types.BuiltinFunctionType)):
        return f"`{value.__name__}`"
    if isinstance(value, str) and value == sys.executable:
        # `platform.architecture` has this default, which made the corpus depend on the environment's path.
        return "this Python"
    plain = value is None or isinstance(value, (bool, int, float, str, bytes))
    return f"`{_ADDRESS.sub('', repr(value))}`" if plain else f"an object of type `{type(value).__name__}`"


def overview(kind: str, name: str, members: list[tuple[str, Any]]) -> str:
    """List members, each with the first line of its documentation; empty for fewer than two."""
    lines = [f"- `{member}`: {documentation(thing).splitlines()[0]}" for member, thing in members]
    return f"The {kind} `{name}` has:\n" + "\n".join(lines) if len(lines) > 1 else ""


def add_call(corpus: Corpus, owner: str, kind: str, members: list[tuple[str, Any]], index: int) -> None:
    """Add conversations about a function or method, with or without a follow-up question, perhaps about the next."""
    member, thing = members[index]
    name = f"{owner}.{member}"
    turns = [(pick(_QUESTIONS, name, kind), documentation(thing))]
    how = arguments(name, parameters_of(thing))
    style = draw(name, 6, "style")
    for following, other in members[index + 1 : index + 2] if style == 0 else []:
        turns.append((pick(_AGAIN, f"{owner}.{following}"), documentation(other)))
    if style <= 1 and how:
        turns.append((pick(_ARGUMENTS, name), how))
        how = ""
    corpus.add(name, turns)
    if how:
        corpus.add(name, [(pick(_ARGUMENTS, name), how)])
    add_search(corpus, name, thing, kind)


def add_search(corpus: Corpus, name: str, thing: Any, kind: str) -> None:
    """Add the reverse question for some: which name fits a description?"""
    first = documentation(thing).split("\n\n")[0]
    # A first paragraph that is a call, or not a sentence, describes nothing.
    if draw(name, 5, "search") > 1 or len(first.split()) < 4 or "->" in first or "(" in first.split()[0]:
        return
    names = [f"`{parameter.name}`" for parameter in parameters_of(thing)]
    call = f" It takes {', '.join(names)}." if names else ""
    corpus.add(name, [(pick(_WHICH, name, kind, first), f"That is `{name}`.{call}")])


def members_of(owner: Any, names: list[str]) -> list[tuple[str, Any]]:
    """Return documented members in the order of `names`."""
    found = []
    for name in names:
        try:
            thing = inspect.getattr_static(owner, name)
        except AttributeError:
            continue
        thing = thing.__func__ if isinstance(thing, (classmethod, staticmethod)) else thing
        if (callable(thing) or inspect.isdatadescriptor(thing)) and documentation(thing):
            found.append((name, thing))
    return found


def add_class(corpus: Corpus, name: str, thing: type) -> None:
    own = vars(thing)
    public = members_of(thing, sorted(member for member in own if not member.startswith("_")))
    special = members_of(thing, sorted(member for member in own if re.fullmatch(r"__\w+__", member)))
    turns = [(pick(_QUESTIONS, name, "class"), documentation(thing))]
    listing = overview("class", name, public)
    if draw(name, 2, "listing") and listing:
        turns.append((f"Which methods and attributes does `{name}` have?", listing))
        listing = ""
        # Some continue with a member from the list.
        if draw(name, 2, "member"):
            member, inner = public[draw(name, len(public), "which")]
            turns.append((f"Say more about `{member}`.", documentation(inner)))
    corpus.add(name, turns)
    if listing:
        corpus.add(name, [(f"List what the class `{name}` offers.", listing)])
    add_search(corpus, name, thing, "class")
    for index, (_, inner) in enumerate(public + special):
        add_call(corpus, name, "method" if callable(inner) else "attribute", public + special, index)


def add_module(corpus: Corpus, name: str, module: types.ModuleType, seen: set[int]) -> None:
    exported = getattr(module, "__all__", None)
    names = sorted(set(exported) if exported else {n for n in vars(module) if not n.startswith("_")})
    members = []
    for member in names:
        thing = vars(module).get(member)
        ours = exported or getattr(thing, "__module__", None) == name
        if ours and id(thing) not in seen and (inspect.isclass(thing) or inspect.isroutine(thing)):
            seen.add(id(thing))
            members.append((member, thing))
    documented = [(member, thing) for member, thing in members if documentation(thing)]
    turns = [(f"What is the module `{name}` for?", documentation(module))]
    listing = overview("module", name, documented)
    if draw(name, 2, "listing"):
        corpus.add(name, [*turns, (f"What is in `{name}`?", listing)])
    else:
        corpus.add(name, turns)
        corpus.add(name, [(f"What does the module `{name}` offer?", listing)])
    for index, (member, thing) in enumerate(members):
        if inspect.isclass(thing):
            add_class(corpus, f"{name}.{member}", thing)
        elif documentation(thing):
            add_call(corpus, name, "function", members, index)


def sections(topic: str) -> Iterator[tuple[str, str]]:
    """Yield title and text of each underlined section of a language topic, without text before the first title."""
    lines = topic.splitlines()
    underlines = (at for at, line in enumerate(lines[1:]) if _UNDERLINE.fullmatch(line.strip()))
    titles = [at for at in underlines if lines[at].strip() and not lines[at].startswith(" ")]
    for at, following in pairwise([*titles, len(lines)]):
        yield lines[at].strip(), "\n".join(lines[at + 2 : following]).strip()


def add_topics(corpus: Corpus) -> None:
    from pydoc_data.topics import topics

    for topic, text in sorted(topics.items()):
        for title, body in sections(text):
            if len(body) <= 20:
                continue
            # Passages of a few paragraphs turn a long topic into a conversation instead of one endless answer.
            passages, size = [""], 0
            for paragraph in re.split(r"\n\s*\n", body):
                if size > 1200 + 1200 * draw(title, 4, topic):
                    passages, size = [*passages, ""], 0
                passages[-1] += paragraph + "\n\n"
                size += len(paragraph)
            asked = [f"Explain {title} in Python.", *["Go on."] * (len(passages) - 1)]
            turns = [(question, passage.strip()) for question, passage in zip(asked, passages, strict=True)]
            for start in range(0, len(turns), 3):
                part = turns[start : start + 3]
                if start:
                    part = [(f"Tell me more about {title} in Python (part {start // 3 + 1}).", part[0][1]), *part[1:]]
                corpus.add(f"{topic}: {title}", part)


def main(output: str) -> None:
    warnings.simplefilter("ignore")
    corpus = Corpus()
    add_topics(corpus)
    seen: set[int] = set()
    # Import all modules before describing any: some add to others.
    for name, module in list(find_modules()):
        add_module(corpus, name, module, seen)
    Path(output).write_text("\n".join(corpus.lines) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main(sys.argv[1])
