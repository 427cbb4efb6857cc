"""Several sources of one preparation keep their schemas, limits and epochs, and each has a row of the report."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path

import pytest
from rich.console import Console

from harness.errors import ConfigError
from harness.formats import open_dataset
from harness.prep import TokenizerConfig, prepare
from harness.prep.sources.config import MixedSource, SourceConfig


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Two sources of other schemas, and a tokenizer."""
    path = tmp_path_factory.mktemp("mix")
    short = [{"prompt": f"p {number}", "completion": "x" * (1 + number % 5)} for number in range(200)]
    chats = [
        {"messages": [{"role": "user", "content": f"u {number}"}, {"role": "assistant", "content": "y"}]}
        for number in range(300)
    ]
    for name, records in (("short", short), ("chats", chats), ("again", chats[:50])):
        (path / f"{name}.jsonl").write_text("".join(json.dumps(one) + "\n" for one in records))
    run(path / "all", [MixedSource(str(path / "short.jsonl")), MixedSource(str(path / "chats.jsonl"))])
    return path


def run(path: Path, mix: list[MixedSource], *, tokenizer: str = "", seed: int = 0, **data):
    source, named = SourceConfig(mix=mix, shard_bytes=2000), TokenizerConfig(name=tokenizer, vocab_size=300)
    settings = {"pack_size": 64, "num_workers": 0, "seed": seed, **data}
    return prepare(source, named, path, console=Console(quiet=True), **settings)


def sequences(path: Path) -> Counter[bytes]:
    reader = open_dataset(path)
    return Counter(view.input_ids.tobytes() for number in range(len(reader)) for view in reader[number].sequences())


def test_sources_of_other_schemas_are_one_dataset_with_a_row_for_each(folder, tmp_path):
    mix = [MixedSource(str(folder / "short.jsonl")), MixedSource(str(folder / "chats.jsonl"), limit=120)]
    report = run(tmp_path / "data", mix, tokenizer=str(folder / "all" / "tokenizer"))
    assert report.schema == "prompt_completion, messages"
    assert [(name, row.records) for name, row in report.sources.items()] == [(mix[0].path, 200), (mix[1].path, 120)]
    assert sum(split.conversations for split in report.splits.values()) == 320


def test_epochs_repeat_the_training_data_of_a_source_and_leave_validation_alone(folder, tmp_path):
    short, chats, tokenizer = str(folder / "short.jsonl"), str(folder / "chats.jsonl"), str(folder / "all/tokenizer")
    only = run(tmp_path / "only", [MixedSource(short)], tokenizer=tokenizer)
    mix = [MixedSource(short, epochs=2), MixedSource(chats, epochs=0.5)]
    report = run(tmp_path / "mixed", mix, tokenizer=tokenizer)
    assert list(report.sources) == [f"{short} (2 epochs)", f"{chats} (0.5 epochs)"]
    once = sequences(folder / "all/train")
    mixed, of_short = (sequences(tmp_path / name / "train") for name in ("mixed", "only"))
    assert {one: count for one, count in mixed.items() if one in of_short} == dict.fromkeys(of_short, 2)
    of_chats = [one for one in once if one not in of_short]
    kept = [one for one in of_chats if one in mixed]
    assert {mixed[one] for one in kept} == {1}
    assert 0.4 < len(kept) / len(of_chats) < 0.6
    assert report.splits["train"].conversations == 2 * only.splits["train"].conversations + len(kept)
    assert sequences(tmp_path / "mixed" / "validation") == sequences(folder / "all/validation")


def test_the_share_of_an_epoch_is_chosen_by_the_seed_and_by_nothing_else(folder, tmp_path):
    mix, tokenizer = [MixedSource(str(folder / "chats.jsonl"), epochs=0.5)], str(folder / "all/tokenizer")
    for name, seed in (("a", 0), ("b", 0), ("c", 1)):
        run(tmp_path / name, mix, tokenizer=tokenizer, seed=seed)
    assert sequences(tmp_path / "a/train") == sequences(tmp_path / "b/train")
    assert sequences(tmp_path / "a/train") != sequences(tmp_path / "c/train")


def test_a_duplicate_in_a_second_source_counts_for_the_first(folder, tmp_path):
    mix = [MixedSource(str(folder / "again.jsonl"), epochs=3), MixedSource(str(folder / "chats.jsonl"))]
    tokenizer = str(folder / "all/tokenizer")
    report = run(tmp_path / "data", mix, tokenizer=tokenizer, validation_fraction=0, drop_duplicates=True)
    assert report.dropped == {"duplicate": 50}
    assert sorted(sequences(tmp_path / "data/train").values()) == [1] * 250 + [3] * 50


def test_another_mix_is_not_taken_for_a_finished_one(folder, tmp_path):
    mix, tokenizer = [MixedSource(str(folder / "chats.jsonl"), epochs=2)], str(folder / "all/tokenizer")
    run(tmp_path / "data", mix, tokenizer=tokenizer)
    assert run(tmp_path / "data", mix, tokenizer=tokenizer).reused
    mix[0].epochs = 3
    with pytest.raises(ConfigError, match=r"source\.mix\[0\]\.epochs was 2|source\.mix was"):
        run(tmp_path / "data", mix, tokenizer=tokenizer)


@pytest.mark.parametrize(
    ("settings", "where", "words"),
    [
        ({"kind": "pydoc"}, "source.mix", "built-in corpus"),
        ({"mix": [MixedSource("a.jsonl"), MixedSource()]}, "source.mix[1].path", "no path"),
    ],
)
def test_settings_that_a_mix_would_not_use_are_refused(settings, where, words):
    with pytest.raises(ConfigError) as caught:
        SourceConfig(**{"mix": [MixedSource("a.jsonl")], **settings})
    assert caught.value.where == where
    assert words in caught.value.what


@pytest.mark.parametrize("epochs", [0, float("nan"), 1001])
def test_epochs_outside_their_bounds_are_refused(epochs):
    with pytest.raises(ConfigError, match="epochs"):
        MixedSource("a.jsonl", epochs=epochs)
