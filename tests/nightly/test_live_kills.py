"""Runs on live chunks with a slow producer, damaged chunks, other layouts, a kill and a signal.

Kills of either side at any operation are in tests/unit/protocols and tests/kills.
"""

from __future__ import annotations

import re
import subprocess
import time
from pathlib import Path

import pytest
from live_streams import some_chats, some_packs, train, write_stream

from harness.errors import HarnessError
from harness.loader.live.folder import LiveFolder
from harness.prep.tokenize.bpe import train_bpe
from harness.train.digests import read_digests
from harness.train.metrics import read_metrics

from ..distributed.conftest import launcher, run_command
from ..integration.live_rank import SIZE
from ..integration.test_live_processes import Side, Stream, until

pytestmark = [pytest.mark.nightly, pytest.mark.timeout(2400)]
MODEL = (
    *("model.num_layers=4", "model.hidden_size=32", "model.ffn_hidden_size=64", "loader.global_batch_size=4"),
    *("schedule=as_packed", "schedule.max_tokens_per_rank=256", "trainer.device=cpu", "trainer.record_digests=true"),
    *("trainer.checkpoint_interval=4", "optimizer.decay_steps=100"),
)


@pytest.fixture
def stream(tmp_path: Path) -> Stream:
    (tmp_path / "out").mkdir()
    return Stream(tmp_path / "live", tmp_path / "out")


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tokenizer")
    train_bpe(["question alpha beta gamma delta 0123456789 "] * 20, folder, vocab_size=300)
    return folder


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


@pytest.mark.parametrize("fault", ["corrupted", "gap", "late"])
def test_a_fault_ends_all_ranks_together_with_its_name(stream: Stream, fault: str) -> None:
    write_stream(stream.folder, some_packs(40), [5] * 8, end=fault != "late")
    if fault == "corrupted":
        path = stream.folder / "chunk_00005.jsonl"
        path.write_bytes(path.read_bytes().replace(b"1", b"2", 1))
    if fault == "gap":
        for left in stream.folder.glob("chunk_00005*"):
            left.unlink()
    training = stream.ranks(4, timeout_s=3)
    with training:
        assert training.wait() == [2] * 4
    output = training.output()
    expected = {
        "corrupted": "rank 1: the chunk is damaged",
        "gap": r"data-parallel rank 1 waited \d+ s for chunk_00005",
        "late": r"waited \d+ s for chunk_000(08|09|10|11) of \S+; its producer was last seen",
    }
    assert re.search(expected[fault], output), output
    assert "Traceback" not in output


class Sft:
    """Runs of `recipes.sft` on a stream of conversations."""

    def __init__(self, stream: Stream, tokenizer: Path, folder: Path) -> None:
        self._stream, self._tokenizer = stream, tokenizer
        self.folder = folder

    def command(self, ranks: int, *overrides: str) -> list[str]:
        return [
            *launcher(ranks),
            *("harness.recipes.sft", "data=live", f"data.live.path={self._stream.folder}", "data.live.pack_size=128"),
            *("data.live.timeout_s=600", "data.live.open_packs=3", f"data.live.tokenizer.name={self._tokenizer}"),
            f"run_dir={self.folder}",
            *MODEL,
            *overrides,
        ]


@pytest.fixture
def sft(stream: Stream, tokenizer: Path, tmp_path: Path) -> Sft:
    return Sft(stream, tokenizer, tmp_path / "run")


@pytest.mark.parametrize(
    "layout",
    [
        ["parallel.tensor_parallel_size=2"],
        ["parallel.context_parallel_size=2"],
        ["parallel.pipeline_parallel_size=4"],
        ["parallel=pp2_vpp2"],
        ["parallel=tp2_pp2"],
    ],
    ids=lambda layout: layout[0].partition("=")[2],
)
def test_ranks_that_share_rows_train_the_same_ones(sft: Sft, stream: Stream, layout: list[str]) -> None:
    write_stream(stream.folder, some_chats(150), [50] * 3)
    code, output = run_command(sft.command(4, *layout))
    assert code == 0, output
    steps = read_digests(sft.folder)
    assert [step.disagreements for step in steps] == [[]] * len(steps)
    ids = sorted(one for step in steps for row in step.rows for one in row.sequences.tolist())
    assert len(ids) == len(set(ids)) == 150


def test_a_killed_run_resumes_on_other_ranks_and_trains_each_conversation_once(sft: Sft, stream: Stream) -> None:
    write_stream(stream.folder, some_chats(300), [30] * 4, end=False)
    first = Side([(["setsid", *sft.command(4, "trainer.steps=500")], {})], stream.out / "first.log")
    first.start()
    try:
        # Until it has trained what there is, and waits with checkpoints of steps that are not the last.
        until(lambda: _steps(sft.folder) >= 5, first)
        time.sleep(4)
    finally:
        subprocess.run(["kill", "-9", "--", f"-{first.running[0].pid}"], check=False)
        first.wait()
    marked = LiveFolder(stream.folder).look().completed
    write_stream(stream.folder, some_chats(300)[120:], [60] * 3)
    code, output = run_command(sft.command(2, "trainer.steps=500", "resume=true"))
    assert code == 0, output
    ids = sorted(one for step in read_digests(sft.folder) for row in step.rows for one in row.sequences.tolist())
    assert len(ids) == len(set(ids)) == 300
    contents = LiveFolder(stream.folder).look()
    assert set(marked) < set(contents.completed) == set(contents.chunks) == set(range(7))


def test_a_signal_ends_a_run_that_waits_for_data_with_a_checkpoint(sft: Sft, stream: Stream) -> None:
    write_stream(stream.folder, some_chats(100), [50] * 2, end=False)
    first = Side([(sft.command(1), {})], stream.out / "first.log")
    with first:
        until(lambda: "has waited" in first.output(), first)
        first.running[0].terminate()
        assert first.wait() == [75], first.output()
    steps = _steps(sft.folder)
    write_stream(stream.folder, some_chats(150)[100:], [50])
    code, output = run_command(sft.command(1, "resume=true"))
    assert code == 0, output
    assert _steps(sft.folder) > steps
    ids = sorted(one for step in read_digests(sft.folder) for row in step.rows for one in row.sequences.tolist())
    assert len(ids) == len(set(ids)) == 150


def _steps(folder: Path) -> int:
    try:
        return len(read_metrics(folder / "metrics.jsonl"))
    except (OSError, HarnessError):
        return 0
