"""When chunks are marked as completed, and what a run that marks them early may lose in a crash."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from live_streams import CAPACITY, some_packs, write_stream

from harness.errors import FormatError, LoaderError
from harness.loader import LiveConfig, LoaderState, RankLayout
from harness.loader.live.folder import LiveFolder
from harness.loader.live.rank import BatchPlan
from harness.megatron.data.live_feed import LiveFeed
from harness.schedule import SequenceCost

ROWS, SIZES = 24, [4] * 6


@pytest.fixture
def folder(tmp_path: Path) -> LiveFolder:
    write_stream(tmp_path / "live", some_packs(ROWS), SIZES)
    return LiveFolder(tmp_path / "live")


def feed(folder: LiveFolder, completed: str, state: LoaderState | None = None) -> LiveFeed:
    config = LiveConfig(path=folder.where, pack_size=128, timeout_s=60.0, completed=completed)
    plan = BatchPlan(RankLayout(), 4, CAPACITY, SequenceCost())
    return LiveFeed(config, plan, tokenizer=None, state=state, device=torch.device("cpu"))


def delete(folder: LiveFolder, *chunks: int) -> None:
    """Delete chunks as a producer does."""
    contents = folder.look()
    for chunk in chunks:
        for files in (contents.chunks, contents.ready, contents.completed):
            if chunk in files:
                folder.files.delete(files[chunk])


def rows_of(batch) -> list[int]:
    """Return chunk * 4 + row of each pack of a batch."""
    return sorted((int(id_) >> 40) * 4 + (int(id_) >> 18 & (1 << 22) - 1) for id_ in batch.pack_ids)


def test_a_chunk_is_marked_when_its_rows_are_in_batches_or_when_a_checkpoint_holds_them(job, folder) -> None:
    marked = {}
    for completed in ("read", "trained"):
        with feed(folder, completed) as live:
            steps = iter(live)
            batches = [next(steps), next(steps)]
            marked[completed] = sorted(folder.look().completed)
            live.trained(batches[-1].state)
            assert sorted(folder.look().completed) == [0, 1]
        folder.keep_again(range(len(SIZES)))
    assert marked == {"read": [0, 1], "trained": []}


def test_after_a_crash_a_run_that_marks_early_trains_what_is_left_and_says_what_is_lost(job, folder, capsys) -> None:
    with feed(folder, "read") as live:
        steps = iter(live)
        saved = next(steps).state
        next(steps), next(steps), next(steps)
    assert sorted(folder.look().completed) == [0, 1, 2, 3]
    delete(folder, 0, 1, 2)
    capsys.readouterr()
    with feed(folder, "read", saved) as live:
        # The chunk that is read again is not deleted meanwhile.
        assert sorted(folder.look().completed) == []
        batches = list(live)
    assert [row for batch in batches for row in rows_of(batch)] == list(range(12, 24))
    printed = capsys.readouterr().out
    assert "chunks deleted after the checkpoint: 2 (chunk_00001 to chunk_00002)" in printed
    assert "chunks deleted before all of their rows were trained: 2" in printed


def test_a_run_that_keeps_chunks_until_they_are_saved_refuses_a_gap(job, folder) -> None:
    with feed(folder, "trained") as live:
        saved = next(iter(live)).state
    delete(folder, 0, 1)
    with pytest.raises(LoaderError, match="chunk_00001 was deleted") as error, feed(folder, "trained", saved):
        pass
    assert "data.live.completed=read" in error.value.fix


def test_a_resume_without_a_crash_loses_nothing(job, folder, capsys) -> None:
    with feed(folder, "read") as live:
        steps = iter(live)
        first = [next(steps), next(steps)]
    delete(folder, 0, 1)
    with feed(folder, "read", first[-1].state) as live:
        rest = list(live)
    assert [row for batch in [*first, *rest] for row in rows_of(batch)] == list(range(ROWS))
    assert "deleted" not in capsys.readouterr().out


def test_the_log_names_rank_and_chunk(job, folder, capsys) -> None:
    with feed(folder, "trained") as live:
        list(live)
    lines = [line for line in capsys.readouterr().out.splitlines() if "Loaded" in line]
    assert lines == [f"Rank 0: Loaded chunk {chunk} (4 samples from chunk_0000{chunk}.jsonl)" for chunk in range(6)]


def test_a_store_that_does_not_answer_is_not_taken_for_another_run(job, monkeypatch) -> None:
    pytest.importorskip("boto3")
    for name, value in {"ENDPOINT_URL": "http://127.0.0.1:1", "ACCESS_KEY_ID": "a", "SECRET_ACCESS_KEY": "b"}.items():
        monkeypatch.setenv(f"AWS_{name}", value)
    monkeypatch.setenv("HARNESS_STORAGE_TIMEOUT_S", "1")
    plan = BatchPlan(RankLayout(), 4, CAPACITY, SequenceCost())
    config = LiveConfig(path="s3://bucket/live", pack_size=128)
    with pytest.raises(FormatError, match="object storage did not answer"):
        LiveFeed(config, plan, tokenizer=None, state=None, device=job.device)
