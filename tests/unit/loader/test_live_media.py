"""Live chunks with sounds in base64 are written as they came, and trained by the ranks that read them."""

from __future__ import annotations

import base64
import json
import tracemalloc
from collections import Counter
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import xxhash
from live_streams import some_packs, train

from harness.errors import FormatError, PrepError
from harness.loader.live import LiveProducer
from harness.loader.live.produce import Item, produce_chunks, read_conversations
from harness.prep import ChatTokenizer, TokenizerConfig
from harness.prep.chat import RecordReader
from harness.prep.media import MediaLimits
from harness.records import Medium, Pack
from tests.samples.media_models import save_media_model, sound

SOUNDS = [sound(3000 + 800 * number, seed=number) for number in range(9)]
READER = RecordReader(media=MediaLimits())


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> ChatTokenizer:
    folder = save_media_model(tmp_path_factory.mktemp("model"), "qwen3_omni_moe", mel=8)
    return ChatTokenizer(TokenizerConfig(kind="huggingface", name=str(folder)))


def seed_records() -> list[dict[str, Any]]:
    """Return records as Megatron-SWIFT's own example has them, and one of text alone."""
    chats: list[dict[str, Any]] = [
        {
            "messages": [
                {"role": "user", "content": "<audio>What is being said?</audio>"},
                {"role": "assistant", "content": f"Number {number}."},
            ],
            "audios": [base64.b64encode(data).decode()],
        }
        for number, data in enumerate(SOUNDS)
    ]
    return [*chats, {"messages": [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello."}]}]


def write(folder: Path, suffix: str = ".jsonl", rows_per_chunk: int = 2) -> list[bytes]:
    lines = [json.dumps(record).encode() for record in seed_records()]
    items = [Item(line, f"line {number}", reader=READER) for number, line in enumerate(lines)]
    with LiveProducer(folder, suffix=suffix, rows_per_chunk=rows_per_chunk) as producer:
        produce_chunks(producer, items)
        producer.end()
    return lines


def trained_media(folder: Path, tokenizer: ChatTokenizer, dp_size: int, **options: Any) -> Counter[int]:
    """Return how often each sound was trained, after checking its places and features."""
    assert tokenizer.media_rules is not None
    of_digest = {xxhash.xxh3_64_intdigest(data): data for data in SOUNDS}
    found: Counter[int] = Counter()
    for step in train(folder, dp_size=dp_size, size=4, tokenizer=tokenizer, **options).steps:
        for batch in step:
            for row in batch.rows:
                if row.media is None:
                    continue
                media = row.media
                for at, digest in enumerate(media.digests.tolist()):
                    first = int(row.cu_seqlens_padded[media.sequences[at]] + media.starts[at])
                    tokens = row.tokens[first : first + media.tokens[at]]
                    assert (tokens == tokenizer.media_rules.tokens["audio"]).all()
                    assert not row.loss_mask[first - 1 : first + len(tokens) - 1].any()
                    expected = tokenizer.media_rules.features([Medium("audio", 0, 1, of_digest[digest])])
                    for name, values in expected.items():
                        own = media.arrays[name][at]
                        assert np.array_equal(own[..., : values.shape[-1]], values[0])
                    found[digest] += 1
    return found


@pytest.mark.parametrize("suffix", [".jsonl", ".parquet"])
@pytest.mark.parametrize("dp_size", [1, 2])
def test_every_sound_is_trained_once_in_its_place(
    tmp_path: Path, tokenizer: ChatTokenizer, suffix: str, dp_size: int
) -> None:
    lines = write(tmp_path, suffix)
    if suffix == ".jsonl":
        stored = b"".join(path.read_bytes() for path in sorted(tmp_path.glob("chunk_*.jsonl")))
        assert stored.splitlines() == lines
    assert trained_media(tmp_path, tokenizer, dp_size) == dict.fromkeys(map(xxhash.xxh3_64_intdigest, SOUNDS), 1)


@pytest.mark.parametrize("window", [None, 5])
@pytest.mark.parametrize("schedule", ["dp_balanced", "cost_balanced"])
def test_a_sound_is_trained_where_its_sequence_is_placed(
    tmp_path: Path, tokenizer: ChatTokenizer, schedule: str, window: int | None
) -> None:
    write(tmp_path)
    trained = trained_media(tmp_path, tokenizer, 3, schedule=schedule, window=window)
    assert trained == dict.fromkeys(map(xxhash.xxh3_64_intdigest, SOUNDS), 1)


@pytest.mark.parametrize(("limit", "rows"), [(1, 1), (len(SOUNDS[0]) + len(SOUNDS[1]) - 1, 2)])
def test_large_media_are_tokenized_a_few_rows_at_a_time(
    tmp_path: Path, tokenizer: ChatTokenizer, monkeypatch: pytest.MonkeyPatch, limit: int, rows: int
) -> None:
    from harness.loader.live import rank

    write(tmp_path, rows_per_chunk=5)
    whole = trained_media(tmp_path, tokenizer, 1)
    sizes = []
    encode = ChatTokenizer.encode_each
    monkeypatch.setattr(rank, "_BLOCK_BYTES", limit)
    monkeypatch.setattr(
        ChatTokenizer, "encode_each", lambda self, parsed: sizes.append(len(parsed)) or encode(self, parsed)
    )
    assert trained_media(tmp_path, tokenizer, 1) == whole
    assert max(sizes) == rows


class _Inline(Future):
    """A pool that reads at once, so that a test counts the same bytes each time."""

    def __init__(self, **_: Any) -> None:
        super().__init__()

    def submit(self, function: Any) -> Future:
        done: Future = Future()
        done.set_result(function())
        return done

    def shutdown(self) -> None:
        pass


@pytest.mark.submission
@pytest.mark.parametrize("suffix", [".jsonl", ".parquet"])
@pytest.mark.parametrize(("schedule", "windows"), [("as_packed", 2), ("cost_balanced", 3)])
def test_a_rank_holds_the_media_of_its_steps_and_not_those_of_its_stream(
    tmp_path: Path, tokenizer: ChatTokenizer, monkeypatch: pytest.MonkeyPatch, suffix: str, schedule: str, windows: int
) -> None:
    """Bytes that Python and numpy hold at most: of a step that is read and of one that is made or exchanged."""
    from harness.loader.live import consumer, rank
    from harness.prep.media import MediaRules
    from harness.prep.sources import tables

    size, total, data = 24, 144, base64.b64encode(large := sound(100_000, rate=20_000)).decode()
    monkeypatch.setattr(tables, "_CHUNK_BYTES", 2 * len(large))
    monkeypatch.setattr(rank, "_BLOCK_BYTES", 2 * len(large))
    monkeypatch.setattr(MediaRules, "features", lambda self, media: {"none": np.zeros((len(media), 1))})
    monkeypatch.setattr(consumer, "ThreadPoolExecutor", _Inline)
    with LiveProducer(tmp_path, suffix=suffix, max_waiting=total) as written:
        for record in [{**seed_records()[0], "audios": [data]}] * total:
            written.add(record)
        written.end()
    assert written.num_chunks == 1
    now: list[float] = []

    def count(*_: int) -> None:
        now.append(tracemalloc.get_traced_memory()[0] / len(large))

    tracemalloc.start()
    try:
        train(tmp_path, size=size, tokenizer=tokenizer, schedule=schedule, open_packs=1, before_step=count)
        most = tracemalloc.get_traced_memory()[1] / len(large)
    finally:
        tracemalloc.stop()
    # Beside them an open pack, a block, and what reading one more record takes, mostly as base64.
    assert (most < windows * size + 18, max(now) < size + 12) == (True, True), (most, now)


def test_large_media_are_written_as_tables_that_ranks_read(tmp_path: Path, tokenizer: ChatTokenizer) -> None:
    data = base64.b64encode(sound(900_000, rate=192_000)).decode()
    with LiveProducer(tmp_path, suffix=".parquet") as written:
        for _ in range(16):  # more than a page of a dictionary may have
            written.add({**seed_records()[0], "audios": [data]})
        written.end()
    steps = train(tmp_path, size=8, tokenizer=tokenizer, open_packs=1).steps
    assert sum(batch.num_sequences for step in steps for batch in step) == 16


def test_a_table_of_sounds_is_written_as_base64(tmp_path: Path, tokenizer: ChatTokenizer) -> None:
    rows = [{**record, "audios": [{"bytes": data}]} for record, data in zip(seed_records(), SOUNDS, strict=False)]
    turn = pa.list_(pa.struct([("role", pa.string()), ("content", pa.string())]))
    audio = pa.list_(pa.struct([("bytes", pa.binary())]))
    pq.write_table(
        pa.Table.from_pylist(rows, pa.schema([("messages", turn), ("audios", audio)])), tmp_path / "a.parquet"
    )
    with LiveProducer(tmp_path / "live", rows_per_chunk=4) as producer:
        produce_chunks(producer, read_conversations(str(tmp_path / "a.parquet"), READER))
        producer.end()
    assert trained_media(tmp_path / "live", tokenizer, 1).total() == len(SOUNDS)


def test_what_ranks_cannot_read_is_refused_when_it_is_added(tmp_path: Path) -> None:
    record = {**seed_records()[0], "audios": ["a.wav"]}
    (tmp_path / "a.wav").write_bytes(SOUNDS[0])
    with LiveProducer(tmp_path / "live") as producer:
        with pytest.raises(PrepError, match=r"`audios\[0\]` \(turn 1\) is not in the record itself, as base64"):
            produce_chunks(producer, [Item(json.dumps(record).encode(), "line 1", reader=READER)])
        with pytest.raises(FormatError, match="is not in the record itself"):
            producer.add(record)
    pack = some_packs(1)[0]
    with LiveProducer(tmp_path / "packs", kind="packs") as producer:
        media = (Medium("audio", 1, 1, SOUNDS[0]),)
        mask = np.zeros_like(pack.loss_mask)
        with pytest.raises(FormatError, match="packs with media cannot be live rows"):
            producer.add(Pack(pack.input_ids, mask, pack.seq_start_id, media))


def test_a_model_of_text_refuses_chunks_with_media_by_name(tmp_path: Path, tokenizer: ChatTokenizer) -> None:
    from harness.prep.tokenize import train_bpe

    write(tmp_path / "live")
    train_bpe(["What is being said? Number 0."], tmp_path / "text", vocab_size=300)
    text = ChatTokenizer(TokenizerConfig(name=str(tmp_path / "text")))
    with pytest.raises(FormatError, match=r"invalid conversation \(media\): the record has `audios`; only text"):
        train(tmp_path / "live", tokenizer=text)
