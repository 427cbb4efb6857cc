"""Preference records: the `chosen` answer, which follows `prompt` or includes it; used only if set by name."""

from __future__ import annotations

from collections.abc import Mapping

from harness.prep.chat.records import BadReason, Conversation, Record, Schema
from harness.prep.chat.turns import CHAT_FIELDS, chat, list_of_turns, train_only_answer, turns_or_text
from harness.prep.chat.values import BadRecordError, is_empty


def _parse(record: Record, where: str) -> Conversation:
    if is_empty(record.get("prompt")):
        if isinstance(record.get("chosen"), str) and not record["chosen"].lstrip().startswith("["):
            raise BadRecordError(BadReason.NO_MESSAGES, "`chosen` is a text, but there is no `prompt`")
        return chat(record, list_of_turns(record, "chosen"), where)
    prompt, chosen = turns_or_text(record, "prompt", "user"), turns_or_text(record, "chosen", "assistant")
    if len(chosen) > len(prompt) and chosen[: len(prompt)] == prompt:
        return train_only_answer(chat(record, chosen, where), len(chosen) - len(prompt))
    if isinstance(chosen[0], Mapping) and chosen[0].get("role") in ("system", "developer", "user"):
        raise BadRecordError(BadReason.BAD_TURN, "`chosen` begins with a prompt that differs from `prompt`")
    return train_only_answer(chat(record, prompt + chosen, where), len(chosen))


PREFERENCE = Schema(
    # `rejected` identifies preference records.
    fields=frozenset(("prompt", "chosen", "rejected")) | CHAT_FIELDS,
    fits=lambda record: record.get("chosen") is not None and record.get("rejected") is not None,
    parse=_parse,
    use="asked",
)
