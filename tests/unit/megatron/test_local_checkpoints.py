"""Checkpoints on the nodes' own disks: copies between peers, and what a run resumes from."""

from __future__ import annotations

import errno
import os
import secrets
import shutil
import socket
import time
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

import pytest

from harness.errors import CheckpointError
from harness.loader import LoaderState
from harness.megatron.job import runtime
from harness.megatron.state import local as local_checkpoints
from harness.megatron.state.checkpoint import find_newest
from harness.megatron.state.local import LocalCopies, LocalStore
from harness.megatron.state.peers import Listener, PeerCopy, receiver_of
from harness.storage import StoredFile
from harness.storage.checksums import digest_files
from harness.train import Progress
from harness.train.checkpoints import write_run_file
from harness.train.local import (
    LocalRecord,
    begin_attempt,
    begin_local_attempt,
    copy_verified,
    may_resume,
    own_local_record,
    read_local_record,
    write_local_record,
)

TOKEN = secrets.token_bytes(32)


def test_every_rank_sends_to_a_rank_of_the_next_disk() -> None:
    disks = [[0, 1], [2, 3], [4]]
    assert [receiver_of(rank, disks) for rank in range(5)] == [2, 3, 4, 4, 0]
    assert receiver_of(0, [[0, 1]]) is None


class Peers:
    """Ranks 0 and 1 on one disk and rank 2 on another, each with a file of its own."""

    def __init__(self, folder: Path) -> None:
        self.folders = [folder / "a", folder / "a", folder / "b"]
        self.files: list[list[StoredFile]] = []
        for rank, path in enumerate(self.folders):
            path.mkdir(exist_ok=True)
            (path / f"__{rank}_0").write_bytes(os.urandom((5 << 20) + rank))
            self.files.append(digest_files(path, [f"__{rank}_0"]))
        self.listeners = [Listener("127.0.0.1") for _ in range(3)]
        self.copies: list[PeerCopy] = []

    def start(self, rank: int, *, timeout_s: float = 300) -> PeerCopy:
        copy = PeerCopy(
            rank,
            self.folders[rank],
            self.files,
            [2, 2, 0],
            listener=self.listeners[rank],
            places=[listener.place for listener in self.listeners],
            token=TOKEN,
            number=1,
            timeout_s=timeout_s,
        )
        self.copies.append(copy)
        return copy

    def problems(self) -> list[list[str]]:
        for copy in self.copies:
            while not copy.is_done:
                time.sleep(0.01)
        return [copy.problems for copy in self.copies]


@pytest.fixture
def peers(tmp_path: Path) -> Iterator[Peers]:
    made = Peers(tmp_path)
    yield made
    for copy in made.copies:
        copy.close()
    for listener in made.listeners:
        listener.close()


def test_both_disks_have_all_files_afterwards_and_strangers_are_ignored(peers: Peers) -> None:
    with socket.create_connection(peers.listeners[2].place) as stranger:
        stranger.sendall(bytes(100))
        for rank in range(3):
            peers.start(rank)
        assert peers.problems() == [[], [], []]
    names = ["__0_0", "__1_0", "__2_0"]
    for folder in peers.folders[1:]:
        assert digest_files(folder, names) == [file for files in peers.files for file in files]
        assert sorted(path.name for path in folder.iterdir()) == names


def test_other_bytes_than_were_written_are_no_copy_and_the_rank_is_named(peers: Peers) -> None:
    path = peers.folders[1] / "__1_0"
    path.write_bytes(bytes(path.stat().st_size))
    for rank in range(3):
        peers.start(rank)
    assert [bool(problems) for problems in peers.problems()] == [False, False, True]
    assert "rank 1 sent __1_0 with different content than it wrote" in peers.copies[2].problems[0]
    assert not (peers.folders[2] / "__1_0").exists()


def test_a_full_disk_and_a_file_cut_short_are_named_and_end_the_copy(peers: Peers) -> None:
    (peers.folders[2] / "__1_0.copying").symlink_to("/dev/full")
    (peers.folders[2] / "__2_0").write_bytes(b"short")
    for rank in range(3):
        peers.start(rank)
    problems = peers.problems()
    assert "the connection of a peer ended early" in problems[0][0]
    assert any("No space left on device" in problem for problem in problems[2])
    assert any("__2_0 has 5 bytes, expected 5,242,882" in problem for problem in problems[2])
    assert not list(peers.folders[0].glob("*.copying"))


def test_closing_ends_a_copy_whose_peers_never_come(peers: Peers) -> None:
    copy = peers.start(2, timeout_s=1000)
    time.sleep(0.2)  # so that it waits for a connection
    assert not copy.is_done
    copy.close()
    assert copy.is_done
    assert copy.problems


def test_a_receiver_without_memory_has_no_copy(peers: Peers, monkeypatch) -> None:
    monkeypatch.setattr("harness.megatron.state.peers._PIECE_BYTES", 1 << 60)
    for rank in range(3):
        peers.start(rank)
    assert any("MemoryError" in problem for problem in peers.problems()[2])


def test_300_connections_that_send_nothing_and_one_that_never_ends_its_greeting_do_not_hold_up_a_copy(
    peers: Peers,
) -> None:
    place = peers.listeners[2].place
    with ExitStack() as stack:
        silent = [stack.enter_context(socket.create_connection(place)) for _ in range(300)]
        silent[0].sendall(TOKEN[:16])
        for rank in range(3):
            peers.start(rank)
        assert peers.problems() == [[], [], []]
        # None of them was closed for its silence: the copies did not wait for that.
    assert (peers.folders[2] / "__0_0").exists()


def test_senders_that_never_connect_end_a_copy_however_many_others_do(peers: Peers) -> None:
    copy, place = peers.start(2, timeout_s=1), peers.listeners[2].place
    with ExitStack() as stack:
        while not copy.is_done:
            stack.enter_context(socket.create_connection(place))
            time.sleep(0.05)
    assert any("no answer for 1 s" in problem for problem in copy.problems)


@pytest.fixture
def job() -> Iterator[None]:
    with runtime.start("cpu"):
        yield


RUN, ATTEMPT = "a" * 32, "b" * 32


def checkpoint(folder: Path, step: int, *, run: str = RUN, attempt: str = ATTEMPT) -> Path:
    path = folder / f"step-{step:08d}"
    path.mkdir(parents=True)
    for name in ("__0_0", "__1_0"):
        (path / name).write_bytes(f"{name} of {step}".encode() * 100)
    facts = {"run": run, "attempt": attempt}
    write_run_file(path, Progress(step, LoaderState(1)), facts, [], ["__0_0", "__1_0"])
    return path


def test_a_local_checkpoint_is_used_where_it_is_the_newest_whole_one(tmp_path: Path, job: None) -> None:
    record = LocalRecord(str(tmp_path / "disk"), RUN, ATTEMPT, 9, ("gpu03", "gpu04"))
    local, shared = record.folder(record.root), tmp_path / "checkpoints"
    older, whole = checkpoint(shared, 4), checkpoint(local, 6)
    content = {path.name: path.read_bytes() for path in whole.iterdir()}
    lost, flipped, headless = (checkpoint(local, step) for step in (7, 8, 9))
    checkpoint(local, 50, attempt="c" * 32)
    checkpoint(local, 60, run="c" * 32)
    (lost / "__1_0").unlink()
    (flipped / "__0_0").write_bytes((flipped / "__0_0").read_bytes().swapcase())
    (headless / "run.json").write_text("{}")

    newest, passed_over = find_newest(shared, LocalCopies(record.root, record))
    assert newest == shared / "step-00000006"
    assert {path.name: path.read_bytes() for path in newest.iterdir()} == content
    no_manifest = "its checksums.json and run.json are damaged, or of another run, on every node that has them"
    assert [error.what for error in passed_over] == [
        f"the local checkpoint of step 60 is incomplete: {no_manifest}",
        f"the local checkpoint of step 50 is incomplete: {no_manifest}",
        f"the local checkpoint of step 9 (written on gpu03, gpu04) is incomplete: {no_manifest}",
        f"the local checkpoint of step 8 is incomplete: __0_0 on {socket.gethostname()} "
        + passed_over[3].what.partition(socket.gethostname() + " ")[2],
        "the local checkpoint of step 7 is incomplete: missing or truncated on all nodes: 1 of 2 files: __1_0",
    ]
    assert "has the hash " in passed_over[3].what
    assert sorted(path.name for path in shared.iterdir()) == [older.name, newest.name]

    shutil.rmtree(newest)
    shutil.rmtree(local)
    newest, passed_over = find_newest(shared, LocalCopies(record.root, record))
    assert newest == older
    assert [error.what for error in passed_over] == [
        "the local checkpoint of step 9 (written on gpu03, gpu04) is incomplete: no node of this job has any of its "
        "files"
    ]
    assert "trainer.local_checkpoints is not set" in find_newest(shared, LocalCopies("", record))[1][0].what
    checkpoint(shared, 9)
    assert find_newest(shared, LocalCopies(record.root, record)) == (shared / "step-00000009", [])


def test_a_local_checkpoint_that_finds_no_room_in_the_run_s_folder_leaves_nothing_there(
    tmp_path: Path, job: None, monkeypatch
) -> None:
    """Each attempt would otherwise take room from the next."""
    record = LocalRecord(str(tmp_path / "disk"), RUN, ATTEMPT, 6, ("gpu03",))
    checkpoint(record.folder(record.root), 6)
    shared = tmp_path / "checkpoints"

    for full in ("__1_0", "run.json"):

        def copy_and_fill(source: Path, target: Path, stored: StoredFile, full: str = full) -> None:
            copy_verified(source, target, stored)
            (target.parent / full).unlink(missing_ok=True)
            (target.parent / full).symlink_to("/dev/full")

        monkeypatch.setattr(local_checkpoints, "copy_verified", copy_and_fill)
        with pytest.raises(CheckpointError, match=r"cannot be copied into the run's folder: .*No space left on device"):
            find_newest(shared, LocalCopies(record.root, record))
        assert list(shared.iterdir()) == []


def test_an_attempt_that_trains_has_a_folder_of_its_own_and_one_without_local_checkpoints_has_none(tmp_path) -> None:
    one, two = begin_attempt(tmp_path), begin_attempt(tmp_path)
    assert (one.run, one.place) == (two.run, two.place)
    first = begin_local_attempt(tmp_path, "/scratch", one)
    assert not may_resume(tmp_path)
    second = begin_local_attempt(tmp_path, "/scratch", two)
    assert first is not None
    assert second == read_local_record(tmp_path) == own_local_record(tmp_path)
    text = (tmp_path / "local_checkpoints.json").read_text()
    assert second.folder("/x") == Path("/x") / f"run-{one.run}" / f"attempt-{two.attempt}" != first.folder("/x")
    assert begin_local_attempt(tmp_path, "", two) is None
    assert read_local_record(tmp_path) is None
    # The folder is removed in the end: it has to be one of a run, and not the disk or another one.
    texts = [text.replace(one.run, run) for run in ("", ".", "..", "a/b", "/home", f"../{one.run}", one.run[1:])]
    texts += [text.replace(*pair) for pair in (('"/scratch"', "5"), ("[]", "[1]"), (f'"{two.attempt}"', "true"))]
    for damaged in ("{}", *texts):
        (tmp_path / "local_checkpoints.json").write_text(damaged)
        with pytest.raises(CheckpointError, match="the record of local checkpoints cannot be read"):
            read_local_record(tmp_path)
    (tmp_path / "identity.json").write_text("[]")
    with pytest.raises(CheckpointError, match="the run's identity cannot be read"):
        begin_attempt(tmp_path)


@pytest.mark.parametrize("change", ["copied", "moved", "restored", "copied without its identity", "its files copied"])
def test_a_folder_that_is_another_one_begins_a_new_run_without_local_checkpoints(tmp_path: Path, change: str) -> None:
    run, other = tmp_path / "a", tmp_path / "b"
    run.mkdir()
    identity = begin_attempt(run)
    record = begin_local_attempt(run, "/scratch", identity)
    assert record is not None
    write_local_record(run, replace(record, step=4))
    assert may_resume(run)
    if change == "moved":
        run.rename(other)
    elif change == "restored":
        shutil.copytree(run, other)
        shutil.rmtree(run)
        other = other.rename(run)
    else:
        if change == "its files copied":  # into the folder of another run
            other.mkdir()
            begin_attempt(other)
        names = ["local_checkpoints.json", *(["identity.json"] if change == "copied" else [])]
        other.mkdir(exist_ok=True)
        for name in names:
            shutil.copy2(run / name, other / name)
    assert (own_local_record(other), may_resume(other)) == (None, False)
    assert begin_attempt(other).run != identity.run
    assert (own_local_record(other), may_resume(other)) == (None, False)
    if change not in ("moved", "restored"):  # the original is as it was
        assert own_local_record(run) == replace(record, step=4)
        assert begin_attempt(run).run == identity.run


def test_earlier_attempts_that_fill_a_disk_are_removed_before_it_is_tried(tmp_path: Path, job, monkeypatch) -> None:
    probe = LocalStore._probe

    def probe_for_room(store: LocalStore, folder: Path) -> None:
        if list(folder.parent.glob(f"{earlier.folder('').name}/step-*")):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(folder))
        probe(store, folder)

    monkeypatch.setattr(LocalStore, "_probe", probe_for_room)
    earlier = begin_local_attempt(tmp_path, str(tmp_path), begin_attempt(tmp_path))
    assert earlier is not None
    checkpoint(earlier.folder(earlier.root), 6)
    now = begin_attempt(tmp_path)
    store = LocalStore.open(str(tmp_path), tmp_path, now, log=print, timeout_s=1)
    assert store is not None
    assert [path.name for path in earlier.folder(str(tmp_path)).parent.iterdir()] == [f"attempt-{now.attempt}"]


def test_a_disk_that_cannot_be_used_is_a_warning_and_no_error(tmp_path: Path, job: None) -> None:
    (tmp_path / "file").touch()
    log: list[str] = []
    identity = begin_attempt(tmp_path)
    assert LocalStore.open(str(tmp_path / "file"), tmp_path, identity, log=log.append, timeout_s=1) is None
    assert "warning: no local checkpoints are written: " in log[0]
    assert "Not a directory" in log[0]
