"""Whatever a parser of stored bytes is given, it reads it or raises our own error: no other exception, and no flood."""

from __future__ import annotations

import importlib.util
import json
import math
from dataclasses import asdict
from pathlib import Path

import numpy as np
import pytest
from damage import damage_bytes, damage_json

from harness.loader.live.folder import NO_RECORD
from harness.train.digests import DIGESTS_FILE
from tests.fuzz.__main__ import RUNS, fuzz
from tests.fuzz.targets import RULES, TARGETS

DEEP = b"[" * 100_000
HF_CONFIG = {"model_type": "llama", "hidden_size": 8, "max_position_embeddings": 9}
MEGATRON = {"tokens": [1], "labels": [2], "cu_seqlens": [0, 1]}
# What a search has found, to which a parser once had no answer of its own.
REGRESSIONS = [
    ("state", "", DEEP),
    ("live", "END.json", DEEP),
    ("live", "_producer", DEEP),
    ("live", "chunk_00000.jsonl.ready", json.dumps({**asdict(NO_RECORD), "total_rows": []}).encode()),
    (
        "run",
        DIGESTS_FILE,
        b'{"step": Infinity, "epoch": 0, "digest": "", "packs": [], "disagreements": [], "rows": []}\n',
    ),
    ("hf_config", "", DEEP),
    ("hf_config", "", b"true"),
    ("hf_config", "", json.dumps({**HF_CONFIG, "max_position_embeddings": []}).encode()),
    ("hf_config", "", json.dumps({**HF_CONFIG, "max_position_embeddings": math.inf}).encode()),
    ("hf_config", "", json.dumps({**HF_CONFIG, "num_attention_heads": 0}).encode()),
    ("hf_config", "", json.dumps({**HF_CONFIG, "rope_scaling": True}).encode()),
    ("imports", "megatron.jsonl", json.dumps({**MEGATRON, "loss_mask": {}}).encode() + b"\n"),
    ("imports", "megatron.jsonl", json.dumps({**MEGATRON, "loss_mask": [10**400]}).encode() + b"\n"),
    ("records", "lease", DEEP),
    ("media rules", "", RULES[1].replace("16000", "16.000").replace("n_window", "n").encode()),
    ("settings", "", b"{model: {5: 1}, data: {}, loader: {}, optimizer: {}, parallel: {}, trainer: {}}"),
]


@pytest.mark.submission
@pytest.mark.parametrize("name", TARGETS)
def test_damaged_files_are_read_or_refused(tmp_path: Path, name: str) -> None:
    target, generator = TARGETS[name](tmp_path / name), np.random.default_rng(1)
    assert all(map(target.try_one, target.seeds))
    for number in range(100):
        seed = target.seeds[number % len(target.seeds)]
        damage = damage_json if number % 3 == 0 else damage_bytes
        # The first byte chooses the file of a target of several.
        target.try_one(seed[:1] + damage(seed[1:], generator))


@pytest.mark.parametrize("number", range(len(REGRESSIONS)))
def test_what_once_broke_a_parser_is_answered(tmp_path: Path, number: int) -> None:
    name, file, data = REGRESSIONS[number]
    target = TARGETS[name](tmp_path / name)
    target.try_one(bytes([target.files.index(file)]) + data if file else data)


@pytest.mark.parametrize("name", ["token shards", "sources", "imports", "parquet"])
def test_names_of_columns_that_are_no_utf8_are_answered(tmp_path: Path, name: str) -> None:
    """A footer has each name twice: in the schema, and with each of the column's chunks."""
    target, changed = TARGETS[name](tmp_path / name), 0
    for seed in target.seeds:
        for old in (b"element", b"input_ids", b"role"):
            at = seed.rfind(old)
            while b"PAR1" in seed[:5] and at > 0:
                target.try_one(seed[:at] + b"\xf4" + seed[at + 1 :])
                at, changed = seed.rfind(old, 0, at), changed + 1
    assert changed > 1


@pytest.mark.nightly
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("name", TARGETS)
def test_a_search_for_bytes_that_break_a_parser_finds_none(tmp_path, name, report_points) -> None:
    if importlib.util.find_spec("atheris") is None:
        pytest.skip("needs atheris, which has wheels for some versions of Python")
    ended = fuzz(name, RUNS, tmp_path)
    found = [path.name for path in tmp_path.iterdir()]
    assert ended.returncode == 0, f"{found}\n{ended.stderr[-3000:]}"
    report_points("fuzz", name, RUNS, of="inputs", outcome="read, or refused by name")
