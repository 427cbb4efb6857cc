"""From chat data to packed datasets; needs numpy and pyarrow, and tokenizers where text is tokenized.

    from harness import prepare

    report = prepare("chats/", "org/name", "data/chats", pack_size=4096)
    report.splits["train"].packs

Read `pipeline` first: it runs the stages in order. `chat`, `tokenize` and `packing` can be used alone.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from harness.doors import names_on_first_use
from harness.prep.packing import MIN_SEQUENCE_TOKENS, OVER_LONG, Member, StreamPacker, pack_of, plan_packs
from harness.prep.tokenize import ChatTokenizer, TokenizerConfig, as_prepared, tokenizer_hash

if TYPE_CHECKING:
    from harness.prep.pipeline import PrepareConfig, prepare
    from harness.prep.preview import show_preview

__all__ = [
    "MIN_SEQUENCE_TOKENS",
    "OVER_LONG",
    "ChatTokenizer",
    "Member",
    "PrepareConfig",
    "StreamPacker",
    "TokenizerConfig",
    "as_prepared",
    "pack_of",
    "plan_packs",
    "prepare",
    "show_preview",
    "tokenizer_hash",
]

# pyarrow and rich take 0.3 s, which a run that only needs a tokenizer must not pay.
__getattr__ = names_on_first_use(
    __name__, {"PrepareConfig": "pipeline", "prepare": "pipeline", "show_preview": "preview"}
)
