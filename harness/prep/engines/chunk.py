"""From records to sequences, a chunk at a time."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from harness.prep.chat import BadRecord, Conversation
from harness.prep.reading import Chunk
from harness.prep.tokenize import ChatTokenizer, TokenizerConfig, fit_to_pack
from harness.records import Int32Array, UInt8Array


@dataclass(frozen=True, slots=True)
class TokenizeJob:
    """What a worker needs to know; plain values, so that it can be sent and compared.

    Attributes:
        folder: the tokenizer's folder.
        content: hashes of what is in it; a process that has loaded one takes it for another only if they are equal.
        mask, control_tokens: as in TokenizerConfig; the template is the folder's.
        pack_size, over_long: as in PackingConfig.
    """

    folder: str
    content: str
    mask: str
    control_tokens: str
    pack_size: int
    over_long: str

    def load(self) -> ChatTokenizer:
        """The tokenizer, with the template that is stored with it."""
        return ChatTokenizer(TokenizerConfig(name=self.folder, mask=self.mask, control_tokens=self.control_tokens))


@dataclass(frozen=True, eq=False, slots=True)
class TokenizedChunk:
    """The sequences of one chunk, end to end, and an account of every record in it.

    Attributes:
        input_ids: int32 [n].
        loss_mask: uint8 [n].
        lengths: int32 [sequences].
        hashes: uint64 [sequences], of the conversations.
        bad: records that are no usable conversations.
        dropped: conversations left out for their length, by reason.
        num_truncated: conversations that were cut.
        num_records: read, blank lines not counted.
    """

    input_ids: Int32Array
    loss_mask: UInt8Array
    lengths: Int32Array
    hashes: npt.NDArray[np.uint64]
    bad: list[BadRecord]
    dropped: Counter[str]
    num_truncated: int
    num_records: int


def tokenize_chunk(chunk: Chunk, tokenizer: ChatTokenizer, job: TokenizeJob) -> TokenizedChunk:
    """Parse, tokenise and cut the records of a chunk."""
    bad: list[BadRecord] = []
    conversations: list[Conversation] = []
    num_records = 0
    for record in chunk.parse():
        num_records += 1
        if isinstance(record, BadRecord):
            bad.append(record)
        else:
            conversations.append(record)
    sequences, hashes = [], []
    outcomes: Counter[str] = Counter()
    for conversation, encoded in zip(conversations, tokenizer.encode(conversations), strict=True):
        if isinstance(encoded, BadRecord):
            bad.append(encoded)
            continue
        sequence, outcome = fit_to_pack(encoded, pack_size=job.pack_size, over_long=job.over_long)
        outcomes[outcome] += 1
        if sequence is not None:
            sequences.append(sequence)
            hashes.append(conversation.hash())
    return TokenizedChunk(
        input_ids=np.concatenate([np.empty(0, np.int32), *(one.input_ids for one in sequences)]),
        loss_mask=np.concatenate([np.empty(0, np.uint8), *(one.loss_mask for one in sequences)]),
        lengths=np.array([len(one) for one in sequences], np.int32),
        hashes=np.array(hashes, np.uint64),
        bad=bad,
        dropped=Counter({name: n for name, n in outcomes.items() if name not in ("kept", "truncated")}),
        num_truncated=outcomes["truncated"],
        num_records=num_records,
    )
