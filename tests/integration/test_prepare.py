"""A whole preparation: real files, real tokenizers and real datasets."""

from __future__ import annotations

import io
import json
import re

import numpy as np
import pytest
from rich.console import Console

from harness.errors import PrepError
from harness.formats import open_dataset, verify_dataset
from harness.prep import ChatTokenizer, TokenizerConfig, prepare
from harness.prep.chat.reader import parse_line
from harness.prep.pipeline import repack_store
from harness.prep.sources.config import SourceConfig

WORDS = ["packs", "hold", "sequences", "of", "tokens", "that", "a", "model", "reads", "and", "learns", "to", "continue"]


def record(number: int) -> dict[str, object]:
    """A chat of one or two exchanges; every eleventh is long."""
    rng = np.random.default_rng(number)

    def text(count: int) -> str:
        return f"{number} " + " ".join(rng.choice(WORDS, count))

    turns = []
    for _ in range(1 + number % 2):
        turns.append({"role": "user", "content": text(5)})
        turns.append({"role": "assistant", "content": text(200 if number % 11 == 0 else 8)})
    return {"messages": turns}


def write_jsonl(path, records) -> str:
    path.write_text("".join(json.dumps(one) + "\n" for one in records))
    return str(path)


@pytest.fixture(scope="module")
def chats(tmp_path_factory):
    return write_jsonl(tmp_path_factory.mktemp("chats") / "chats.jsonl", map(record, range(300)))


def run(path, source: str, *, tokenizer=None, on_bad="refuse", limit=0, **data):
    """Prepare; return the report and what is printed."""
    console = Console(file=io.StringIO(), width=120)
    given = SourceConfig(path=source, on_bad=on_bad, limit=limit)
    trains = TokenizerConfig(**{"vocab_size": 400, **(tokenizer or {})})
    settings = {"pack_size": 128, "validation_fraction": 0.1, "num_workers": 0, **data}
    return prepare(given, trains, path, console=console, **settings), console.file.getvalue()


def sequences(path) -> list[tuple[bytes, bytes]]:
    return sorted(
        (one.input_ids.tobytes(), one.loss_mask.tobytes()) for pack in open_dataset(path) for one in pack.sequences()
    )


@pytest.fixture(scope="module")
def prepared(tmp_path_factory, chats):
    path = tmp_path_factory.mktemp("data") / "chats"
    report, output = run(path, chats)
    return path, report, output


def test_every_conversation_is_stored_with_the_tokens_and_mask_of_the_tokenizer(prepared, chats):
    path, report, _ = prepared
    tokenizer = ChatTokenizer(TokenizerConfig(name=str(path / "tokenizer")))
    with open(chats, "rb") as lines:  # noqa: PTH123
        encoded = tokenizer.encode([parse_line(line, "") for line in lines])
    expected = sorted((one.input_ids.tobytes(), one.loss_mask.tobytes()) for one in encoded if len(one) <= 128)
    assert sorted(sequences(path / "train") + sequences(path / "validation")) == expected
    assert report.dropped == {"over_long": 300 - len(expected)}
    assert len(expected) < 300


def test_the_report_counts_the_stored_data_and_the_manifest_records_its_provenance(prepared):
    path, report, output = prepared
    for name, split in report.splits.items():
        reader = open_dataset(path / name)
        assert split.conversations == len(reader.sequence_lengths)
        assert split.tokens == reader.sequence_lengths.sum()
        assert split.trained_tokens == sum(int(pack.loss_mask.sum()) for pack in reader)
        assert split.packs == len(reader)
        assert split.fill == split.tokens / (split.packs * 128)
        assert split.fingerprint == reader.fingerprint
    assert report.records == 300
    assert json.loads((path / "report.json").read_text())["splits"]["train"]["packs"] == report.splits["train"].packs
    assert "dropped: over_long" in output
    assert f"{report.splits['train'].tokens:,}" in output
    names = {"report.html", "report.json", "report.md", "tokenizer", "train", "validation"}
    assert {entry.name for entry in path.iterdir()} == names
    tokenizer = ChatTokenizer(TokenizerConfig(name=str(path / "tokenizer")))
    provenance = open_dataset(path / "validation").manifest.provenance
    assert provenance.tokenizer_hash == tokenizer.tokenizer_hash
    assert provenance.chat_template_hash == tokenizer.chat_template_hash
    assert (provenance.tokenizer, provenance.packer, provenance.seed) == ("../tokenizer", "best_fit_decreasing", 0)
    assert provenance.settings_hash == report.settings_hash
    assert provenance.counts["vocab_size"] == 400
    assert provenance.counts["dropped_over_long"] == report.dropped["over_long"]


def test_a_second_run_with_the_same_settings_removes_what_a_killed_one_left_and_changes_nothing_else(prepared, chats):
    path, report, _ = prepared
    before = {file: file.stat().st_mtime_ns for file in path.rglob("*")}
    (path / ".shards").mkdir()
    (path / ".shards/part").write_bytes(b"killed after the report")
    again, output = run(path, chats, num_workers=1)
    assert again.reused
    assert "is already prepared" in output
    assert again.splits == report.splits
    assert {file: file.stat().st_mtime_ns for file in path.rglob("*")} == before


def test_bad_records_stop_the_run_and_are_listed_with_file_and_line(tmp_path):
    source = tmp_path / "chats.jsonl"
    source.write_text(json.dumps(record(1)) + "\nbroken\n" + '{"messages": []}\n')
    with pytest.raises(PrepError) as error:
        run(tmp_path / "d", str(source))
    assert "1 not_json, 1 no_messages" in error.value.what
    assert f"{source}, line 2" in error.value.where
    assert f"{source}, line 3" in error.value.where
    assert "source.on_bad=skip" in error.value.fix
    assert not (tmp_path / "d" / "report.json").exists()


def test_bad_records_can_be_skipped_counted_and_listed(tmp_path):
    source = tmp_path / "chats.jsonl"
    forged = {"messages": [{"role": "user", "content": "<|im_end|>"}, {"role": "assistant", "content": "x"}]}
    lines = [*map(json.dumps, map(record, range(30))), "broken", "[]", json.dumps(forged), "{}"]
    source.write_text("\n".join(lines))
    report, output = run(tmp_path / "d", str(source), on_bad="skip")
    assert report.bad == {"not_json": 1, "not_an_object": 1, "control_token": 1, "no_messages": 1}
    assert report.records == 34
    assert "bad: control_token" in output
    listed = [json.loads(line) for line in (tmp_path / "d" / "bad_records.jsonl").read_text().splitlines()]
    assert [one["where"] for one in listed] == [f"{source}, line {n}" for n in (31, 32, 33, 34)]
    assert [one["record"] for one in listed] == ["broken", [], forged, {}]
    assert (tmp_path / "d" / "bad_records_to_repair.jsonl").read_text().splitlines() == lines[30:]
    assert report.examples["bad not_json"][0].startswith(f"{source}, line 31: ")


def test_plain_chats_keep_their_bytes(tmp_path, prepared, chats):
    """The fingerprints are those of the first version with this tokenizer."""
    assert {name: split.fingerprint for name, split in prepared[1].splits.items()} == {
        "train": "f4db2e7e41243ad8c907c7df55af947b",
        "validation": "a96cc1ae77f2ff90a20f1cef0bd682fd",
    }
    report, _ = run(tmp_path / "e", chats, over_long="cut", drop_duplicates=True)
    assert {name: split.fingerprint for name, split in report.splits.items()} == {
        "train": "d22ef215e1b596555fc626a930c59aa8",
        "validation": "9a4348f7d2b872f49bf34b8937230bfa",
    }


def talk(number: int) -> dict[str, object]:
    """A chat of three exchanges with a system prompt, about 120 tokens."""
    turns = [{"role": "system", "content": "packs"}]
    for exchange in range(3):
        turns.append({"role": "user", "content": f"{number} {exchange} tokens that a model"})
        turns.append({"role": "assistant", "content": f"reads and learns {number} {exchange} " * 2})
    return {"messages": turns}


def test_all_sequences_of_a_conversation_are_in_one_split_and_duplicates_are_conversations(tmp_path):
    source = write_jsonl(tmp_path / "chats.jsonl", [talk(number % 80) for number in range(100)])
    data = {"over_long": "split", "validation_fraction": 0.3, "pack_size": 64}
    report, output = run(tmp_path / "d", source, drop_duplicates=True, **data)
    assert report.dropped == {"duplicate": 20}
    assert sum(split.conversations for split in report.splits.values()) == 80
    sequences_made = sum(split.sequences for split in report.splits.values())
    assert (report.split, report.truncated, report.lost_tokens) == (100, 0, 0)
    assert sequences_made == 240
    assert "(3.00 each)" in output
    tokenizer = ChatTokenizer(TokenizerConfig(name=str(tmp_path / "d" / "tokenizer")))
    numbers = {}
    for name, split in report.splits.items():
        reader = open_dataset(tmp_path / "d" / name)
        assert len(reader.sequence_lengths) == split.sequences
        texts = [tokenizer.decode(one.input_ids.tolist()) for pack in reader for one in pack.sequences()]
        assert all(text.startswith("<|im_start|>system\npacks<|im_end|>") for text in texts)
        numbers[name] = {text.partition("user\n")[2].split()[0] for text in texts}
        assert len(numbers[name]) == split.conversations
    assert not numbers["train"] & numbers["validation"]
    # Without duplicates left out, the same conversations are in the same split.
    again, _ = run(tmp_path / "e", source, packed_storage="virtual", **data)
    assert sum(split.conversations for split in again.splits.values()) == 100


def test_the_report_names_schema_mask_unused_fields_and_first_places(tmp_path):
    rows = [{**record(number), "id": number} for number in range(40)]
    rows[7]["messages"] = [*rows[7]["messages"], {"role": "user", "content": "and?"}]
    rows[9]["messages"] = [{"role": "user", "content": "?"}, {"role": "assistant", "content": "<tool_call>f"}]
    rows[11]["messages"] = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "tokens " * 300}]
    source = write_jsonl(tmp_path / "chats.jsonl", rows)
    report, output = run(tmp_path / "d", source, over_long="cut")
    assert (report.schema, report.unused, report.user_last) == ("messages", ["id"], 1)
    assert report.examples["user_last"] == [f"{source}, line 8"]
    assert report.examples["tagged_calls"] == [f"{source}, line 10"]
    assert f"{source}, line 12" in report.examples["truncated"]
    assert report.lost_tokens > 100
    values = json.loads((tmp_path / "d" / "report.json").read_text())
    assert values["examples"] == report.examples
    assert values["mask"] == report.mask
    assert values["sources"][source]["records"] == 40
    for text in (output, (tmp_path / "d" / "report.md").read_text()):
        for words in ("end with a user turn", "messages", "unused fields", report.mask["rule"]):
            assert words in text
    for name in ("report.md", "report.html"):
        assert f"{source}, line 8" in (tmp_path / "d" / name).read_text()


def test_the_report_names_the_factor_by_which_turns_of_their_own_repeat_a_conversation(tmp_path):
    template = tmp_path / "forgetful.jinja"
    template.write_text(
        "{% for m in messages %}<|im_start|>{{ m.role }}\n{% if m.role == 'assistant' and loop.last %}<think></think>"
        "{% endif %}{{ m.content }}<|im_end|>\n{% endfor %}"
        "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    )
    turns = [{"role": role, "content": f"{role} {n}"} for n in range(6) for role in ("user", "assistant")]
    source = write_jsonl(tmp_path / "chats.jsonl", [{"messages": turns}] * 10)
    data = {"pack_size": 4096, "validation_fraction": 0, "packed_storage": "legacy_npy_pickle"}
    trains = {"vocab_size": 300, "chat_template": str(template)}
    report, output = run(tmp_path / "d", source, tokenizer=trains, **data)
    assert list(report.splits) == ["train"]
    assert not (tmp_path / "d" / "validation").exists()
    reader = open_dataset(tmp_path / "d" / "train")
    assert reader.format == "npy"
    lengths = sorted(int(length) for length in reader.sequence_lengths)
    assert len(lengths) == 60
    assert report.repeated_tokens == sum(lengths) - 10 * lengths[-1]
    factor = sum(lengths) / (10 * lengths[-1])
    assert f"{factor:.1f} times the tokens of one rendering" in " ".join(output.split())


@pytest.mark.parametrize("has_tokenizer", [False, True])
def test_a_source_of_which_nothing_is_left_is_refused_with_the_first_reason(tmp_path, prepared, has_tokenizer):
    tokenizer = {"name": str(prepared[0] / "tokenizer")} if has_tokenizer else None
    media = write_jsonl(tmp_path / "media.jsonl", [{**record(number), "images": ["a.png"]} for number in range(3)])
    with pytest.raises(PrepError, match=r"no record can be trained on, 3 were refused: 3 media") as caught:
        run(tmp_path / "d", media, tokenizer=tokenizer, on_bad="skip")
    assert f"{media}, line 1: the record has `images`" in caught.value.where
    empty = write_jsonl(tmp_path / "empty.jsonl", [])
    with pytest.raises(PrepError, match="there are no records in the file") as caught:
        run(tmp_path / "e", empty, tokenizer=tokenizer)
    assert caught.value.where == empty


def test_a_conversation_stays_in_its_split_when_others_are_added(tmp_path, prepared):
    path, _, _ = prepared
    more = write_jsonl(tmp_path / "more.jsonl", map(record, range(299, -1, -3)))
    run(tmp_path / "d", more, tokenizer={"name": str(path / "tokenizer")})
    for name in ["train", "validation"]:
        assert set(sequences(tmp_path / "d" / name)) <= set(sequences(path / name))


def test_virtual_storage_gives_the_same_packs_and_can_be_repacked(tmp_path, prepared, chats):
    path, report, _ = prepared
    again, _ = run(tmp_path / "d", chats, packed_storage="virtual")
    assert again.splits == report.splits
    assert list(open_dataset(tmp_path / "d" / "train")) == list(open_dataset(path / "train"))
    # Repacked for longer packs it holds the sequences of a preparation for longer packs.
    repack_store(str(tmp_path / "d" / "train"), str(tmp_path / "longer"), pack_size=256)
    longer, _ = run(tmp_path / "l", chats, pack_size=256, limit=300)
    assert open_dataset(tmp_path / "longer").fingerprint != report.splits["train"].fingerprint
    kept = set(sequences(tmp_path / "longer"))
    assert kept <= set(sequences(tmp_path / "l" / "train"))
    assert len(kept) == report.splits["train"].conversations <= longer.splits["train"].conversations
    # The whole folder can be moved.
    (tmp_path / "d").rename(tmp_path / "moved")
    assert verify_dataset(tmp_path / "moved" / "train") == []
    reader = open_dataset(tmp_path / "moved" / "train")
    assert (tmp_path / "moved" / "train" / reader.manifest.provenance.tokenizer / "tokenizer.json").exists()
    stored = open_dataset(tmp_path / "moved" / "sequences" / "train").manifest.provenance.tokenizer
    assert (tmp_path / "moved" / "sequences" / "train" / stored / "tokenizer.json").exists()


@pytest.mark.parametrize(
    ("change", "words", "fix"),
    [
        ({"pack_size": 4}, "for train: read 300 records; left out: 300 over_long", "data.pack_size"),
        ({"validation_fraction": 0.000001, "limit": 2}, "for validation", "data.validation_fraction=0"),
        ({"validation_fraction": 0.999999}, "for train", "the fractions of the splits"),
    ],
)
def test_a_split_without_conversations_is_an_error(tmp_path, chats, change, words, fix):
    with pytest.raises(PrepError, match=f"no conversations remain {words}") as caught:
        run(tmp_path / "d", chats, **change)
    assert fix in caught.value.fix


def test_a_split_has_a_conversation_although_its_fraction_is_less_than_one_and_a_line_says_so(tmp_path, chats):
    report, log = run(tmp_path / "d", chats, limit=4, validation_fraction=0.000001, test_fraction=0.000001)
    found = {name: split.conversations for name, split in report.splits.items()}
    assert found == dict.fromkeys(("train", "validation", "test"), 1)
    for name in ("validation", "test"):
        assert f"{name}: 1 conversation, more than data.{name}_fraction=1e-06 of 3." in log
    counted = []
    for limit in range(4, 9):
        report, log = run(tmp_path / f"{limit}", chats, limit=limit, validation_fraction=0.99 / limit)
        counted.append(report.splits["validation"].conversations)
        assert re.findall(r"^validation: (\d+) conversations?, more", log, re.MULTILINE) == [str(counted[-1])], log
    assert max(counted) > 1


def test_a_template_without_generation_tags_is_masked_by_what_it_renders(tmp_path, prepared, chats):
    path, _, _ = prepared
    template = tmp_path / "plain.jinja"
    template.write_text(
        "{% for m in messages %}{{ m.role + ': ' + m.content + '<|im_end|>\\n' }}{% endfor %}"
        "{% if add_generation_prompt %}assistant: {% endif %}"
    )
    named = {"name": str(path / "tokenizer"), "chat_template": str(template)}
    report, output = run(tmp_path / "d", chats, tokenizer=named, packed_storage="virtual")
    assert f"Mask: {report.mask['rule']}, because {report.mask['why']}" in output
    for name in ("train", "sequences/train", "validation"):
        assert dict(open_dataset(tmp_path / "d" / name).manifest.provenance.mask) == report.mask
    saved = ChatTokenizer(TokenizerConfig(name=str(tmp_path / "d" / "tokenizer"), mask="all"))
    assert saved.chat_template == template.read_text()
