"""Print untrusted text safely: names in files, manifests, records and messages of libraries.

All output to terminals and pages goes through this module: `print_line`, `print_text` and `open_console` write to
terminals, `code_span` and `escape_markdown` are for Markdown, and errors contain `printable`, `redact`ed text.
"""

from __future__ import annotations

import os
import re
import sys
from typing import IO, TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rich.console import Console

# Exit code of a command whose output is no longer read, like a program ended by SIGPIPE; 1 means a failed check.
UNREAD = 141
# Control characters except line break and tab, bidirectional marks and separators, and lone surrogates.
_UNPRINTABLE = re.compile(
    "[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ufeff\ud800-\udfff\U000e0000-\U000e007f]"
)
# Words before `token` and `key` that indicate vocabulary or lookup terms instead of credentials.
_ORDINARY = (
    "pad|[be]o[stm]|unk|cls|sep|mask|start|end|stop|image|audio|video|special|control|next|last|first|largest|bad|new"
    "|per|by|a|to|turn|multi|sub|text|natural|resume|inner|full|pack|cache|sort|dict|state|primary|public"
)
# Names of credentials: HF_TOKEN, openai-key, clientSecret, AWS_ACCESS_KEY_ID, ...
_SECRET = (
    r"(?i:(?<![\w-])(?![\w-]*(?:[_-](?:file|path|dir)|error|exception)\b|invalid)"
    rf"(?!(?:[\w-]*[_-])?(?:{_ORDINARY})[_-](?:token|key)\b)"
    r"(?:(?>[\w-]*?(?:password(?!less)|passwd|passphrase|secret(?!ar[iy]|ion|ly)|credential(?!l?ed|l?ing)|connection_string))[\w-]*+"
    r"|[\w-]*(?:[^\W_][_-]|api|access|account|auth|private|refresh|session)(?:token|key(?:_?id)?)(?:_?\d+)?)(?![\w-]))"
)
# Excludes prose such as "credentials: in the vault".
_NO_PROSE = r"(?!(?<=: )(?:an?|are|at|by|from|in|is|no|not|on|see|the|via)[ \t]+[a-z])"
_IS = r"[\"']?[ \t]*[=:](?![=:])[ \t]*"
# Patterns of credentials and their replacements.
_RULES = (
    # A user without a password is a token in a web address, but a container in abfs://; a port is not a password.
    (r"://[^/\s:\[]*:(?!\d+/)(?:[^\s\"'<>@]{0,512}/)?[^/\s]*@|(?:(?<=http)|(?<=https))://[^/\s]+@", "://***@"),
    # `?` alone is a glob; followed by a name and a value it is a query, which may contain keys and signatures.
    (r"\?[\w.-]+=[^\s\"'<>\\]*", "?***"),
    (r"(?i)\b(sig|signature|x-amz-[\w-]{1,64}|x-goog-[\w-]{1,64}|token)=[^&\s\"'<>\\,]+", r"\1=***"),
    (rf"(?i)\b(authorization{_IS}[\"']?(?:bearer|basic|token)[ \t]+)[^\s\"',}}]+", r"\1***"),
    (rf"(?i)\b((?:bearer|basic)[ \t]+|(?:authorization|token){_IS}[\"']?)(?=\S{{0,256}}\d)[\w.~+/=-]{{16,}}", r"\1***"),
    (rf"({_SECRET}{_IS}){_NO_PROSE}(?:([\"'])(?:(?!\2).)+|[^\s\"',}}&]+)", r"\1\2***"),
)


def printable(text: str) -> str:
    """Replace characters that control a terminal or reorder a line with visible pictures."""
    return _UNPRINTABLE.sub(lambda match: _picture(ord(match[0])), text)


def one_line(text: str) -> str:
    """Return `printable` text on one line, with pictures for line breaks and tabs."""
    return printable(text).replace("\n", _picture(10)).replace("\t", _picture(9))


def indented(text: str) -> str:
    """Indent all lines after the first, so that a line break in a name cannot imitate a line of a message."""
    return re.sub(r"\n\s*", "\n         ", text)


def _picture(code: int) -> str:
    return chr(0x2400 + code) if code < 32 else "\u2421" if code == 127 else "\ufffd"


def code_span(text: str) -> str:
    """Return text as a Markdown code span that its contents cannot end, also inside a table."""
    return "`" + " ".join(printable(text).replace("`", "'").replace("|", "\u2502").split()) + "`"


def escape_markdown(text: str) -> str:
    """Return text on one line, escaped for Markdown, also inside a table."""
    # An underscore within a word needs no escape.
    pattern = r"[\\`*\[\]<>|#]|(?<![^\W_])_|_(?![^\W_])"
    return re.sub(pattern, r"\\\g<0>", " ".join(printable(text).split()))


def redact(text: str) -> str:
    """Remove credentials of URIs, signed queries and environment variables from a text."""
    for pattern, kept in _RULES:
        text = re.sub(pattern, kept, text)
    return _hide_values(text)


def redact_all(values: Any) -> Any:
    """Return plain values (dicts, lists, scalars) without credentials, for a file that commands will read."""
    if isinstance(values, dict):
        return {
            name: "***" if isinstance(value, str) and value and re.fullmatch(_SECRET, str(name)) else redact_all(value)
            for name, value in values.items()
        }
    if isinstance(values, list):
        return [redact_all(value) for value in values]
    # Other texts, such as templates, may legitimately contain `token=...`.
    return values if not isinstance(values, str) else redact(values) if "://" in values else _hide_values(values)


def _hide_values(text: str) -> str:
    for name, value in os.environ.items():
        if len(value) >= 6 and value in text and re.fullmatch(_SECRET, name):
            text = text.replace(value, "***")
    return text


def count_of(count: int, noun: str) -> str:
    """Format a count as `1 cell` or `2 cells`."""
    return f"{count:,} {noun}{'' if count == 1 else 's'}"


def duration(seconds: float) -> str:
    """Format a time with its two largest units: `48 s`, `12 min 5 s`, `3 h 20 min`, `2 d 4 h`."""
    rest, counts = max(0, round(seconds)), list[tuple[int, str]]()
    for unit, size in {"d": 86_400, "h": 3_600, "min": 60, "s": 1}.items():
        count, rest = divmod(rest, size)
        counts += [(count, unit)] if count or counts or unit == "s" else []
    return " ".join(f"{count} {unit}" for place, (count, unit) in enumerate(counts[:2]) if count or not place)


def print_text(text: object = "", *, end: str = "\n", file: IO[str] | None = None, flush: bool = False) -> None:
    """Print text to `file` (default standard output), without credentials and control characters."""
    try:
        print(printable(redact(str(text))), end=end, file=file, flush=flush)
    except BrokenPipeError:
        if file is not None:
            raise
        sys.exit(UNREAD)


def print_line(text: object, *, file: IO[str] | None = None, flush: bool = False) -> None:
    """Print text on one line, including any line breaks in names; see `print_text`."""
    print_text(one_line(str(text)), file=file, flush=flush)


def open_console(*, width: int | None = None, stderr: bool = False, **options: Any) -> Console:
    """Open a console for tables and progress bars that prints `printable` text without interpreting markup.

    Args:
        width: columns if the output is not a terminal; None never wraps there.
        stderr: print to standard error.
        options: options of Rich's Console.
    """
    from rich.console import Console
    from rich.text import Text

    class PlainConsole(Console):
        """Prints `printable` text, also inside tables and groups, which render their parts through `render`."""

        def on_broken_pipe(self) -> None:  # Rich would end the process with exit code 1
            sys.exit(UNREAD)

        def render(self, renderable: Any, options: Any = None) -> Any:
            if isinstance(renderable, Text) and (plain := printable(renderable.plain)) != renderable.plain:
                renderable = renderable.copy()
                renderable.plain = plain
            return super().render(renderable, options)

        def render_str(self, text: str, **options: Any) -> Text:
            return super().render_str(printable(text), **options)

    if not (sys.stderr if stderr else sys.stdout).isatty() and "file" not in options:
        options = {"width": width, "soft_wrap": width is None, **options}
    return PlainConsole(stderr=stderr, markup=False, emoji=False, highlight=False, **options)
