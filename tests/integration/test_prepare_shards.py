"""A preparation works in shards: finished shards are kept, damaged ones are made again."""

from __future__ import annotations

import json
import shutil
import sys
from contextlib import suppress
from datetime import date
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from rich.console import Console

from harness.errors import PrepError
from harness.prep import TokenizerConfig, pipeline, prepare, report, shards
from harness.prep.sources.config import SourceConfig
from harness.storage import natural_key

WORDS = ["shards", "are", "made", "once", "and", "checked", "before", "they", "count", "as", "done"]
SETTINGS = {"pack_size": 256, "validation_fraction": 0.2, "num_workers": 0}


def write_source(folder: Path, *, files: int = 3, records: int = 120) -> Path:
    """Chats in several files; the second file has a bad record and a duplicate."""
    folder.mkdir()
    for file in range(files):
        rng = np.random.default_rng(file)
        lines = []
        for number in range(records):
            turns = [("user", f"{file} {number}"), ("assistant", " ".join(rng.choice(WORDS, 5 + number % 40)))]
            lines.append(json.dumps({"messages": [{"role": role, "content": text} for role, text in turns]}))
        if file == 1:
            lines[50] = "broken"
            lines[70] = lines[20]
        (folder / f"part-{file}.jsonl").write_text("\n".join(lines) + "\n")
    return folder


@pytest.fixture(scope="module")
def source(tmp_path_factory) -> Path:
    return write_source(tmp_path_factory.mktemp("source") / "chats")


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory, source) -> str:
    """The tokenizer that the first preparation would train."""
    path = tmp_path_factory.mktemp("tokenizer") / "d"
    run(path, source, tokenizer=TokenizerConfig(vocab_size=300))
    return str(path / "tokenizer")


def run(path: Path, source: Path, *, tokenizer: TokenizerConfig, engine: str = "local", **data):
    given = SourceConfig(path=str(source), on_bad="skip", shard_bytes=3000)
    return prepare(given, tokenizer, path, console=Console(quiet=True), engine=engine, **{**SETTINGS, **data})


def content(path: Path) -> dict[str, bytes]:
    """All files of a preparation except its reports, which hold times."""
    files = (file for file in sorted(path.rglob("*")) if file.is_file() and file.stem != "report")
    return {str(file.relative_to(path)): file.read_bytes() for file in files}


def receipts(path: Path) -> dict[str, int]:
    """Modification time of each shard; empty once the preparation has finished and deleted them."""
    times = {}
    with suppress(FileNotFoundError):  # they are deleted meanwhile
        for file in path.glob(".shards/?????/receipt.json"):
            times[file.parent.name] = file.stat().st_mtime_ns
    return times


def interrupt(path: Path, source: Path, tokenizer: TokenizerConfig, monkeypatch) -> None:
    """Interrupt a preparation after making its shards."""

    def stop(*_: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(pipeline.Preparation, "_pack", stop)
        with pytest.raises(KeyboardInterrupt):
            run(path, source, tokenizer=tokenizer)


def resume(path: Path, source: Path, tokenizer: TokenizerConfig, monkeypatch, **data):
    """Continue; return the report and the times of all shards before they are deleted.

    Shards that are kept count as work of an earlier run, by which the time that is left is estimated.
    """
    spool, after, before, earlier, advance = pipeline.Spool, {}, receipts(path), [], report.Stage.advance

    def count(stage: report.Stage, step: float, *, is_earlier: bool = False) -> None:
        earlier.append(is_earlier)
        advance(stage, step, is_earlier=is_earlier)

    with monkeypatch.context() as patch:
        patch.setattr(report.Stage, "advance", count)
        patch.setattr(pipeline, "Spool", lambda shards: (after.update(receipts(path)), spool(shards))[1])
        made = run(path, source, tokenizer=tokenizer, **data)
    assert sum(earlier) == len(before.items() & after.items())
    return made, after


@pytest.fixture
def interrupted(tmp_path, source, tokenizer, monkeypatch):
    """A preparation that was interrupted; its copy of the source can be changed."""
    shutil.copytree(source, tmp_path / "chats")
    interrupt(tmp_path / "d", tmp_path / "chats", TokenizerConfig(name=tokenizer), monkeypatch)
    return tmp_path / "d", tmp_path / "chats"


def finish(path: Path, source: Path, tokenizer: str, monkeypatch, **data) -> list[str]:
    """Continue, compare against an uninterrupted run, and return the names of shards that were made again."""
    before = receipts(path)
    _, after = resume(path, source, TokenizerConfig(name=tokenizer), monkeypatch, **data)
    assert not (path / ".shards").exists()
    run(path.parent / "again", source, tokenizer=TokenizerConfig(name=tokenizer), **data)
    assert content(path) == content(path.parent / "again")
    assert sorted(after, key=natural_key) == [f"{number:05d}" for number in range(len(after))]
    return sorted(name for name in after if after[name] != before.get(name))


def test_damaged_and_incomplete_shards_and_those_of_a_changed_file_are_made_again_and_others_kept(
    interrupted, tokenizer, monkeypatch
):
    path, source = interrupted
    assert len(receipts(path)) > 10
    made = path / ".shards"
    shutil.rmtree(made / "00001")
    damaged = bytearray((made / "00003" / "input_ids.bin").read_bytes())
    damaged[100] ^= 1
    (made / "00003" / "input_ids.bin").write_bytes(damaged)
    (made / "00005" / "receipt.json").unlink()
    (made / "00006" / "receipt.json").write_text("{")
    (made / "00007" / "loss_mask.bin").write_bytes((made / "00007" / "loss_mask.bin").read_bytes()[:-1])
    (made / "00002.0123abcd").mkdir()
    changed = source / "part-2.jsonl"
    of_changed = [
        receipt.parent.name
        for receipt in path.glob(".shards/?????/receipt.json")
        if receipt.parent.name > "00007" and json.loads(receipt.read_text())["shard"]["path"] == str(changed)
    ]
    assert len(of_changed) > 1
    changed.write_text(changed.read_text().replace("checked", "counted"))
    remade = ["00001", "00003", "00005", "00006", "00007", *sorted(of_changed)]
    assert finish(path, source, tokenizer, monkeypatch) == remade


def test_other_settings_make_every_shard_again(interrupted, tokenizer, monkeypatch):
    path, source = interrupted
    made = len(receipts(path))
    assert len(finish(path, source, tokenizer, monkeypatch, pack_size=512)) == made


def test_a_file_that_changes_while_it_is_read_is_an_error(tmp_path, source, tokenizer, monkeypatch):
    own = tmp_path / "chats"
    shutil.copytree(source, own)
    read = shards.read_shard

    def touch(shard):
        yield from read(shard)
        with (own / "part-1.jsonl").open("a") as file:
            file.write("{}\n")

    monkeypatch.setattr(shards, "read_shard", touch)
    with pytest.raises(PrepError, match="changed while it was read"):
        run(tmp_path / "d", own, tokenizer=TokenizerConfig(name=tokenizer))


def test_a_preparation_that_is_continued_another_day_writes_the_date_of_the_first(
    tmp_path, source, tokenizer, monkeypatch
):
    template = tmp_path / "dated.jinja"
    template.write_text(
        "{{ strftime_now('%Y-%m-%d') + '\\n' }}{% for m in messages %}{{ m.role + ': ' }}"
        "{% if m.role == 'assistant' %}{% generation %}{{ m.content + '<|im_end|>\\n' }}{% endgeneration %}"
        "{% else %}{{ m.content + '\\n' }}{% endif %}{% endfor %}{% if add_generation_prompt %}assistant: {% endif %}"
    )
    dated = TokenizerConfig(name=tokenizer, chat_template=str(template))

    def on(day: int) -> None:
        monkeypatch.setattr(pipeline, "date", SimpleNamespace(today=lambda: date(2026, 1, day)))

    on(1)
    path = tmp_path / "d"
    interrupt(path, source, dated, monkeypatch)
    before = receipts(path)
    on(2)
    report, after = resume(path, source, dated, monkeypatch)
    assert after == before != {}
    assert report.settings["date"] == "2026-01-01"
    # On a third day it is still the same dataset; another one has another date and other tokens.
    on(3)
    assert run(path, source, tokenizer=dated).reused
    other = run(tmp_path / "e", source, tokenizer=dated)
    assert other.splits["train"].fingerprint != report.splits["train"].fingerprint
    plain = run(tmp_path / "f", source, tokenizer=TokenizerConfig(name=tokenizer))
    assert "date" not in plain.settings


def command(path: Path, source: Path, tokenizer: str, *more: str) -> list[str]:
    return [
        *(
            *(sys.executable, "-m", "harness.recipes.prepare", "source=files", f"source.path={source}"),
            "source.on_bad=skip",
        ),
        *("source.shard_bytes=20000", f"tokenizer.name={tokenizer}", f"data.path={path}", "data.pack_size=256", *more),
    ]


def test_shards_of_a_tokenizer_that_changed_are_made_again_though_its_tokens_are_the_same(
    interrupted, tokenizer, monkeypatch
):
    path, source = interrupted
    made, file = len(receipts(path)), path.parent / "other" / "tokenizer.json"
    shutil.copytree(tokenizer, file.parent)
    file.write_text(json.dumps(json.loads(file.read_text()) | {"normalizer": {"type": "Lowercase"}}))
    assert len(finish(path, source, str(file.parent), monkeypatch)) == made


def test_a_skipped_row_whose_keys_are_no_text_is_kept(tmp_path, tokenizer):
    file, path = tmp_path / "a.parquet", tmp_path / "d"
    turns = [{"role": "user", "content": "shards"}, {"role": "assistant", "content": "are made"}]
    keys = pa.map_(pa.binary(), pa.int32())
    kind = pa.struct([("role", pa.string()), ("content", pa.string()), ("weights", keys)])
    rows = [turns, [turns[0], {**turns[1], "weights": [(b"\xff", 1)]}]]
    pq.write_table(pa.table({"messages": pa.array(rows, pa.list_(kind))}), file)
    report = run(path, file, tokenizer=TokenizerConfig(name=tokenizer), validation_fraction=0.0)
    assert (report.records, report.bad) == (2, {"unknown_field": 1})
    (listed,) = (path / "bad_records.jsonl").read_text().splitlines()
    assert "are made" in json.loads(listed)["record"]
    assert len((path / "bad_records_to_repair.jsonl").read_text().splitlines()) == 1
