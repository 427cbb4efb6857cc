"""From chat data to packed datasets; needs numpy and pyarrow, and tokenizers where text is tokenized.

    from harness import prepare

    report = prepare("chats/", "org/name", "data/chats", pack_size=4096)
    report.splits["train"].packs

Read `pipeline` first: it runs the stages in order. `chat`, `tokenize` and `packing` can be used alone.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from harness.doors import names_on_first_use
from harness.prep.chat import BadRecord, Conversation, parse_line, parse_record
from harness.prep.fitting import fit_conversation
from harness.prep.packing import (
    MIN_SEQUENCE_TOKENS,
    OVER_LONG,
    PACKERS,
    Member,
    PackingConfig,
    StreamPacker,
    pack_of,
    plan_packs,
)
from harness.prep.tokenize import ChatTokenizer, TokenizerConfig, as_prepared, end_tokens, tokenizer_hash, train_bpe

if TYPE_CHECKING:
    from harness.prep.pipeline import PrepareConfig, prepare, repack_store
    from harness.prep.preview import show_preview
    from harness.prep.shards import Receipt, ShardJob, do_shard
    from harness.prep.sources import SourceConfig, cut_shards, list_files, read_chunks, read_shard, unread_columns

__all__ = [
    "MIN_SEQUENCE_TOKENS",
    "OVER_LONG",
    "PACKERS",
    "BadRecord",
    "ChatTokenizer",
    "Conversation",
    "Member",
    "PackingConfig",
    "PrepareConfig",
    "Receipt",
    "ShardJob",
    "SourceConfig",
    "StreamPacker",
    "TokenizerConfig",
    "as_prepared",
    "cut_shards",
    "do_shard",
    "end_tokens",
    "fit_conversation",
    "list_files",
    "pack_of",
    "parse_line",
    "parse_record",
    "plan_packs",
    "prepare",
    "read_chunks",
    "read_shard",
    "repack_store",
    "show_preview",
    "tokenizer_hash",
    "train_bpe",
    "unread_columns",
]

# pyarrow and rich take 0.3 s, which a run that only needs a tokenizer must not pay.
__getattr__ = names_on_first_use(
    __name__,
    {
        **dict.fromkeys(("PrepareConfig", "prepare", "repack_store"), "pipeline"),
        "show_preview": "preview",
        **dict.fromkeys(("Receipt", "ShardJob", "do_shard"), "shards"),
        **dict.fromkeys(
            ("SourceConfig", "cut_shards", "list_files", "read_chunks", "read_shard", "unread_columns"), "sources"
        ),
    },
)
