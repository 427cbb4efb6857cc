"""Live chunks in a real S3 server: streams equal those in folders, and conditional requests keep writers apart."""

from __future__ import annotations

import json
import os
import signal
import threading
from pathlib import Path
from typing import Any

import pytest
from live_streams import some_packs, train, write_stream
from small_packs import write_packs
from typer.testing import CliRunner

from harness.cli.app import app
from harness.errors import ConfigError, FormatError
from harness.loader.live import LiveProducer
from harness.loader.live.folder import LiveFolder
from harness.storage import claims
from harness.storage.claims import ClaimStore, Lease

from ..integration.test_live_processes import Stream, until
from .conftest import OTHER, content

pytestmark = [pytest.mark.s3, pytest.mark.submission]

ROWS, SIZES = 30, [4, 5, 3, 6, 2, 4, 6]


def names(place: str) -> set[str]:
    return set(LiveFolder(place).files.names())


@pytest.mark.parametrize("suffix", [".jsonl", ".parquet"])
def test_a_stream_in_a_bucket_trains_as_the_one_in_a_folder_and_resumes(place, tmp_path, suffix) -> None:
    rows = some_packs(ROWS)
    write_stream(tmp_path / "live", rows, SIZES, suffix=suffix)
    write_stream(place, rows, SIZES, suffix=suffix)
    assert names(place) == {path.name for path in (tmp_path / "live").iterdir()}
    expected = train(tmp_path / "live", dp_size=2, size=4)
    remote = train([place], dp_size=2, size=4)
    assert remote.digests == expected.digests
    assert remote.loaded == expected.loaded
    # The stream has a name of its own, so the position is one of the bucket's.
    begun = train([place], dp_size=2, size=4, steps=2)
    rest = train([place], dp_size=1, size=4, state=begun.state())
    assert sorted(begun.sequences + rest.sequences) == expected.sequences


def test_ranks_wait_for_chunks_and_producers_for_room(place: str) -> None:
    rows = some_packs(ROWS)
    folder = LiveFolder(place)

    def produce() -> None:
        with LiveProducer(place, kind="packs", rows_per_chunk=3, max_waiting=2, keep=1) as producer:
            for row in rows:
                producer.add(row)
            producer.end()

    def mark(_rank: int, step: int) -> None:
        folder.complete(range(step - 1))

    producing = threading.Thread(target=produce)
    producing.start()
    trained = train([place], size=3, before_step=mark)
    producing.join()
    assert [len(step[0].pack_ids) for step in trained.steps] == [3] * 10
    assert len(folder.look().chunks) < 5, "completed chunks were deleted"
    status = json.loads(CliRunner().invoke(app, ["live", "status", place, "--json"]).output)
    assert (status["producer"], status["chunks"], status["rows"], status["ended"]) == ("ended", 10, ROWS, True)


def test_a_second_producer_is_refused_and_one_that_was_killed_is_taken_over(place: str, tmp_path: Path) -> None:
    rows = some_packs(ROWS)
    with LiveProducer(place, kind="packs") as producer:
        with pytest.raises(FormatError, match=f"another process is writing here: process {os.getpid()} on"):
            LiveProducer(place, kind="packs")
        producer.add(rows[0])
        producer.flush()
    child = os.fork()
    if child == 0:
        killed = LiveProducer(place, kind="packs")
        for row in rows[1:4]:
            killed.add(row)
        killed._folder.write_record = lambda name, record: os.kill(os.getpid(), signal.SIGKILL)
        killed.flush()
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGKILL
    assert {"chunk_00001.jsonl"} <= names(place)
    with LiveProducer(place, kind="packs") as producer:
        assert "chunk_00001.jsonl" not in names(place), "a chunk without a record comes again"
        assert producer.num_rows == 1
        for row in rows[1:]:
            producer.add(row)
        producer.end()
    write_stream(tmp_path / "live", rows, [1, 29])
    assert train([place]).digests == train(tmp_path / "live").digests


def test_a_producer_that_lost_its_lease_writes_nothing_more(store: ClaimStore, place: str) -> None:
    rows = some_packs(8)
    producer = LiveProducer(place, kind="packs")
    producer.add(rows[0])
    # As after a pause of the whole machine, longer than a lease.
    store.put("_producer", OTHER + b"{}")
    with pytest.raises(FormatError, match="another process is writing here: process 7 on elsewhere"):
        producer.flush()
    producer.close()
    assert names(place) == {"_producer"}
    assert content(store, "_producer") == OTHER + b"{}"
    # Whoever takes over keeps what another has made.
    store.delete("_producer")
    stale = LiveProducer(place, kind="packs")
    stale.add(rows[0])
    store.put("chunk_00000.jsonl", b"of another", only_if="")
    with pytest.raises(FormatError, match="already exists"):
        stale.flush()
    stale.close()
    assert content(store, "chunk_00000.jsonl") == b"of another"


def test_a_lease_of_a_dead_process_whose_number_another_one_has_is_watched_and_taken(store, monkeypatch) -> None:
    lease = Lease(store, "lease")
    lease.acquire()
    owner = json.loads(content(store, "lease").partition(b"\n")[0])
    lease.release(remove=True)
    store.put("lease", json.dumps(owner).encode() + b"\nleft")
    with pytest.raises(FormatError, match=f"another process is writing here: process {os.getpid()} on "):
        Lease(store, "lease").acquire()
    monkeypatch.setattr(claims, "LEASE_S", 1.0)
    store.put("lease", json.dumps({**owner, "renewed": 1.0}).encode() + b"\nleft")
    again = Lease(store, "lease")
    assert again.acquire() == b"left"
    again.release(remove=True)


def test_other_stores_and_wrong_secrets_are_named(place: str, monkeypatch: Any) -> None:
    with pytest.raises(ConfigError, match="msc:// does not support conditional requests"):
        LiveFolder("msc://profile/live")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "another-secret-value")
    with pytest.raises(FormatError, match="the secret key, or this machine's clock, is wrong") as refused:
        LiveFolder(place).look()
    assert "another-secret-value" not in str(refused.value)


@pytest.mark.nightly
def test_both_sides_in_a_bucket_are_killed_and_every_row_is_trained_once(place: str, tmp_path: Path) -> None:
    rows = some_packs(60)
    write_packs(tmp_path / "source", rows, format="memmap", pack_size=64)
    (tmp_path / "out").mkdir()
    aws = {name: value for name, value in os.environ.items() if name.startswith(("AWS_", "HARNESS_"))}
    stream = Stream(place, tmp_path / "out", variables=aws)
    options = ("chunks.rows=5", "chunks.max_waiting=2", "chunks.keep=1")
    producer = stream.producer(tmp_path / "source", *options, kind="packs")
    with producer, stream.ranks(1, step_s=0.05) as training:
        until(lambda: len(stream.trained()) >= 4, producer, training)
        for side in (producer, training):
            side.kill()
        for side in (producer, training):
            side.start()
        assert (training.wait(), producer.wait()) == ([0], [0]), training.output() + producer.output()
    trained = [one for step in stream.trained() for one in step["ids"]]
    assert len(trained) == len(set(trained)) == sum(pack.num_sequences for pack in rows)
