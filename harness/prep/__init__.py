"""Convert chat data to packed datasets; requires numpy and pyarrow, and tokenizers to tokenize text.

    from harness import prepare

    report = prepare("chats/", "org/name", "data/chats", pack_size=4096)
    report.splits["train"].packs

Read `pipeline` first: it runs the stages in order. `chat`, `tokenize` and `packing` can be used alone.
"""

from typing import TYPE_CHECKING

from harness.doors import names_on_first_use

if TYPE_CHECKING:
    from harness.prep.packing import MIN_SEQUENCE_TOKENS, OVER_LONG, Member, StreamPacker, pack_of, plan_packs
    from harness.prep.pipeline import PrepareConfig, prepare
    from harness.prep.preview import show_preview
    from harness.prep.tokenize import ChatTokenizer, TokenizerConfig, as_prepared, tokenizer_hash

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

# Importing pyarrow and rich takes 0.3 s, too long for a run that needs only a tokenizer; `packing` needs only numpy.
__getattr__ = names_on_first_use(
    __name__,
    packing="MIN_SEQUENCE_TOKENS Member OVER_LONG StreamPacker pack_of plan_packs",
    pipeline="PrepareConfig prepare",
    preview="show_preview",
    tokenize="ChatTokenizer TokenizerConfig as_prepared tokenizer_hash",
)
