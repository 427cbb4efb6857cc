"""`jsonl`: closed folders of chunks, `chunk_00000.jsonl`, one pack a line.

A line is an object with input_ids, labels, position_ids, lengths, pack_length and num_samples; a line of other tools
may have either `lengths` or `position_ids` alone, and a sequence begins where a position is 0. `labels` is aligned
with the tokens: labels[j] is input_ids[j] where token j is trained, and -100 elsewhere; the first token of a
sequence is never trained. Packs are label-aligned (`harness.records`), so masks move by one position both ways.
"""

from __future__ import annotations

import json
import os
import re
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from harness.errors import FormatError
from harness.formats.base import Format, ShardReader, ShardWriter, find_files
from harness.paths import how_to_pack
from harness.records import Int64Array, Pack
from harness.storage import Folder
from harness.storage.files import OutputFile
from harness.storage.inputs import open_source

SUFFIX = ".jsonl"
IGNORED_LABEL = -100
# A pack of 10 million tokens; anything longer is damage, and would take fifty times its size in memory.
MAX_LINE_BYTES = 256 << 20
# Quotes and brackets of a line: names of samples, say, in fields of other tools. Parsed, each takes up to 70 bytes.
_MAX_MARKS = 1 << 20

_BLOCK_BYTES = 1 << 22
_LIVE_NAME = re.compile(r"chunk_.*\.(ready|completed)|END\.json|_producer|_consumer")
# As `line_of_pack` writes it: other tools order the fields otherwise, or put spaces between them.
_OWN_LINE = re.compile(
    rb'\{"input_ids":\[[\d,]+\],"labels":\[[\d,-]+\],"position_ids":\[[\d,]+\],"lengths":\[[\d,]+\],'
    rb'"pack_length":\d+,"num_samples":\d+\}\n'
)
_PACK = "`harness prepare source.path=FILE data.path=DIR` packs its conversations"
_PACK_FIRST = f"{_PACK}; a packed line lists input_ids, labels, and lengths or position_ids"
_SMALLER = "pack again with a smaller data.pack_size: each pack is one line"


def line_of_pack(pack: Pack) -> bytes:
    """Serialize a pack as a line of a chunk, newline included; FormatError as for `labels_of_pack`, or if too long."""
    starts = pack.seq_start_id
    lengths = np.diff(starts, append=len(pack))
    fields = {
        "input_ids": pack.input_ids.tolist(),
        "labels": labels_of_pack(pack).tolist(),
        "position_ids": (np.arange(len(pack)) - np.repeat(starts, lengths)).tolist(),
        "lengths": lengths.tolist(),
        "pack_length": len(pack),
        "num_samples": len(lengths),
    }
    line = json.dumps(fields, separators=(",", ":")).encode() + b"\n"
    if len(line) > MAX_LINE_BYTES:
        what = f"takes {len(line):,} bytes as a line, and lines above {MAX_LINE_BYTES:,} are not read"
        raise FormatError(what, fix="prepare smaller packs, or write another format")
    return line


def labels_of_pack(pack: Pack) -> Int64Array:
    """Return labels aligned with the tokens, int64 [T]: each trained token, and -100 elsewhere."""
    ends = np.append(pack.seq_start_id[1:], len(pack))
    if pack.loss_mask[ends - 1].any():
        at = int(ends[int(np.argmax(pack.loss_mask[ends - 1]))]) - 1
        what = f"trains position {at:,}, the last of its sequence, which labels aligned with tokens cannot express"
        raise FormatError(what, fix="set loss_mask to 0 at the last position of each sequence, or use another format")
    labels = np.full(len(pack), IGNORED_LABEL, np.int64)
    trained = np.flatnonzero(pack.loss_mask[:-1]) + 1
    labels[trained] = pack.input_ids[trained]
    return labels


def parse_line(line: bytes) -> dict[str, Any]:
    """Parse a line to its fields; raises FormatError unless it is an object that its bytes can honestly be."""
    if len(line) > MAX_LINE_BYTES:
        raise FormatError(f"is a line of {len(line):,} bytes, more than {MAX_LINE_BYTES:,}", fix=_SMALLER)
    if (marks := sum(line.count(mark) for mark in (b'"', b"[", b"{"))) > _MAX_MARKS:
        raise FormatError(f"has {marks:,} quotes and brackets, too many for lists of numbers", fix=_PACK_FIRST)
    try:
        fields = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise FormatError(f"is not JSON: {str(error)[:200]}", fix=_PACK_FIRST) from None
    if not isinstance(fields, dict):
        raise FormatError("is not a JSON object", fix=_PACK_FIRST)
    return fields


def pack_of_line(line: bytes) -> Pack:
    """Parse the pack of one line; raises FormatError for anything that `line_of_pack` could not have written."""
    fields = parse_line(line)
    ids, labels = whole_numbers(fields, "input_ids"), whole_numbers(fields, "labels")
    n, positions = ids.shape[0], whole_numbers(fields, "position_ids") if "position_ids" in fields else None
    if "lengths" in fields or positions is None:
        lengths = whole_numbers(fields, "lengths")
    else:
        # A position before the first 0 leaves lengths that do not sum to n.
        lengths = np.diff(np.flatnonzero(positions == 0), append=n)
    if positions is not None and positions.shape != ids.shape:
        raise FormatError(f"has {n:,} input_ids but {positions.shape[0]:,} position_ids")
    check_counts(ids, labels, lengths)
    starts = np.cumsum(lengths) - lengths
    if positions is not None and not np.array_equal(positions, np.arange(n) - np.repeat(starts, lengths)):
        raise FormatError("has position_ids that do not restart with each sequence")
    for name, expected in (("pack_length", n), ("num_samples", lengths.shape[0])):
        if name in fields and fields[name] != expected:
            raise FormatError(f"has {name} {str(fields[name])[:40]}, expected {expected:,}")
    pack, firsts = pack_of_labels(ids, labels, starts)
    if firsts.any():
        at = int(starts[int(np.argmax(firsts))])
        raise FormatError(f"trains position {at:,}, the first of its sequence, which no position predicts")
    return pack


def check_counts(ids: Int64Array, labels: Int64Array, lengths: Int64Array, *, is_padded: bool = False) -> int:
    """Return the sum of lengths; raise FormatError unless it is the number of ids, or at most that if `is_padded`."""
    # Python numbers: a sum of huge lengths wraps around in int64.
    n, real = int(ids.shape[0]), int(sum(lengths.tolist()))
    if not lengths.shape[0] or (lengths <= 0).any() or real > n or (real < n and not is_padded) or labels.shape != (n,):
        what = f"has {n:,} input_ids, {labels.shape[0]:,} labels and lengths that sum to {real:,}, or are not positive"
        raise FormatError(what)
    return real


def pack_of_labels(
    ids: npt.NDArray[Any], labels: npt.NDArray[Any], starts: npt.NDArray[Any]
) -> tuple[Pack, npt.NDArray[np.bool_]]:
    """Return the pack of labels aligned with tokens, and bool [sequences]: whether each first token was trained."""
    trained = labels != IGNORED_LABEL
    check_labels(labels[trained], ids[trained], np.flatnonzero(trained))
    firsts = trained[starts]
    trained[starts] = False
    return Pack(ids, np.append(trained[1:], False), starts), firsts


def check_labels(labels: Int64Array, tokens: Int64Array, positions: Int64Array) -> None:
    """Raise FormatError unless each label is the token that it must be; `positions` are for the error."""
    wrong = labels != tokens
    if wrong.any():
        at = int(np.argmax(wrong))
        raise FormatError(
            f"has the label {int(labels[at])} at position {int(positions[at]):,}, expected the token {int(tokens[at])}"
        )


def whole_numbers(fields: dict[str, Any], name: str) -> npt.NDArray[Any]:
    """Return a field of a parsed line as int64 [n]; raises FormatError unless it is a list of whole numbers."""
    values = fields.get(name)
    if not isinstance(values, list):
        what = f"has {name} of type {type(values).__name__}, expected a list" if name in fields else f"has no {name}"
        raise FormatError(what, fix=_PACK_FIRST)
    try:
        array = np.array(values) if values else np.zeros(0, np.int64)
    except (ValueError, OverflowError):
        array = np.array(None)
    if array.dtype.kind not in "iu" or array.ndim != 1:
        raise FormatError(f"has {name} that are not all integers", fix=_PACK_FIRST)
    return array.astype(np.int64)


class JsonlShard(ShardReader):
    def __init__(self, path: Path, _pack_size: int | None = None) -> None:
        self._path = path
        self._source = open_source(path)
        ends, position, num_bytes = [np.zeros(0, np.int64)], 0, self._source.num_bytes
        while block := self._source.read_at(position, _BLOCK_BYTES):
            ends.append(np.flatnonzero(np.frombuffer(block, np.uint8) == ord("\n")) + position + 1)
            position += len(block)
        # Where each line ends, newline included.
        self._ends = np.concatenate(ends)
        if num_bytes and (not self._ends.shape[0] or self._ends[-1] != num_bytes):
            raise FormatError("the last line has no line break: the chunk is truncated", where=str(path))
        self.num_packs = int(self._ends.shape[0])

    def read_row(self, row: int) -> Pack:
        try:
            return pack_of_line(self.line(row))
        except FormatError as error:
            fix = error.fix.replace(_PACK, how_to_pack(self._path))
            raise FormatError(f"the line {error.what}", where=self.where(row), fix=fix) from None

    def line(self, row: int, most: int = MAX_LINE_BYTES) -> bytes:
        """Return the bytes of a line, newline included; raises FormatError if it has more than `most`."""
        start = int(self._ends[row - 1]) if row else 0
        num_bytes = int(self._ends[row]) - start
        if num_bytes > most:
            raise FormatError(f"is {num_bytes:,} bytes long, more than {most:,}", fix=_SMALLER)
        return self._source.read_at(start, num_bytes)

    def where(self, row: int) -> str:
        return f"{self._path}, line {row + 1:,}"

    def close(self) -> None:
        self._source.close()


class JsonlWriter(ShardWriter[OutputFile]):
    def __init__(self, folder: Folder, name: str, _pack_size: int, _rows_per_group: int) -> None:
        super().__init__([name], [folder.create_file(name)])

    def append(self, pack: Pack) -> None:
        self._files[0].write(line_of_pack(pack))


def is_own(path: Path) -> bool:
    """Return whether a chunk begins with a line of `line_of_pack` and is not one of a live folder.

    Live chunks have the same names and lines; marks beside them belong to the folder of a stream, open or closed.
    """
    if any(_LIVE_NAME.fullmatch(name) for name in os.listdir(path.parent)):  # noqa: PTH208
        return False
    with path.open("rb") as file:
        return _OWN_LINE.fullmatch(file.readline(MAX_LINE_BYTES)) is not None


FORMAT = Format(
    name="jsonl",
    shard_template=f"chunk_{{:05d}}{SUFFIX}",
    suffixes=(SUFFIX,),
    packs_per_shard=1000,
    write_shard=JsonlWriter,
    open_shard=JsonlShard,
    find_bare=partial(find_files, suffixes=(SUFFIX,)),
    is_own=is_own,
)
