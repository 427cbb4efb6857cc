"""Live chunks from an input of conversations or packs, files or a pipe, each exactly once despite crashes."""

from __future__ import annotations

import base64
import json
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import closing, suppress
from dataclasses import dataclass, field, replace
from itertools import islice
from typing import Any, TypeGuard

import xxhash

from harness.errors import ConfigError, FormatError, LoaderError, PrepError
from harness.formats import open_dataset
from harness.formats.index import pack_digest
from harness.formats.layouts.jsonl import pack_of_line
from harness.formats.reader import require_plain
from harness.loader.live.producer import LiveProducer
from harness.prep import ChatTokenizer, Member, StreamPacker, pack_of
from harness.prep.chat import NUM_DETECTION_RECORDS, BadReason, BadRecord, Conversation, RecordReader, record_of_row
from harness.prep.chat.turns import TEXT_ALONE
from harness.prep.fitting import fit_conversation
from harness.prep.sources.finding import list_files, unread_columns
from harness.prep.sources.reading import columns_of, read_chunks
from harness.prep.tokenize import Encoded
from harness.printing import count_of
from harness.records import Pack

STDIN = "-"
_ANY_SCHEMA = RecordReader()
# Index of the item in the input, and of the sequence in the item.
_Key = tuple[int, int]


@dataclass(frozen=True)
class Item:
    """One item of the input; `line` identifies it, and is JSON for a conversation."""

    line: bytes
    where: str
    pack: Pack | None = None
    reader: RecordReader = _ANY_SCHEMA

    def parse(self) -> Conversation | BadRecord:
        """Parse the conversation, or return the reason why it is invalid."""
        return self.reader.parse_line(self.line, self.where)


@dataclass(frozen=True)
class Packing:
    """Settings of a producer that packs conversations; see `StreamPacker` and `PackingConfig`."""

    tokenizer: ChatTokenizer
    pack_size: int
    over_long: str = "drop"
    open_packs: int = 16
    # Conversations tokenized together; more are faster, but add latency on a slow input.
    block: int = 64


def read_conversations(source: str, reader: RecordReader = _ANY_SCHEMA) -> Iterator[Item]:
    """Yield chat records from files (see `list_files`), or non-blank lines of standard input for `-`."""
    if source == STDIN:
        for number, line in enumerate(sys.stdin.buffer, start=1):
            if line.strip():
                yield Item(line, f"standard input, line {number}", reader=reader)
        return
    for chunk in read_chunks(list_files(source), reader=reader):
        for number, record in enumerate(chunk.records, start=chunk.first):
            line = record
            if not isinstance(line, bytes):  # a row of Parquet or Arrow
                line = json.dumps(record_of_row(line) if isinstance(line, Mapping) else line, default=_as_json).encode()
            if line.strip():
                yield Item(line, f"{chunk.path}, {chunk.unit} {number}", reader=reader)


def log_unused_fields(items: Iterable[Item], source: str, log: Callable[[str], None]) -> Iterator[Item]:
    """Yield all items of a source; log unused fields of the first records and unused columns of tables."""
    known: set[str] = set()
    files = {} if source == STDIN else {str(file): file for file in list_files(source)}
    for number, item in enumerate(items):
        if number < NUM_DETECTION_RECORDS:
            names: set[str] = set()
            # Invalid JSON is refused when the item is parsed.
            with suppress(ValueError, RecursionError):
                names = item.reader.unused_keys(json.loads(item.line))
            # Rows of tables do not include unused columns.
            if (file := files.pop(item.where.rpartition(", ")[0], None)) is not None:
                names.update(unread_columns(columns_of(file), item.reader))
            if new := sorted(names - known):
                known.update(new)
                log(f"ignored fields: {', '.join(new)}")
        yield item


def _as_json(value: Any) -> dict[str, str]:
    """Return an object, which is not a string, for a value that JSON does not support."""
    data = {"data": base64.b64encode(value).decode()} if isinstance(value, bytes) else {}
    return {"type": type(value).__name__, **data}


def read_packs(source: str) -> Iterator[Item]:
    """Yield the packs of a dataset (see `open_dataset`), or of JSONL lines from standard input for `-`."""
    if source == STDIN:
        for number, line in enumerate(sys.stdin.buffer, start=1):
            where = f"standard input, line {number}"
            try:
                yield Item(line, where, pack_of_line(line))
            except FormatError as error:
                raise FormatError(f"the line {error.what}", where=where, fix=error.fix) from None
        return
    with closing(open_dataset(source)) as reader:
        require_plain(reader, "a stream of packs")
        for index in range(len(reader)):
            pack = reader[index]
            yield Item(b"%016x" % pack_digest(pack), f"{source}, pack {index}", pack)


def produce_chunks(
    producer: LiveProducer,
    items: Iterable[Item],
    *,
    packing: Packing | None = None,
    append: bool = False,
    leave_rest: bool = False,
    ends: bool = False,
    on_bad: str = "refuse",
    log: Callable[[str], None] = lambda line: None,
) -> dict[str, int]:
    """Add all items that are not in the folder yet, in complete chunks; the caller writes the END record.

    A restarted producer receives the same input from its beginning and skips items in complete chunks; a digest
    verifies that the input is the same. This also applies to an interrupted appended input.

    Args:
        packing: pack conversations here; None to add rows unchanged.
        append: the input follows one that was added completely.
        leave_rest: the input follows an interrupted one, whose rest is abandoned.
        ends: the caller ends the stream with this input; until then it counts as interrupted.
        on_bad: `refuse` or `skip` invalid conversations.

    Returns:
        Number of conversations left out, by reason.

    Raises:
        PrepError: an invalid conversation is refused.
        ConfigError: the input is not the one that the folder's newest chunks were made from.
        LoaderError: the stream has ended, but the input has more items.
    """
    if producer.input and not append:
        what = "other input was appended after the first input of the folder"
        fix = "pass only new input, or the last appended input again, with --append"
        raise ConfigError(what, where=str(producer.path), fix=fix)
    if producer.ended and append and not producer.input:
        what = "the stream has ended; no rows can be added"
        raise LoaderError(what, where=str(producer.path), fix="use a new folder")
    is_new = append and not producer.ended and (producer.input_is_whole or leave_rest)
    done = (None if is_new else producer.position) or {"items": 0}
    rest, usable = _numbered(items, producer, done, is_new=is_new), _Usable(on_bad)
    if packing is not None:
        _add_packed(producer, rest, done, packing, usable)
    else:
        for item, position in rest:
            if item.pack is not None:
                producer.add(item.pack, position)
            elif usable(parsed := item.parse()):
                # Readers of chunks do not know renamed columns.
                is_as_given = replace(item.reader, media=None) == _ANY_SCHEMA
                producer.add(item.line if is_as_given else parsed.as_record(), position)
    if not producer.ended:
        (producer.flush if ends else producer.end_input)()
    usable.log(log)
    return usable.left_out


@dataclass
class _Usable:
    """Filter for valid conversations, which refuses or counts invalid ones."""

    on_bad: str
    left_out: Counter[str] = field(default_factory=Counter)
    dropped: list[int] = field(default_factory=list)

    def __call__(self, parsed: Conversation | BadRecord) -> TypeGuard[Conversation]:
        if not isinstance(parsed, BadRecord):
            if parsed.dropped_media is not None:
                self.dropped.append(parsed.dropped_media)
            return True
        if self.on_bad == "refuse" and parsed.reason != BadReason.OMITTED:
            what = f"the conversation is invalid ({parsed.reason}): {parsed.detail}"
            fix = "fix it, or skip such records with source.on_bad=skip"
            media = "; to train on media, omit tokenizer.name: the ranks then tokenize with their model's tokenizer"
            raise PrepError(what, where=parsed.where, fix=fix + media * (TEXT_ALONE in parsed.detail))
        self.left_out[str(parsed.reason)] += 1
        return False

    def log(self, log: Callable[[str], None]) -> None:
        if self.left_out:
            log("left out: " + ", ".join(f"{count:,} {why}" for why, count in sorted(self.left_out.items())))
        if self.dropped:
            omitted = f"media omitted from {count_of(len(self.dropped), 'conversation')}"
            log(f"{omitted}, with {count_of(sum(self.dropped), 'placeholder')}")


def _numbered(
    items: Iterable[Item], producer: LiveProducer, done: dict[str, Any], *, is_new: bool
) -> Iterator[tuple[Item, dict[str, Any]]]:
    """Yield items that are not in complete chunks, each with the position after it; items of open packs come first."""
    if "items" not in done:
        what = "the folder's newest chunk does not record its part of the input"
        raise ConfigError(what, where=str(producer.path), fix="pass only new input, with --append")
    skip = int(done["items"])
    if producer.ended:
        fix = "the stream has ended; use a new folder"
    elif producer.input_is_whole:
        fix = "pass the first input of the folder, use a new folder, or pass only new input with --append"
    else:
        fix = "pass the input of the newest chunks again, from its beginning, because it was interrupted; "
        fix += "--append --leave-rest abandons the rest of it for another input"
    again = {item for pack in done.get("open", ()) for item, _ in pack}
    digest = xxhash.xxh3_64()
    number = -1
    for number, item in enumerate(items):
        digest.update(item.line)
        after = {"items": number + 1, "digest": digest.hexdigest()}
        if number + 1 == skip and done.get("digest") not in (None, after["digest"]):
            what = f"the input differs from the first {count_of(skip, 'item')} in the folder's chunks"
            raise ConfigError(what, where=item.where, fix=fix)
        if number == skip and not producer.ended:  # not earlier, so that a refused input is never begun
            producer.begin_input(is_new=is_new)
        if number >= skip or number in again:
            yield item, after
    if number + 1 < skip:
        what = f"the input has {count_of(number + 1, 'item')}, but the folder's chunks already contain {skip:,}"
        raise ConfigError(what, where=str(producer.path), fix=fix)


def _add_packed(
    producer: LiveProducer,
    rest: Iterator[tuple[Item, dict[str, Any]]],
    after: dict[str, Any],
    packing: Packing,
    usable: _Usable,
) -> None:
    """Pack conversations after a position; conversations of open packs come first and are restored."""
    packer: StreamPacker[_Key] = StreamPacker(packing.pack_size, max_open=packing.open_packs)
    were_open: list[list[_Key]] = [[(item, part) for item, part in pack] for pack in after.get("open", ())]
    awaited = {number for pack in were_open for number, _ in pack}
    waited: dict[_Key, Member[_Key]] = {}
    for position, conversation, encoded in _tokenized(rest, packing):
        number, members = position["items"] - 1, list[Member[_Key]]()
        # Items of open packs were counted before.
        if isinstance(encoded, BadRecord) or number not in awaited:
            usable(encoded if isinstance(encoded, BadRecord) else conversation)
        if isinstance(conversation, Conversation) and not isinstance(encoded, BadRecord):
            size, over_long = packing.pack_size, packing.over_long
            fitted = fit_conversation(conversation, encoded, packing.tokenizer, pack_size=size, over_long=over_long)
            members = [Member((number, part), piece, len(piece)) for part, piece in enumerate(fitted.pieces)]
            if not members:
                usable.left_out[fitted.reason] += 1
        if number in awaited:
            awaited.remove(number)
            waited |= {member.key: member for member in members}
            if not awaited:
                packer.restore([[waited[key] for key in pack if key in waited] for pack in were_open])
            continue
        after = position
        full = [pack for member in members if (pack := packer.add(member)) is not None]
        for done, pack in enumerate(full, start=1):
            # Record unwritten packs of the same item as open, so that the item is read again after a crash.
            unwritten = [[member.key for member in other] for other in full[done:]]
            producer.add(pack_of(pack), {**after, "open": unwritten + packer.open_keys})
    while (rest_of := packer.flush()) is not None:
        producer.add(pack_of(rest_of), {**after, "open": packer.open_keys})


def _tokenized(
    rest: Iterator[tuple[Item, dict[str, Any]]], packing: Packing
) -> Iterator[tuple[dict[str, Any], Conversation | BadRecord, Sequence[Encoded] | BadRecord]]:
    """Yield the position after each item, its conversation, and the tokenized sequences."""
    while block := list(islice(rest, packing.block)):
        parsed = [item.parse() for item, _ in block]
        yield from zip((after for _, after in block), parsed, packing.tokenizer.encode_each(parsed), strict=True)
