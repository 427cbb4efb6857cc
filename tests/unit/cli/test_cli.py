"""The command line: what it prints for people, for programs, and how it ends."""

from __future__ import annotations

import json

import numpy as np
import pytest

from harness.formats import Provenance, open_dataset, open_writer
from harness.records import Pack

PACKS = [Pack([1, 2, 3, 4], [1, 1, 1, 0], [0]), Pack([5, 6, 7, 8, 9], [1, 0, 0, 1, 0], [0, 2])]


@pytest.fixture
def dataset(tmp_path):
    path = tmp_path / "data"
    with open_writer(path, format="parquet", pack_size=8, provenance=Provenance(tokenizer="none")) as writer:
        for pack in PACKS:
            writer.append(pack)
    return path


def test_inspect_tells_what_a_dataset_holds(harness, dataset):
    code, told, _ = harness("inspect", dataset)
    assert code == 0
    assert "2 of 8 tokens" in told
    code, told, _ = harness("inspect", dataset, "--json")
    (summary,) = json.loads(told)
    assert (summary["packs"], summary["sequences"], summary["tokens"], summary["trained_tokens"]) == (2, 3, 9, 5)


def test_convert_gives_the_same_packs_and_diff_finds_nothing(harness, dataset, tmp_path):
    code, told, _ = harness("convert", dataset, tmp_path / "out", "--to", "memmap")
    assert code == 0
    assert "2 packs, 3 sequences, 9 tokens as memmap" in told
    assert list(open_dataset(tmp_path / "out")) == PACKS
    code, told, _ = harness("diff", dataset, tmp_path / "out")
    assert (code, "hold the same packs" in told) == (0, True)


def test_diff_names_the_first_difference_and_ends_with_1(harness, dataset, tmp_path):
    with open_writer(tmp_path / "other", format="jsonl", pack_size=8) as writer:
        writer.append(PACKS[0])
        writer.append(Pack([5, 6, 7, 80, 9], [1, 0, 0, 1, 0], [0, 2]))
    code, told, _ = harness("diff", dataset, tmp_path / "other")
    assert (code, told.strip()) == (1, "first difference: pack 1, input_ids[3]: 8 and 80")
    code, told, _ = harness("diff", dataset, tmp_path / "other", "--json")
    expected = {"pack": 1, "field": "input_ids", "position": 3, "a": 8, "b": 80}
    assert (code, json.loads(told)["difference"]) == (1, expected)


def test_verify_ends_with_0_for_a_whole_dataset_and_with_1_for_a_damaged_one(harness, dataset):
    code, told, _ = harness("verify", dataset)
    assert (code, "2 packs, nothing wrong" in told) == (0, True)
    shard = dataset / "shard_000000.parquet"
    content = bytearray(shard.read_bytes())
    content[len(content) // 4] ^= 1
    shard.write_bytes(content)
    code, told, _ = harness("verify", dataset)
    assert code == 1
    assert "shard_000000.parquet" in told
    code, told, _ = harness("verify", dataset, "--json")
    assert (code, len(json.loads(told)["problems"]) > 0) == (1, True)


def test_import_takes_over_a_pickled_npy_and_tells_what_it_changed(harness, tmp_path):
    rows = [{"input_ids": [5, 6, 7], "loss_mask": [1, 1, 1], "seq_start_id": [0]}]
    np.save(tmp_path / "packed.npy", np.array(rows, dtype=object), allow_pickle=True)
    code, told, error = harness("import", tmp_path / "packed.npy", tmp_path / "out", "--from", "megatron_bridge")
    assert (code, error) == (0, "")
    assert "cleared last positions: 1" in told
    assert list(open_dataset(tmp_path / "out")) == [Pack([5, 6, 7], [1, 1, 0], [0])]


@pytest.mark.parametrize(
    "arguments",
    [
        ["inspect", "nowhere"],
        ["verify", "nowhere"],
        ["convert", "nowhere", "out", "--to", "memmap"],
        ["diff", "nowhere", "nowhere"],
        ["import", "nowhere", "out", "--from", "nemotron"],
    ],
)
def test_what_is_not_there_is_one_clear_error_with_code_2(harness, arguments, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    code, _, error = harness(*arguments)
    assert code == 2
    assert "nowhere" in error
    assert "fix:" in error
    assert "Traceback" not in error


def test_an_unknown_format_names_those_that_are_there(harness, dataset, tmp_path):
    code, _, error = harness("convert", dataset, tmp_path / "out", "--to", "arrow")
    assert code == 2
    assert "npy, memmap, binidx, jsonl, virtual, parquet" in error
