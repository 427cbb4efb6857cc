"""Convert conversations to sequences: chat template, token ids, and the mask of trained tokens.

    tokenizer = ChatTokenizer(TokenizerConfig(name="folder or hub id"))
    tokenizer.encode([conversation])        # [SequenceView(input_ids, loss_mask)] or [BadRecord]

Read `masks` first: it finds the text to train; `rendering` runs the template. `train_bpe` trains a tokenizer on the
conversations. The libraries (transformers, tokenizers, jinja2) are imported when a tokenizer is loaded.
"""

from harness.prep.tokenize.bpe import CHAT_TEMPLATE, train_bpe
from harness.prep.tokenize.config import TokenizerConfig
from harness.prep.tokenize.offsets import TokenBytes, token_mask
from harness.prep.tokenize.recorded import as_prepared, end_tokens
from harness.prep.tokenize.tokenizer import ChatTokenizer, Encoded, texts_of, tokenizer_hash

__all__ = [
    "CHAT_TEMPLATE",
    "ChatTokenizer",
    "Encoded",
    "TokenBytes",
    "TokenizerConfig",
    "as_prepared",
    "end_tokens",
    "texts_of",
    "token_mask",
    "tokenizer_hash",
    "train_bpe",
]
