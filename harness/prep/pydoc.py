"""The built-in corpus: documentation of Python's standard library as conversations, so that every machine has data.

As a script (`python pydoc.py OUTPUT`) it imports nearly all of the standard library and nothing else, which
`write_pydoc_corpus` does in a process of its own.
"""

from __future__ import annotations

import importlib
import inspect
import json
import os
import pkgutil
import re
import subprocess
import sys
import types
import warnings
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

_TIMEOUT_S = 300
# Importing these opens a window or a browser, prints, or changes the terminal; or they are tests or demonstrations.
SKIPPED = {"__main__", "antigravity", "idlelib", "lib2to3", "pydoc_data", "readline", "rlcompleter", "test", "this"}
SKIPPED |= {"tkinter", "turtle", "turtledemo"}
SKIPPED_PARTS = {"test", "tests", "encodings"}
_ADDRESS = re.compile(r" at 0x[0-9a-fA-F]+")
_SYSTEM = "You answer questions about Python briefly and exactly."
_QUESTIONS = ("What does `{}` do?", "Explain `{}`.", "What is `{}` for?", "I found `{}` in some code. What is it?")
# Characters of a passage of a topic, about, and passages of a conversation.
_PASSAGE, _PASSAGES = 1000, 2

# A name, and a text about it.
Entry = tuple[str, str]


def write_pydoc_corpus(path: Path) -> None:
    """Write questions and answers about the standard library as JSONL, the same on every run of one Python.

    A process of its own imports the library's modules, without site packages, display or standard input.

    Args:
        path: the file to write; it appears whole or not at all.

    Raises:
        PrepError: collecting failed.
    """
    # Not at the top: the script runs without packages.
    from harness.errors import PrepError

    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(path.name + ".tmp")
    # -P and -S: the script's folder must not hide modules, and installed packages must not add any.
    command = [sys.executable, "-P", "-S", "-s", "-B", "-X", "utf8", __file__, str(temporary.resolve())]
    kept = {name: os.environ[name] for name in ("PATH", "HOME", "SYSTEMROOT", "LD_LIBRARY_PATH") if name in os.environ}
    fix = "use another Python, or your own chats with source=files source.path=..."
    try:
        result = subprocess.run(
            command,
            env={**kept, "PYTHONHASHSEED": "0", "TERM": "dumb"},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            timeout=_TIMEOUT_S,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise PrepError(f"collecting Python's documentation failed: {error}", where=sys.executable, fix=fix) from error
    if result.returncode != 0 or not temporary.exists():
        message = " ".join(result.stderr.decode(errors="replace").strip().splitlines()[-1:])
        what = f"collecting Python's documentation ended with code {result.returncode}: {message}"
        raise PrepError(what, where=sys.executable, fix=fix)
    temporary.replace(path)


def draw(name: str, choices: int) -> int:
    """Return a number below `choices` that depends on the name alone: the corpus is the same on every run."""
    return zlib.crc32(name.encode()) % choices


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
    text = inspect.cleandoc(text).strip() if isinstance(text, str) else ""
    # Examples of codecs hold half surrogate pairs, which are not text.
    return _ADDRESS.sub("", text).encode("utf-8", "replace").decode() if len(text) > 20 else ""


def arguments(name: str, thing: Any) -> str:
    """Return a sentence about the arguments of a call by name; empty where they are unknown or none."""
    try:
        names = [f"`{name}`" for name in inspect.signature(thing).parameters if name not in ("self", "cls")]
    except Exception:  # a module's own descriptors may raise anything
        return ""
    return f"`{name}` takes {', '.join(names)}." if names else ""


def entries(name: str, owner: Any, seen: set[int]) -> Iterator[Entry]:
    """Yield the documentation of a module or class and of all that it defines, each object once, by full name."""
    yield name, documentation(owner)
    exported = getattr(owner, "__all__", None)
    for member in sorted(exported or [one for one in vars(owner) if not one.startswith("_") or inspect.isclass(owner)]):
        thing = vars(owner).get(member)
        thing = thing.__func__ if isinstance(thing, (classmethod, staticmethod)) else thing
        is_own = inspect.isclass(owner) or exported or getattr(thing, "__module__", None) == name
        if id(thing) in seen or not is_own or not (callable(thing) or inspect.isdatadescriptor(thing)):
            continue
        seen.add(id(thing))
        full = f"{name}.{member}"
        if inspect.isclass(thing) and not inspect.isclass(owner):
            yield from entries(full, thing, seen)
        elif text := documentation(thing):
            yield full, text
            yield f"{full}()", arguments(full, thing)


def conversations(found: list[Entry]) -> Iterator[list[Entry]]:
    """Divide entries into conversations of one question, or of three about neighbors."""
    at = 0
    while at < len(found):
        turns = 1 if draw(found[at][0], 12) else 3
        yield [(_QUESTIONS[draw(name, len(_QUESTIONS))].format(name), text) for name, text in found[at : at + turns]]
        at += turns


def topics() -> Iterator[list[Entry]]:
    """Yield the language's reference as conversations: a topic in passages."""
    from pydoc_data.topics import topics as texts

    for topic, text in sorted(texts.items()):
        passages = [""]
        for paragraph in re.split(r"\n\s*\n", text.strip()):
            passages += [""] if len(passages[-1]) > _PASSAGE else []
            passages[-1] += paragraph + "\n\n"
        for start in range(0, len(passages), _PASSAGES):
            part = [("Go on.", passage.strip()) for passage in passages[start : start + _PASSAGES]]
            yield [(f"Tell me about {topic} in Python, part {start // _PASSAGES + 1}.", part[0][1]), *part[1:]]


def main(output: str) -> None:
    warnings.simplefilter("ignore")
    seen: set[int] = set()
    # Import all modules before describing any: some add to others.
    found = [entry for name, module in list(find_modules()) for entry in entries(name, module, seen)]
    # No text is an answer twice: it would be in training and in validation.
    unique = {text: name for name, text in reversed(found) if text}
    lines = []
    answers: set[str] = set()
    for turns in (*topics(), *conversations([(name, text) for text, name in reversed(unique.items())])):
        kept = [(question, answer) for question, answer in turns if answer not in answers]
        answers.update(answer for _, answer in kept)
        messages = [{"role": "system", "content": _SYSTEM}] if draw(turns[0][0], 8) == 0 else []
        for question, answer in kept:
            messages += [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]
        if kept:
            lines.append(json.dumps({"messages": messages}, ensure_ascii=False))
    Path(output).write_text("\n".join(lines) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main(sys.argv[1])
