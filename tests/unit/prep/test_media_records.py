"""Records with images and sounds become sequences with media, or are refused by name."""

from __future__ import annotations

import base64
import io
import json
import re
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from harness.errors import ConfigError, FormatError, PrepError
from harness.formats import open_dataset
from harness.prep import prepare
from harness.prep.chat import BadReason, BadRecord, Conversation, RecordReader
from harness.prep.fitting import fit_conversation
from harness.prep.media import MediaLimits, draw_medium, measure
from harness.prep.shards import Receipt, ShardJob, do_shard
from harness.prep.sources.config import SourceConfig
from harness.prep.sources.reading import SourceChunk, SourceShard, read_shard
from harness.prep.spool import Spool
from harness.prep.tokenize import ChatTokenizer, TokenizerConfig
from harness.records import Pack
from tests.samples.media_models import PLACEHOLDER, picture, save_media_model, sound

READER = RecordReader(media=MediaLimits())
CAT, DOG, HELLO, BYE = picture(40, 30, seed=1), picture(30, 40, seed=2), sound(9000, seed=3), sound(16000, seed=4)


def b64(data):
    return base64.b64encode(data).decode()


def turns(user, **more):
    return {"messages": [{"role": "user", "content": user}, {"role": "assistant", "content": "A cat."}], **more}


def uri(data, mime="image/png"):
    return f"data:{mime};base64,{b64(data)}"


def parts_of(conversation):
    assert isinstance(conversation, Conversation), conversation
    return [part if isinstance(part, str) else (part.kind, part.data) for part in conversation.messages[0].parts]


@pytest.mark.parametrize(
    ("record", "parts"),
    [
        # As Megatron-SWIFT's own example has it.
        (turns("<audio>What is being said?</audio>", audios=[b64(HELLO)]), [("audio", HELLO), "What is being said?"]),
        (turns("<audio></audio>\nWhat?", audio=b64(HELLO)), [("audio", HELLO), "What?"]),
        (turns("Compare <image>\n<image>\nnow", images=[b64(CAT), b64(DOG)]),
         ["Compare ", ("image", CAT), ("image", DOG), "now"]),
        (turns("<image>\nExplain <video>.", image=uri(CAT)), [("image", CAT), "Explain <video>."]),
        (turns([{"type": "image_url", "image_url": {"url": uri(CAT)}}, {"type": "text", "text": "What?"}]),
         [("image", CAT), "What?"]),
        (turns([{"type": "text", "text": "What?"},
                {"type": "input_audio", "input_audio": {"data": b64(HELLO), "format": "wav"}}]),
         ["What?", ("audio", HELLO)]),
        (turns([{"type": "audio", "audio": b64(HELLO)}, {"type": "audio", "audio_url": uri(BYE, "audio/wav")}]),
         [("audio", HELLO), ("audio", BYE)]),
        (turns([{"type": "image", "base64": b64(CAT)}, {"image": b64(DOG)}]), [("image", CAT), ("image", DOG)]),
        (turns([{"type": "image"}, {"type": "text", "text": "<image>What?"}], images=[{"bytes": CAT, "path": "a.png"},
                                                                                    {"bytes": DOG}]),
         [("image", CAT), ("image", DOG), "What?"]),
        (turns([{"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": b64(CAT)}},
                {"type": "text", "text": "What?"}]), [("image", CAT), "What?"]),
        ({"conversations": [{"from": "human", "value": "<image>\nWhat?"}, {"from": "gpt", "value": "A"}],
          "image": b64(CAT)}, [("image", CAT), "What?"]),
        ({**turns(""), "messages": json.dumps(turns("<image>\nWhat?")["messages"]), "images": [CAT]},
         [("image", CAT), "What?"]),
        (turns("The tag <image> is HTML."), ["The tag <image> is HTML."]),
        (turns("The tag <image> is HTML.", images=None), ["The tag <image> is HTML."]),
        (turns("<image>What?", image=b64(CAT), images=[]), [("image", CAT), "What?"]),
        (turns("What?", images=[], audios=[], videos=[]), ["What?"]),
    ],
)  # fmt: skip
def test_media_come_from_every_form_of_record(record, parts):
    parsed = READER.parse(record, "here")
    assert parts_of(parsed) == parts
    again = READER.parse(json.loads(json.dumps(parsed.as_record())), "here")
    assert again == parsed
    assert again.hash() == parsed.hash()


def test_paths_are_relative_to_the_file_of_the_record(tmp_path: Path):
    (tmp_path / "cats").mkdir()
    (tmp_path / "cats" / "a.png").write_bytes(CAT)
    record = turns("<image>What?", images=["cats/a.png"])
    assert parts_of(READER.parse(record, "here", str(tmp_path))) == [("image", CAT), "What?"]
    bad = READER.parse(record, "here")
    assert isinstance(bad, BadRecord)
    assert bad.detail == "`images[0]` (turn 1) is not in the record itself, as base64"


def test_paths_in_a_file_of_the_root_folder_are_relative_to_it(tmp_path: Path):
    (tmp_path / "a.png").write_bytes(CAT)
    record = json.dumps(turns("<image>What?", images=[f"{tmp_path}/a.png"[1:]])).encode()
    (parsed,) = SourceChunk("/chats.jsonl", "line", 1, [record], len(record), READER).parse()
    assert parts_of(parsed) == [("image", CAT), "What?"]


@pytest.mark.parametrize(
    ("record", "detail"),
    [
        (turns("<audio><audio>What?", audios=[b64(HELLO)]),
         "the turns have 2 <audio> placeholders, and the record has 1 for them"),
        (turns("What?", images=[b64(CAT)]), "the turns have 0 <image> placeholders, and the record has 1 for them"),
        (turns("<image>What?", images=[]), "the turns have 1 <image> placeholders, and the record has 0 for them"),
        (turns("<audio>What?", audios=[], images=[]),
         "the turns have 1 <audio> placeholders, and the record has 0 for them"),
        (turns([{"type": "image"}]), "the turns have 1 <image> placeholders, and the record has 0 for them"),
        (turns("<video>What?", videos=["a.mp4"]), "the record has `videos`, and videos cannot be trained on "
                                                  "(source.drop_media=true)"),
        (turns([{"type": "video", "video": "a.mp4"}]), "part 1 of turn 1 is a video, and only images and sounds can "
                                                       "be trained on"),
        (turns("<image>", images=["nothing.png"]), "`images[0]` (turn 1) {folder}/nothing.png cannot be read: No such "
                                                   "file or directory"),
        (turns("<audio><audio>", audios=[b64(HELLO), b64(CAT)]), "`audios[1]` (turn 1) is an image, not an audio"),
        (turns("<audio>", audio=b64(HELLO), audios=[b64(CAT)]), "the record has both `audio` and `audios`; leave one "
                                                               "of them out"),
        (turns("<image>", images=[b64(CAT[:-200])]), "`images[0]` (turn 1) is damaged: "),
        ({"messages": [{"role": "user", "content": "Draw."},
                       {"role": "assistant", "content": [{"type": "image", "image": b64(CAT)}]}]},
         "turn 2 (assistant) has an image, and only text that the assistant writes can be trained on"),
        (turns("What?", image_path="a.png"), "the record has `image_path`, which is media by its name"),
        ({"instruction": "<image>", "output": "A cat.", "images": [b64(CAT)]}, "the record has `images`; only text"),
        ({"prompt": [{"role": "user", "content": [{"type": "image"}]}], "images": [b64(CAT)],
          "completion": [{"role": "assistant", "content": "A cat."}]}, "the record has `images`; only text"),
    ],
)  # fmt: skip
def test_what_cannot_be_trained_is_named(record, detail, tmp_path):
    bad = READER.parse(record, "here", str(tmp_path))
    assert isinstance(bad, BadRecord), bad
    assert bad.reason is BadReason.MEDIA
    assert bad.detail.startswith(detail.replace("{folder}", str(tmp_path))), bad.detail


@pytest.mark.parametrize(
    ("part", "detail"),
    [
        ({"image": b64(CAT), "max_pixels": 9}, "part 1 of turn 1 has the field 'max_pixels'; to leave out: "
                                               "source.ignore_fields=[max_pixels]"),
        ({"image": b64(CAT), "text": "What?"}, "part 1 of turn 1 has the field 'text'; to leave out: "),
        ({"index": 1}, "part 1 of turn 1 has the index 1, and media are placed in the order of their list"),
    ],
)  # fmt: skip
def test_a_part_with_more_than_a_medium_is_refused_and_one_of_the_list_is_the_next(part, detail):
    rest = [{"type": "image", "index": 1, "text": None, "image": None}, {"type": "text", "text": "Which?"}]
    images = [b64(DOG)] if "image" in part else [b64(CAT), b64(DOG)]
    record = turns([{"type": "image", "index": 0}, *rest], images=[b64(CAT), b64(DOG)])
    assert parts_of(READER.parse(record, "here")) == [("image", CAT), ("image", DOG), "Which?"]
    bad = READER.parse(turns([{"type": "image", **part}, *rest], images=images), "here")
    assert isinstance(bad, BadRecord)
    assert bad.detail.startswith(detail)


def test_a_store_that_does_not_answer_is_no_bad_record(monkeypatch):
    pytest.importorskip("obstore")
    place = {"AWS_ENDPOINT_URL": "http://127.0.0.1:9", "AWS_ACCESS_KEY_ID": "a", "AWS_SECRET_ACCESS_KEY": "b"}
    for name, value in {**place, "HARNESS_STORAGE_TIMEOUT_S": "1"}.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(FormatError, match="object storage did not answer") as caught:
        READER.parse(turns("<image>What?", images=["s3://bucket/a.png"]), "here", "")
    assert caught.value.where == "s3://bucket/a.png"


def test_conversations_differ_by_their_media():
    one, other = (READER.parse(turns("<image>What?", images=[b64(data)]), "here") for data in (CAT, DOG))
    assert one.hash() != other.hash()


@pytest.fixture(scope="module")
def tokenizers(tmp_path_factory):
    made = {}
    for family in PLACEHOLDER:
        folder = save_media_model(tmp_path_factory.mktemp(family), family)
        made[family] = ChatTokenizer(TokenizerConfig(kind="huggingface", name=str(folder)))
    return made


CHATS = {
    "audio": {"messages": [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "<audio>What is said?"}, {"role": "assistant", "content": "Hello."},
        {"role": "user", "content": "And <audio> then <audio>?"}, {"role": "assistant", "content": "Bye."}],
        "audios": [b64(HELLO), b64(BYE), b64(HELLO)]},
    "image": {"messages": [
        {"role": "user", "content": "<image>\nWhat is this?"}, {"role": "assistant", "content": "A cat."},
        {"role": "user", "content": "<image>\nAnd this?"}, {"role": "assistant", "content": "A dog."}],
        "images": [b64(CAT), b64(DOG)]},
}  # fmt: skip


@pytest.mark.parametrize("family", PLACEHOLDER)
def test_tokens_are_those_of_the_template_with_each_placeholder_repeated(family, tokenizers):
    tokenizer = tokenizers[family]
    kind = "audio" if family in ("qwen2_audio", "qwen3_omni_moe") else "image"
    conversation = READER.parse(CHATS[kind], "here")
    (made,) = tokenizer.encode_each([conversation])[0]
    view = made.view
    counts = [tokenizer.media_rules.count_tokens(kind, measure(kind, part.data)) for part in conversation.media]
    # The oracle: the text of transformers' own rendering, each placeholder as often as its medium has tokens.
    messages = [turn.as_dict() for turn in conversation.messages]
    for turn in messages if family == "llava" else []:  # it takes no texts but parts
        if isinstance(turn["content"], str):
            turn["content"] = [{"type": "text", "text": turn["content"]}]
    rendered = tokenizer.hf.apply_chat_template(messages, tokenize=False)
    pieces = rendered.split(PLACEHOLDER[family])
    assert len(pieces) == len(counts) + 1
    expanded = pieces[0] + "".join(
        PLACEHOLDER[family] * count + piece for count, piece in zip(counts, pieces[1:], strict=True)
    )
    assert tokenizer.hf.encode(expanded, add_special_tokens=False) == view.input_ids.tolist()
    token = tokenizer.media_rules.tokens[kind]
    assert [(one.kind, one.data, one.tokens) for one in view.media] == [
        (kind, part.data, count) for part, count in zip(conversation.media, counts, strict=True)
    ]
    for one in view.media:
        assert (view.input_ids[one.start : one.start + one.tokens] == token).all()
    assert (view.input_ids == token).sum() == sum(counts)
    trained = view.input_ids[1:][view.loss_mask[:-1].astype(bool)]
    answers = [turn.text for turn in conversation.messages if turn.role == "assistant"]
    end = "</s>" if family == "llava" else "<|im_end|>"
    assert tokenizer.decode(trained) == "".join(answer + end for answer in answers)


def test_every_token_and_weights_leave_placeholders_untrained(tokenizers):
    for config in ({"mask": "all"}, {"train_on": "weighted"}):
        tokenizer = ChatTokenizer(TokenizerConfig(kind="huggingface", name=tokenizers["qwen2_audio"].name, **config))
        record = json.loads(json.dumps(CHATS["audio"]))
        if "train_on" in config:
            record["messages"][2]["weight"] = 0.5
        (made,) = tokenizer.encode_each([READER.parse(record, "here")])[0]
        mask, ids = made.view.loss_mask, made.view.input_ids
        is_placeholder = ids[1:] == tokenizer.media_rules.tokens["audio"]
        assert not mask[:-1][is_placeholder].any()
        values = set(mask.tolist())
        assert values == ({0, 1} if "mask" in config else {0, 50, 100})
        if "mask" in config:
            assert mask[:-1][~is_placeholder].all()


def test_a_text_that_spells_the_placeholder_is_refused(tokenizers):
    record = turns("<audio>What is <|AUDIO|>?", audios=[b64(HELLO)])
    bad = tokenizers["qwen2_audio"].encode_each([READER.parse(record, "here")])[0]
    assert isinstance(bad, BadRecord)
    assert bad.reason is BadReason.CONTROL_TOKEN
    allowing = TokenizerConfig(kind="huggingface", name=tokenizers["qwen2_audio"].name, control_tokens="allow")
    bad = ChatTokenizer(allowing).encode_each([READER.parse(record, "here")])[0]
    assert isinstance(bad, BadRecord)
    assert bad.detail == "the chat template writes 2 placeholders of media, and there are 1"


def test_media_that_the_model_does_not_take_are_refused(tokenizers):
    cases = [
        ("qwen2_audio", turns("<image>", images=[b64(CAT)]), "the image of turn 1 (user) is an image, and a "),
        ("qwen2_audio", turns("<audio>", audios=[b64(sound(480_001))]), "the audio of turn 1 (user) has 30.00 s, more"),
        ("qwen3_omni_moe", turns("<audio>", audios=[b64(sound(150))]), "the audio of turn 1 (user) is too short for"),
    ]  # fmt: skip
    for family, record, detail in cases:
        bad = tokenizers[family].encode_each([READER.parse(record, "here")])[0]
        assert isinstance(bad, BadRecord)
        assert bad.detail.startswith(detail)


def test_a_template_that_writes_no_placeholder_is_refused(tokenizers):
    template = tokenizers["qwen2_audio"].chat_template.replace("<|AUDIO|>", "")
    path = Path(tokenizers["qwen2_audio"].name) / "without.jinja"
    path.write_text(template)
    config = TokenizerConfig(kind="huggingface", name=tokenizers["qwen2_audio"].name, chat_template=str(path))
    bad = ChatTokenizer(config).encode_each([READER.parse(CHATS["audio"], "here")])[0]
    assert isinstance(bad, BadRecord)
    assert bad.detail == "the chat template writes 0 placeholders of media, and there are 3"


def test_each_sequence_of_a_conversation_has_the_media_up_to_its_turn(tokenizers):
    """Use a template that drops earlier reasoning, so that each turn has a sequence of its own."""
    own = Path(tokenizers["qwen3_omni_moe"].name)
    (own / "last.jinja").write_text(
        "{% for m in messages %}<|im_start|>{{ m.role }}\n"
        "{% if m.reasoning_content and loop.last %}<think>{{ m.reasoning_content }}</think>{% endif %}"
        "{% if m.content is string %}{{ m.content }}{% else %}{% for part in m.content %}"
        "{% if part.type == 'audio' %}<|audio_start|><|audio_pad|><|audio_end|>{% else %}{{ part.text }}{% endif %}"
        "{% endfor %}{% endif %}<|im_end|>\n{% endfor %}"
        "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    )
    config = TokenizerConfig(kind="huggingface", name=str(own), chat_template=str(own / "last.jinja"))
    record = json.loads(json.dumps(CHATS["audio"]))
    for number in (2, 4):
        record["messages"][number]["reasoning_content"] = "I heard that."
    made = ChatTokenizer(config).encode_each([READER.parse(record, "here")])[0]
    assert [[one.data for one in sequence.view.media] for sequence in made] == [[HELLO], [HELLO, BYE, HELLO]]
    for view in (sequence.view for sequence in made):
        assert Pack(view.input_ids, view.loss_mask, np.zeros(1, np.int32), view.media).problem() is None


@pytest.mark.parametrize(("num_written", "media"), [(1, None), (2, [[CAT, DOG]])])
def test_a_template_that_leaves_out_a_later_medium_is_refused(num_written, media, tokenizers):
    own = Path(tokenizers["qwen3_vl"].name)
    (own / "first.jinja").write_text(
        "{% set seen = namespace(n=0) %}{% for m in messages %}<|im_start|>{{ m.role }}\n"
        "{% if m.content is string %}{{ m.content }}{% else %}{% for part in m.content %}{% if part.type == 'image' %}"
        f"{{% set seen.n = seen.n + 1 %}}{{% if seen.n <= {num_written} %}}<|image_pad|>{{% endif %}}"
        "{% else %}{{ part.text }}{% endif %}{% endfor %}{% endif %}<|im_end|>\n{% endfor %}"
        "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    )
    config = TokenizerConfig(kind="huggingface", name=str(own), chat_template=str(own / "first.jinja"))
    (made,) = ChatTokenizer(config).encode_each([READER.parse(CHATS["image"], "here")])
    if media is None:
        assert isinstance(made, BadRecord), made
        assert made.detail == "the chat template writes 1 placeholders of media, and there are 2"
    else:
        assert [[one.data for one in sequence.view.media] for sequence in made] == media


@pytest.mark.parametrize("over_long", ["drop", "cut", "split"])
def test_an_over_long_conversation_with_media_is_left_out_whole(over_long, tokenizers):
    tokenizer, conversation = tokenizers["qwen2_audio"], READER.parse(CHATS["audio"], "here")
    made = tokenizer.encode_each([conversation])[0]
    fitted = fit_conversation(conversation, made, tokenizer, pack_size=24, over_long=over_long)
    assert fitted.pieces == ()
    assert fitted.reason == ("over_long" if over_long == "drop" else "over_long_media")
    assert fitted.num_lost > 0


def test_plain_chats_of_a_model_that_takes_media_are_trained_as_before(tokenizers):
    for family, tokenizer in tokenizers.items():
        (made,) = tokenizer.encode_each([READER.parse(turns("Hi"), "here")])[0]
        assert made.view.media == (), family
        assert "A cat." in tokenizer.decode(made.view.input_ids)


def write_chats(folder: Path, records) -> Path:
    path = folder / "chats.jsonl"
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return path


def test_shards_keep_media_and_damage_is_found(tmp_path, tokenizers):
    name = tokenizers["qwen2_audio"].name
    chats = write_chats(tmp_path, [turns("Hi"), CHATS["audio"], turns("Again"), turns("<audio>", audios=[b64(BYE)])])
    job = ShardJob(
        str(tmp_path / "shards"), TokenizerConfig(kind="huggingface", name=name), "", "", 4096, "drop", "skip"
    )
    shard = SourceShard(str(chats), 1, 0, chats.stat().st_size, reader=READER)
    receipt = do_shard(job, 0, shard)
    assert isinstance(receipt, Receipt), receipt
    assert (receipt.sequences, dict(receipt.counts.media_by_kind)) == (4, {"audio": 4})
    assert receipt.counts.audio_seconds == pytest.approx((2 * 9000 + 2 * 16000) / 16000)
    spool = Spool([(job.shard_folder(0), receipt.sequences, receipt.tokens)])
    expected = [tokenizers["qwen2_audio"].encode([READER.parse(json.loads(line), "here")])[0]
                for line in chats.read_text().splitlines()]  # fmt: skip
    pack = spool.pack(np.array([3, 0, 1]))
    assert pack.problem() is None
    for number, view in zip((3, 0, 1), pack.sequences(), strict=True):
        assert view.input_ids.tolist() == expected[number].input_ids.tolist()
        assert view.media == expected[number].media
    assert receipt.counts.media_tokens == sum(one.tokens for view in expected for one in view.media)
    again = do_shard(job, 0, shard)
    assert again.was_there
    path = job.shard_folder(0) / "media_data.bin"
    damaged = bytearray(path.read_bytes())
    damaged[100] ^= 1
    path.write_bytes(damaged)
    assert not do_shard(job, 0, shard).was_there


def test_a_table_of_datasets_with_bytes_is_read(tmp_path, tokenizers):
    rows = [{**turns("<image>\nWhat?"), "images": [{"bytes": CAT, "path": None}]}, {**turns("Hi"), "images": []}]
    image = pa.list_(pa.struct([("bytes", pa.binary()), ("path", pa.string())]))
    turn = pa.list_(pa.struct([("role", pa.string()), ("content", pa.string())]))
    table = pa.Table.from_pylist(rows, pa.schema([("messages", turn), ("images", image)]))
    pq.write_table(table, tmp_path / "chats.parquet")
    path = tmp_path / "chats.parquet"
    shard = SourceShard(str(path), 0, 0, path.stat().st_size, "row", reader=READER)
    first, second = (record for chunk in read_shard(shard) for record in chunk.parse())
    assert parts_of(first) == [("image", CAT), "What?"]
    assert parts_of(second) == ["Hi"]


def test_a_preparation_counts_media_and_records_its_rules(tmp_path, tokenizers, capsys):
    tokenizer = tokenizers["qwen3_omni_moe"]
    (tmp_path / "bye.wav").write_bytes(BYE)
    records = [CHATS["audio"], turns("Hi"), turns("<audio>", audios=["bye.wav"]), turns("<audio>", audios=["no.wav"])]
    path = write_chats(tmp_path, records)
    source = SourceConfig(path=str(path), on_bad="skip")
    settings = {"pack_size": 512, "validation_fraction": 0.0, "num_workers": 0}
    report = prepare(source, tokenizer.name, tmp_path / "data", **settings)
    assert (report.records, dict(report.bad), dict(report.media_by_kind)) == (4, {"media": 1}, {"audio": 4})
    assert "4 audio; 0.00 hours of audio; " in (tmp_path / "data" / "report.md").read_text()
    # A sample shows one placeholder of each sound.
    page = (tmp_path / "data" / "report.html").read_text()
    assert page.count("audio_pad") == 3
    assert page.count('<img src="data:image/svg+xml;base64,') == 3
    line = json.loads((tmp_path / "data" / "bad_records.jsonl").read_text())
    assert line["detail"].startswith("`audios[0]` (turn 1) ")
    assert line["detail"].endswith("no.wav cannot be read: No such file or directory")
    with closing(open_dataset(tmp_path / "data" / "train")) as reader:
        stored = [view for pack in reader for view in pack.sequences()]
        provenance = reader.manifest.provenance
    records[2]["audios"] = [b64(BYE)]
    expected = [tokenizer.encode([READER.parse(record, "here")])[0] for record in records[:3]]
    assert sorted((view.input_ids.tolist(), view.media) for view in stored) == sorted(
        (view.input_ids.tolist(), view.media) for view in expected
    )
    assert provenance.mask["media"] == tokenizer.media_rules.to_text()
    assert provenance.counts["kept_audio"] == 4
    saved = ChatTokenizer(TokenizerConfig(kind="huggingface", name=str(tmp_path / "data" / "tokenizer")))
    assert saved.media_rules == tokenizer.media_rules
    # Programs that generate with the model's export need its processor.
    kept = json.loads((tmp_path / "data" / "tokenizer" / "preprocessor_config.json").read_text())
    assert kept == json.loads((Path(tokenizer.name) / "preprocessor_config.json").read_text())
    with pytest.raises(PrepError, match=r"`audios\[0\]` \(turn 1\) .*no.wav cannot be read"):
        prepare(replace(source, on_bad="refuse"), tokenizer.name, tmp_path / "refused", **settings)
    # A file that was repaired is not among the settings.
    (tmp_path / "no.wav").write_bytes(HELLO)
    assert prepare(source, tokenizer.name, tmp_path / "data", **settings).reused
    assert "data.overwrite=true reads the files of media again" in capsys.readouterr().out
    again = prepare(source, tokenizer.name, tmp_path / "data", overwrite=True, **settings)
    assert (again.reused, again.bad, again.media_by_kind["audio"]) == (False, {}, 5)
    with closing(open_dataset(tmp_path / "data" / "train")) as reader:
        assert sum(len(pack.media) for pack in reader) == 5


def test_views_without_a_model_that_takes_media_are_refused(tmp_path):
    from harness.prep.tokenize import train_bpe

    train_bpe(["What is this? A cat."], tmp_path, vocab_size=300)
    bad = ChatTokenizer(TokenizerConfig(), str(tmp_path)).encode([READER.parse(CHATS["image"], "here")])[0]
    assert isinstance(bad, BadRecord)
    assert bad.reason is BadReason.MEDIA


def test_a_picture_of_a_medium_is_small_and_shows_it():
    import soundfile
    from PIL import Image

    drawn = draw_medium("image", picture(640, 480))
    with Image.open(io.BytesIO(base64.b64decode(drawn.removeprefix("data:image/png;base64,")))) as image:
        assert image.size == (128, 96)
    quiet, loud = np.zeros(8000, np.float32), np.full(8000, 0.5, np.float32)
    file = io.BytesIO()
    soundfile.write(file, np.concatenate([quiet, loud]), 16000, format="WAV")
    svg = base64.b64decode(draw_medium("audio", file.getvalue()).removeprefix("data:image/svg+xml;base64,")).decode()
    heights = [float(text) for text in re.findall(r"v([\d.]+)", svg)]
    assert (len(heights), set(heights[:40]), set(heights[40:])) == (80, {0.0}, {46.0})


# With source.drop_media the text of a record is trained alone; without it the record is refused by name.
PLAIN, DROPPING = RecordReader(), RecordReader(drop_media=True)


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
    refused = PLAIN.parse(record, "here")
    assert isinstance(refused, BadRecord)
    assert refused.reason is BadReason.MEDIA
    parsed = DROPPING.parse(record, "here")
    assert isinstance(parsed, Conversation), parsed
    assert (parsed.messages[0].text, parsed.dropped_media) == (text, placeholders)


@pytest.mark.parametrize("more", [{}, {"images": []}, {"images": None}, {"num_images": 0}])
def test_a_record_without_media_is_left_as_it_is(more):
    record = turns("The tag <image> is HTML.", **more)
    assert DROPPING.parse(record, "here") == PLAIN.parse(record, "here")
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
