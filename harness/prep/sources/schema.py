"""Find the schema of a source's records from the first ones of each file."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from typing import Any

from harness.errors import PrepError
from harness.prep.chat import NUM_DETECTION_RECORDS, RecordReader, detect_schema, record_of_row
from harness.prep.sources.config import SourceConfig
from harness.prep.sources.reading import SourceChunk, columns_of, for_each_file, read_chunks
from harness.storage import Place


def _reader(source: SourceConfig) -> RecordReader:
    return RecordReader(source.schema, source.columns, source.ignore_fields, source.drop_media, source.tool_calls)


def find_schema(files: Iterable[Place], source: SourceConfig) -> tuple[RecordReader, list[str]]:
    """Return the parser of the records of files, the same for all, and the fields that it does not read, in order."""
    reader = _reader(source)
    found: dict[str, str] = {}
    unused: dict[str, None] = {}
    for place, schema, records, names in for_each_file(lambda file: _sample(file, reader), files):
        if schema:
            found.setdefault(schema, place)
        if len(found) > 1:
            (one, one_place), (other, other_place) = found.items()
            what = f"the files use two schemas, {one} and {other}"
            fix = "prepare the files of each schema separately, or convert some of them"
            raise PrepError(what, where=f"{one_place}\n         {other_place}", fix=fix)
        mine = replace(reader, schema=schema)
        for record in records:
            unused |= dict.fromkeys(sorted(mine.unused_keys(record)))
        unused |= dict.fromkeys(unread_columns(names, mine))
    return replace(reader, schema=next(iter(found), source.schema)), list(unused)


def unread_columns(names: list[str], reader: RecordReader) -> list[str]:
    """Return those of a table's columns that are neither read nor ignored."""
    used = {*reader.columns_to_read(names), *reader.ignore_fields}
    return [name for name in names if name not in used]


def _sample(file: Place, reader: RecordReader) -> tuple[str, str, list[Any], list[str]]:
    """Return place and schema of a file's first records, the records, and the names of its columns if it is a table."""
    first = next(_first_chunks(file, reader, NUM_DETECTION_RECORDS), None)
    if first is None:
        return str(file), "", [], []
    records = [record for raw in first.records if (record := _decoded(raw)) is not None]
    names = columns_of(file)
    if records and names:
        # Columns that no schema reads are not in the rows, and belong in the list of what is there.
        records[0] = {**dict.fromkeys(names), **records[0]}
    schema = reader.schema or detect_schema(
        records, columns=reader.columns, ignore_fields=reader.ignore_fields, where=str(file)
    )
    return f"{file}, {first.unit} {first.first}", schema, records, names


def holds_chats(file: Place, source: SourceConfig) -> bool:
    """Return whether a `.json` or `.csv` file of a folder seems to hold chats, by the fields of its first record."""
    reader = _reader(source)
    try:
        first = next(_first_chunks(file, reader, 1), None)
    except PrepError as error:
        # A list that is broken in its first item is not passed over, nor is a file that cannot be read.
        return ", item 0" in error.where or error.__cause__ is not None
    # Blank lines come before it.
    record = _decoded(first.records[-1]) if first is not None else None
    return isinstance(record, Mapping) and bool(reader.columns_to_read(map(str, record)))


def _first_chunks(file: Place, reader: RecordReader, limit: int) -> Iterator[SourceChunk]:
    return (chunk for chunk in read_chunks([file], limit=limit, reader=reader) if chunk.records)


def _decoded(raw: Any) -> Any:
    """Return a record as an object; None for what is not JSON."""
    if isinstance(raw, bytes):
        try:
            return json.loads(raw.decode("utf-8-sig"))
        except (ValueError, RecursionError):
            return None
    return record_of_row(raw) if isinstance(raw, Mapping) else None
