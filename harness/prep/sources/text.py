"""Stream the records of JSON Lines, lists of JSON objects and CSV, plain or compressed, in bounded memory."""

from __future__ import annotations

import contextlib
import csv
import io
import json
import re
import shlex
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any, BinaryIO, cast

import pyarrow as pa

from harness.errors import PrepError
from harness.paths import text_to_records
from harness.prep.chat import BadReason, BadRecord
from harness.prep.chat.values import json_or
from harness.storage import Place
from harness.storage.inputs import open_stream

# Compressed files: suffix and pyarrow's name of the codec.
COMPRESSED = {".gz": "gzip", ".zst": "zstd", ".bz2": "bz2"}
SEPARATORS = {".csv": ",", ".tsv": "\t"}
LINE, ITEM = "line", "item"
# A longer line or item means another kind of file, or damage. Parsed, it can take 35 times its size: `[],[],...`.
MAX_RECORD_BYTES = 32 << 20

_CHUNK_BYTES = 1 << 18
_HEAD_BYTES = 1 << 16
_WINDOW_BYTES = 1 << 20
BOM = b"\xef\xbb\xbf"
# An error near the end of the window may be due to text not read yet: the longest literal is -Infinity.
_MARGIN = 16
_NOT_SPACE = re.compile(r"[^ \t\r\n]")
_MAGIC = {
    b"PAR1": "Parquet",
    b"ARROW1": "Arrow",
    b"\x1f\x8b": "gzip",
    b"\x28\xb5\x2f\xfd": "zstd",
    b"BZh": "bzip2",
    b"PK\x03\x04": "zip",
    b"\xfd7zXZ": "xz",
}
TEXT_SUFFIXES = (".txt", ".md")
_TO_LINES = "jq -c '.[]' FILE.json > FILE.jsonl"


@contextlib.contextmanager
def open_text(place: Place) -> Iterator[tuple[BinaryIO, Any]]:
    """Open a text file, decompressed; also yield the stream whose position measures progress."""
    codec = COMPRESSED.get(PurePosixPath(str(place)).suffix.lower())
    if codec is None:
        with open_stream(place) as raw:
            yield raw, raw
        return
    opened = pa.OSFile(str(place)) if isinstance(place, Path) else pa.PythonFile(open_stream(place), "r")
    with opened as source, pa.CompressedInputStream(source, codec) as stream:
        yield cast(BinaryIO, io.BufferedReader(stream, _CHUNK_BYTES)), source


def find_unit(place: Place, *, is_json: bool) -> str:
    """Return `LINE` or `ITEM`, for one record per line or one JSON list; `.json` is used for both."""
    with open_text(place) as (stream, _):
        head = stream.read(_HEAD_BYTES)
        for magic, kind in _MAGIC.items():
            if head.startswith(magic):
                fix = "extract it, or export a spreadsheet as .csv" if kind in ("zip", "xz") else "rename it"
                raise PrepError(f"the file is {kind}, but its name indicates text", where=str(place), fix=fix)
        if head[:2] in (b"\xff\xfe", b"\xfe\xff"):
            what, fix = "the file is UTF-16, expected UTF-8", "iconv -f UTF-16 -t UTF-8 FILE > NEW_FILE"
            raise PrepError(what, where=str(place), fix=fix)
        head = head.removeprefix(BOM).lstrip()
        while not head and (more := stream.read(_HEAD_BYTES)):
            head = more.lstrip()
        if PurePosixPath(str(place)).suffix.lower() in TEXT_SUFFIXES and head[:1] not in (b"", b"{"):
            fix = text_to_records(shlex.quote(str(place)))
            raise PrepError("the file is plain text, expected records", where=str(place), fix=fix)
        line = head.partition(b"\n")
        if not is_json:
            if head.startswith(b"[") and line[1] and not line[0].rstrip().endswith(b"]"):  # else one bad record
                what = "the file contains one JSON list, but its name indicates one record per line"
                raise PrepError(what, where=str(place), fix=f"rename it to .json, or {_TO_LINES}")
            return LINE
        if head.startswith(b"["):
            return ITEM
        is_begun = line[1] and line[0].rstrip()[-1:] in (b"{", b"[", b",")
        if head.startswith(b"{") and is_begun and json_or(line[0], ...) is ...:
            what = "the file contains one JSON object over several lines, expected a list or one record per line"
            fix = "if the records are a list in it, such as `data`: jq -c '.data[]' FILE.json > FILE.jsonl"
            raise PrepError(what, where=str(place), fix=fix)
        return LINE


def read_lines(place: Place, stream: BinaryIO, first: int, end: int | None) -> Iterator[tuple[int, list[bytes]]]:
    """Yield lines without line ends, about 256 KiB at a time, with the number of the first line.

    `end` is the offset of a line's end to stop at; None for the end of the file.
    """
    left = end - stream.tell() if end is not None else None
    while data := stream.read(_CHUNK_BYTES if left is None else min(left, _CHUNK_BYTES)):
        if not data.endswith(b"\n"):
            data += (rest := stream.readline(MAX_RECORD_BYTES))
            if len(rest) == MAX_RECORD_BYTES and rest[-1:] != b"\n":
                number = first + data.count(b"\n")
                what = f"the line is longer than {MAX_RECORD_BYTES >> 20} MiB"
                fix = "write one record per line; a JSON list requires a file name that ends in .json"
                raise PrepError(what, where=f"{place}, {LINE} {number}", fix=fix)
        if left is not None:
            left = max(0, left - len(data))  # in a changed file, a line may end elsewhere
        lines = (data.removeprefix(BOM) if first == 1 else data).split(b"\n")
        if not lines[-1]:
            lines.pop()
        yield first, lines
        first += len(lines)


def read_items(
    place: Place, stream: BinaryIO, first: int, end: int | None = None
) -> Iterator[tuple[int, list[tuple[int, bytes]]]]:
    """Yield unparsed items of a JSON list with offsets, 256 KiB at a time, from number `first` to offset `end`."""
    scanner = _ItemScanner(place, stream, first, end)
    group: list[tuple[int, bytes]] = []
    size = 0
    for offset, item in scanner.scan():
        group.append((offset, item))
        size += len(item)
        if size >= _CHUNK_BYTES:
            yield first, group
            first, group, size = first + len(group), [], 0
    if group:
        yield first, group


class _ItemScanner:
    """Scanner for the bounds of items, with Python's JSON decoder and a window that grows with the longest item.

    The bytes are decoded as Latin-1, in which every byte is one character: positions then equal file offsets, and no
    window ends inside a character. The items' text is decoded when they are parsed.
    """

    def __init__(self, place: Place, stream: BinaryIO, first: int, end: int | None) -> None:
        self._place, self._stream, self._number, self._end = place, stream, first, end
        self._base = stream.tell() if end is not None or first else 0
        self._window, self._at, self._is_whole = "", 0, False
        # Numbers stay text: Python refuses to convert numbers of more than 4,300 digits.
        self._decode = json.JSONDecoder(strict=False, parse_int=str, parse_float=str).raw_decode

    def scan(self) -> Iterator[tuple[int, bytes]]:
        mark = ","
        if self._number == 0:
            self._fill()
            if self._window.startswith(BOM.decode("latin-1")):
                self._at = len(BOM)
            if self._next() != "[":
                raise self._broken("no list starts here")
            self._at += 1
            mark = self._next()
            self._at += mark == "]"
        while mark != "]":
            start, stop = self._find_item()
            yield self._base + start, self._window[start:stop].encode("latin-1")
            mark = self._next()
            if mark not in (",", "]"):
                raise self._broken("expected `,` or `]` after the item")
            self._at += 1
            self._number += 1
            following = self._next()
            if mark == "," and self._end is not None and self._base + self._at >= self._end:
                return
            if mark == "," and following == "]":
                raise self._broken("a comma follows the last item")
        if self._next():
            raise self._broken("text follows the end of the list")

    def _find_item(self) -> tuple[int, int]:
        """Return the bounds, in the window, of the item at the current position, and move past it."""
        while True:
            self._next()
            try:
                _, stop = self._decode(self._window, self._at)
            except json.JSONDecodeError as error:
                place = self._base + error.pos
                at_end = error.pos >= len(self._window) - _MARGIN or error.msg.startswith("Unterminated string")
                if not at_end or not self._fill():
                    raise self._broken(error.msg, place) from None
                continue
            except RecursionError:
                raise self._broken("nested too deeply") from None
            # A number at the end of the window may have more digits.
            if stop == len(self._window) and self._fill():
                continue
            start, self._at = self._at, stop
            return start, stop

    def _next(self) -> str:
        """Move past white space; return the next character, empty at the end of the file."""
        while True:
            found = _NOT_SPACE.search(self._window, self._at)
            self._at = found.start() if found else len(self._window)
            if found:
                return found.group()
            if not self._fill():
                return ""

    def _fill(self) -> bool:
        """Read more and discard scanned text; return False at the end of the file."""
        if self._is_whole:
            return False
        kept = self._window[self._at :]
        if len(kept) > MAX_RECORD_BYTES:
            raise self._broken(f"the item is longer than {MAX_RECORD_BYTES >> 20} MiB")
        # Double the window, so that a long item is decoded only a few times.
        block = self._stream.read(max(_WINDOW_BYTES, len(kept)))
        self._base, self._window, self._at = self._base + self._at, kept + block.decode("latin-1"), 0
        self._is_whole = not block
        return bool(block)

    def _broken(self, why: str, place: int | None = None) -> PrepError:
        place = self._base + self._at if place is None else place
        cut = self._is_whole and place >= self._base + len(self._window) - _MARGIN
        what = f"the JSON list is {'cut short' if cut else 'broken'} in item {self._number:,}, byte {place:,}: {why}"
        fix = "write the file again; in JSONL (one record per line), a broken record can be skipped"
        return PrepError(what, where=f"{self._place}, {ITEM} {self._number}", fix=fix)


@dataclass(frozen=True, slots=True)
class BadRow(BadRecord):
    """Lines that do not form a row, with their original bytes."""

    text: bytes


class DelimitedReader:
    """Reader of the rows of one file, from its line `first` (1 is the header) to the row at the offset `end`.

    A row has the number of its first line; quoted texts may contain line ends. Reading raises PrepError if a row
    is longer than 32 MiB, or a quote is not closed.
    """

    def __init__(self, place: Place, stream: BinaryIO, separator: str, first: int = 1, end: int | None = None) -> None:
        # The limit is 128 KiB by default, for the whole process; another thread may be reading, so only raise it.
        csv.field_size_limit(max(csv.field_size_limit(), MAX_RECORD_BYTES))
        self._place, self._stream, self._end = place, stream, end
        self._line, self._offset = first, stream.tell() if first > 1 else 0
        self._row_line, self._row_offset, self._problem = first, self._offset, ""
        self._text: list[bytes] = []
        self._rows = csv.reader(self._lines(), delimiter=separator, strict=True)

    def _lines(self) -> Iterator[str]:
        while self._end is None or self._offset < self._end:
            left = MAX_RECORD_BYTES - (self._offset - self._row_offset)
            line = self._stream.readline(left + 1)
            if len(line) > left:
                raise self._unclosed(f"the row is longer than {MAX_RECORD_BYTES >> 20} MiB")
            if not line:
                return
            self._text.append(line)
            text = line.removeprefix(BOM) if self._line == 1 else line
            self._offset, self._line = self._offset + len(line), self._line + 1
            try:
                yield text.decode()
            except UnicodeDecodeError as error:
                self._problem = f"byte {error.start} of line {self._line - 1} is not UTF-8"
                yield text.decode(errors="replace")

    def _unclosed(self, what: str) -> PrepError:
        fix = "close the quote in this row, or write the file again"
        return PrepError(what, where=f"{self._place}, {LINE} {self._row_line}", fix=fix)

    def _next(self) -> list[str] | BadRow | None:
        """Return the next row, or a `BadRow` with the reason why there is none; None at the end."""
        self._row_line, self._row_offset, self._problem, self._text = self._line, self._offset, "", []
        try:
            row = next(self._rows, None)
        except csv.Error as error:
            if "unexpected end" in str(error):
                raise self._unclosed("the file ends within quoted text") from None
            return self._bad(BadReason.BAD_ROW, f"the row cannot be split into columns: {error}")
        return self._bad(BadReason.NOT_UTF8, self._problem) if self._problem else row

    def _bad(self, reason: BadReason, detail: str) -> BadRow:
        return BadRow("", reason, detail, b"".join(self._text))

    def header(self) -> list[str]:
        """Return the names of the columns, from the first line; an index without a name is `Unnamed: 0`."""
        row, where = self._next(), f"{self._place}, {LINE} 1"
        if isinstance(row, BadRow):
            what = f"the header cannot be read: {row.detail}"
            raise PrepError(what, where=where, fix="write the file again, as UTF-8")
        names = [name.strip() or f"Unnamed: {number}" for number, name in enumerate(row or [])]
        if len(names) == 1 and (other := next((mark for mark in ";\t|" if mark in names[0]), "")):
            what = f"the header is one column, {names[0]!r}, which seems to be separated by {other!r}"
            raise PrepError(what, where=where, fix="separate columns with commas in .csv and with tabs in .tsv")
        if twice := [name for name, count in Counter(names).items() if count > 1]:
            what = f"several columns have the name {twice[0]!r}"
            raise PrepError(what, where=where, fix="rename one of them, or remove it")
        return names

    def rows(self, names: Sequence[str]) -> Iterator[tuple[int, int, list[Any]]]:
        """Yield the number and offset of a first line, and one record per line, about 256 KiB at a time.

        A record is a row as a dict of texts by column name, a `BadRow` without a place, or blank for a line on which no
        row starts.
        """
        first, start = self._line, self._offset
        records: list[Any] = []
        header = f"the header has {len(names)}: {', '.join(names)[:200]}"
        while (row := self._next()) is not None:
            if isinstance(row, list) and row and len(row) != len(names):
                row = self._bad(BadReason.BAD_ROW, f"the row has {len(row)} columns, but {header}")
            records.append(dict(zip(names, row, strict=True)) if isinstance(row, list) and row else row or b"")
            records += [b""] * (self._line - self._row_line - 1)
            if self._offset - start >= _CHUNK_BYTES:
                yield first, start, records
                first, start, records = self._line, self._offset, []
        if records:
            yield first, start, records
