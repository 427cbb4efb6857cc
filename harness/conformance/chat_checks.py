"""Checks of chats: what a trainer writes of them as tokens, and which of these it trains."""

from __future__ import annotations

import importlib.util
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from harness.conformance.kit import Failed, Kit, check
from harness.conformance.model import END, SPECIAL, write_tokenizer
from harness.conformance.target import NotSupported, Tokens

# Written between angle brackets like any tag, but tokens of their own in every family that uses them: <|end|>, <|turn>,
# <turn|>, <end_of_turn>, [INST]; DeepSeek's bars are full-width.
_CONTROL = re.compile(
    r"<\|[^<>|\s'\"{}]+\|?>|<[A-Za-z_]+\|>|<\uff5c[^<>\s'\"]+\uff5c>|<\w+_of_\w+>|\[/?(?:INST|[A-Z]+_[A-Z_]+)\]|<sop>"
)
# Of those that end a turn or an answer, the first that a template has is the tokenizer's end-of-sequence token.
_ENDS = (
    *("<|im_end|>", "<|eot_id|>", "<\uff5cend▁of▁sentence\uff5c>", "<|END_OF_TURN_TOKEN|>", "<end_of_utterance>"),
    *("<|return|>", "<|eot|>"),
)
_PARAMETERS = {"type": "object", "properties": {name: {"type": "string"} for name in ("origin", "goal")}}
_TOOL = {"name": "find_route", "description": "Find a route.", "parameters": _PARAMETERS}
_CALLS = [
    {"id": name, "type": "function", "function": {"name": "find_route", "arguments": {"origin": name}}}
    for name in ("first", "other")
]
_RESULTS = {"first": "by train, 42 km", "other": "on foot, 77 km"}


def control_tokens(template: str) -> list[str]:
    """Return the special tokens that a template writes, in the order of their first place."""
    return list(dict.fromkeys(_CONTROL.findall(template)))


def end_token(template: str, otherwise: str = END) -> str:
    """Return the token that ends a turn or an answer of a template, `otherwise` for one without."""
    return next((token for token in _ENDS if token in control_tokens(template)), otherwise)


def _messages(*turns: tuple[str, str]) -> list[dict[str, Any]]:
    return [{"role": role, "content": content} for role, content in turns]


_TURNS = _messages(
    ("user", "What is the capital of France?"),
    ("assistant", "It is Paris."),
    ("user", "And of Italy?"),
    ("assistant", "It is Rome."),
)
_CHAT: dict[str, Any] = {"messages": _messages(("system", "Answer briefly.")) + _TURNS}
_TOOL_CHAT: dict[str, Any] = {
    "messages": [
        *_messages(("user", "Compare two routes.")),
        {"role": "assistant", "content": "", "tool_calls": _CALLS},
        *({"role": "tool", "tool_call_id": name, "name": "find_route", "content": _RESULTS[name]} for name in _RESULTS),
        *_messages(("assistant", "The train is shorter.")),
    ],
    "tools": [{"type": "function", "function": _TOOL}],
}


def _render(kit: Kit, record: dict[str, Any], special: Sequence[str] = ()) -> tuple[str, str]:
    """Return the text that a trainer makes of a chat, and the trained part of it; tokens of a byte each."""
    kit.require("render")
    kit.build([])
    rendered: Tokens = kit.target.render([record])[0]
    words = [bytes([byte]) for byte in range(256)] + [text.encode() for text in (*SPECIAL, *special)]
    pairs = list(zip(rendered["input_ids"], rendered["labels"], strict=True))
    return _text(words, [token for token, _ in pairs]), _text(words, [token for token, label in pairs if label != -100])


def _text(words: list[bytes], tokens: list[int]) -> str:
    return b"".join(words[token] for token in tokens if token < len(words)).decode(errors="replace")


@check("axolotl-ai-cloud/axolotl#2089")
def assistant_alone_is_trained(kit: Kit) -> str:
    """Mask a chat with two assistant turns; both must be trained, and no text of the user or the system."""
    _, trained = _render(kit, _CHAT)
    missing = [text for text in ("It is Paris.", "It is Rome.") if text not in trained]
    surplus = [text for text in ("Answer briefly.", "capital of France", "And of Italy") if text in trained]
    if missing or surplus:
        raise Failed(f"not trained: {missing}; trained by mistake: {surplus}")
    return f"trained: {trained!r}"


@check("huggingface/trl#1623", "huggingface/trl#3091")
def end_token_is_trained(kit: Kit) -> str:
    """Mask a chat; the token that ends each assistant turn must be trained, or the model never learns to stop."""
    _, trained = _render(kit, _CHAT)
    if (count := sum(answer + END in trained for answer in ("It is Paris.", "It is Rome."))) < 2:
        raise Failed(f"{count} of 2 assistant turns train their end token: {trained!r}")
    return "both assistant turns train their end token"


@check("OpenRLHF/OpenRLHF#1079", "PrimeIntellect-ai/prime-rl#2494")
def tool_schemas_are_written(kit: Kit) -> str:
    """Render a chat with a tool; the name and every parameter of the tool must be in the prompt.

    If the schema is missing, the model learns to call tools that it was never shown.
    """
    text, _ = _render(kit, _TOOL_CHAT)
    prompt = text.partition("Compare two routes.")[0]
    if missing := [name for name in ("find_route", "origin", "goal") if name not in prompt]:
        raise Failed(f"not in the prompt: {', '.join(missing)}")
    return "the name and both parameters are in the prompt"


@check("AI-Hypercomputer/maxtext#4419", "mistralai/mistral-common#70")
def tool_results_are_kept(kit: Kit) -> str:
    """Render a turn with two tool calls, then two tool results; all must be in the text, and only the calls trained."""
    text, trained = _render(kit, _TOOL_CHAT)
    results = [result for result in _RESULTS.values() if result not in text]
    calls = [name for name in _RESULTS if name not in trained.partition(END)[0]]
    surplus = [result for result in _RESULTS.values() if result in trained]
    if results or calls or surplus:
        raise Failed(f"results not written: {results}; calls not trained: {calls}; results trained: {surplus}")
    return "two results written, two calls trained"


@check("huggingface/trl#5988", "axolotl-ai-cloud/axolotl#2089")
def stock_templates_are_masked(kit: Kit) -> str:
    """Mask a chat with each template that the trl package ships; a trainer may refuse one, but not mask it wrongly.

    All assistant turns must be trained, including the text after the last one that ends the answer, and no text of the
    user. Requires trl in the trainer's environment.
    """
    kit.require("render")
    spec = importlib.util.find_spec("trl")
    if spec is None or spec.origin is None:
        raise NotSupported("trl, which has the templates, is not installed")
    files = sorted((Path(spec.origin).parent / "chat_templates").glob("*.jinja"))
    wrong, refused, judged = [], [], 0
    for file in (file for file in files if not file.stem.endswith("_training")):
        template = file.read_text(encoding="utf-8")
        special = [text for text in control_tokens(template) if text not in SPECIAL]
        write_tokenizer(kit.model, template, special, end_token(template))
        try:
            text, trained = _render(kit, {"messages": _TURNS}, special)
            if "It is Rome." not in text:
                raise ValueError("a template of images, which writes parts alone")
        except NotSupported:
            raise
        except Exception:  # of the trainer or the template
            refused.append(file.stem)
            continue
        judged += 1
        surplus = [phrase for phrase in ("capital of France", "And of Italy") if phrase in trained]
        missing = [phrase for phrase in ("It is Paris.", "It is Rome.") if phrase not in trained]
        after = text.rpartition("It is Rome.")[2].strip()
        ending = [repr(after)] if after and not missing and not trained.rpartition("It is Rome.")[2].strip() else []
        faults = {"trained": surplus, "not trained": [*missing, *ending]}
        if phrase := "; ".join(f"{name}: {', '.join(values)}" for name, values in faults.items() if values):
            wrong.append(f"{file.stem} ({phrase})")
    if wrong:
        shown = ", ".join(wrong[:3]) + ", ..." * (len(wrong) > 3)
        raise Failed(f"{len(wrong)} of {judged} templates are masked wrongly: {shown}")
    if not judged:
        raise NotSupported(f"all {len(refused)} templates are refused" if refused else "the installed trl has none")
    return f"{judged} templates are masked, {len(refused)} are refused"
