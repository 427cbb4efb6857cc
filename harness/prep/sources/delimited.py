"""CSV and TSV files: their rows as records of text, named by the header, in a stream of bounded memory."""

from __future__ import annotations

import csv
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, BinaryIO

from harness.errors import PrepError
from harness.prep.chat import BadReason, BadRecord
from harness.prep.sources.text import BOM, LINE, MAX_RECORD_BYTES
from harness.storage import Place

SEPARATORS = {".csv": ",", ".tsv": "\t"}
_CHUNK_BYTES = 1 << 18


@dataclass(frozen=True, slots=True)
class BadRow(BadRecord):
    """Lines that are no row of their file, as they are in it."""

    text: bytes


class DelimitedReader:
    """Reader of the rows of one file, from its line `first` (1 is the header) to the row at the offset `end`.

    A row counts as the line on which it begins; quoted texts may have line ends. Reading raises PrepError where a row
    is longer than 32 MiB, or a quote is not closed.
    """

    def __init__(self, place: Place, stream: BinaryIO, separator: str, first: int = 1, end: int | None = None) -> None:
        # 128 KiB by default, for the whole process; another thread may be reading, so it only grows.
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
        """Return the next row, or the reason why it is none; None at the end."""
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
        """Yield number and offset of a first line, and records, one per line, about 256 KiB at a time.

        The record of a line is a row by the names of its columns, every value a text, or a `BadRow` without a
        place; of a line on which no row begins it is blank.
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
