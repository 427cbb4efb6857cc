"""Tokenises chunks of records, here or in worker processes, with the same result in the same order."""

from __future__ import annotations

import os
from collections import Counter, deque
from collections.abc import Iterable, Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from functools import lru_cache
from multiprocessing import get_context

import numpy as np
import numpy.typing as npt

from harness.errors import PrepError
from harness.prep.chat import BadRecord, Conversation
from harness.prep.sources import Chunk
from harness.prep.tokenize import ChatTokenizer, TokenizerConfig, fit_to_pack
from harness.records import Int32Array, UInt8Array

# Below this many bytes of source, starting processes takes longer than tokenising.
_WORKERS_PAY_BYTES = 64 << 20


@dataclass(frozen=True, slots=True)
class TokenizeJob:
    """What a worker needs to know; plain values, so that it can be sent and compared.

    Attributes:
        folder: the tokenizer's folder.
        mask, control_tokens: as in TokenizerConfig; the template is the folder's.
        pack_size, over_long: as in PackingConfig.
    """

    folder: str
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
        num_bytes: of the chunk in its file.
    """

    input_ids: Int32Array
    loss_mask: UInt8Array
    lengths: Int32Array
    hashes: npt.NDArray[np.uint64]
    bad: list[BadRecord]
    dropped: Counter[str]
    num_truncated: int
    num_bytes: int

    def select(self, chosen: npt.NDArray[np.bool_]) -> tuple[Int32Array, UInt8Array, Int32Array]:
        """input_ids, loss_mask and lengths of the sequences where `chosen` [sequences] is true."""
        tokens = np.repeat(chosen, self.lengths)
        return self.input_ids[tokens], self.loss_mask[tokens], self.lengths[chosen]


def tokenize_chunk(chunk: Chunk, tokenizer: ChatTokenizer, job: TokenizeJob) -> TokenizedChunk:
    """Parse, tokenise and cut the records of a chunk."""
    bad: list[BadRecord] = []
    conversations: list[Conversation] = []
    for record in chunk.parse():
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
        num_bytes=chunk.num_bytes,
    )


def count_workers(num_workers: int, source_bytes: int) -> int:
    """The number of processes that `data.num_workers` stands for; 0 is the main process alone."""
    if num_workers >= 0:
        return num_workers
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return cores if cores > 1 and source_bytes >= _WORKERS_PAY_BYTES else 0


def tokenize_chunks(chunks: Iterable[Chunk], job: TokenizeJob, *, num_workers: int) -> Iterator[TokenizedChunk]:
    """Tokenise chunks, in order; at most a few per worker are in memory.

    Raises:
        PrepError: a worker died.
    """
    if num_workers == 0:
        tokenizer = job.load()
        for chunk in chunks:
            yield tokenize_chunk(chunk, tokenizer, job)
        return
    # Spawned, not forked: the tokenizer's library has threads of its own, which a fork would leave locked.
    context = get_context("spawn")
    with ProcessPoolExecutor(num_workers, mp_context=context, initializer=_one_thread) as pool:
        waiting: deque[Future[TokenizedChunk]] = deque()
        try:
            for chunk in chunks:
                waiting.append(pool.submit(_tokenize_in_worker, chunk, job))
                if len(waiting) > 3 * num_workers:
                    yield waiting.popleft().result()
            while waiting:
                yield waiting.popleft().result()
        except BrokenProcessPool as error:
            raise PrepError(
                "a tokenising process died",
                where=f"{num_workers} workers",
                fix="if memory ran out, lower data.num_workers; data.num_workers=0 shows the error itself",
            ) from error
        finally:
            pool.shutdown(wait=False, cancel_futures=True)


def _one_thread() -> None:
    # One process per core is enough; threads beside it would fight for the same cores.
    os.environ["TOKENIZERS_PARALLELISM"] = "false"


def _tokenize_in_worker(chunk: Chunk, job: TokenizeJob) -> TokenizedChunk:
    return tokenize_chunk(chunk, _loaded(job), job)


@lru_cache(maxsize=1)
def _loaded(job: TokenizeJob) -> ChatTokenizer:
    return job.load()
