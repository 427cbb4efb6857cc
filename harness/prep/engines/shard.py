"""Tokenises one shard of the source into a folder of its own, with a receipt; a shard that has one is not done again.

`00007` in the folder of shards holds `sequences.bin` (a record a sequence), `input_ids.bin` and `loss_mask.bin`,
`bad_records.jsonl`, and `receipt.json`. It is written under another name and renamed when it is whole, so that a try
that was given up, wherever it may still be at work, changes nothing.
"""

from __future__ import annotations

import json
import os
import shutil
import uuid
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import xxhash

from harness.errors import HarnessError, PrepError
from harness.prep.chat import BadReason, BadRecord
from harness.prep.engines.chunk import TokenizedChunk, TokenizeJob, tokenize_chunk
from harness.prep.reading import Shard, read_shard
from harness.prep.tokenize import ChatTokenizer
from harness.storage import sync_folder

RECEIPT = "receipt.json"
SEQUENCES, INPUT_IDS, LOSS_MASK, BAD_RECORDS = "sequences.bin", "input_ids.bin", "loss_mask.bin", "bad_records.jsonl"
# Of a sequence: where its tokens begin in the shard's files, its conversation's hash, tokens, and how many are trained.
SEQUENCE = np.dtype([("offset", "<i8"), ("hash", "<u8"), ("length", "<i4"), ("trained", "<i4")])
_READ_BYTES = 1 << 20
_SHOWN_BAD = 10


@dataclass(frozen=True, slots=True)
class ShardJob:
    """What is the same for all shards; plain values, so that it can be sent.

    Attributes:
        folder: of the shards.
        tokenize: how conversations become sequences.
        settings: hash of all that the sequences depend on beside the shard itself.
        refuse: stop at bad records.
    """

    folder: str
    tokenize: TokenizeJob
    settings: str
    refuse: bool


@dataclass(frozen=True)
class Receipt:
    """What a shard was made from, and what it holds.

    Attributes:
        shard: as in `cut_shards`.
        settings: of the job.
        input: `size` and `mtime_ns` of the file, and `xxh3` of the shard's bytes in it.
        output: `num_bytes` and `xxh3` of its files, by name.
        records: read.
        sequences, tokens, trained_tokens: stored.
        bad, dropped: records that are no conversations, and conversations left out for their length, by reason.
        truncated: conversations that were cut.
        was_there: it was made earlier.
    """

    shard: dict[str, Any]
    settings: str
    input: dict[str, Any]
    output: dict[str, dict[str, Any]]
    records: int
    sequences: int
    tokens: int
    trained_tokens: int
    bad: dict[str, int] = field(default_factory=dict)
    dropped: dict[str, int] = field(default_factory=dict)
    truncated: int = 0
    was_there: bool = False


def shard_folder(folder: str | Path, number: int) -> Path:
    return Path(folder) / f"{number:05d}"


def find_receipt(job: ShardJob, number: int, shard: Shard) -> Receipt | None:
    """The receipt of a shard that is whole; None where it is missing, damaged, or of other input or settings."""
    folder = shard_folder(job.folder, number)
    try:
        receipt = Receipt(**json.loads((folder / RECEIPT).read_bytes()))
        if (receipt.shard, receipt.settings) != (_plain(shard), job.settings):
            return None
        stat = Path(shard.path).stat()
        is_same = (receipt.input["size"], receipt.input["mtime_ns"]) == (stat.st_size, stat.st_mtime_ns)
        # A copy of the same bytes has another time.
        if not is_same and receipt.input["xxh3"] != _digest(Path(shard.path), shard.start, shard.end):
            return None
        whole = all(_account(folder / name) == told for name, told in receipt.output.items())
        return replace(receipt, was_there=True) if whole else None
    except (OSError, ValueError, TypeError, KeyError):
        return None


def do_shard(
    job: ShardJob, number: int, shard: Shard, tokenizer: Callable[[TokenizeJob], ChatTokenizer]
) -> Receipt | HarnessError:
    """Make a shard unless it is there. Errors are given, not raised: they come from other processes and machines."""
    try:
        return find_receipt(job, number, shard) or _make(job, number, shard, tokenizer(job.tokenize))
    except HarnessError as error:
        return error
    except OSError as error:
        return PrepError(
            f"the shard cannot be written: {error.strerror or error}",
            where=str(shard_folder(job.folder, number)),
            fix="make room, or name another folder in data.path; what is done is kept",
        )


def refuse(bad: list[BadRecord]) -> None:
    """Raise PrepError with the first of the records, if there are any."""
    if not bad:
        return
    shown = [f"{one.where}: {one.reason}: {one.detail}" for one in bad[:_SHOWN_BAD]]
    if len(bad) > _SHOWN_BAD:
        shown.append(f"and {len(bad) - _SHOWN_BAD:,} more close by")
    fix = "mend the records, or leave bad ones out with source.on_bad=skip"
    if any(one.reason == BadReason.CONTROL_TOKEN for one in bad):
        fix += "; tokenizer.control_tokens=allow lets such text become the token itself"
    counts = Counter(one.reason.value for one in bad)
    reasons = ", ".join(f"{number:,} {reason}" for reason, number in counts.items())
    raise PrepError(f"there are bad records: {reasons}", where="\n         ".join(shown), fix=fix)


def _make(job: ShardJob, number: int, shard: Shard, tokenizer: ChatTokenizer) -> Receipt:
    final = shard_folder(job.folder, number)
    folder = final.with_name(f"{final.name}.{uuid.uuid4().hex[:8]}")
    folder.mkdir(parents=True)
    try:
        before = Path(shard.path).stat()
        counts = _write(job, folder, (tokenize_chunk(one, tokenizer, job.tokenize) for one in read_shard(shard)))
        digest = _digest(Path(shard.path), shard.start, shard.end)
        after = Path(shard.path).stat()
        if (before.st_size, before.st_mtime_ns) != (after.st_size, after.st_mtime_ns):
            raise PrepError(
                "the file changed while it was read", where=shard.path, fix="prepare it once nothing writes to it"
            )
        receipt = Receipt(
            shard=_plain(shard),
            settings=job.settings,
            input={"size": after.st_size, "mtime_ns": after.st_mtime_ns, "xxh3": digest},
            output={name: _account(folder / name) for name in (SEQUENCES, INPUT_IDS, LOSS_MASK, BAD_RECORDS)},
            **counts,
        )
        with (folder / RECEIPT).open("wb") as file:
            file.write(json.dumps(asdict(receipt)).encode())
            file.flush()
            os.fsync(file.fileno())
        _put_in_place(folder, final)
        return receipt
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _write(job: ShardJob, folder: Path, chunks: Iterator[TokenizedChunk]) -> dict[str, Any]:
    bad: Counter[str] = Counter()
    dropped: Counter[str] = Counter()
    num_records = sequences = tokens = trained_tokens = truncated = 0
    with (
        (folder / SEQUENCES).open("wb") as records,
        (folder / INPUT_IDS).open("wb") as ids,
        (folder / LOSS_MASK).open("wb") as mask,
        (folder / BAD_RECORDS).open("w", encoding="utf-8") as bad_records,
    ):
        for chunk in chunks:
            if job.refuse:
                refuse(chunk.bad)
            lengths = chunk.lengths.astype(np.int64)
            ends = np.cumsum(lengths)
            found = np.zeros(len(lengths), SEQUENCE)
            found["offset"], found["hash"], found["length"] = tokens + ends - lengths, chunk.hashes, lengths
            # A sequence has tokens, so that no two begin at the same place.
            if len(lengths):
                found["trained"] = np.add.reduceat(chunk.loss_mask, ends - lengths, dtype=np.int32)
            records.write(found.tobytes())
            ids.write(chunk.input_ids.astype("<i4", copy=False).tobytes())
            mask.write(chunk.loss_mask.tobytes())
            bad_records.writelines(json.dumps(asdict(one)) + "\n" for one in chunk.bad)
            bad.update(one.reason.value for one in chunk.bad)
            dropped += chunk.dropped
            truncated += chunk.num_truncated
            num_records += chunk.num_records
            sequences += len(lengths)
            tokens += int(lengths.sum())
            trained_tokens += int(found["trained"].sum(dtype=np.int64))
        for file in (records, ids, mask, bad_records):
            file.flush()
            os.fsync(file.fileno())
    return {
        "records": num_records,
        "sequences": sequences,
        "tokens": tokens,
        "trained_tokens": trained_tokens,
        "bad": dict(bad),
        "dropped": dict(dropped),
        "truncated": truncated,
    }


def _put_in_place(folder: Path, final: Path) -> None:
    """Rename a whole shard; of two tries at once, either will do, for they hold the same."""
    for _ in range(3):
        try:
            folder.rename(final)
            break
        except OSError:
            # There is one without a valid receipt, or another try has just come first.
            with suppress(OSError):
                shutil.rmtree(final)
    else:
        raise PrepError("the shard cannot be put in place", where=str(final), fix="remove the folder, then try again")
    sync_folder(final.parent)


def _plain(shard: Shard) -> dict[str, Any]:
    """As it comes back from JSON."""
    found: dict[str, Any] = json.loads(json.dumps(asdict(shard)))
    return found


def _account(path: Path) -> dict[str, Any]:
    size = path.stat().st_size
    return {"num_bytes": size, "xxh3": _digest(path, 0, size)}


def _digest(path: Path, start: int, end: int) -> str:
    """xxh3_64 (hexadecimal) of some bytes of a file."""
    total, left = xxhash.xxh3_64(), end - start
    with path.open("rb") as file:
        file.seek(start)
        while left and (block := file.read(min(left, _READ_BYTES))):
            total.update(block)
            left -= len(block)
    return str(total.hexdigest())
