"""Whatever a parser of stored bytes is given, it reads it or raises our own error: no other exception, and no flood."""

from __future__ import annotations

import importlib.util
import json
from base64 import b64decode
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from damage import damage_bytes, damage_json

from tests.fuzz.__main__ import fuzz
from tests.fuzz.targets import TARGETS

REGRESSIONS = json.loads(Path(__file__).with_name("regressions.json").read_text())


@pytest.mark.parametrize("name", TARGETS)
def test_damaged_files_are_read_or_refused(tmp_path: Path, name: str) -> None:
    target, generator = TARGETS[name](tmp_path / name), np.random.default_rng(1)
    assert all(map(target.try_one, target.seeds))
    for number in range(100):
        seed = target.seeds[number % len(target.seeds)]
        damage = damage_json if number % 3 == 0 else damage_bytes
        # The first byte chooses the file of a target of several.
        target.try_one(seed[:1] + damage(seed[1:], generator))


@pytest.mark.parametrize("name", REGRESSIONS)
def test_what_once_broke_a_parser_is_refused(tmp_path: Path, name: str) -> None:
    target = TARGETS[name](tmp_path / name)
    for text in REGRESSIONS[name]:
        target.try_one(b64decode(text))


@pytest.mark.nightly
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("name", TARGETS)
def test_a_search_for_bytes_that_break_a_parser_finds_none(
    tmp_path: Path, name: str, report_points: Callable[..., None]
) -> None:
    if importlib.util.find_spec("atheris") is None:
        pytest.skip("needs atheris, which has wheels for some versions of Python")
    ended = fuzz(name, 20_000, tmp_path)
    found = [path.name for path in tmp_path.iterdir()]
    assert ended.returncode == 0, f"{found}\n{ended.stderr[-3000:]}"
    report_points("fuzz", name, 20_000, of="inputs", outcome="read, or refused by name")
