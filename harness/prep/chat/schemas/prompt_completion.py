"""Records with `prompt` and `completion`, each a text or a list of turns; only the completion is trained.

Records of unpaired preferences also have a `label`; completions whose label is false are left out.
"""

from __future__ import annotations

from harness.prep.chat.records import BadReason, Conversation, Record, Schema
from harness.prep.chat.turns import ANSWER_FIELDS, CHAT_FIELDS, answer_turn, chat, train_only_answer, turns_or_text
from harness.prep.chat.values import BadRecordError, is_empty


def _parse(record: Record, where: str) -> Conversation:
    if record.get("label") is False or str(record.get("label")).lower() == "false":  # text tables spell out the value
        raise BadRecordError(BadReason.UNWANTED, "`label` is false: the completion is a negative example")
    prompt, completion = turns_or_text(record, "prompt", "user"), turns_or_text(record, "completion", "assistant")
    if isinstance(record["completion"], str):
        completion = [answer_turn(record, "completion")]
    elif held := [name for name in ANSWER_FIELDS if not is_empty(record.get(name))]:
        raise BadRecordError(BadReason.BAD_TURN, f"`{held[0]}` is set in addition to a completion with turns")
    return train_only_answer(chat(record, prompt + completion, where), len(completion))


PROMPT_COMPLETION = Schema(
    fields=frozenset(("prompt", "completion", "label", *ANSWER_FIELDS)) | CHAT_FIELDS,
    fits=lambda record: record.get("prompt") is not None and record.get("completion") is not None,
    parse=_parse,
)
