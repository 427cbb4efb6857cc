"""From an input to live chunks: conversations or packs, from files or a pipe, each exactly once over any crashes."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from itertools import islice
from typing import Any

import xxhash

from harness.errors import ConfigError, FormatError, LoaderError, PrepError
from harness.formats import open_dataset, pack_digest
from harness.formats.jsonl import pack_of_line
from harness.loader.live.producer import LiveProducer
from harness.prep import (
    BadRecord,
    ChatTokenizer,
    Conversation,
    Member,
    StreamPacker,
    fit_to_pack,
    list_files,
    pack_of,
    parse_line,
    read_chunks,
)
from harness.records import Pack, SequenceView

STDIN = "-"


@dataclass(frozen=True)
class Item:
    """One of the input: bytes that tell it from others, where it stands, and the pack where it is one."""

    line: bytes
    where: str
    pack: Pack | None = None


@dataclass(frozen=True)
class Packing:
    """How a producer packs conversations itself: see `StreamPacker` and `PackingConfig`. So many of a `block` are
    tokenised at one time; more are faster, but wait for each other where they come slowly."""

    tokenizer: ChatTokenizer
    pack_size: int
    over_long: str = "drop"
    open_packs: int = 16
    block: int = 64


def read_conversations(source: str) -> Iterator[Item]:
    """Lines of JSON from files (`list_files`), or from standard input for `-`; blank ones are no items."""
    if source == STDIN:
        lines = enumerate(sys.stdin.buffer, start=1)
        yield from (Item(line, f"standard input, line {number}") for number, line in lines if line.strip())
        return
    for chunk in read_chunks(list_files(source)):
        for number, record in enumerate(chunk.records, start=chunk.first):
            line = record if isinstance(record, bytes) else json.dumps(record).encode()
            if line.strip():
                yield Item(line, f"{chunk.path}, {chunk.unit} {number}")


def read_packs(source: str) -> Iterator[Item]:
    """Packs of a dataset, as `open_dataset` takes them; or lines as in JSONL chunks from standard input for `-`."""
    if source == STDIN:
        for number, line in enumerate(sys.stdin.buffer, start=1):
            try:
                yield Item(line, f"standard input, line {number}", pack_of_line(line))
            except FormatError as error:
                raise FormatError(
                    f"the line {error.what}", where=f"standard input, line {number}", fix=error.fix
                ) from None
        return
    reader = open_dataset(source)
    try:
        for index in range(len(reader)):
            pack = reader[index]
            yield Item(b"%016x" % pack_digest(pack), f"{source}, pack {index}", pack)
    finally:
        reader.close()


def produce_chunks(
    producer: LiveProducer,
    items: Iterable[Item],
    *,
    packing: Packing | None = None,
    append: bool = False,
    leave_rest: bool = False,
    on_bad: str = "refuse",
    say: Callable[[str], None] = lambda line: None,
) -> dict[str, int]:
    """Add all items that are not in the folder yet, in whole chunks; the END record is left to the caller.

    A producer that starts again is given the same input from its beginning and passes over what is in whole chunks;
    a digest makes sure that it is the same. So it does with an input that is appended and was not added to its end.

    Args:
        packing: pack conversations here; None leaves rows as they are.
        append: the input comes behind one that was added to its end.
        leave_rest: and behind one that was not, whose rest nobody wants.
        on_bad: `refuse` or `skip` conversations that cannot be used.

    Returns:
        how many conversations were left out, and why.

    Raises:
        PrepError: a bad conversation that is refused.
        ConfigError: the input is not the one that the folder's newest chunks were made from.
        LoaderError: the stream has ended, and there is more in the input.
    """
    left_out: dict[str, int] = {}

    def leave_out(why: str) -> None:
        left_out[why] = left_out.get(why, 0) + 1

    def usable(parsed: Conversation | BadRecord) -> bool:
        if not isinstance(parsed, BadRecord):
            return True
        if on_bad == "refuse":
            raise PrepError(
                f"the conversation cannot be used ({parsed.reason}): {parsed.detail}",
                where=parsed.where,
                fix="mend it, or leave such out with --on-bad skip",
            )
        leave_out(str(parsed.reason))
        return False

    is_new = _is_new_input(producer, append=append, leave_rest=leave_rest)
    done = (None if is_new else producer.position) or {"items": 0}
    rest = _numbered(items, producer, done, is_new=is_new)
    if packing is not None:
        _add_packed(producer, rest, done, packing, usable, leave_out)
    else:
        for item, position in rest:
            if item.pack is not None:
                producer.add(item.pack, position)
            elif usable(parse_line(item.line, item.where)):
                producer.add(item.line, position)
    if not producer.ended:
        producer.end_input()
    if left_out:
        say("left out: " + ", ".join(f"{count:,} {why}" for why, count in sorted(left_out.items())))
    return left_out


def _is_new_input(producer: LiveProducer, *, append: bool, leave_rest: bool) -> bool:
    """Whether the input comes behind the one that the producer before was at, and is not that one again."""
    if producer.input and not append:
        raise ConfigError(
            "other input was appended to what the folder was begun with",
            fix="give only what is new, or again what was appended last, with --append",
        )
    if producer.ended and append and not producer.input:
        raise LoaderError("the stream has ended, nothing can be appended", fix="name a new folder")
    return append and not producer.ended and (producer.input_is_whole or leave_rest)


def _numbered(
    items: Iterable[Item], producer: LiveProducer, done: dict[str, Any], *, is_new: bool
) -> Iterator[tuple[Item, dict[str, Any]]]:
    """The items that are not in whole chunks yet, each with the position after it; those of open packs first."""
    if "items" not in done:
        raise ConfigError(
            "the folder's newest chunk does not say which part of an input it holds",
            fix="give only what is new, with --append",
        )
    skip = int(done["items"])
    if producer.ended:
        fix = "the stream has ended: name a new folder"
    elif producer.input_is_whole:
        fix = "give the input that the folder was begun with, name a new folder, or give only what is new with --append"
    else:
        fix = "give the input that its newest chunks were made from again, from its beginning: it was not added to its "
        fix += "end. With --append --leave-rest another one comes behind what is there of it"
    again = {number for pack in done.get("open", ()) for number in pack}
    digest = xxhash.xxh3_64()
    number = -1
    for number, item in enumerate(items):
        digest.update(item.line)
        after = {"items": number + 1, "digest": digest.hexdigest()}
        if number + 1 == skip and done.get("digest") not in (None, after["digest"]):
            raise ConfigError(
                f"the first {skip:,} items are not those that the folder's chunks were made from",
                where=item.where,
                fix=fix,
            )
        if number == skip and not producer.ended:  # not before: an input that is refused was not begun
            producer.begin_input(is_new=is_new)
        if number >= skip or number in again:
            yield item, after
    if number + 1 < skip:
        raise ConfigError(
            f"the input has {number + 1:,} items, and {skip:,} of it are in the folder's chunks already", fix=fix
        )


def _add_packed(
    producer: LiveProducer,
    rest: Iterator[tuple[Item, dict[str, Any]]],
    after: dict[str, Any],
    packing: Packing,
    usable: Callable[[Conversation | BadRecord], bool],
    leave_out: Callable[[str], None],
) -> None:
    """Pack conversations behind a position; those that waited in open packs come first, and wait there again."""
    packer: StreamPacker[int] = StreamPacker(packing.pack_size, max_open=packing.open_packs)
    were_open = [list(pack) for pack in after.get("open", ())]
    awaited = {number for pack in were_open for number in pack}
    waited: dict[int, Member[int]] = {}
    for number, position, encoded in _tokenised(rest, packing):
        is_again = number in awaited
        if not is_again:
            after = position
        member = None
        if not isinstance(encoded, BadRecord):
            sequence, what = fit_to_pack(encoded, pack_size=packing.pack_size, over_long=packing.over_long)
            if sequence is not None:
                member = Member(number, sequence, len(sequence))
            else:
                leave_out(what)
        else:
            usable(encoded)
        if is_again:
            awaited.remove(number)
            waited |= {number: member} if member is not None else {}
            if not awaited:
                packer.restore([[waited[place] for place in pack if place in waited] for pack in were_open])
        elif member is not None and (full := packer.add(member)) is not None:
            producer.add(pack_of(full), _with_open(after, packer))
    while (full := packer.flush()) is not None:
        producer.add(pack_of(full), _with_open(after, packer))


def _tokenised(
    rest: Iterator[tuple[Item, dict[str, Any]]], packing: Packing
) -> Iterator[tuple[int, dict[str, Any], SequenceView | BadRecord]]:
    """Number, position after it and tokens of each conversation."""
    while block := list(islice(rest, packing.block)):
        parsed = [parse_line(item.line, item.where) for item, _ in block]
        made = iter(packing.tokenizer.encode([one for one in parsed if isinstance(one, Conversation)]))
        for one, (_, position) in zip(parsed, block, strict=True):
            yield position["items"] - 1, position, next(made) if isinstance(one, Conversation) else one


def _with_open(after: dict[str, Any], packer: StreamPacker[int]) -> dict[str, Any]:
    return {**after, "open": packer.open_keys}
