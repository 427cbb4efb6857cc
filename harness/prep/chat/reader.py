"""Parse one chat record into a Conversation, or into a BadRecord with the reason; detect the schema of records."""

from __future__ import annotations

import hashlib
import importlib
import inspect
import os
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import cached_property, lru_cache
from itertools import islice
from pathlib import Path
from typing import Any

from harness.checks import require_choice
from harness.errors import ConfigError, PrepError
from harness.prep.chat.hermes import lift_calls
from harness.prep.chat.media import is_media, with_media, without_media
from harness.prep.chat.records import BadReason, BadRecord, Conversation
from harness.prep.chat.schemas import SCHEMAS
from harness.prep.chat.schemas.batch import BATCH_FIELDS, REQUESTS, unwrapped
from harness.prep.chat.schemas.sharegpt import CALL_ROLES
from harness.prep.chat.turns import (
    LISTS_OF_TURNS,
    LISTS_OR_TEXTS,
    TEXT_ALONE,
    TURN_FIELDS,
    as_list,
    is_media_part,
)
from harness.prep.chat.values import MEDIA_FIELDS, SYSTEM_FIELDS, BadRecordError, decoded, is_empty, load_json, show
from harness.prep.media import MediaLimits

SCHEMA = "source.schema"
NUM_DETECTION_RECORDS = 100
# Record fields that affect what the model sees or writes, but that no schema reads.
_UNREAD_FIELDS = frozenset((*MEDIA_FIELDS, "functions"))
_FIELDS = frozenset().union(*(schema.fields for schema in SCHEMAS.values()))


@dataclass(frozen=True)
class RecordReader:
    """Parser of a source's records; can be sent to workers.

        reader = RecordReader(schema="alpaca", columns={"instruction": "question", "output": "answer"})
        reader.parse({"question": "Hi", "answer": "Hello"}, "chats.jsonl, line 1")

    Attributes:
        schema: a key of `SCHEMAS`, or a function `module:function` that returns a record with `messages`; empty detects
            the schema of each record.
        columns: renamed fields of a record (`messages`) or of its turns (`role` or `messages.role`), as a mapping from
            the field to its name in the records.
        ignore_fields: fields of a record, its turns and their parts, and types of parts and items, to leave out.
        drop_media: leave images, audio and videos out with their placeholders, instead of refusing such records.
        media: limits of images and sounds; None refuses records with media.
        tool_calls: `given`, or `hermes` to read calls and results from the text (`lift_calls`).
        function_digest: digest of the function's source file; empty if `schema` is not a function.

    Raises:
        ConfigError: a schema, function or field does not exist, or `ignore_fields` contains a media field.
    """

    schema: str = ""
    columns: Mapping[str, str] = field(default_factory=dict)
    ignore_fields: Sequence[str] = ()
    drop_media: bool = False
    tool_calls: str = "given"
    media: MediaLimits | None = None
    function_digest: str = field(default="", init=False)

    def __post_init__(self) -> None:
        # Plain values, so that readers with the same settings are equal and can be sent to workers.
        object.__setattr__(self, "columns", dict(self.columns))
        object.__setattr__(self, "ignore_fields", tuple(self.ignore_fields))
        if self._is_function:
            object.__setattr__(self, "function_digest", load_function(self.schema)[1])
            if self.columns:
                fix = f"omit it: {self.schema} receives each record unchanged and reads the fields itself"
                raise ConfigError("column names cannot be set for a function", where="source.columns", fix=fix)
        elif self.schema:
            require_choice(self.schema, SCHEMAS, setting=SCHEMA)
        known = TURN_FIELDS | {"from", "value"} | self._fields
        for name, column in self.columns.items():
            if (_turn_field(name) or name) not in known:
                what = f"field {name!r} does not exist" + (f" in the schema {self.schema}" if self.schema else "")
                fix = f"source.columns.{column}={name}, or " if column in known else ""
                fix += f"use one of: {', '.join(sorted(known))}"
                raise ConfigError(what, where="source.columns", fix=fix)
            if not isinstance(column, str) or not column:
                what = f"the column name is {column!r}"
                raise ConfigError(what, where=f"source.columns.{name}", fix="use the name in the records")
        if media := sorted(MEDIA_FIELDS.intersection(self.ignore_fields)):
            what = f"{media[0]} cannot be ignored: the text of the records refers to it"
            fix = "remove such records from the source, or train only on their text with source.drop_media=true"
            raise ConfigError(what, where="source.ignore_fields", fix=fix)

    def parse(self, record: object, where: str, folder: str | None = None) -> Conversation | BadRecord:
        """Parse one decoded JSON object; relative media paths refer to `folder`, and None refuses all paths."""
        try:
            if not isinstance(record, Mapping):
                raise BadRecordError(BadReason.NOT_AN_OBJECT, f"a JSON {type(record).__name__}, expected an object")
            if self._is_function:
                record = call_function(self.schema, self.function_digest, record)
            record = self._rewritten(record if self._is_function else unwrapped(record))
            dropped = None
            if self.drop_media:
                record, dropped = without_media(record)
            elif self.media is not None:
                record = with_media(record, folder, self.media)
            _refuse_unread(record)
            schema = SCHEMAS["messages" if self._is_function else self.schema or _detect(record)]
            conversation = schema.parse(record, where)
            if self.tool_calls == "hermes":
                conversation = lift_calls(conversation)
            return conversation if dropped is None else replace(conversation, dropped_media=dropped)
        except BadRecordError as bad:
            read = [(name, column) for name, column in self.columns.items() if f"`{name}`" in bad.detail]
            mapped = f" ({', '.join(f'`{name}` is the column `{column}`' for name, column in read)})" if read else ""
            return BadRecord(where, bad.reason, bad.detail + mapped)
        except RecursionError:
            return BadRecord(where, BadReason.NOT_JSON, "nested too deeply")

    def parse_line(self, line: bytes, where: str, folder: str | None = None) -> Conversation | BadRecord:
        """Parse one line of JSONL (UTF-8), with or without its newline."""
        try:
            record = load_json(line.decode("utf-8-sig"))
        except UnicodeDecodeError as error:
            return BadRecord(where, BadReason.NOT_UTF8, f"byte {error.start} of the line is not UTF-8")
        except RecursionError:
            return BadRecord(where, BadReason.NOT_JSON, "nested too deeply")
        except ValueError as error:
            hint = "; a record is one line, as `jq -c .` writes it" if line.strip() in (b"{", b"[", b"[{") else ""
            return BadRecord(where, BadReason.NOT_JSON, f"{error}{hint}")
        return self.parse(record, where, folder)

    def unused_keys(self, record: object) -> set[str]:
        """Return the names of a record's fields that are neither read nor ignored; null fields do not count."""
        if not isinstance(record, Mapping) or self._is_function:
            return set()
        try:
            record = unwrapped(record)
            used = self._used if self.schema else self._used_by(SCHEMAS[_detect(self._rewritten(record))].fields)
        except BadRecordError:
            return set()
        # Half a surrogate pair in a name cannot be printed.
        return {str(key).encode(errors="replace").decode() for key in record.keys() - used if record[key] is not None}

    def columns_to_read(self, names: Iterable[str]) -> list[str]:
        """Return the names of the columns that `parse` needs, to read or to refuse them."""
        if self._is_function:  # a function may read any column
            return [name for name in names if name not in self.ignore_fields]
        used = self._used if set(REQUESTS).isdisjoint(names := list(names)) else self._used | BATCH_FIELDS
        return [name for name in names if name in used and name not in self.ignore_fields]

    @property
    def _is_function(self) -> bool:
        return ":" in self.schema

    @property
    def _fields(self) -> frozenset[str]:
        if self._is_function:
            return SCHEMAS["messages"].fields
        return SCHEMAS[self.schema].fields if self.schema else _FIELDS

    @cached_property
    def _used(self) -> frozenset[str]:
        return self._used_by(self._fields)

    def _used_by(self, fields: Iterable[str]) -> frozenset[str]:
        return _UNREAD_FIELDS.union((self.columns.get(name, name) for name in fields), self.ignore_fields)

    def _rewritten(self, record: Mapping[str, Any]) -> Mapping[str, Any]:
        """Return a record with its fields renamed to ours, without ignored fields."""
        if not self.columns and not self.ignore_fields and not self.drop_media:
            return record
        record = self._renamed(record, {name: self.columns[name] for name in self.columns if name in _FIELDS})
        # Without a prompt, `chosen` contains turns.
        texts = [name for name in LISTS_OR_TEXTS if name != "chosen" or not is_empty(record.get("prompt"))]
        held = ((name, record[name]) for name in LISTS_OF_TURNS if not is_empty(record.get(name)))
        made = {name: self._turns(value) for name, value in held if name not in texts or isinstance(value, list)}
        for name in SYSTEM_FIELDS.intersection(record):  # a turn in Gemini records, parts in Anthropic records
            value = record[name]
            made[name] = self._turn(value) if isinstance(value, Mapping) else self._parts(value)
        return {**record, **made}

    def _renamed(self, item: Mapping[str, Any], columns: Mapping[str, str]) -> dict[str, Any]:
        moved = {*columns.values(), *columns.keys(), *self.ignore_fields}
        kept = {key: value for key, value in item.items() if key not in moved}
        return kept | {name: item[column] for name, column in columns.items() if column in item}

    def _turns(self, value: object) -> object:
        if isinstance(value, str) and value.lstrip().startswith("["):
            with suppress(BadRecordError):  # refused when it is parsed
                value = decoded(value, "", BadReason.NO_MESSAGES)
        value = as_list(value)
        if not isinstance(value, list):
            return value
        return [self._turn(turn) if isinstance(turn, Mapping) else turn for turn in value if not self._ignores(turn)]

    def _ignores(self, part: object) -> bool:
        """Return True if a part or an item has an ignored type; only `drop_media` leaves out media."""
        if not isinstance(part, Mapping):
            return False
        kinds = (part.get("type"), *(("thought", "thinking") if part.get("thought") else ()))  # Gemini's thoughts
        return any(kind in self.ignore_fields for kind in kinds) and not is_media_part(part)

    def _parts(self, value: object) -> object:
        """Return content without its ignored parts; text is returned unchanged."""
        if not isinstance(value, list):
            return value
        kept = (part for part in value if not self._ignores(part))
        return [self._renamed(part, {}) if isinstance(part, Mapping) else part for part in kept]

    def _turn(self, turn: Mapping[str, Any]) -> Mapping[str, Any]:
        inside = {inner: column for name, column in self.columns.items() if (inner := _turn_field(name))}
        turn = self._renamed(turn, inside)
        for name in ("content", "tool_calls", "function_call", "value", "parts") if self.ignore_fields else ():
            value = turn.get(name)
            is_call = name in ("tool_calls", "function_call") or turn.get("from", turn.get("role")) in CALL_ROLES
            if is_call and isinstance(value, str):
                with suppress(BadRecordError):  # refused when it is parsed
                    value = decoded(value, "", BadReason.BAD_TOOLS)
            if name == "parts" and isinstance(value, Mapping):
                value = [value]
            if isinstance(value, list):
                turn = {**turn, name: self._parts(value)}
            elif is_call and isinstance(value, Mapping):
                turn = {**turn, name: self._renamed(value, {})}
        return turn


def parse_record(record: object, where: str, **settings: Any) -> Conversation | BadRecord:
    """Parse one decoded record with a `RecordReader` of these settings."""
    return RecordReader(**settings).parse(record, where)


def parse_line(line: bytes, where: str, **settings: Any) -> Conversation | BadRecord:
    """Parse one line of JSONL with a `RecordReader` of these settings."""
    return RecordReader(**settings).parse_line(line, where)


def detect_schema(
    records: Iterable[object],
    *,
    columns: Mapping[str, str] | None = None,
    ignore_fields: Sequence[str] = (),
    where: str = "",
) -> str:
    """Return the schema of a source's first 100 records; records that are not objects or match no schema are skipped.

    Empty if there are no objects. Raises PrepError if no schema matches, several match a record, or records differ.
    """
    reader = RecordReader("", columns or {}, ignore_fields)
    found: Counter[str] = Counter()
    names: dict[str, None] = {}
    problem = ""
    for record in islice(records, NUM_DETECTION_RECORDS):
        if isinstance(record, Mapping):
            names |= dict.fromkeys(map(str, record))
            try:
                found[_detect(reader._rewritten(unwrapped(record)))] += 1
            except BadRecordError as bad:
                problem = problem or (bad.detail if bad.reason == BadReason.UNKNOWN_SCHEMA else "")
    if len(found) == 1 and not problem:
        return next(iter(found))
    if not names:
        return ""
    fields = ", ".join(name.encode(errors="replace").decode() for name in islice(names, 20))
    fix = f"set one with source.schema={'|'.join(SCHEMAS)}"
    if not problem and found:
        listed = ", ".join(f"{count} {name}" for name, count in found.items())
        problem = f"the first records use several schemas: {listed}"
        fix += ", or prepare the files of each schema separately"
    elif not problem:
        problem = "no schema matches the first records"
        fix += ", and map its fields with source.columns.messages=chat or source.columns.prompt=question"
        fix += " source.columns.completion=answer; source.schema=MODULE:FUNCTION converts each record"
        if where.endswith((".csv", ".tsv")):
            fix += "; without a header, add one as the first line, such as prompt,completion"
    elif "; " in problem:
        problem, _, fix = problem.rpartition("; ")
    raise PrepError(f"{problem}; fields: {fields}", where=where or "source.path", fix=fix)


def record_of_row(row: Any) -> Any:
    """Return a Parquet or Arrow row, or a value in it, without null fields.

    All structs of a column share their fields, so a field that a row lacks is null in it. A tool call's argument that
    is null on purpose must be stored as JSON text.
    """
    if isinstance(row, dict):
        return {name: record_of_row(value) for name, value in row.items() if value is not None}
    return [record_of_row(value) for value in row] if isinstance(row, list) else row


def _detect(record: Mapping[str, Any]) -> str:
    """Return the only schema that matches a record; raise BadRecordError if none or several match."""
    fitting = [name for name, schema in SCHEMAS.items() if schema.fits(record)]
    if len(fitting) > 1:
        fitting = [name for name in fitting if SCHEMAS[name].use != "last"] or fitting
    if len(fitting) == 1 and SCHEMAS[fitting[0]].use != "asked":
        return fitting[0]
    names = ", ".join(sorted(map(repr, record))[:10]) or "none"
    detail = f"no schema matches the fields ({names}); set source.schema and source.columns"
    if fitting == ["preference"]:
        detail = "`chosen` and `rejected` form a preference record; source.schema=preference trains on `chosen`"
    elif fitting:
        detail = f"several schemas match: {', '.join(fitting)}; choose one with source.schema={fitting[0]}"
    elif "input_ids" in record:
        detail = "tokens instead of chats; to train on packs: data.path, on packs of other tools: `harness import`"
    reason = BadReason.UNKNOWN_SCHEMA if fitting or "input_ids" in record else BadReason.NO_MESSAGES
    raise BadRecordError(reason, detail)


def _refuse_unread(record: Mapping[str, Any]) -> None:
    held = sorted(name for name in _UNREAD_FIELDS if not is_empty(record.get(name)))
    if media := [name for name in held if name in MEDIA_FIELDS]:
        raise BadRecordError(BadReason.MEDIA, f"the record has `{media[0]}`; {TEXT_ALONE}")
    if held:
        detail = (
            f"the record has `{held[0]}`, which no schema reads; to read it as tools: source.columns.tools={held[0]}"
        )
        raise BadRecordError(BadReason.UNKNOWN_FIELD, f"{detail}; to leave out: source.ignore_fields=[{held[0]}]")
    for name, value in record.items():
        # A column that is read as another field is text.
        if name not in _FIELDS and isinstance(name, str) and is_media(name, value):
            detail = f"the record has `{name}`, which is media by its name; only text can be trained on; "
            fix = f"to leave out: source.ignore_fields=[{name}], or all media: source.drop_media=true"
            raise BadRecordError(BadReason.MEDIA, detail + fix)


def _turn_field(name: str) -> str:
    """Return the turn field named by a setting, alone or after its list (`messages.role`); empty for a record field."""
    inner = name.rpartition(".")[2] if name.partition(".")[0] in LISTS_OF_TURNS else name
    return inner if inner in TURN_FIELDS or inner in ("from", "value") else ""


def call_function(name: str, digest: str, record: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the record made by a user's function; raise BadRecordError if it makes none.

    The function takes a record and returns one with `messages`, or None to omit it. PrepError if its digest differs.
    """
    call, found = load_function(name)
    if found != digest:
        what = f"the source file of {name} changed after the preparation started"
        raise PrepError(what, where=SCHEMA, fix="start again with the same, unchanged copy on all machines")
    try:
        made = call(dict(record))
    except (Exception, SystemExit) as error:
        raise BadRecordError(BadReason.FUNCTION_FAILED, f"{name} raised {type(error).__name__}: {error}") from error
    if made is None:
        raise BadRecordError(BadReason.OMITTED, f"{name} returned None")
    if not isinstance(made, Mapping):
        detail = f'{name} returned {show(made)}, expected {{"messages": [...]}}'
        raise BadRecordError(BadReason.FUNCTION_FAILED, detail)
    return made


@lru_cache(maxsize=8)
def load_function(name: str) -> tuple[Callable[[dict[str, Any]], object], str]:
    """Import a function once per process, also from the working folder; return it and its source file's digest."""
    module_name, _, function = name.partition(":")
    if (here := str(Path.cwd())) not in sys.path and "" not in sys.path:
        sys.path.append(here)  # programs installed by pip do not search it
    try:
        module = importlib.import_module(module_name)
    except (Exception, SystemExit) as error:  # a module can raise anything, and may be a script
        what = f"the module {module_name!r} cannot be imported: {type(error).__name__}: {error}"
        fix = "specify an importable module, such as chats:to_messages for chats.py in the working folder"
        raise ConfigError(what, where=SCHEMA, fix=fix) from error
    call: Any = getattr(module, function, None)
    if not callable(call):
        known = ", ".join(key for key, value in vars(module).items() if inspect.isfunction(value)) or "none"
        raise ConfigError(f"{module_name} has no function {function!r}", where=SCHEMA, fix=f"its functions: {known}")
    file = getattr(module, "__file__", None)
    if not file or not os.path.isfile(file):  # noqa: PTH113 - a string from Python
        what = f"{module_name} has no source file, whose hash identifies the function"
        raise ConfigError(what, where=SCHEMA, fix="write a module that calls the function")
    return call, hashlib.sha256(Path(file).read_bytes()).hexdigest()[:16]
