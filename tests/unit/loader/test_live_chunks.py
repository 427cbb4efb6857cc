"""Live chunks are trained row by row, each once, by any number of ranks and over any stops."""

from __future__ import annotations

import json
import queue
import threading
import time
from collections import Counter
from pathlib import Path

import pytest
from live_streams import Trained, long_chats, some_chats, some_packs, train, write_stream

from harness.errors import FormatError, LoaderError
from harness.loader.live import LiveProducer
from harness.loader.live.position import positions_from_json
from harness.loader.live.rank import FolderReader, Offer
from harness.prep import ChatTokenizer, TokenizerConfig
from harness.prep.tokenize.bpe import train_bpe
from harness.printing import count_of

SIZES = [5, 1, 7, 3, 4, 2, 6, 3]


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> ChatTokenizer:
    folder = tmp_path_factory.mktemp("tokenizer")
    train_bpe(["question alpha beta gamma delta 0123456789 "] * 20, folder, vocab_size=300)
    return ChatTokenizer(TokenizerConfig(name=str(folder)))


@pytest.fixture(scope="module")
def packs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("packs")
    write_stream(folder, some_packs(sum(SIZES)), SIZES)
    return folder


@pytest.fixture(scope="module")
def chats(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("chats")
    write_stream(folder, some_chats(sum(SIZES)), SIZES)
    return folder


@pytest.fixture(scope="module")
def divided(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Conversations that are split into several sequences, of which some complete more than one pack."""
    folder = tmp_path_factory.mktemp("divided")
    write_stream(folder, long_chats(sum(SIZES)), SIZES)
    return folder


@pytest.mark.parametrize(("dp_size", "size"), [(1, 4), (2, 5), (3, 4), (4, 5)])
def test_every_pack_is_trained_once_the_uneven_last_ones_too(packs: Path, dp_size: int, size: int) -> None:
    expected = sorted(one.input_ids.tolist() for pack in some_packs(sum(SIZES)) for one in pack.sequences())
    trained = train(packs, dp_size=dp_size, size=size)
    assert sorted(one.input_ids.tolist() for one in trained.stored.values()) == expected
    assert len(trained.sequences) == len(expected)
    assert trained.log == [f"the stream ended: {sum(SIZES)} rows in {len(SIZES)} chunks"]
    for step in trained.steps:
        assert len({batch.num_microbatches for batch in step}) == 1
        assert len({tuple(batch.pack_ids.tolist()) for batch in step}) == 1
        assert (
            sum(row.num_tokens for batch in step for row in batch.rows if row.num_trained_tokens) <= step[0].num_tokens
        )


def test_rank_r_reads_the_chunks_of_its_number_and_the_log_names_them(packs: Path) -> None:
    assert sorted(train(packs, dp_size=3).loaded) == sorted(
        f"Rank {chunk % 3}: Loaded chunk {chunk} ({count_of(size, 'sample')} from chunk_0000{chunk}.jsonl)"
        for chunk, size in enumerate(SIZES)
    )
    for step in train(packs, dp_size=3, size=6).steps:
        for rank, batch in enumerate(step):
            assert {int(one) >> 40 for row in batch.sequence_ids for one in row} <= set(range(rank, 9, 3))


def test_sequences_of_one_conversation_are_trained_under_ids_of_their_own(
    divided: Path, tokenizer: ChatTokenizer
) -> None:
    trained = train(divided, dp_size=2, tokenizer=tokenizer, over_long="split", pack_size=64)
    rows = {id_ >> 18 for id_ in trained.sequences}
    assert len(rows) == sum(SIZES) < len(trained.sequences) == len(set(trained.sequences))
    assert trained.log == [f"the stream ended: {sum(SIZES)} rows in {len(SIZES)} chunks"]


def test_a_chunk_counts_as_trained_only_when_none_of_its_rows_waits_in_an_open_pack(
    chats: Path, tokenizer: ChatTokenizer
) -> None:
    trained = train(chats, dp_size=2, size=2, tokenizer=tokenizer)
    done: Counter[int] = Counter()
    for number, step in enumerate(trained.steps):
        done.update(int(one) >> 40 for batch in step for row in batch.sequence_ids for one in row)
        position = positions_from_json(trained.state(number).live, 1)[0]
        whole = [chunk for chunk, size in enumerate(SIZES) if done[chunk] == size]
        assert position.trained_chunks(range(len(SIZES))) == whole


def test_the_reported_steps_are_those_that_were_trained(tmp_path: Path) -> None:
    write_stream(tmp_path, some_packs(8), [8])
    trained = train(tmp_path, size=2)
    assert len(trained.steps) == 4
    assert trained.reported == [0, 1, 2, 3, 4]


def test_a_late_chunk_is_awaited_and_the_wait_is_logged(tmp_path: Path) -> None:
    rows = some_packs(8)
    write_stream(tmp_path, rows[:4], [4], end=False)
    later = threading.Timer(2.6, lambda: write_stream(tmp_path, rows[4:], [4]))
    later.start()
    trained = train(tmp_path, dp_size=2, size=2)
    assert len(trained.sequences) == sum(pack.num_sequences for pack in rows)
    waited, _, rest = trained.log[0].partition(" s for chunk_00001 of ")
    assert waited.startswith("data-parallel rank 1 has waited ")
    assert rest.startswith(f"{tmp_path}; its producer was last seen")


def test_a_wait_ends_with_an_error_on_all_ranks_that_names_rank_and_chunk(tmp_path: Path) -> None:
    write_stream(tmp_path, some_packs(4), [4], end=False)
    with pytest.raises(
        LoaderError, match=r"data-parallel rank 1 waited \d s for chunk_00001 of .*; its producer was las"
    ) as caught:
        train(tmp_path, dp_size=2, size=2, timeout_s=0.5)
    assert caught.value.where == str(tmp_path)


def test_a_gap_in_the_numbering_is_named(tmp_path: Path) -> None:
    write_stream(tmp_path, some_packs(6), [2, 2, 2])
    for left in tmp_path.glob("chunk_00001*"):
        left.unlink()
    with pytest.raises(LoaderError, match=r"chunk_00001.*the numbering has a gap: chunk_00002.jsonl exists"):
        train(tmp_path, dp_size=2, size=2, timeout_s=0.5)
    for left in tmp_path.glob("chunk_00002*"):
        left.unlink()
    with pytest.raises(LoaderError, match="the numbering has a gap: the stream ended after 3 chunks"):
        train(tmp_path, dp_size=2, size=2, timeout_s=0.5)


@pytest.mark.parametrize("suffix", [".jsonl", ".parquet"])
def test_a_changed_chunk_is_found_before_a_row_of_it_is_trained(tmp_path: Path, suffix: str) -> None:
    write_stream(tmp_path, some_packs(8), [4, 4], suffix=suffix)
    path = tmp_path / f"chunk_00001{suffix}"
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(bytes(data))
    trained = Trained()
    with pytest.raises(FormatError, match=r"the chunk is damaged: [\d,]+ bytes with hash") as caught:
        train(tmp_path, dp_size=1, size=2, into=trained)
    assert caught.value.where == str(path)
    assert {one >> 40 for one in trained.sequences} == {0}
    with pytest.raises(FormatError, match="data-parallel rank 1: the chunk is damaged"):
        train(tmp_path, dp_size=2, size=2)


def test_chunks_of_other_producers_need_no_record(tmp_path: Path, tokenizer: ChatTokenizer) -> None:
    for index in range(3):
        lines = [json.dumps(chat) for chat in some_chats(6, seed=index)]
        (tmp_path / f"chunk_{index:05d}.jsonl").write_text("\n".join(lines) + "\n")
    with pytest.raises(LoaderError, match=r"without a ready record; data.live.require_ready=false accepts"):
        train(tmp_path, tokenizer=tokenizer, timeout_s=0.2)
    # Their stream has no end: they are trained until the steps are done, or the wait for more is too long.
    trained = Trained()
    with pytest.raises(LoaderError, match=r"for chunk_00003 of .*; its producer was never seen"):
        train(tmp_path, size=1, tokenizer=tokenizer, timeout_s=2.0, require_ready=False, settle_s=0.2, into=trained)
    assert trained.steps
    with LiveProducer(tmp_path) as producer:
        producer.end()
    trained = train(tmp_path, dp_size=2, size=2, tokenizer=tokenizer, require_ready=False)
    assert len(trained.sequences) == 18


def test_a_chunk_that_is_written_in_place_is_not_read_before_it_is_whole(
    tmp_path: Path, tokenizer: ChatTokenizer
) -> None:
    def write_slowly() -> None:
        for index in range(2):
            with (tmp_path / f"chunk_{index:05d}.jsonl").open("w") as file:
                for number, chat in enumerate(some_chats(6, seed=index)):
                    file.write(json.dumps(chat) + "\n")
                    if number == 2:
                        file.flush()
                        time.sleep(0.5)
        with LiveProducer(tmp_path) as producer:
            producer.end()

    writing = threading.Thread(target=write_slowly)
    writing.start()
    trained = train(tmp_path, size=2, tokenizer=tokenizer, require_ready=False, settle_s=3600.0)
    writing.join()
    assert len(trained.sequences) == 12


@pytest.mark.parametrize("digits", ["0", "0000", "000000"])
@pytest.mark.parametrize("require_ready", [False, True])
def test_a_misnamed_chunk_is_pointed_at(tmp_path: Path, digits: str, require_ready: bool) -> None:
    (tmp_path / f"chunk_{digits}.jsonl").write_text("{}\n")
    with pytest.raises(LoaderError, match=rf"chunk_{digits}.jsonl exists, but names must have five digits"):
        train(tmp_path, timeout_s=0.2, require_ready=require_ready)


def test_a_run_does_not_resume_on_another_stream(packs: Path, tmp_path: Path) -> None:
    state = train(packs, steps=2).state()
    write_stream(tmp_path, some_packs(sum(SIZES), seed=1), SIZES)
    with pytest.raises(LoaderError, match=f"but this run was trained on {state.fingerprint}"):
        train(tmp_path, state=state)


def test_a_stream_that_lost_rows_is_not_accepted_as_whole(packs: Path) -> None:
    state = train(packs, steps=2).state()
    values = json.loads(state.live)
    short = {**values, "rows": values["rows"] - 1}
    with pytest.raises(LoaderError, match="the stream ended after 31 rows, but 30 were read"):
        train(packs, state=type(state)(**{**json.loads(state.to_json()), "live": json.dumps(short)}))


def test_a_stream_without_rows_is_an_error(tmp_path: Path) -> None:
    with LiveProducer(tmp_path) as producer:
        producer.end()
    with pytest.raises(LoaderError, match="the stream ended without any trainable row"):
        train(tmp_path, dp_size=2)


def test_bad_conversations_are_refused_or_left_out_and_counted(tmp_path: Path, tokenizer: ChatTokenizer) -> None:
    good = [json.dumps(chat) for chat in some_chats(3)]
    (tmp_path / "chunk_00000.jsonl").write_text("\n".join([good[0], "{}", "", *good[1:]]) + "\n")
    with LiveProducer(tmp_path) as producer:
        producer.end()
    with pytest.raises(FormatError, match=r"invalid conversation \(no_messages\)") as caught:
        train(tmp_path, tokenizer=tokenizer, require_ready=False)
    assert caught.value.where.endswith("chunk_00000.jsonl, line 2")
    trained = train(tmp_path, tokenizer=tokenizer, require_ready=False, on_bad="skip", size=1)
    assert len(trained.sequences) == 3
    assert trained.log == ["the stream ended: 5 rows in 1 chunk; left out: 1 no_messages"]
    long = {"messages": [{"role": "user", "content": "question"}, {"role": "assistant", "content": "alpha " * 200}]}
    write_stream(tmp_path / "long", [*some_chats(2), *[long] * 3], [5])
    trained = train(tmp_path / "long", tokenizer=tokenizer)
    assert trained.log == ["the stream ended: 5 rows in 1 chunk; left out: 3 over_long"]
    (tmp_path / "chunk_00000.jsonl").write_text(json.dumps({**some_chats(1)[0], "images": ["a.png"]}) + "\n")
    with pytest.raises(FormatError, match=r"invalid conversation \(media\)") as caught:
        train(tmp_path, tokenizer=tokenizer, require_ready=False)
    assert "`harness live produce` with source.drop_media=true" in caught.value.fix


def test_conversations_left_out_after_the_last_step_are_counted_and_logged(
    tmp_path: Path, tokenizer: ChatTokenizer
) -> None:
    (tmp_path / "chunk_00000.jsonl").write_text('{"messages": []}\n' * 3)
    (tmp_path / "chunk_00001.jsonl").write_text('{"messages": []}\n')
    with LiveProducer(tmp_path) as producer:
        producer.end()
    with pytest.raises(LoaderError, match="without any trainable row; left out: 4 no_messages"):
        train(tmp_path, tokenizer=tokenizer, require_ready=False, on_bad="skip", dp_size=2)


def test_the_next_step_is_read_while_one_is_trained(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_stream(tmp_path, some_packs(8), [4, 4])
    offers: queue.SimpleQueue[Offer] = queue.SimpleQueue()
    read = FolderReader.offer

    def offer(stream: FolderReader, share: int) -> Offer:
        made = read(stream, share)
        offers.put(made)
        return made

    monkeypatch.setattr(FolderReader, "offer", offer)

    def train_first_step(_rank: int, step: int) -> None:
        if step == 1:
            first, second = offers.get(timeout=60), offers.get(timeout=60)
            assert len(first.packs) == len(second.packs) == 4
            (tmp_path / "chunk_00001.jsonl").unlink()

    assert len(train(tmp_path, size=4, before_step=train_first_step).steps) == 2
