"""Live chunks under kills: either side, at any moment, and what is trained is what an undisturbed run trains."""

from __future__ import annotations

import random
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from live_streams import some_chats, some_packs, train, write_chats, write_stream
from small_packs import write_packs

from harness.errors import HarnessError
from harness.loader.live.folder import LiveFolder
from harness.prep.tokenize.bpe import train_bpe
from harness.train.digests import read_digests
from harness.train.metrics import read_metrics

from ..distributed.conftest import launcher, run_command, run_sft
from ..integration.live_rank import SIZE
from ..integration.test_live_processes import Side, Stream, stream, until

__all__ = ["stream"]

pytestmark = [pytest.mark.nightly, pytest.mark.timeout(2400)]
KILLS, ROWS_PER_CHUNK = 50, 9
MODEL = (
    *("model.num_layers=4", "model.hidden_size=32", "model.ffn_hidden_size=64", "loader.global_batch_size=4"),
    *("schedule=as_packed", "schedule.max_tokens_per_rank=256", "trainer.device=cpu", "trainer.record_digests=true"),
    *("trainer.checkpoint_interval=4", "optimizer.decay_steps=100"),
)


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tokenizer")
    train_bpe(["question alpha beta gamma delta 0123456789 "] * 20, folder, vocab_size=300)
    return folder


def kill_at_random(sides: list[Side], stream: Stream, draw: random.Random, *, kills: int = KILLS) -> int:
    """SIGKILL one side or both at so many moments, and start it again; gives how many came before the end."""
    made = 0
    while made < kills and not stream.is_done:
        # From the middle of starting up to well into a stretch of training.
        time.sleep(draw.choice([0.3, 1.5, 4.0]) * draw.random())
        if draw.random() < 0.7:  # at a time when something is trained
            before = len(stream.trained())
            until(lambda before=before: len(stream.trained()) != before or stream.is_done, *sides)
        if stream.is_done:
            break
        chosen = draw.choice([sides[:1], sides[1:], sides])
        for side in chosen:
            side.kill()
        made += 1
        for side in chosen:
            side.start()
    return made


def test_fifty_kills_change_nothing(stream: Stream, tmp_path: Path) -> None:
    rows = some_packs(2400)
    sizes = [min(ROWS_PER_CHUNK, len(rows) - start) for start in range(0, len(rows), ROWS_PER_CHUNK)]
    write_stream(tmp_path / "reference", rows, sizes)
    expected = train(tmp_path / "reference", dp_size=4, size=SIZE)
    source = write_packs(tmp_path / "source", rows, format="memmap", pack_size=64)

    options = (f"chunks.rows={ROWS_PER_CHUNK}", "chunks.max_waiting=4", "chunks.keep=2")
    producer, training = stream.producer(source, *options, kind="packs"), stream.ranks(4, interval=7, step_s=0.25)
    with producer, training:
        kills = kill_at_random([producer, training], stream, random.Random(4))
        assert training.wait() == [0] * 4, training.output()[-3000:]
        assert producer.wait() == [0], producer.output()[-3000:]
    assert kills == KILLS
    assert "Traceback" not in producer.output()
    assert [line["digests"] for line in stream.trained()] == expected.digests
    assert sorted(id for line in stream.trained() for id in line["ids"]) == expected.sequences
    ends = [LiveFolder(folder).end() for folder in (stream.folder, tmp_path / "reference")]
    assert (ends[0].rows, ends[0].chain) == (ends[1].rows, ends[1].chain)


def test_kills_with_another_number_of_ranks_after_each_repeat_and_lose_nothing(stream, tokenizer, tmp_path) -> None:
    draw = random.Random(0)

    class AnyRanks(Side):
        def start(self) -> None:
            self.commands = stream.ranks(
                draw.choice([1, 2, 4]), interval=5, step_s=0.2, tokenizer=str(tokenizer)
            ).commands
            super().start()

    source = write_chats(tmp_path / "source.jsonl", 1500)
    producer = stream.producer(source, f"chunks.rows={ROWS_PER_CHUNK}", "chunks.max_waiting=4", "chunks.keep=0")
    training = AnyRanks([], stream.out / "ranks.log")
    with producer, training:
        assert kill_at_random([producer, training], stream, draw, kills=20) == 20
        assert set(training.wait()) == {0}, training.output()[-3000:]
        assert producer.wait() == [0], producer.output()[-3000:]
    ids = [id for line in stream.trained() for id in line["ids"]]
    assert len(ids) == len(set(ids)) == 1500


def test_a_slow_producer_keeps_every_rank_waiting_together(stream: Stream, tmp_path: Path) -> None:
    """Chunks come every second, and one after longer than a collective may take; no rank times out."""
    rows = some_packs(48)
    write_stream(tmp_path / "reference", rows, [4] * 12)
    expected = train(tmp_path / "reference", dp_size=4, size=SIZE)
    # The collectives' time has to suffice for a busy machine to start all ranks.
    training = stream.ranks(4, collective_s=90)
    with training:
        for part in range(12):
            time.sleep(100 if part == 5 else 1)
            write_stream(stream.folder, rows[4 * part : 4 * part + 4], [4], end=part == 11)
        assert training.wait() == [0] * 4, training.output()
    assert [line["digests"] for line in stream.trained()] == expected.digests
    assert "has waited" in training.output()


def test_a_damaged_chunk_ends_all_ranks_together_with_its_name(stream: Stream) -> None:
    """Other faults end the ranks that are threads, in `tests/unit/loader`."""
    write_stream(stream.folder, some_packs(40), [5] * 8)
    path = stream.folder / "chunk_00005.jsonl"
    path.write_bytes(path.read_bytes().replace(b"1", b"2", 1))
    training = stream.ranks(4, timeout_s=3)
    with training:
        assert training.wait() == [2] * 4
    assert "rank 1: the chunk is damaged" in training.output()
    assert "Traceback" not in training.output()


def settings_of(live: Path, tokenizer: Path, run: Path) -> list[str]:
    """Return the settings of a run of `recipes.sft` on a stream of conversations."""
    data = ("data=live", f"data.live.path={live}", "data.live.pack_size=128", "data.live.timeout_s=600")
    more = ("data.live.open_packs=3", f"data.live.tokenizer.name={tokenizer}", f"run_dir={run}")
    return [*data, *more, *MODEL]


@pytest.fixture
def sft(stream: Stream, tokenizer: Path, tmp_path: Path) -> Callable[..., list[str]]:
    """sft(ranks, *overrides): the command of a run in the folder `run`."""
    settings = settings_of(stream.folder, tokenizer, tmp_path / "run")
    return lambda ranks, *overrides: [*launcher(ranks), "harness.recipes.sft", *settings, *overrides]


def test_ranks_that_share_rows_train_the_same_ones(tokenizer: Path, tmp_path: Path) -> None:
    layouts = [
        f"parallel.{name}_parallel_size={size}" for name, size in (("tensor", 2), ("context", 2), ("pipeline", 4))
    ]
    runs = []
    for number, layout in enumerate((*layouts, "parallel=pp2_vpp2", "parallel=tp2_pp2")):
        live, run = tmp_path / f"live-{number}", tmp_path / f"run-{number}"
        write_stream(live, some_chats(150), [50] * 3)
        runs.append(([*settings_of(live, tokenizer, run), layout], str(run), None))
    run_sft(4, tmp_path, runs)
    for settings, run, _ in runs:
        steps = read_digests(Path(run))
        assert [step.disagreements for step in steps] == [[]] * len(steps), settings[-1]
        ids = sorted(one for step in steps for row in step.rows for one in row.sequences.tolist())
        assert len(ids) == len(set(ids)) == 150, settings[-1]


def test_a_killed_run_resumes_on_other_ranks_and_trains_each_conversation_once(
    sft, stream: Stream, tmp_path: Path
) -> None:
    write_stream(stream.folder, some_chats(300), [30] * 4, end=False)
    first = Side([(["setsid", *sft(4, "trainer.steps=500")], {})], stream.out / "first.log")
    first.start()
    try:
        # Until it has trained what there is, and waits with checkpoints of steps that are not the last.
        until(lambda: _steps(tmp_path / "run") >= 5, first)
        time.sleep(4)
    finally:
        subprocess.run(["kill", "-9", "--", f"-{first.running[0].pid}"], check=False)
        first.wait()
    marked = LiveFolder(stream.folder).look().completed
    write_stream(stream.folder, some_chats(300)[120:], [60] * 3)
    code, output = run_command(sft(2, "trainer.steps=500", "resume=true"))
    assert code == 0, output
    ids = sorted(one for step in read_digests(tmp_path / "run") for row in step.rows for one in row.sequences.tolist())
    assert len(ids) == len(set(ids)) == 300
    contents = LiveFolder(stream.folder).look()
    assert set(marked) < set(contents.completed) == set(contents.chunks) == set(range(7))


def test_a_signal_ends_a_run_that_waits_for_data_with_a_checkpoint(sft, stream: Stream, tmp_path: Path) -> None:
    write_stream(stream.folder, some_chats(100), [50] * 2, end=False)
    first = Side([(sft(1), {})], stream.out / "first.log")
    with first:
        until(lambda: "has waited" in first.output(), first)
        first.running[0].terminate()
        assert first.wait() == [75], first.output()
    steps = _steps(tmp_path / "run")
    write_stream(stream.folder, some_chats(150)[100:], [50])
    code, output = run_command(sft(1, "resume=true"))
    assert code == 0, output
    assert _steps(tmp_path / "run") > steps
    ids = sorted(one for step in read_digests(tmp_path / "run") for row in step.rows for one in row.sequences.tolist())
    assert len(ids) == len(set(ids)) == 150


def _steps(folder: Path) -> int:
    try:
        return len(read_metrics(folder / "metrics.jsonl"))
    except (OSError, HarnessError):
        return 0
