"""Tokenize one shard of the source into its own folder, with a receipt; a shard with a valid receipt is kept.

Folder `00007` contains `sequences.bin` (one record per sequence), `input_ids.bin`, `loss_mask.bin`, `media.bin` (one
per medium), `media_data.bin`, `samples.jsonl`, `bad_records.jsonl`, `bad_records_to_repair.jsonl` and `receipt.json`.
It is written under another name and renamed once complete, so an abandoned attempt that is still running changes
nothing. Every few seconds, an attempt saves its progress in `partial.json`; after a kill, the next one continues there.

`harness.prep.spool` reads the sequences of all shards.
"""

from __future__ import annotations

import json
import os
import shutil
import time
import uuid
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import asdict, dataclass, field, fields, replace
from datetime import date
from functools import lru_cache
from itertools import compress, islice
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from harness.errors import FormatError, HarnessError, PrepError, os_errors_as
from harness.formats.inspect import Decoder, text_runs
from harness.prep.chat import BadReason, BadRecord, Conversation
from harness.prep.fitting import fit_conversation
from harness.prep.folder import BAD_RECORDS, TO_REPAIR, settings_hash
from harness.prep.media import AudioSize, draw_medium, measure
from harness.prep.sources.reading import SourceChunk, SourceShard, is_blank, read_shard
from harness.prep.sources.text import BadRow
from harness.prep.spool import INPUT_IDS, LOSS_MASK, MEDIA, MEDIA_DATA, MEDIUM, SEQUENCE, SEQUENCES
from harness.prep.tokenize import ChatTokenizer, Encoded, TokenizerConfig
from harness.printing import count_of
from harness.records import MEDIA_KINDS, SequenceView
from harness.settings import load, to_plain
from harness.storage import StoredFile, parse_place, stamp_of, sync_path, write_atomically
from harness.storage.checksums import digest_files
from harness.storage.files import Stamp

# Increment when the same settings start to produce different data.
VERSION = 3
RECEIPT, PARTIAL = "receipt.json", "partial.json"
SAMPLES = "samples.jsonl"
# File with the number of source bytes that an attempt has read, for progress display.
_PROGRESS = "progress"
_FILES = (SEQUENCES, INPUT_IDS, LOSS_MASK, MEDIA, MEDIA_DATA, BAD_RECORDS, TO_REPAIR, SAMPLES)
_SHOWN_BAD = 10
# Tags of tool calls and results in the text of Hermes records; templates write their own tags.
_CALL_TAGS = ("<tool_call>", "<tool_response>")
# Approximate bytes of media in memory at once.
_MEDIA_BYTES = 64 << 20
# Target time to tokenize one batch of records.
_BATCH_S = 0.25
# Interval for saving progress inside a shard: a kill loses little more than this, however slow the machine.
_SAVE_S = 15.0
# Conversations per shard whose text is kept for the report page.
_MAX_SAMPLES = 2
_MAX_EXAMPLES = 3
_MAX_PICTURES = 4
# Sequences per conversation, and characters per sequence, in a report.
_MAX_SEQUENCES, _MAX_CHARACTERS = 6, 6000


@dataclass
class Counts:
    """Counts of records and conversations.

    Attributes:
        records: number of records read; each is kept as a conversation, counted as bad, or dropped.
        dropped: conversations left out because of their length, as duplicates or by a function, by reason.
        partial: conversations with some sequences kept and others left out because of their length.
        split: conversations that were divided because they are longer than a pack.
        lost_tokens: trained tokens that were cut off or left out because their conversation is longer than a pack.
        repeated_tokens: tokens in addition to the longest sequence of each conversation: a turn that is served
            differently repeats the conversation before it.
        media: kept conversations whose images, audio and videos were left out (`source.drop_media`).
        placeholders: placeholders of such media that were removed from the text.
        media_by_kind, media_tokens: media of kept conversations, and their placeholder tokens.
        user_last: kept conversations that end with a user turn, which has no answer to train on.
        tagged_calls: kept conversations whose text has tool calls or results in tags, which templates also write.
        examples: places of the first records by kind: `bad REASON`, `dropped REASON`, `partial`, `truncated` and so on.
    """

    records: int = 0
    bad: Counter[str] = field(default_factory=Counter)
    dropped: Counter[str] = field(default_factory=Counter)
    partial: int = 0
    truncated: int = 0
    split: int = 0
    lost_tokens: int = 0
    repeated_tokens: int = 0
    media: int = 0
    placeholders: int = 0
    media_by_kind: Counter[str] = field(default_factory=Counter)
    media_tokens: int = 0
    audio_seconds: float = 0.0
    user_last: int = 0
    tagged_calls: int = 0
    examples: dict[str, list[str]] = field(default_factory=dict)

    def count(self, kind: str, place: str, *, reason: str = "") -> None:
        """Add one to the field `kind`, under `reason` if given; keep the place if it is among the first."""
        if reason:
            getattr(self, kind)[reason] += 1
        else:
            setattr(self, kind, getattr(self, kind) + 1)
        self._keep(f"{kind} {reason}".rstrip(), [place])

    def _keep(self, kind: str, places: list[str]) -> None:
        self.examples[kind] = [*self.examples.get(kind, []), *places][:_MAX_EXAMPLES]

    def add(self, other: Counts) -> None:
        for name in (entry.name for entry in fields(Counts) if entry.name != "examples"):
            setattr(self, name, getattr(self, name) + getattr(other, name))
        for kind, places in other.examples.items():
            self._keep(kind, places)


@dataclass(frozen=True, slots=True)
class SequenceSample:
    """Text runs of one sequence, each with a flag for trained text, and the token counts of the whole sequence."""

    num_tokens: int
    num_trained: int
    runs: list[tuple[str, bool]]
    is_whole: bool = True


@dataclass(frozen=True, slots=True)
class Sample:
    """One conversation (without messages if it is plain text) and its first sequences.

    `pictures` show the first media of the first sequence, as data URIs.
    """

    where: str
    num_messages: int
    num_sequences: int
    sequences: list[SequenceSample]
    pictures: list[str] = field(default_factory=list)

    @property
    def title(self) -> str:
        turns = f"{self.num_messages} turn{'s' * (self.num_messages != 1)}" if self.num_messages else "text"
        return f"{self.where}: {turns}, {self.num_sequences} sequence{'s' * (self.num_sequences != 1)}"


def make_sample(
    conversation: Conversation, pieces: Sequence[SequenceView], tokenizer: Decoder, *, is_whole: bool = False
) -> Sample:
    """Decode the sequences of a conversation: all of them in full if `is_whole`, else the start of the first ones."""
    sequences = []
    max_sequences, max_characters = (len(pieces), 1 << 40) if is_whole else (_MAX_SEQUENCES, _MAX_CHARACTERS)
    for piece in pieces[:max_sequences]:
        # Keep only the first placeholder token of each medium.
        kept = np.ones(len(piece), np.bool_)
        for one in piece.media:
            kept[one.start + 1 : one.start + one.tokens] = False
        runs, left = [], max_characters
        for text, trained in text_runs(SequenceView(piece.input_ids[kept], piece.loss_mask[kept]), tokenizer):
            if left > 0:
                runs.append((text[:left], trained))
            left -= len(text)
            if left < 0:
                break
        sequences.append(SequenceSample(len(piece), int(np.count_nonzero(piece.loss_mask)), runs, left >= 0))
    pictures = [draw_medium(one.kind, one.data) for piece in pieces[:1] for one in piece.media[:_MAX_PICTURES]]
    return Sample(conversation.where, len(conversation.messages), len(pieces), sequences, pictures)


@dataclass(frozen=True, slots=True)
class ShardJob:
    """Settings shared by all shards, as plain values that can be sent to workers.

    `content` is a hash of the tokenizer's folder, `today` the date (YYYY-MM-DD) that its chat template writes, if any.
    """

    folder: str
    tokenizer: TokenizerConfig
    content: str
    today: str
    pack_size: int
    over_long: str
    on_bad: str

    @property
    def settings(self) -> str:
        """Hash of everything that the sequences depend on, except the shard itself."""
        values = asdict(self)
        del values["folder"], values["tokenizer"]["name"]
        return settings_hash({**values, "version": VERSION})

    def shard_folder(self, number: int) -> Path:
        return Path(self.folder) / f"{number:05d}"


@dataclass
class Receipt:
    """Input and contents of a shard, finished or partial; `was_there` is true if an earlier run made it."""

    shard: dict[str, Any]
    settings: str
    input: Stamp | None = None
    output: list[StoredFile] = field(default_factory=list)
    counts: Counts = field(default_factory=Counts)
    conversations: int = 0
    sequences: int = 0
    tokens: int = 0
    trained_tokens: int = 0
    was_there: bool = False


def do_shard(job: ShardJob, number: int, shard: SourceShard) -> Receipt | HarnessError:
    """Make a shard unless it exists intact; errors are returned, not raised, because they cross processes."""
    folder = job.shard_folder(number)
    fix = "free disk space, or set data.path to another folder; finished shards are kept"
    try:
        with os_errors_as(PrepError, "the shard cannot be written", where=folder, fix=fix):
            with suppress(OSError):
                receipt = _read_receipt(folder / RECEIPT, job, shard)
                if receipt is not None and digest_files(folder, _FILES) == receipt.output:
                    return replace(receipt, was_there=True)
            return _make(job, folder, shard)
    except HarnessError as error:
        return error


def refuse(bad: list[BadRecord]) -> None:
    """Raise PrepError listing the first bad records, if there are any; omitted records do not count."""
    if not (bad := [record for record in bad if record.reason != BadReason.OMITTED]):
        return
    equal: dict[str, list[str]] = {}
    for record in bad:
        equal.setdefault(f"{record.reason}: {record.detail}", []).append(record.where)
    shown = [
        f"{places[0]}: {text}" + (f" (and {count_of(len(places) - 1, 'more record')})" if len(places) > 1 else "")
        for text, places in list(equal.items())[:_SHOWN_BAD]
    ]
    if len(equal) > _SHOWN_BAD:
        shown.append(f"and {sum(map(len, list(equal.values())[_SHOWN_BAD:])):,} more")
    fix = "fix the records, or skip bad ones with source.on_bad=skip"
    if any(record.reason == BadReason.CONTROL_TOKEN for record in bad):
        fix += "; tokenizer.control_tokens=allow encodes such text as the token"
    counts = Counter(record.reason.value for record in bad)
    reasons = ", ".join(f"{number:,} {reason}" for reason, number in counts.items())
    raise PrepError(f"there are bad records: {reasons}", where="\n         ".join(shown), fix=fix)


def _read_receipt(path: Path, job: ShardJob, shard: SourceShard) -> Receipt | None:
    """Return a finished or partial receipt; None if it is missing, damaged, or for other input or settings."""
    with suppress(OSError, FormatError):
        receipt = load(Receipt, path.read_bytes(), where=path)
        expected = (json.loads(json.dumps(asdict(shard))), job.settings, stamp_of(parse_place(shard.path)))
        if (receipt.shard, receipt.settings, receipt.input) == expected:
            return receipt
    return None


@lru_cache(maxsize=1)
def _load_tokenizer(config: str, content: str, today: str) -> ChatTokenizer:
    """Load a tokenizer once per process; a new `content` reloads a folder that was rewritten."""
    return ChatTokenizer(TokenizerConfig(**json.loads(config)), today=date.fromisoformat(today) if today else None)


def _make(job: ShardJob, final: Path, shard: SourceShard) -> Receipt:
    tokenizer = _load_tokenizer(json.dumps(asdict(job.tokenizer)), job.content, job.today)
    folder = final.with_name(f"{final.name}.{uuid.uuid4().hex[:8]}")
    folder.mkdir(parents=True)
    try:
        stamp = stamp_of(parse_place(shard.path))
        receipt = _resume(job, final, folder, shard) or Receipt(asdict(shard), job.settings, stamp)
        with ExitStack() as stack:
            files = {name: stack.enter_context((folder / name).open("ab")) for name in _FILES}
            writer = _ShardWriter(job, files, receipt, num_done=receipt.counts.records)
            done, saved = 0, time.monotonic()
            for chunk in read_shard(shard):
                for share in writer.add(chunk, tokenizer):
                    (folder / _PROGRESS).write_text(str(done + int(share * chunk.num_bytes)))
                    if not writer.refused and time.monotonic() - saved >= _SAVE_S:
                        writer.sync()
                        receipt.output = [StoredFile(name, file.tell(), "") for name, file in files.items()]
                        write_atomically(folder / PARTIAL, json.dumps(to_plain(receipt)).encode())
                        saved = time.monotonic()
                done += chunk.num_bytes
            writer.sync()
        # Check each shard: in a changed file, the next shard would start mid-record and report bad records.
        if stamp_of(parse_place(shard.path)) != stamp:
            fix = "prepare it when no program writes to it"
            raise PrepError("the file changed while it was read", where=shard.path, fix=fix)
        receipt.output = digest_files(folder, _FILES)
        write_atomically(folder / RECEIPT, json.dumps(to_plain(receipt)).encode())
        # Either of two concurrent attempts will do: they contain the same bytes.
        for _ in range(3):
            try:
                folder.rename(final)
                break
            except OSError:
                # The folder exists without a valid receipt, or another attempt has just finished.
                shutil.rmtree(final, ignore_errors=True)
        else:
            fix = "remove the folder, then try again"
            raise PrepError("the shard cannot be moved into place", where=str(final), fix=fix)
        sync_path(final.parent)
        return receipt
    finally:
        if not (folder / PARTIAL).exists():  # the next attempt continues from it
            shutil.rmtree(folder, ignore_errors=True)


def _resume(job: ShardJob, final: Path, folder: Path, shard: SourceShard) -> Receipt | None:
    """Copy the furthest saved progress of killed attempts into the folder of this one; return its receipt, if any.

    The files are copied because that attempt may still be writing, and are needed if this one is killed at once, too.
    """
    paths = final.parent.glob(f"{final.name}.*/{PARTIAL}")
    found = [(path.parent, receipt) for path in paths if (receipt := _read_receipt(path, job, shard)) is not None]
    if not found:
        return None
    old, receipt = max(found, key=lambda each: (each[1].counts.records, each[0]))
    (old / _PROGRESS).unlink(missing_ok=True)
    for file in receipt.output:
        shutil.copyfile(old / file.path, folder / file.path)
        os.truncate(folder / file.path, file.num_bytes)
    return receipt


@dataclass
class _ShardWriter:
    """Writer of a shard's records, after the first `num_done`, to its open files by name; counts the records."""

    job: ShardJob
    files: Mapping[str, BinaryIO]
    receipt: Receipt
    num_done: int = 0
    refused: list[BadRecord] = field(default_factory=list)
    rows: list[tuple[int, int, int, int, int]] = field(default_factory=list)
    batch: int = 8

    def sync(self) -> None:
        for file in self.files.values():
            file.flush()
            os.fsync(file.fileno())

    def add(self, chunk: SourceChunk, tokenizer: ChatTokenizer) -> Iterator[float]:
        """Write a chunk's tokens, and yield the share done several times a second; PrepError for refused records."""
        present = [raw for raw in chunk.records if not is_blank(raw)]
        num_written = min(self.num_done, len(present))
        self.num_done -= num_written
        if present and num_written == len(present):
            return
        num_before = self.receipt.counts.records - num_written
        records = islice(zip(present, chunk.parse(), strict=True), num_written, None)
        while some := _batch(records, self.batch):
            began = time.monotonic()
            for (raw, item), result in zip(some, tokenizer.encode_each([item for _, item in some]), strict=True):
                if isinstance(result, BadRecord) and result.reason == BadReason.OMITTED:
                    self.receipt.counts.count("dropped", f"{result.where}: {result.detail}", reason=result.reason.value)
                elif isinstance(result, BadRecord) and self.job.on_bad == "refuse":
                    self.refused.append(result)
                elif isinstance(result, BadRecord):
                    self._leave_out(raw, result)
                elif isinstance(item, Conversation):
                    self._store(item, result, tokenizer)
            fitting = int(len(some) * _BATCH_S / max(time.monotonic() - began, 1e-6))
            self.batch = max(1, min(fitting, 2 * self.batch, 1024))
            self.receipt.counts.records += len(some)
            self.files[SEQUENCES].write(np.array(self.rows, SEQUENCE).tobytes())
            self.rows.clear()
            yield (self.receipt.counts.records - num_before) / len(chunk.records)
        refuse(self.refused)

    def _leave_out(self, raw: Any, record: BadRecord) -> None:
        self.receipt.counts.count("bad", f"{record.where}: {record.detail}", reason=record.reason.value)
        raw = raw.text if isinstance(raw, BadRow) else raw
        spelled = _as_json(raw).encode()
        self.files[BAD_RECORDS].write(json.dumps(asdict(record)).encode()[:-1] + b', "record": ' + spelled + b"}\n")
        line = raw.rstrip(b"\r\n") if isinstance(raw, bytes) else b"\n"
        # Rows of tables are not text, and an item of a JSON list may span several lines.
        self.files[TO_REPAIR].write((spelled if b"\n" in line else line) + b"\n")

    def _store(self, conversation: Conversation, sequences: Sequence[Encoded], tokenizer: ChatTokenizer) -> None:
        job, stored, counts, where = self.job, self.receipt, self.receipt.counts, conversation.where
        fitted = fit_conversation(conversation, sequences, tokenizer, pack_size=job.pack_size, over_long=job.over_long)
        counts.lost_tokens += fitted.num_lost
        if not fitted.pieces:
            num_tokens = max(len(one.view) for one in sequences)
            counts.count("dropped", f"{where}: {num_tokens:,} tokens", reason=fitted.reason)
            return
        counts.placeholders += conversation.dropped_media or 0
        if not fitted.is_split:
            lengths = [len(piece) for piece in fitted.pieces]
            counts.repeated_tokens += sum(lengths) - max(lengths)
        found = {
            "partial": fitted.is_partial,
            "truncated": fitted.is_cut,
            "split": fitted.is_split,
            "media": conversation.dropped_media is not None,
            "user_last": any(turn.role == "user" for turn in conversation.messages[-1:]),
            "tagged_calls": any(tag in turn.text for turn in conversation.messages for tag in _CALL_TAGS),
        }
        for kind in compress(found, found.values()):
            counts.count(kind, where)
        digest = conversation.hash()
        for medium in conversation.media:
            counts.media_by_kind[medium.kind] += 1
            if isinstance(size := measure(medium.kind, medium.data), AudioSize):
                counts.audio_seconds += size.num_samples / size.rate
        places: dict[int, int] = {}  # a medium that several sequences contain is stored once
        for part, piece in enumerate(fitted.pieces):
            for one in piece.media:
                if id(one.data) not in places:
                    places[id(one.data)] = self.files[MEDIA_DATA].tell()
                    self.files[MEDIA_DATA].write(one.data)
                place = (MEDIA_KINDS.index(one.kind), places[id(one.data)], len(one.data))
                row = np.array([(stored.sequences + part, one.start, one.tokens, *place)], MEDIUM)
                self.files[MEDIA].write(row.tobytes())
                counts.media_tokens += one.tokens
            trained = int(np.count_nonzero(piece.loss_mask))
            self.rows.append((stored.tokens, digest, part, len(piece), trained))
            self.files[INPUT_IDS].write(piece.input_ids.astype("<i4", copy=False).tobytes())
            self.files[LOSS_MASK].write(piece.loss_mask.tobytes())
            stored.tokens += len(piece)
            stored.trained_tokens += trained
        stored.conversations += 1
        stored.sequences += len(fitted.pieces)
        if stored.conversations <= _MAX_SAMPLES:
            line = json.dumps(asdict(make_sample(conversation, fitted.pieces, tokenizer)))
            self.files[SAMPLES].write(line.encode() + b"\n")


def _batch(records: Iterator[tuple[Any, Any]], size: int) -> list[tuple[Any, Any]]:
    """Return the next records, at most `size`, or fewer if their media are large."""
    some: list[tuple[Any, Any]] = []
    num_bytes = 0
    while len(some) < size and num_bytes <= _MEDIA_BYTES and (one := next(records, None)) is not None:
        some.append(one)
        num_bytes += sum(len(part.data) for part in one[1].media) if isinstance(one[1], Conversation) else 0
    return some


def bytes_in_progress(folder: Path) -> int:
    """Return the bytes of the source that unfinished shards have read, given the folder of all shards."""
    total = 0
    for file in folder.glob(f"*.*/{_PROGRESS}"):
        with suppress(OSError, ValueError):  # it was just renamed, or is being written
            total += int(file.read_text())
    return total


def _as_json(raw: object) -> str:
    """Return a record as one line of JSON; if it is not valid JSON, its text as a JSON string."""
    try:
        value = json.loads(raw.decode("utf-8-sig")) if isinstance(raw, bytes) else raw
        # A Parquet row can contain values that JSON cannot.
        return json.dumps(value, default=lambda odd: f"{len(odd):,} bytes" if isinstance(odd, bytes) else str(odd))
    except (ValueError, TypeError, RecursionError):  # TypeError: a row's keys are not text
        return json.dumps(raw.decode(errors="backslashreplace").rstrip("\r\n") if isinstance(raw, bytes) else str(raw))
