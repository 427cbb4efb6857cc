"""With source.drop_media the text of a record is trained alone; without it the record is refused by name."""

from __future__ import annotations

import json

import pytest

from harness.errors import ConfigError
from harness.formats import open_dataset
from harness.prep import prepare
from harness.prep.chat import BadReason, BadRecord, Conversation, RecordReader
from harness.prep.sources.config import SourceConfig

READER, DROPPING = RecordReader(), RecordReader(drop_media=True)


def turns(user, **more):
    return {"messages": [{"role": "user", "content": user}, {"role": "assistant", "content": "A cat."}], **more}


def part(kind, **more):
    return {"type": kind, **more}


@pytest.mark.parametrize(
    ("record", "text", "placeholders"),
    [
        (turns("<image>\nWhat is this?", images=["a.png"]), "What is this?", 1),
        (turns("<audio>What is said?", audios=["UklGRg=="]), "What is said?", 1),
        # As Megatron-SWIFT's own example has it.
        (turns("<audio>What is said?</audio>", audios=["UklGRg=="]), "What is said?", 1),
        (turns("<audio></audio>\nWhat is said?", audios=["UklGRg=="]), "What is said?", 1),
        (turns("</audio> ends a tag.", audios=["UklGRg=="]), "</audio> ends a tag.", 0),
        (turns("Watch <video_1> and <video_2>.", videos=["a.mp4", "b.mp4"]), "Watch  and .", 2),
        (turns("<|image|>What?", image_path="a.png"), "What?", 1),
        (turns("What is this?", images=["a.png"]), "What is this?", 0),
        # Only placeholders of the kinds that the record holds.
        (turns("<image>Explain <video>.", images=["a.png"]), "Explain <video>.", 1),
        (turns([part("image_url", image_url={"url": "a"}), part("text", text="What?")]), "What?", 1),
        (turns([{"image": "a.png"}, {"text": "What?"}]), "What?", 1),
        ({"conversations": [{"from": "human", "value": "<image>\nWhat?"}, {"from": "gpt", "value": "A"}], "image": "a"},
         "What?", 1),
        ({"instruction": "What? <image>", "output": "A cat.", "images": ["a.png"]}, "What? ", 1),
        ({"messages": json.dumps(turns("<image>\nWhat?")["messages"]), "images": [{"bytes": "x"}]}, "What?", 1),
        # As tables mark a column that the row has a value in.
        (turns("<image>What?", images=True), "What?", 1),
    ],
)  # fmt: skip
def test_media_and_their_placeholders_are_removed_and_counted(record, text, placeholders):
    refused = READER.parse(record, "here")
    assert isinstance(refused, BadRecord)
    assert refused.reason is BadReason.MEDIA
    parsed = DROPPING.parse(record, "here")
    assert isinstance(parsed, Conversation), parsed
    assert (parsed.messages[0].text, parsed.dropped_media) == (text, placeholders)


@pytest.mark.parametrize("more", [{}, {"images": []}, {"images": None}, {"num_images": 0}])
def test_a_record_without_media_is_left_as_it_is(more):
    record = turns("The tag <image> is HTML.", **more)
    assert DROPPING.parse(record, "here") == READER.parse(record, "here")
    assert DROPPING.parse(record, "here").dropped_media is None


def test_a_turn_of_media_alone_is_a_bad_record():
    bad = DROPPING.parse(turns("<image>\n", images=["a.png"]), "here")
    assert isinstance(bad, BadRecord)
    assert bad.reason is BadReason.EMPTY_TURN


def test_a_preparation_counts_conversations_and_placeholders(tmp_path):
    chats = [turns("<image>\n<image>\nWhat is this?", images=["a", "b"]), turns("What?", images=["c"]), turns("Hi")]
    (tmp_path / "chats.jsonl").write_text("".join(json.dumps(chat) + "\n" for chat in chats * 4))
    source = SourceConfig(path=str(tmp_path / "chats.jsonl"), drop_media=True)
    report = prepare(source, None, tmp_path / "data", pack_size=256, validation_fraction=0.0)
    assert (report.records, report.media, report.placeholders) == (12, 8, 8)
    assert "| 8 | conversations are trained only on their text |" in (tmp_path / "data" / "report.md").read_text()
    counts = open_dataset(tmp_path / "data" / "train").manifest.provenance.counts
    assert (counts["media"], counts["placeholders"]) == (8, 8)


def test_a_folder_that_was_prepared_before_there_was_the_setting_is_still_prepared(tmp_path):
    (tmp_path / "chats.jsonl").write_text("".join(json.dumps(turns("Hi")) + "\n" for _ in range(4)))

    def prepared(**source):
        settings = SourceConfig(path=str(tmp_path / "chats.jsonl"), **source)
        return prepare(settings, None, tmp_path / "data", pack_size=256, validation_fraction=0.0)

    assert not prepared().reused
    report = json.loads((tmp_path / "data" / "report.json").read_text())
    assert "drop_media" not in report["settings"]["source"]
    del report["media"], report["placeholders"]
    (tmp_path / "data" / "report.json").write_text(json.dumps(report))
    assert prepared().reused
    with pytest.raises(ConfigError, match="drop_media was None and is True"):
        prepared(drop_media=True)
