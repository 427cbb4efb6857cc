"""Checks of chats: what a trainer writes of them as tokens, and which of these it trains."""

from __future__ import annotations

from typing import Any

from harness.conformance.kit import Failed, Kit, check
from harness.conformance.model import END
from harness.conformance.target import Tokens

_TOOL = {
    "type": "function",
    "function": {
        "name": "find_route",
        "description": "Find a route.",
        "parameters": {
            "type": "object",
            "properties": {"origin": {"type": "string"}, "goal": {"type": "string"}},
            "required": ["origin", "goal"],
        },
    },
}
_CHAT = {
    "messages": [
        {"role": "system", "content": "Answer briefly."},
        {"role": "user", "content": "What is the capital of France?"},
        {"role": "assistant", "content": "It is Paris."},
        {"role": "user", "content": "And of Italy?"},
        {"role": "assistant", "content": "It is Rome."},
    ]
}
_CALLS: dict[str, Any] = {
    "messages": [
        {"role": "user", "content": "Compare two routes."},
        {
            "role": "assistant",
            "content": "",
            "tool_calls": [
                {"id": name, "type": "function", "function": {"name": "find_route", "arguments": {"origin": name}}}
                for name in ("first", "other")
            ],
        },
        {"role": "tool", "tool_call_id": "first", "name": "find_route", "content": "by train, 42 km"},
        {"role": "tool", "tool_call_id": "other", "name": "find_route", "content": "on foot, 77 km"},
        {"role": "assistant", "content": "The train is shorter."},
    ],
    "tools": [_TOOL],
}


def _render(kit: Kit, record: dict[str, Any]) -> tuple[str, str]:
    """Return the text that a trainer makes of a chat, and the trained part of it; tokens of a byte each."""
    kit.require("render")
    kit.build([])
    rendered: Tokens = kit.target.render([record])[0]
    trained = [token for token, label in zip(rendered["input_ids"], rendered["labels"], strict=True) if label != -100]
    return _text(rendered["input_ids"]), _text(trained)


def _text(tokens: list[int]) -> str:
    special = {256: "<|im_start|>", 257: END, 258: "<|endoftext|>"}
    parts = [special.get(token, "").encode() or bytes([token]) for token in tokens if token < 259]
    return b"".join(parts).decode(errors="replace")


@check("axolotl-ai-cloud/axolotl#2089")
def assistant_alone_is_trained(kit: Kit) -> str:
    """Mask a chat of two turns; every assistant turn must be trained, and no word of the user or the system."""
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
    if (count := trained.count(END)) < 2:
        raise Failed(f"{count} of 2 assistant turns train their end token: {trained!r}")
    return "both assistant turns train their end token"


@check("OpenRLHF/OpenRLHF#1079", "PrimeIntellect-ai/prime-rl#2494")
def tool_schemas_are_written(kit: Kit) -> str:
    """Render a chat with a tool; the name and every parameter of the tool must be in the prompt.

    Without its schema the trained call comes from nowhere, and the model learns to invent tools.
    """
    text, _ = _render(kit, _CALLS)
    prompt = text.partition("Compare two routes.")[0]
    if missing := [name for name in ("find_route", "origin", "goal") if name not in prompt]:
        raise Failed(f"not in the prompt: {', '.join(missing)}")
    return "the name and both parameters are in the prompt"


@check("AI-Hypercomputer/maxtext#4419", "mistralai/mistral-common#70")
def tool_results_are_kept(kit: Kit) -> str:
    """Render two tool results in a row and two calls in one turn; all must be written, and calls alone be trained."""
    text, trained = _render(kit, _CALLS)
    results = [result for result in ("by train, 42 km", "on foot, 77 km") if result not in text]
    calls = [name for name in ("first", "other") if name not in trained.partition(END)[0]]
    surplus = [result for result in ("by train, 42 km", "on foot, 77 km") if result in trained]
    if results or calls or surplus:
        raise Failed(f"results not written: {results}; calls not trained: {calls}; results trained: {surplus}")
    return "two results written, two calls trained"
