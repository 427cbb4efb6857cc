"""The built-in corpus: documentation of Python's standard library as conversations, so that every machine has data.

Run as a script (`python pydoc.py OUTPUT`), it imports nearly all of the standard library and nothing else;
`write_pydoc_corpus` runs it in a separate process.
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
from contextlib import suppress
from pathlib import Path
from typing import Any, cast

_TIMEOUT_S = 300
# Importing these opens a window or a browser, prints, or changes the terminal; or they are tests or demonstrations.
_SKIPPED = {"__main__", "antigravity", "idlelib", "lib2to3", "pydoc_data", "readline", "rlcompleter", "test", "this"}
_SKIPPED |= {"tkinter", "turtle", "turtledemo"}
_SKIPPED_PARTS = {"test", "tests", "encodings"}
_ADDRESS = re.compile(r" at 0x[0-9a-fA-F]+")
_SYSTEM = {"role": "system", "content": "You answer questions about Python briefly and exactly."}
_QUESTIONS = ("What does `{}` do?", "Explain `{}`.", "What is `{}` for?", "I found `{}` in some code. What is it?")
# Approximate characters per passage of a topic, and passages per conversation.
_PASSAGE, _PASSAGES = 1000, 2

# A name or a question, and a text about it.
Entry = tuple[str, str]


def write_pydoc_corpus(path: Path) -> None:
    """Write questions and answers about the standard library as JSONL, identical on every run of the same Python.

    A separate process imports the library's modules, without site packages, display or standard input. The file
    appears complete or not at all.
    """
    # Imported here because the script runs without packages.
    from harness.errors import PrepError

    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(path.name + ".tmp")
    # -P and -S: the script's folder must not hide modules, and installed packages must not add any.
    command = [sys.executable, "-P", "-S", "-s", "-B", "-X", "utf8", __file__, str(temporary.resolve())]
    kept = {name: os.environ[name] for name in ("PATH", "HOME", "SYSTEMROOT", "LD_LIBRARY_PATH") if name in os.environ}
    env = {**kept, "PYTHONHASHSEED": "0", "TERM": "dumb"}
    try:
        subprocess.run(command, env=env, stdin=subprocess.DEVNULL, capture_output=True, timeout=_TIMEOUT_S, check=True)
        temporary.replace(path)
    except (OSError, subprocess.SubprocessError) as error:
        last = (getattr(error, "stderr", None) or b"").decode(errors="replace").strip().rpartition("\n")[2]
        what = f"collecting Python's documentation failed: {last or error}"
        fix = "use another Python, or your own chats with source=files source.path=..."
        raise PrepError(what, where=sys.executable, fix=fix) from error


def _draw(name: str, choices: int) -> int:
    """Return a number below `choices` that depends only on the name: the corpus is the same on every run."""
    return zlib.crc32(name.encode()) % choices


def _modules(name: str) -> Iterator[tuple[str, types.ModuleType]]:
    """Yield a module and its public submodules, with their names, except those that cannot be imported here."""
    try:
        module = importlib.import_module(name)
    except (Exception, SystemExit):  # for another operating system, or an optional library is missing
        return
    yield name, module
    for info in sorted(pkgutil.iter_modules(getattr(module, "__path__", ())), key=lambda info: info.name):
        if not info.name.startswith("_") and not _SKIPPED_PARTS & {info.name, name}:
            yield from _modules(f"{name}.{info.name}")


def _documentation(thing: Any) -> str:
    """Return the object's own docstring, never an inherited one."""
    text = getattr(thing, "__doc__", None)
    text = inspect.cleandoc(text).strip() if isinstance(text, str) else ""
    # Examples of codecs contain half surrogate pairs, which are not text.
    return _ADDRESS.sub("", text).encode("utf-8", "replace").decode() if len(text) > 20 else ""


def _entries(name: str, owner: Any, seen: set[int]) -> Iterator[Entry]:
    """Yield the full name and documentation of a module or class and of all that it defines, each object once."""
    yield name, _documentation(owner)
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
            yield from _entries(full, thing, seen)
        elif text := _documentation(thing):
            yield full, text
            names: list[str] = []
            with suppress(Exception):  # a module's own descriptors may raise anything
                parameters = inspect.signature(cast(Any, thing)).parameters
                names = [f"`{name}`" for name in parameters if name not in ("self", "cls")]
            yield f"{full}()", f"`{full}` takes {', '.join(names)}." if names else ""


def _topics() -> Iterator[list[Entry]]:
    """Yield the language reference as conversations, each about passages of one topic."""
    from pydoc_data.topics import topics

    for topic, text in sorted(topics.items()):
        passages = [""]
        for paragraph in re.split(r"\n\s*\n", text.strip()):
            passages += [""] if len(passages[-1]) > _PASSAGE else []
            passages[-1] += paragraph + "\n\n"
        for start in range(0, len(passages), _PASSAGES):
            part = [("Go on.", passage.strip()) for passage in passages[start : start + _PASSAGES]]
            yield [(f"Tell me about {topic} in Python, part {start // _PASSAGES + 1}.", part[0][1]), *part[1:]]


def _write(output: Path) -> None:
    seen: set[int] = set()
    names = sorted(name for name in sys.stdlib_module_names - _SKIPPED if not name.startswith(("_", "xx")))
    # Import all modules before describing any: some add to others.
    modules = [found for name in names for found in _modules(name)]
    # No text is an answer twice, since it could be in both training and validation.
    unique = {text: name for name, text in reversed([one for each in modules for one in _entries(*each, seen)]) if text}
    found, chats = [(name, text) for text, name in reversed(unique.items())], [*_topics()]
    while found:  # one question, or three about adjacent names
        turns = 1 if _draw(found[0][0], 12) else 3
        chats.append([(_QUESTIONS[_draw(name, len(_QUESTIONS))].format(name), text) for name, text in found[:turns]])
        found = found[turns:]
    answers: set[str] = set()
    with output.open("w", encoding="utf-8") as file:
        for chat in chats:
            messages = [_SYSTEM] if _draw(chat[0][0], 8) == 0 else []
            for question, answer in chat:
                if answer not in answers:
                    messages += [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]
            answers.update(answer for _, answer in chat)
            if messages not in ([], [_SYSTEM]):
                file.write(json.dumps({"messages": messages}, ensure_ascii=False) + "\n")


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    _write(Path(sys.argv[1]))
