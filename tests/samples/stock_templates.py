"""Stock chat templates as model makers publish them, tokenizers for them, and conversations of every shape.

The templates are read from the `trl` package, which keeps them beside twins of its own that mark what is trained.
"""

from __future__ import annotations

import importlib.util
import json
import re
from pathlib import Path
from typing import Any

import pytest
from tokenizers import AddedToken, Tokenizer

from harness.conformance.chat_checks import control_tokens, end_token
from harness.prep.tokenize import train_bpe

TWIN = "_training"
TEXTS = [
    *("The quick brown fox jumps over the lazy dog.\n", "def f(x):\n    return x + 1\n"),
    *('{"name": "get_weather", "arguments": {"city": "Paris"}}', "Grüße, 世界! \U0001f600"),
] * 20
# Families add these to the vocabulary without making them special: users may write them.
_WORDS = re.compile(r"</?(?:think|tool_call|tool_response|tools|arg_key|arg_value|atem:[a-z_]+)>")
BEGIN, END, PAD, UNKNOWN = "<s>", "</s>", "<pad>", "<unk>"


def _folder() -> Path:
    spec = importlib.util.find_spec("trl")
    if spec is None:  # the image has the nightly tests' packages only
        pytest.skip("needs trl", allow_module_level=True)
    return Path(spec.origin).parent / "chat_templates"


def stock_templates() -> dict[str, str]:
    """Return the text of every stock template by its name."""
    files = sorted(_folder().glob("*.jinja"))
    return {file.stem: file.read_text(encoding="utf-8") for file in files if not file.stem.endswith(TWIN)}


def training_twin(name: str) -> str | None:
    """Return the text of the twin that TRL trains a stock template with; None if it has none."""
    file = _folder() / f"{name}{TWIN}.jinja"
    return file.read_text(encoding="utf-8") if file.is_file() else None


def tokenizer_for(template: str, folder: Path, *, texts: list[str] | None = None, size: int = 320) -> Path:
    """Train a small tokenizer of `size` and a template's special tokens, and save it with the template."""
    train_bpe(texts or TEXTS, folder, vocab_size=size)
    file = folder / "tokenizer.json"
    tokenizer = Tokenizer.from_file(str(file))
    control = control_tokens(template)
    end = end_token(template, END)
    begin = "<|begin_of_text|>" if "<|begin_of_text|>" in control else BEGIN
    tokenizer.add_special_tokens([*control, begin, end, PAD, UNKNOWN])
    words = dict.fromkeys(_WORDS.findall(template))
    tokenizer.add_tokens([AddedToken(word, special=False, normalized=False) for word in words])
    tokenizer.save(str(file))
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": begin,
        "eos_token": end,
        "pad_token": PAD,
        "unk_token": UNKNOWN,
        "additional_special_tokens": control,
        "clean_up_tokenization_spaces": False,
        "chat_template": template,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(settings, indent=2) + "\n", encoding="utf-8")
    return folder


Turn = dict[str, Any]


def turn(role: str, content: Any, **rest: Any) -> Turn:
    return {"role": role, "content": content, **rest}


def call(name: str, arguments: dict[str, Any] | str, number: int = 1) -> dict[str, Any]:
    """Build a tool call; ids have nine characters, as Mistral's must."""
    return {"id": f"call{number:05d}", "type": "function", "function": {"name": name, "arguments": arguments}}


def tool(name: str, description: str, **properties: str) -> dict[str, Any]:
    parameters = {
        "type": "object",
        "properties": {key: {"type": "string", "description": text} for key, text in properties.items()},
        "required": list(properties),
    }
    return {"type": "function", "function": {"name": name, "description": description, "parameters": parameters}}


def result(text: str, number: int = 1, name: str = "get_weather") -> Turn:
    return turn("tool", text, tool_call_id=f"call{number:05d}", name=name)


TOOLS = [
    tool("get_weather", "Current weather of a city.", city="Name of the city."),
    tool("get_time", "Local time of a city.", city="Name of the city."),
]
PARIS, ROME = {"city": "Paris"}, {"city": "Rome"}
_ASK = turn("user", "How warm is it in Paris?")
_CALL = turn("assistant", "", tool_calls=[call("get_weather", PARIS)])
_SYSTEM = turn("system", "Be brief.")
_ONE = [turn("user", "Hi there"), turn("assistant", "Hello, friend.")]
_TWO = [*_ONE, turn("user", "What is 2 + 2?"), turn("assistant", "It is 4.")]
_THREE = [*_TWO, turn("user", "And 3 + 3?"), turn("assistant", "That makes 6.")]
_THOUGHT = turn("assistant", "It is 4.", reasoning_content="Two and two are four.")
_LATER = [turn("user", "And 3 + 3?"), turn("assistant", "That makes 6.", reasoning_content="Twice three.")]


def _with(message: Turn, **changes: Any) -> Turn:
    return {**message, **changes}


# Name of the shape: its messages and tools.
SHAPES: dict[str, tuple[list[Turn], list[dict[str, Any]]]] = {
    "one_turn": (_ONE, []),
    "two_turns": (_TWO, []),
    "three_turns": (_THREE, []),
    "system": ([_SYSTEM, *_ONE], []),
    "system_two_turns": ([_SYSTEM, *_TWO], []),
    "developer": ([turn("developer", "Be brief."), *_ONE], []),
    "ends_with_user": ([*_ONE, turn("user", "Thanks")], []),
    "white_space": ([turn("user", " Hi \n"), turn("assistant", "\n Hello,  friend. \n")], []),
    "text_parts": (
        [
            turn("user", [{"type": "text", "text": "Hi "}, {"type": "text", "text": "there"}]),
            turn("assistant", [{"type": "text", "text": "Hello, friend."}]),
        ],
        [],
    ),
    "tools_unused": (_ONE, TOOLS),
    "tool_call": ([_ASK, _CALL], TOOLS),
    "tool_call_of_null_content": ([_ASK, _with(_CALL, content=None)], TOOLS),
    "tool_call_of_text_arguments": ([_ASK, _with(_CALL, tool_calls=[call("get_weather", json.dumps(PARIS))])], TOOLS),
    "tool_call_with_content": ([_ASK, _with(_CALL, content="Let me see.")], TOOLS),
    "tool_result": ([_ASK, _CALL, result("21 C"), turn("assistant", "It has 21 degrees.")], TOOLS),
    "system_tool_result": ([_SYSTEM, _ASK, _CALL, result("21 C"), turn("assistant", "It has 21 degrees.")], TOOLS),
    "parallel_calls": (
        [
            turn("user", "How warm is it in Paris, and in Rome?"),
            _with(_CALL, tool_calls=[call("get_weather", PARIS), call("get_weather", ROME, 2)]),
            result("21 C"),
            result("27 C", 2),
            turn("assistant", "21 and 27 degrees."),
        ],
        TOOLS,
    ),
    "calls_in_steps": (
        [
            _ASK,
            _CALL,
            result("21 C"),
            _with(_CALL, tool_calls=[call("get_time", PARIS, 2)]),
            result("noon", 2, "get_time"),
            turn("assistant", "21 degrees at noon."),
        ],
        TOOLS,
    ),
    "tool_result_two_turns": (
        [
            _ASK,
            _CALL,
            result("21 C"),
            turn("assistant", "It has 21 degrees."),
            turn("user", "And in Rome?"),
            _with(_CALL, tool_calls=[call("get_weather", ROME, 2)]),
            result("27 C", 2),
            turn("assistant", "27 degrees."),
        ],
        TOOLS,
    ),
    "reasoning": ([turn("user", "What is 2 + 2?"), _THOUGHT], []),
    "reasoning_two_turns": ([turn("user", "What is 2 + 2?"), _THOUGHT, *_LATER], []),
    "reasoning_in_the_first_turn": ([turn("user", "What is 2 + 2?"), _THOUGHT, *_ONE], []),
    "reasoning_in_the_content": (
        [turn("user", "What is 2 + 2?"), turn("assistant", "<think>\nTwo and two are four.\n</think>\n\nIt is 4.")],
        [],
    ),
    "reasoning_in_the_content_two_turns": (
        [
            turn("user", "What is 2 + 2?"),
            turn("assistant", "<think>\nTwo and two are four.\n</think>\n\nIt is 4."),
            turn("user", "And 3 + 3?"),
            turn("assistant", "<think>\nTwice three.\n</think>\n\nThat makes 6."),
        ],
        [],
    ),
    "reasoning_and_tools": (
        [
            _ASK,
            _with(_CALL, reasoning_content="The tool knows."),
            result("21 C"),
            turn("assistant", "It has 21 degrees.", reasoning_content="The tool says 21."),
        ],
        TOOLS,
    ),
    "reasoning_and_tools_two_turns": (
        [
            _ASK,
            _with(_CALL, reasoning_content="The tool knows."),
            result("21 C"),
            turn("assistant", "It has 21 degrees.", reasoning_content="The tool says 21."),
            turn("user", "And in Rome?"),
            _with(_CALL, tool_calls=[call("get_weather", ROME, 2)], reasoning_content="Once more."),
            result("27 C", 2),
            turn("assistant", "27 degrees.", reasoning_content="The tool says 27."),
        ],
        TOOLS,
    ),
}
