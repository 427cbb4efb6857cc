"""Tokenize one shard of the source into a folder of its own, with a receipt; a shard with a valid receipt is kept.

Folder `00007` holds `sequences.bin` (one record per sequence), `input_ids.bin`, `loss_mask.bin`, `bad_records.jsonl`
and `receipt.json`. It is written under another name and renamed once complete, so that an abandoned attempt, wherever
it may still be running, changes nothing.

`Spool` reads the sequences of all shards by number, and `divide` divides them among splits; memory does not grow with
the tokens.
"""

from __future__ import annotations

import json
import os
import shutil
import uuid
from collections import Counter
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property, lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from harness.errors import HarnessError, PrepError
from harness.prep.chat import BadReason, BadRecord
from harness.prep.folder import settings_hash
from harness.prep.sources import Shard, read_shard
from harness.prep.tokenize import ChatTokenizer, TokenizerConfig, fit_to_pack
from harness.records import Int32Array, Int64Array, Pack
from harness.storage import Place, digest_of, file_digest, parse_place, stamp_of, sync_folder

# Increment when the same settings begin to give other data.
VERSION = 1
RECEIPT = "receipt.json"
SEQUENCES, INPUT_IDS, LOSS_MASK, BAD_RECORDS = "sequences.bin", "input_ids.bin", "loss_mask.bin", "bad_records.jsonl"
# A sequence: offset of its tokens in the shard's files, hash of its conversation, its tokens, and how many are trained.
SEQUENCE = np.dtype([("offset", "<i8"), ("hash", "<u8"), ("length", "<i4"), ("trained", "<i4")])
_SHOWN_BAD = 10


@dataclass(frozen=True, slots=True)
class ShardJob:
    """Settings shared by all shards; plain values, so that they can be sent to workers.

    Attributes:
        folder: of the shards.
        tokenizer: the tokenizer's folder, which includes the chat template.
        content: hashes of that folder's content; part of the identity of a loaded tokenizer.
        mask, control_tokens: as in TokenizerConfig.
        pack_size, over_long: as in PackingConfig.
        on_bad: as in SourceConfig.
    """

    folder: str
    tokenizer: str
    content: str
    mask: str
    control_tokens: str
    pack_size: int
    over_long: str
    on_bad: str

    @property
    def settings(self) -> str:
        """Hash of everything that the sequences depend on beside the shard itself."""
        values = asdict(self)
        del values["folder"], values["tokenizer"]
        return settings_hash({**values, "version": VERSION})

    def shard_folder(self, number: int) -> Path:
        return Path(self.folder) / f"{number:05d}"


@dataclass
class Receipt:
    """Input and content of a finished shard.

    Attributes:
        shard: fields of the `Shard`.
        settings: of the job.
        input: `num_bytes` and `version` of the file (its `Stamp`), and `xxh3` of the shard's bytes in one on a disk.
        output: `num_bytes` and `xxh3` of each written file, by name.
        records: number of records read.
        sequences, tokens, trained_tokens: stored.
        bad: bad records by reason.
        dropped: conversations left out for their length, by reason.
        truncated: conversations that were cut.
        was_there: an earlier run made it.
    """

    shard: dict[str, Any]
    settings: str
    input: dict[str, Any] = field(default_factory=dict)
    output: dict[str, dict[str, Any]] = field(default_factory=dict)
    records: int = 0
    sequences: int = 0
    tokens: int = 0
    trained_tokens: int = 0
    bad: dict[str, int] = field(default_factory=dict)
    dropped: dict[str, int] = field(default_factory=dict)
    truncated: int = 0
    was_there: bool = False


def do_shard(job: ShardJob, number: int, shard: Shard) -> Receipt | HarnessError:
    """Make a shard unless it exists. Errors are returned, not raised: they cross processes and machines."""
    try:
        return _find_receipt(job, number, shard) or _make(job, number, shard)
    except HarnessError as error:
        return error
    except OSError as error:
        return PrepError(
            f"the shard cannot be written: {error.strerror or error}",
            where=str(job.shard_folder(number)),
            fix="free some space, or name another folder in data.path; finished shards are kept",
        )


def refuse(bad: list[BadRecord]) -> None:
    """Raise PrepError that lists the first of the bad records, if there are any."""
    if not bad:
        return
    shown = [f"{record.where}: {record.reason}: {record.detail}" for record in bad[:_SHOWN_BAD]]
    if len(bad) > _SHOWN_BAD:
        shown.append(f"and {len(bad) - _SHOWN_BAD:,} more nearby")
    fix = "fix the records, or leave bad ones out with source.on_bad=skip"
    if any(record.reason == BadReason.CONTROL_TOKEN for record in bad):
        fix += "; tokenizer.control_tokens=allow turns such text into the token itself"
    counts = Counter(record.reason.value for record in bad)
    reasons = ", ".join(f"{number:,} {reason}" for reason, number in counts.items())
    raise PrepError(f"there are bad records: {reasons}", where="\n         ".join(shown), fix=fix)


def _find_receipt(job: ShardJob, number: int, shard: Shard) -> Receipt | None:
    """Return the receipt of an intact shard; None if it is missing, damaged, or of other input or settings."""
    folder = job.shard_folder(number)
    try:
        receipt = Receipt(**json.loads((folder / RECEIPT).read_bytes()))
        if (receipt.shard, receipt.settings) != (json.loads(json.dumps(asdict(shard))), job.settings):
            return None
        source = parse_place(shard.path)
        digest = receipt.input.pop("xxh3")
        # A copy of the same bytes has another time.
        if receipt.input != asdict(stamp_of(source)) and (not digest or digest != _digest(source, shard)):
            return None
        receipt.input["xxh3"] = digest
        intact = all(_describe(folder / name) == expected for name, expected in receipt.output.items())
        return replace(receipt, was_there=True) if intact else None
    except (OSError, ValueError, TypeError, KeyError):
        return None


@lru_cache(maxsize=1)
def _load_tokenizer(folder: str, content: str, mask: str, control_tokens: str) -> ChatTokenizer:
    """Load a tokenizer once a process; `content` reloads a folder that was written again."""
    return ChatTokenizer(TokenizerConfig(name=folder, mask=mask, control_tokens=control_tokens))


def _make(job: ShardJob, number: int, shard: Shard) -> Receipt:
    tokenizer = _load_tokenizer(job.tokenizer, job.content, job.mask, job.control_tokens)
    final, source = job.shard_folder(number), parse_place(shard.path)
    folder = final.with_name(f"{final.name}.{uuid.uuid4().hex[:8]}")
    folder.mkdir(parents=True)
    try:
        before = stamp_of(source)
        receipt = _write(job, folder, shard, tokenizer)
        digest = _digest(source, shard)
        if stamp_of(source) != before:
            fix = "prepare it once nothing writes to it"
            raise PrepError("the file changed while it was read", where=shard.path, fix=fix)
        receipt.input = {**asdict(before), "xxh3": digest}
        receipt.output = {name: _describe(folder / name) for name in (SEQUENCES, INPUT_IDS, LOSS_MASK, BAD_RECORDS)}
        with (folder / RECEIPT).open("wb") as file:
            file.write(json.dumps(asdict(receipt)).encode())
            file.flush()
            os.fsync(file.fileno())
        # Of two concurrent attempts either will do, since they hold the same bytes.
        for _ in range(3):
            try:
                folder.rename(final)
                break
            except OSError:
                # There is one without a valid receipt, or another attempt has just finished.
                with suppress(OSError):
                    shutil.rmtree(final)
        else:
            fix = "remove the folder, then try again"
            raise PrepError("the shard cannot be put in place", where=str(final), fix=fix)
        sync_folder(final.parent)
        return receipt
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _write(job: ShardJob, folder: Path, shard: Shard, tokenizer: ChatTokenizer) -> Receipt:
    """Write the sequences and bad records of a shard; return its receipt, which still lacks input and output."""
    receipt = Receipt(shard=asdict(shard), settings=job.settings)
    bad: Counter[str] = Counter()
    dropped: Counter[str] = Counter()
    with (
        (folder / SEQUENCES).open("wb") as sequences,
        (folder / INPUT_IDS).open("wb") as ids,
        (folder / LOSS_MASK).open("wb") as mask,
        (folder / BAD_RECORDS).open("w", encoding="utf-8") as bad_records,
    ):
        for chunk in read_shard(shard):
            records = list(chunk.parse())
            conversations = [record for record in records if not isinstance(record, BadRecord)]
            refused = [record for record in records if isinstance(record, BadRecord)]
            rows = []
            for conversation, encoded in zip(conversations, tokenizer.encode(conversations), strict=True):
                if isinstance(encoded, BadRecord):
                    refused.append(encoded)
                    continue
                sequence, outcome = fit_to_pack(encoded, pack_size=job.pack_size, over_long=job.over_long)
                if sequence is None:
                    dropped[outcome] += 1
                    continue
                trained = int(np.count_nonzero(sequence.loss_mask))
                rows.append((receipt.tokens, conversation.hash(), len(sequence), trained))
                ids.write(sequence.input_ids.astype("<i4", copy=False).tobytes())
                mask.write(sequence.loss_mask.tobytes())
                receipt.truncated += outcome == "truncated"
                receipt.tokens += len(sequence)
                receipt.trained_tokens += trained
            if job.on_bad == "refuse":
                refuse(refused)
            sequences.write(np.array(rows, SEQUENCE).tobytes())
            bad_records.writelines(json.dumps(asdict(record)) + "\n" for record in refused)
            bad.update(record.reason.value for record in refused)
            receipt.records += len(records)
            receipt.sequences += len(rows)
        for file in (sequences, ids, mask, bad_records):
            file.flush()
            os.fsync(file.fileno())
    receipt.bad, receipt.dropped = dict(bad), dict(dropped)
    return receipt


def _digest(source: Place, shard: Shard) -> str:
    """Return a hash of a shard's bytes; empty for an object, whose ETag is enough."""
    return digest_of(source, shard.start, shard.end) if isinstance(source, Path) else ""


def _describe(path: Path) -> dict[str, Any]:
    return {"num_bytes": path.stat().st_size, "xxh3": file_digest(path)}


def _map(path: Path, dtype: np.dtype[Any], count: int) -> npt.NDArray[Any]:
    # An empty file cannot be mapped.
    return np.memmap(path, dtype, "r", shape=(count,)) if count else np.empty(0, dtype)


class Spool:
    """Sequences of all shards, numbered in the order of the shards.

    Args:
        shards: folder, number of sequences and number of tokens of each.
    """

    def __init__(self, shards: Iterable[tuple[Path, int, int]]) -> None:
        self._sequences, self._input_ids, self._loss_mask = [], [], []
        for folder, num_sequences, num_tokens in shards:
            self._sequences.append(_map(folder / SEQUENCES, SEQUENCE, num_sequences))
            self._input_ids.append(_map(folder / INPUT_IDS, np.dtype("<i4"), num_tokens))
            self._loss_mask.append(_map(folder / LOSS_MASK, np.dtype("u1"), num_tokens))
        self._first: Int64Array = np.cumsum([0, *map(len, self._sequences)], dtype=np.int64)

    def hashes(self) -> npt.NDArray[np.uint64]:
        """Return the hashes of the conversations, uint64 [sequences]."""
        return np.concatenate([np.zeros(0, np.uint64), *(sequences["hash"] for sequences in self._sequences)])

    def pack(self, sequence_ids: Int64Array) -> Pack:
        """Join sequences end to end in the given order."""
        shards = np.searchsorted(self._first, sequence_ids, side="right") - 1
        ids, masks, lengths = [], [], []
        for at, number in zip(shards.tolist(), (sequence_ids - self._first[shards]).tolist(), strict=True):
            offset, _, length, _ = self._sequences[at][number].item()
            ids.append(self._input_ids[at][offset : offset + length])
            masks.append(self._loss_mask[at][offset : offset + length])
            lengths.append(length)
        starts = np.cumsum([0, *lengths[:-1]], dtype=np.int32)
        return Pack(input_ids=np.concatenate(ids), loss_mask=np.concatenate(masks), seq_start_id=starts)

    def column(self, name: str, ids: Int64Array) -> Int32Array:
        """Return `length` or `trained` of the sequences `ids` (int64 [n], ascending) as int32 [n]."""
        values = np.empty(len(ids), np.int32)
        for at, sequences in enumerate(self._sequences):
            low, high = np.searchsorted(ids, self._first[at : at + 2])
            values[low:high] = sequences[name][ids[low:high] - self._first[at]]
        return values


@dataclass(frozen=True, eq=False)
class Split:
    """Sequences `ids` (int64 [sequences], ascending) of a spool."""

    spool: Spool
    ids: Int64Array

    def __len__(self) -> int:
        return len(self.ids)

    @cached_property
    def lengths(self) -> Int32Array:
        """int32 [sequences], in tokens."""
        return self.spool.column("length", self.ids)

    @property
    def num_tokens(self) -> int:
        return int(self.lengths.sum(dtype=np.int64))

    @property
    def num_trained_tokens(self) -> int:
        return int(self.spool.column("trained", self.ids).sum(dtype=np.int64))

    def pack(self, numbers: Int64Array) -> Pack:
        """Join sequences of the split, given by their number in it, end to end in the given order."""
        return self.spool.pack(self.ids[numbers])


def divide(
    spool: Spool, shares: Mapping[str, float], *, rest: str, drop_duplicates: bool
) -> tuple[dict[str, Split], int]:
    """Divide sequences among splits by the hashes of their conversations.

    A conversation stays in its split when others are added or removed.

    Args:
        shares: share of the conversations for each split; a split with share 0 is not made.
        rest: name of the split for the remaining conversations, which comes first in the result.
        drop_duplicates: leave out all but the first of several conversations with the same hash.

    Returns:
        the splits, and the number of sequences left out.
    """
    hashes = spool.hashes()
    # The hash, scaled to 0 to 1, picks the split.
    places = np.searchsorted(np.cumsum(list(shares.values())), hashes.astype(np.float64) / 2.0**64, side="right")
    num_duplicates = 0
    if drop_duplicates:
        is_first = np.zeros(len(hashes), np.bool_)
        is_first[np.unique(hashes, return_index=True)[1]] = True
        places[~is_first] = -1
        num_duplicates = len(hashes) - int(is_first.sum())
    splits = {rest: Split(spool, np.flatnonzero(places == len(shares)))}
    for place, (name, share) in enumerate(shares.items()):
        if share:
            splits[name] = Split(spool, np.flatnonzero(places == place))
    return splits, num_duplicates
