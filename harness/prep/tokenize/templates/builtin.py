"""Registry of built-in chat templates: the file of each, and its special tokens.

The templates write the format that a family's models know. A turn that the format does not support (tools, reasoning)
fails with a message instead of being left out. The token that ends a turn is marked; the line break after it is not.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path

from harness.errors import ConfigError
from harness.settings import nearest_name


@dataclass(frozen=True)
class TemplateTokens:
    """Special tokens of a built-in template: `ends`, which end an assistant turn, and `marks`, all others.

    The last of `ends` is the tokenizer's end-of-sequence token. `begin` is the first token of a text, which the
    template writes as the tokenizer's own; empty if it writes none.
    """

    ends: tuple[str, ...]
    marks: tuple[str, ...]
    begin: str = ""


_CHATML = TemplateTokens(("<|im_end|>",), ("<|im_start|>",))
_LLAMA = TemplateTokens(("<|eot_id|>",), ("<|start_header_id|>", "<|end_header_id|>"), "<|begin_of_text|>")
BUILT_IN = {
    "chatml": _CHATML,
    "llama3": _LLAMA,
    "llama3_1": _LLAMA,
    "qwen2_5": _CHATML,
    "qwen3": _CHATML,
    "qwen3_instruct": _CHATML,
    "gemma": TemplateTokens(("<end_of_turn>",), ("<start_of_turn>",), "<bos>"),
    "phi3": TemplateTokens(("<|end|>", "<|endoftext|>"), ("<|system|>", "<|user|>", "<|assistant|>")),
    "mistral": TemplateTokens(
        ("</s>",),
        (
            *("[INST]", "[/INST]", "[SYSTEM_PROMPT]", "[/SYSTEM_PROMPT]", "[AVAILABLE_TOOLS]", "[/AVAILABLE_TOOLS]"),
            *("[TOOL_CALLS]", "[ARGS]", "[TOOL_RESULTS]", "[/TOOL_RESULTS]", "[THINK]", "[/THINK]"),
        ),
        "<s>",
    ),
    # Its bars are full-width characters.
    "deepseek": TemplateTokens(
        ("<\uff5cend▁of▁sentence\uff5c>",),
        tuple(
            f"<\uff5c{mark}\uff5c>"
            for mark in (
                *("User", "Assistant", "tool▁calls▁begin", "tool▁calls▁end", "tool▁call▁begin", "tool▁call▁end"),
                *("tool▁sep", "tool▁outputs▁begin", "tool▁outputs▁end", "tool▁output▁begin", "tool▁output▁end"),
            )
        ),
        "<\uff5cbegin▁of▁sentence\uff5c>",
    ),
}


# <|user|>, <|turn>, <turn|>, <start_of_turn>, [INST], and DeepSeek's with full-width bars.
_CONTROL = re.compile(
    r"<\|[^<>|\s'\"{}]+\|?>|<[A-Za-z_]+\|>|<\uff5c[^<>\s'\"]+\uff5c>|<\w+_of_\w+>|</s>|\[/?(?:INST|[A-Z]+_[A-Z_]+)\]"
)
_KNOWN_ENDS = frozenset(end for tokens in BUILT_IN.values() for end in tokens.ends)


def spelled_tokens(template: str, *, end_of_text: str) -> TemplateTokens:
    """Return the special tokens spelled in a template, else those of `chatml`; `end_of_text` if it has no end."""
    found = list(dict.fromkeys(_CONTROL.findall(template)))
    ends = [token for token in found if token in _KNOWN_ENDS]
    if not ends or "eos_token" in template:
        ends.append(end_of_text)
    begin = "<|begin_of_text|>" if "bos_token" in template else ""
    marks = tuple(token for token in found if token not in ends and token != begin)
    return TemplateTokens(tuple(ends), marks, begin) if found else _CHATML


def load_template(name: str) -> str:
    """Return the text of a built-in template, or of a file; a built-in name takes precedence over a file."""
    if name in BUILT_IN:
        return files(__package__).joinpath(f"{name}.jinja").read_text(encoding="utf-8").removesuffix("\n")
    path = Path(name).expanduser()
    try:
        return path.read_text(encoding="utf-8")
    except FileNotFoundError:
        near = nearest_name(name, BUILT_IN)
        hint = f"did you mean {near}? " if near else ""
        what = f"chat template {name!r} is neither a built-in template nor a file"
        fix = f"{hint}use a Jinja file, or one of {', '.join(BUILT_IN)}"
        raise ConfigError(what, where="tokenizer.chat_template", fix=fix) from None
    except (OSError, UnicodeDecodeError) as error:
        what, fix = f"the template cannot be read: {error}", "check tokenizer.chat_template"
        raise ConfigError(what, where=name, fix=fix) from error
