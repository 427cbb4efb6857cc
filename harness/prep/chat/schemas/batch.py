"""Lines of batch files of OpenAI (`body`), Anthropic (`params`) and Vertex AI (`request`), with or without an answer.

They are not a separate schema: the record is the request with its answer, in the `messages`, `responses` or `gemini`
schema.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from harness.prep.chat.records import BadReason, Record
from harness.prep.chat.values import BadRecordError, decoded_object, is_empty, show

_ODD = BadReason.NOT_AN_OBJECT
REQUESTS = ("body", "params", "request")
BATCH_FIELDS = frozenset((*REQUESTS, "response", "result", "custom_id", "method", "url", "error", "key", "status"))
# Reasons why an answer ends before the model has finished it.
_CUT = ("length", "content_filter", "max_tokens", "refusal", "pause_turn", "safety", "recitation", "prohibited_content")


def unwrapped(record: Record) -> Mapping[str, Any]:
    """Return the request of a batch line with its answer as the last turn; return other records unchanged."""
    name = next((name for name in REQUESTS if name in record and _is_request(record, name)), "")
    if not name:
        if "custom_id" in record and ("response" in record or "result" in record):
            what = "a batch response without its request; add the `body` of the request with the same custom_id"
            raise BadRecordError(BadReason.UNKNOWN_SCHEMA, what.replace("body", "params", "result" in record))
        return record
    body, field = decoded_object(record[name], f"`{name}`", _ODD), "result" if name == "params" else "response"
    if not is_empty(record.get("error")):
        raise BadRecordError(BadReason.UNWANTED, f"the request failed: {show(record['error'])}")
    if is_empty(record.get(field)):
        if name == "request" and not is_empty(record.get("status")):
            raise BadRecordError(BadReason.UNWANTED, f"the request failed: {show(record['status'])}")
        return body
    answer = decoded_object(record[field], f"`{field}`", _ODD)
    if answer.get("status_code") not in (None, 200):
        raise BadRecordError(BadReason.UNWANTED, f"the request failed with status {show(answer['status_code'])}")
    if name == "params" and answer.get("type") != "succeeded":
        raise BadRecordError(BadReason.UNWANTED, f"the request failed: its result is {show(answer.get('type'))}")
    inner = "message" if name == "params" else "body" if answer.get("body") is not None else ""
    answer = decoded_object(answer.get(inner), f"the `{inner}` of `{field}`", _ODD) if inner else answer
    return _with_answer(body, answer, field)


def _is_request(record: Record, name: str) -> bool:
    """Return True if this field is a batch request, rather than a field of another kind of record."""
    if name != "request":
        return "custom_id" in record or (name == "body" and "url" in record)
    inner = record[name]
    return isinstance(inner, Mapping) and any(key in inner and key not in record for key in ("contents", "messages"))


def _with_answer(body: Mapping[str, Any], answer: Mapping[str, Any], field: str) -> Mapping[str, Any]:
    if "output" in answer:  # OpenAI Responses
        return {**body, **{name: answer[name] for name in ("output", "status") if name in answer}}
    turns, kind, key = "messages", "choices", "message"
    if "contents" in body:
        turns, kind, key = "contents", "candidates", "content"
    choices = answer.get(kind)
    if kind == "choices" and "content" in answer:  # an Anthropic message
        message = {"role": answer.get("role"), "content": answer["content"]}
        choices = [{"message": message, "stop_reason": answer.get("stop_reason")}]
    if not isinstance(choices, list) or len(choices) != 1 or not isinstance(choices[0], Mapping):
        number = len(choices) if isinstance(choices, list) else 0
        raise BadRecordError(BadReason.BAD_TURN, f"the `{field}` has {number} {kind}, expected one answer")
    for name in ("finish_reason", "finishReason", "stop_reason"):
        if str(choices[0].get(name)).lower() in _CUT:
            detail = f"the answer is incomplete: its {name} is {show(choices[0][name])}"
            raise BadRecordError(BadReason.UNWANTED, detail)
    asked = body.get(turns)
    return {**body, turns: [*(asked if isinstance(asked, list) else []), choices[0].get(key)]}
