"""Damage to the bytes of a file, as disks and hands do it."""

from __future__ import annotations

import re

import numpy as np

EXTREMES = [0, 1, 0x7F, 0x80, 0xFF, 0x7FFFFFFF, 0xFFFFFFFF, 1 << 62, (1 << 63) - 1, (1 << 64) - 1]
_VALUE = re.compile(rb'-?\d+(?:\.\d+)?|"[^"]*"|true|false|null|\[[^\[\]]*\]|\{[^{}]*\}')
_VALUES = [
    b"1e999",
    b"NaN",
    b"-1",
    b"0",
    b"null",
    b"[]",
    b"{}",
    b'""',
    b"true",
    b"1.5",
    b"9" * 30,
    b'"\\ud800"',
    b"[[1]]",
]
_VALUES += [b'{"a":1}', b'"/etc/passwd"', b"[" * 3000 + b"]" * 3000]


def damage_bytes(data: bytes, generator: np.random.Generator) -> bytes:
    """One of seven kinds of damage."""
    out = bytearray(data)
    at = int(generator.integers(len(out))) if out else 0
    width = int(generator.choice([1, 2, 4, 8]))
    match int(generator.integers(7)):
        case 0:
            out[at : at + 1] = bytes([out[at] ^ (1 << int(generator.integers(8)))]) if out else b"\1"
        case 1:
            value = EXTREMES[int(generator.integers(len(EXTREMES)))] & ((1 << 8 * width) - 1)
            out[at : at + width] = value.to_bytes(width, "little")
        case 2:
            del out[at:]
        case 3:
            out[at:at] = generator.bytes(int(generator.integers(1, 40)))
        case 4:
            del out[at : at + int(generator.integers(1, 40))]
        case 5:
            other = int(generator.integers(len(out))) if out else 0
            out[at : at + width] = out[other : other + width]
        case _:
            out[at : at + 30] = generator.bytes(30)
    return bytes(out)


def damage_json(data: bytes, generator: np.random.Generator) -> bytes:
    """Put another value of JSON in the place of one."""
    places = [match.span() for match in _VALUE.finditer(data)]
    if not places:
        return damage_bytes(data, generator)
    start, end = places[int(generator.integers(len(places)))]
    return data[:start] + _VALUES[int(generator.integers(len(_VALUES)))] + data[end:]
