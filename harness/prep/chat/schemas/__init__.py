"""Schemas of chat records: each is one file with one `Schema`, and one line in `SCHEMAS`."""

from __future__ import annotations

from collections.abc import Mapping

from harness.prep.chat.records import Schema
from harness.prep.chat.schemas.alpaca import ALPACA
from harness.prep.chat.schemas.gemini import GEMINI
from harness.prep.chat.schemas.messages import MESSAGES
from harness.prep.chat.schemas.pairs import PAIRS
from harness.prep.chat.schemas.preference import PREFERENCE
from harness.prep.chat.schemas.prompt_completion import PROMPT_COMPLETION
from harness.prep.chat.schemas.responses import RESPONSES
from harness.prep.chat.schemas.sharegpt import SHAREGPT
from harness.prep.chat.schemas.text import TEXT
from harness.prep.chat.schemas.xlam import XLAM

__all__ = ["SCHEMAS"]

SCHEMAS: Mapping[str, Schema] = {
    "messages": MESSAGES,
    "sharegpt": SHAREGPT,
    "gemini": GEMINI,
    "responses": RESPONSES,
    "alpaca": ALPACA,
    "prompt_completion": PROMPT_COMPLETION,
    "xlam": XLAM,
    "pairs": PAIRS,
    "text": TEXT,
    "preference": PREFERENCE,
}
