"""Render chat templates in a separate process with limits on processor time and memory.

A template is an untrusted program. Jinja's sandbox keeps it away from the interpreter, but does not prevent
`3**60000000` or an endlessly growing list: the system ends a process that does either. One process serves all the
tokenizers of this one; it receives batches of conversations as pickles and answers in JSON, which is never executed.
"""

from __future__ import annotations

import errno
import json
import os
import pickle
import signal
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from contextlib import suppress
from datetime import date
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import harness
from harness import errors
from harness.errors import ConfigError, HarnessError, PrepError
from harness.prep.chat import BadReason, BadRecord, BadRecordError, Conversation
from harness.prep.chat.values import check_text
from harness.prep.tokenize.config import MAX_CHARACTERS, OUT_OF_CHARACTERS, OUT_OF_MEMORY, TokenizerConfig
from harness.prep.tokenize.masks import Masker, Rendered

if TYPE_CHECKING:
    from harness.prep.tokenize.rendering import Template

# Limit per conversation of up to 64 turns, in proportion for longer ones. A hundred turns take some milliseconds.
CPU_S = 10.0
# Limit on address space beyond the interpreter's.
MEMORY_BYTES = 2 << 30
# The text of a conversation may be several times as long as a short record, but only a little longer than a long one:
# tokenizing takes up to 600 bytes of memory per character in this process.
_TIMES, _LONGER, _ALWAYS = 8, 4 << 20, 64 << 10
_MAX_DETAIL = 1000
_FIX = "set another template with tokenizer.chat_template, or remove the conversation"
# numpy reports a lack of memory as an ImportError; a missing module would be missing in this process, too.
_SERVE = f"""import os
try: from harness.prep.tokenize.renderer import serve; serve()
except (MemoryError, ImportError, OSError) as error:
    if getattr(error, "errno", {errno.ENOMEM}) != {errno.ENOMEM}: raise
    os._exit({OUT_OF_MEMORY})
"""
# The process ends when its standard input does, not by signals sent to all processes of the job.
_NOT_FOR_IT = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)


class _StoppedError(Exception):
    """The process was ended by one of its limits, named in the argument."""


class Renderer:
    """A chat template with a mask rule (`Masker`), run in the rendering process.

    The template may read `variables`, such as `bos_token`, by name, and writes the date `today`, or the current date if
    None; `special` contains the texts of the tokenizer's special tokens.
    """

    def __init__(
        self,
        template: str,
        variables: Mapping[str, Any],
        config: TokenizerConfig,
        special: Sequence[str],
        *,
        today: date | None = None,
        where: str,
    ) -> None:
        self._settings = pickle.dumps((template, dict(variables), config, tuple(special), today, where))
        self._where = where
        facts: tuple[str, str, bool, list[str]] = self._ask("facts")
        self.rule, self.why, self.uses_date, ends = facts
        self.end_tokens = tuple(ends)

    def sequences(self, conversations: Sequence[Conversation]) -> list[list[Rendered] | BadRecord]:
        """Return the sequences of each conversation, or the reason why it has none."""
        if not conversations:
            return []
        try:
            answers = _exchange((self._settings, "sequences", list(conversations)))
        except _StoppedError as stopped:
            if len(conversations) > 1:
                return [self.sequences([one])[0] for one in conversations]
            what, where = f"the chat template {stopped}", f"{conversations[0].where}; template: {self._where}"
            raise PrepError(what, where=where, fix=_FIX) from None
        return [
            BadRecord(one.where, BadReason(made["reason"]), made["detail"])
            if isinstance(made, dict)
            else [Rendered(text, [(start, end) for start, end in spans], *others) for text, spans, *others in made]
            for one, made in zip(conversations, answers, strict=True)
        ]

    def prompt(self, turns: Sequence[Mapping[str, Any]]) -> str:
        """Return the text of a conversation up to the start of the assistant's next turn."""
        return str(self._ask("prompt", list(turns)))

    def _ask(self, name: str, *arguments: Any) -> Any:
        try:
            return _exchange((self._settings, name, *arguments))
        except _StoppedError as stopped:
            # Not a ConfigError: callers skip a tokenizer after one, and here memory may just have run out.
            raise PrepError(f"the chat template {stopped}", where=self._where, fix=_FIX) from None


class _Process:
    def __init__(self, cpu_s: float, memory_bytes: int) -> None:
        paths = [str(Path(harness.__file__).parent.parent), *filter(None, [os.environ.get("PYTHONPATH")])]
        self.cpu_s, self.memory_bytes, self.lock = cpu_s, memory_bytes, threading.Lock()
        self._process = subprocess.Popen(
            [sys.executable, "-P", "-c", _SERVE, str(cpu_s), str(memory_bytes)],
            env={**os.environ, "PYTHONPATH": os.pathsep.join(paths), "OMP_NUM_THREADS": "1"},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            bufsize=1 << 20,
            start_new_session=True,
        )

    @property
    def has_ended(self) -> bool:
        return self._process.poll() is not None

    def exchange(self, request: bytes) -> Any:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        try:
            self._process.stdin.write(request)
            self._process.stdin.flush()
            line = self._process.stdout.readline()
        except OSError:
            line = b""
        if line.endswith(b"\n"):
            return json.loads(line)
        code = self._process.wait()
        if code == -signal.SIGPROF:
            raise _StoppedError(f"takes more than {self.cpu_s:g} s of processor time")
        if code == OUT_OF_CHARACTERS:
            raise _StoppedError(f"writes more than {MAX_CHARACTERS:,} characters")
        if code == OUT_OF_MEMORY:
            raise _StoppedError(f"ran out of memory; its limit is {self.memory_bytes / 2**30:g} GiB of memory")
        raise _StoppedError(f"ended the process that renders it ({f'signal {-code}' if code < 0 else f'code {code}'})")


@lru_cache(maxsize=2)
def _process_of(pid: int, cpu_s: float, memory_bytes: int) -> _Process:
    """Return the rendering process for the process `pid`: a fork does not share pipes with its parent."""
    return _Process(cpu_s, memory_bytes)


def _exchange(request: tuple[Any, ...]) -> Any:
    while True:
        process = _process_of(os.getpid(), CPU_S, MEMORY_BYTES)
        with process.lock:
            if not process.has_ended:
                answer = process.exchange(pickle.dumps(request, protocol=5))
                break
            _process_of.cache_clear()
    if "error" in answer:
        kind, what, where, fix = answer["error"]
        raise getattr(errors, kind)(what, where=where, fix=fix)
    return answer["made"]


# ---- in the rendering process --------------------------------------------------------------------------------------


def serve() -> None:
    """Answer requests on standard input until it ends, within the limits given as arguments."""
    import resource

    cpu_s, memory_bytes = float(sys.argv[1]), int(sys.argv[2])
    for number in _NOT_FOR_IT:
        signal.signal(number, signal.SIG_IGN)
    answers = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # keep other output out of the answers
    from harness.prep.tokenize import rendering  # noqa: F401 - before memory is limited

    if (sizes := Path("/proc/self/statm")).exists():  # on Linux; macOS does not enforce it
        limit = int(sizes.read_text().split()[0]) * resource.getpagesize() + memory_bytes
        resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    with suppress(EOFError, BrokenPipeError):  # the asking process has ended or was killed
        while True:
            settings, name, *arguments = pickle.load(sys.stdin.buffer)
            answers.write(json.dumps(_answer(settings, name, arguments, cpu_s)).encode() + b"\n")
            answers.flush()


def _answer(settings: bytes, name: str, arguments: list[Any], cpu_s: float) -> dict[str, Any]:
    try:
        signal.setitimer(signal.ITIMER_PROF, cpu_s)
        template, masker = _made(settings)
        if name == "sequences":
            return {"made": [_sequences(masker, conversation, cpu_s) for conversation in arguments[0]]}
        if name == "prompt":
            text = template.render(arguments[0], prompt=True)
            _check_texts([text], arguments[0])
            return {"made": text}
        return {"made": (masker.rule, masker.why, template.uses_date, masker.end_tokens)}
    except MemoryError:
        raise
    except HarnessError as error:
        return {"error": (type(error).__name__, *map(_cut, (error.what, error.where, error.fix)))}
    except Exception as error:  # a template is an untrusted program and can raise anything
        what = getattr(error, "detail", f"the chat template failed: {type(error).__name__}: {error}")
        return {"error": ("ConfigError", _cut(what), pickle.loads(settings)[5], _FIX)}


@lru_cache(maxsize=8)
def _made(settings: bytes) -> tuple[Template, Masker]:
    import jinja2

    from harness.prep.tokenize.rendering import Template

    text, variables, config, special, today, where = pickle.loads(settings)
    try:
        template = Template(text, variables, today=today)
    except jinja2.TemplateSyntaxError as error:
        what = f"the chat template is not valid Jinja: {error.message}, line {error.lineno}"
        raise ConfigError(what, where=where, fix="fix the template") from None
    return template, Masker(template, config, special, where=where)


def _sequences(masker: Masker, conversation: Conversation, cpu_s: float) -> Any:
    signal.setitimer(signal.ITIMER_PROF, cpu_s * (1 + len(conversation.messages) // 64))
    try:
        found = masker.sequences(conversation)
        _check_texts([made.text for made in found], conversation)
    except BadRecordError as refused:
        return {"reason": refused.reason, "detail": _cut(refused.detail)}
    return [(made.text, made.spans, list(made.weights), made.num_turns) for made in found]


def _check_texts(texts: Sequence[str], given: Conversation | Sequence[Any]) -> None:
    """Raise BadRecordError for texts that cannot be encoded, or are much longer than their record."""
    for text in texts:
        check_text(text, "what the chat template writes")
    if (longest := max(map(len, texts), default=0)) <= _ALWAYS:
        return
    record = given.as_record() if isinstance(given, Conversation) else given
    size = len(json.dumps(record, ensure_ascii=False, default=str))
    allowed = min(_TIMES * size, size + _LONGER) + _ALWAYS
    if longest > allowed:
        detail = f"the chat template writes {longest:,} characters for a record of {size:,}, and may write"
        detail += f" {allowed:,}; set another template with "
        raise BadRecordError(BadReason.TEMPLATE_FAILED, f"{detail}tokenizer.chat_template, or divide the record")


def _cut(text: str) -> str:
    return text if len(text) <= _MAX_DETAIL else f"{text[:_MAX_DETAIL]}..."
