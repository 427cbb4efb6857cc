"""Lines of OpenAI's batch files: the request in `body`, and where it was joined to it, the `response`.

They are no schema of their own: the record is the request with its answer, of the schema `messages` or `responses`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from harness.prep.chat.records import BadReason
from harness.prep.chat.values import BadRecordError, decoded, is_empty, show

BATCH_FIELDS = frozenset(("body", "response", "custom_id", "method", "url", "error"))


def unwrapped(record: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the request of a line of a batch with its answer as the last turn; another record as it is."""
    if "body" not in record or not ("custom_id" in record or "url" in record):
        if record.keys() >= {"custom_id", "response"}:
            what = "an answer of a batch without its request; add the `body` of the request with the same custom_id"
            raise BadRecordError(BadReason.UNKNOWN_SCHEMA, what)
        return record
    body = _object(record["body"], "`body`")
    if not is_empty(record.get("error")):
        raise BadRecordError(BadReason.UNWANTED, f"the request failed: {show(record['error'])}")
    if is_empty(record.get("response")):
        return body
    response = _object(record["response"], "`response`")
    if response.get("status_code") not in (None, 200):
        raise BadRecordError(BadReason.UNWANTED, f"the request failed with status {show(response['status_code'])}")
    answer = response if response.get("body") is None else _object(response["body"], "the `body` of `response`")
    if "output" in answer:  # of the Responses
        return {**body, **{name: answer[name] for name in ("output", "status") if name in answer}}
    choices = answer.get("choices")
    if not isinstance(choices, list) or len(choices) != 1 or not isinstance(choices[0], Mapping):
        number = len(choices) if isinstance(choices, list) else 0
        raise BadRecordError(BadReason.BAD_TURN, f"the `response` has {number} choices, expected one answer")
    if choices[0].get("finish_reason") in ("length", "content_filter"):
        detail = f"the answer is incomplete: its finish_reason is {choices[0]['finish_reason']!r}"
        raise BadRecordError(BadReason.UNWANTED, detail)
    turns = body.get("messages")
    return {**body, "messages": [*(turns if isinstance(turns, list) else []), choices[0].get("message")]}


def _object(value: object, what: str) -> Mapping[str, Any]:
    value = decoded(value, what, BadReason.NOT_AN_OBJECT)
    if not isinstance(value, Mapping):
        raise BadRecordError(BadReason.NOT_AN_OBJECT, f"{what} is a {type(value).__name__}, expected an object")
    return value
