"""Convert tool descriptions to the form that templates expect, with parameters as JSON Schema.

Datasets also describe parameters in other ways: `{"city": {"type": "str", "default": "Paris"}}` (xLAM), `input_schema`
(Anthropic), and Python's type names. Templates leave out anything that they do not know.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import lru_cache
from itertools import count, pairwise
from typing import Any

from harness.prep.chat.records import BadReason, Message
from harness.prep.chat.values import (
    JSON_ENCODER,
    BadRecordError,
    check_json,
    decoded,
    decoded_list,
    decoded_object,
    first_name,
    is_empty,
    show,
)

_NAMES = {
    "string": ("str", "string"),
    "integer": ("int", "integer"),
    "number": ("float", "number", "double"),
    "boolean": ("bool", "boolean"),
    "array": ("list", "array", "tuple", "set", "sequence", "iterable"),
    "object": ("dict", "object", "mapping"),
    "null": ("none", "null", "nonetype"),
}
_TYPES = {name: kind for kind, names in _NAMES.items() for name in names}
_MAX_DEPTH = 16
# Keywords of JSON Schema whose value is a mapping of names to schemas, and those for a schema or a list of schemas.
_BY_NAME = ("properties", "patternProperties", "$defs", "definitions", "dependentSchemas", "dependencies")
_INSIDE = (
    *("items", "prefixItems", "additionalItems", "unevaluatedItems", "contains", "anyOf", "oneOf", "allOf", "not"),
    *("if", "then", "else", "additionalProperties", "unevaluatedProperties", "propertyNames"),
)
# Names of the parameters in descriptions for OpenAI, Anthropic, MCP, Google and Cohere.
_PARAMETERS = (
    *("parameters", "input_schema", "inputSchema", "parametersJsonSchema", "parameters_json_schema"),
    "parameter_definitions",
)


def parse_tools(value: object) -> tuple[Mapping[str, Any], ...]:
    """Return tool descriptions in the form that templates expect, with parameters as JSON Schema.

    `value` is a list, or its JSON text, of `{"type": "function", "function": {...}}` or of the functions themselves;
    each of them may also be JSON text.
    """
    items = decoded_list(value, "`tools`")
    try:
        text = JSON_ENCODER.encode(items)
    except (TypeError, ValueError, RecursionError):
        return tuple(map(_parse_tool, items, count(1)))
    return _parse_text(text)


# Most records of a source have the same tools, which are checked once.
@lru_cache(maxsize=64)
def _parse_text(text: str) -> tuple[Mapping[str, Any], ...]:
    return tuple(map(_parse_tool, json.loads(text), count(1)))


def _parse_tool(value: object, number: int) -> Mapping[str, Any]:
    what = f"tool {number}"
    tool = decoded_object(value, what, BadReason.BAD_TOOLS)
    check_json(tool, what, BadReason.BAD_TOOLS)
    function = tool.get("function")
    if function is None and tool.get("name") is not None:
        if tool.get("type") in ("function", "custom"):  # the flat forms of OpenAI's Responses and of Anthropic
            tool = {key: item for key, item in tool.items() if key not in ("type", "function")}
        tool = {"type": "function", "function": tool}
        function = tool["function"]
    kind = tool.get("type", "function")
    if kind != "function":
        raise BadRecordError(BadReason.BAD_TOOLS, f"{what} is of type {show(kind)}, expected 'function'")
    if not isinstance(function, Mapping) or not isinstance(function.get("name"), str) or not function["name"]:
        raise BadRecordError(BadReason.BAD_TOOLS, f"{what} has no name")
    return {**({} if "type" in tool else {"type": "function"}), **tool, "function": _with_parameters(function, what)}


def _with_parameters(function: Mapping[str, Any], what: str) -> Mapping[str, Any]:
    """Return a function's description with its parameters as JSON Schema in `parameters`."""
    name = next((key for key in _PARAMETERS if not is_empty(function.get(key))), "")
    if not name:
        return function
    place = f"the {name} of {what} ({show(function['name'])})"
    given = decoded_object(function[name], place, BadReason.BAD_TOOLS)
    check_json(given, place, BadReason.BAD_TOOLS)  # the caller has checked JSON text only as a string
    if _is_schema(given):
        schema = _as_json_schema(given)
    else:
        required, properties = [], {}
        for key, value in given.items():
            if value is None:  # Parquet gives all rows the same fields
                continue
            if not isinstance(value, Mapping) or not (_is_schema(value) or "description" in value):
                raise BadRecordError(BadReason.BAD_TOOLS, f"{place} are not JSON Schema, and {show(key)} has no type")
            spelled = str(value.get("type", "")).replace(" ", "").lower().removeprefix("typing.")
            is_optional = "default" in value or spelled.endswith(",optional") or spelled.startswith("optional[")
            required += [key] if value.get("required", not is_optional) is True else []
            rest = {part: item for part, item in value.items() if part != "required" or isinstance(item, list)}
            properties[key] = _as_json_schema(rest)
        schema = {"type": "object", "properties": properties, "required": required}
    if name == "parameters" and schema is function[name]:
        return function
    return {**{key: item for key, item in function.items() if key not in (name, "parameters")}, "parameters": schema}


def refuse_hidden_parameters(tools: Sequence[Mapping[str, Any]], messages: Sequence[Message]) -> None:
    """Raise BadRecordError for a call with arguments if its tool may describe them in a field that is not read."""
    for function in (tool["function"] for tool in tools):
        schema = function.get("parameters")
        others = [name for name in function if name not in ("name", "description", "strict", "parameters")]
        if not any(map(function.get, others)) and not (schema or {}).get("required"):
            continue
        # An object whose properties are not described may contain anything.
        if schema and ("properties" not in schema or any(map(schema.get, ("$ref", *_BY_NAME, *_INSIDE)))):
            continue
        calls = (call for message in messages for call in message.tool_calls if call.name == function["name"])
        given: Iterator[Any] = (decoded(call.arguments, "", BadReason.BAD_TOOLS) for call in calls)
        for arguments in filter(None, given):
            detail = f"a call of {show(function['name'])} has the argument {first_name(arguments)}, but the tool "
            detail += f"describes no parameter: it has {', '.join(map(show, function))}; describe them in "
            detail += "`parameters`, or leave all tools out: source.ignore_fields=[tools]"
            raise BadRecordError(BadReason.BAD_TOOLS, detail)


def _is_schema(given: Mapping[str, Any]) -> bool:
    """Return True for JSON Schema; False for xLAM's parameters by name, which may be called `type` or `properties`."""
    properties = given.get("properties")
    if isinstance(properties, Mapping):
        return isinstance(given.get("type"), str) or not isinstance(properties.get("type"), str)
    lists = (given.get(key) for key in ("type", "required", "anyOf", "oneOf", "allOf", "enum"))
    return isinstance(given.get("type", given.get("$ref")), str) or any(isinstance(item, list) for item in lists)


def _as_json_schema(given: Any) -> Any:
    """Return a schema with JSON type names in place of Python's; the same object if it has none of them."""
    if not isinstance(given, Mapping):
        return given
    made, kind = dict(given), given.get("type")
    if isinstance(kind, str) and kind not in _NAMES:
        found = _of_type(kind)
        made = {key: found.get(key, item) for key, item in made.items() if key != "type" or found.get("type")} | found
    made = map_schemas(made, lambda _, schema: _as_json_schema(schema))
    return given if made == given else made


def map_schemas(schema: Mapping[str, Any], change: Callable[[str, Any], Any]) -> dict[str, Any]:
    """Return a schema with `change` applied to each schema inside it, given that schema's name or "".

    The target of a `$ref` is inside `$defs` or `definitions` and visited there, so that cyclic references end.
    """
    made = dict(schema)
    for key, value in schema.items():
        if key in _BY_NAME and isinstance(value, Mapping):
            made[key] = {name: change(name, inner) for name, inner in value.items()}
        elif key in _INSIDE:
            made[key] = [change("", inner) for inner in value] if isinstance(value, list) else change("", value)
    return made


def _of_type(spelled: str) -> dict[str, Any]:
    """Return the schema of a type such as `str, optional` or `List[int]`; a type that JSON lacks allows any value."""
    if spelled.count("[") > _MAX_DEPTH:
        return {}
    parts = [part for part in _split(spelled, ",") if part.lower() not in ("optional", "")]
    either = _split(parts[0], "|") if len(parts) == 1 else []
    name, _, inside = either[0].partition("[") if len(either) == 1 else ("union", "", "")
    name, inner = name.strip().lower().removeprefix("typing."), _split(inside.removesuffix("]"), ",")
    if name in ("optional", "union"):
        schemas = [_of_type(text) for text in (inner if inside else either) if _TYPES.get(text.lower()) != "null"]
        return schemas[0] if len(schemas) == 1 else {"anyOf": schemas} if schemas and all(schemas) else {}
    kind = _TYPES.get(name)
    schemas = [_of_type(text) for text in inner if text not in ("", "...")]
    if kind == "array" and schemas and schemas[0] and all(schema == schemas[0] for schema in schemas):
        return {"type": kind, "items": schemas[0]}
    if kind == "object" and len(schemas) == 2 and schemas[1]:
        return {"type": kind, "additionalProperties": schemas[1]}
    return {"type": kind} if kind else {}


def _split(text: str, separator: str) -> list[str]:
    """Split a text at the separators that are outside brackets."""
    edges, depth = [-1], 0
    for place, character in enumerate(text):
        depth += (character == "[") - (character == "]")
        if character == separator and depth == 0:
            edges.append(place)
    return [text[before + 1 : edge].strip() for before, edge in pairwise([*edges, len(text)])]
