"""Two processes that write to one place in a real S3 server: one at a time, also after pauses and outages."""

from __future__ import annotations

import json
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
from live_streams import wait_until, write_chats

from harness.errors import ConfigError, FormatError
from harness.formats import open_dataset, open_writer
from harness.prep import TokenizerConfig, prepare
from harness.records import Pack
from harness.storage import claims, open_folder
from harness.storage.claims import ClaimStore, Lease

from .conftest import OTHER, content
from .faulty_proxy import Fault

pytestmark = [pytest.mark.s3, pytest.mark.submission]

PACKS = [Pack([number, 2, 300], [1, 1, 0], [0]) for number in range(12)]


def take(store: ClaimStore, lease: Lease) -> None:
    """Put another owner into a lease between two renewals.

    A server may answer an unconditional write that meets a renewal as if it had been overwritten at once.
    """
    with lease._lock:
        store.put(lease._name, OTHER)


def writer(place: str, **settings: Any) -> Any:
    return open_writer(place, pack_size=8, packs_per_shard=4, **settings)


def test_a_writer_that_lost_its_lease_leaves_the_files_and_the_lease_of_the_next_one(store, place) -> None:
    # As a process that is paused for longer than a lease, in the middle of its second shard.
    with ExitStack() as stack:
        stack.enter_context(pytest.raises(FormatError, match="another process is writing here: process 7 on"))
        paused_writer = stack.enter_context(writer(place))
        for pack in PACKS[:6]:
            paused_writer.append(pack)
        lease = paused_writer._claim._marker._lease
        take(store, lease)
        names = ["shard_000000.parquet", "shard_000001.parquet", "_writing", "manifest.json"]
        for name in names:
            store.put(name, b"of the next writer")
        wait_until(lambda: lease._lost is not None)
        for pack in PACKS[6:]:
            paused_writer.append(pack)
    assert [content(store, name) for name in names] == [b"of the next writer"] * 4
    assert content(store, "_lease") == OTHER


def test_an_owner_without_its_store_stops_before_it_writes_more_and_goes_on_if_nobody_took_the_lease(
    proxy, store, monkeypatch
) -> None:
    monkeypatch.setattr(claims, "LEASE_S", 1.5)
    monkeypatch.setattr(claims, "_RENEW_S", 0.1)
    lease = Lease(store, "lease")
    lease.acquire()
    lease.check()
    proxy.faults += [Fault("status", method="PUT", path="lease", times=10**6, code=503)]
    wait_until(lambda: claims._now() >= lease._sure_until)
    with pytest.raises(FormatError, match="object storage"):
        lease.check()
    proxy.faults.clear()
    lease.check()
    lease.write(b"left")
    take(store, lease)
    wait_until(lambda: lease._lost is not None)
    with pytest.raises(FormatError, match="process 7 on elsewhere"):
        lease.check()
    lease.release(remove=True)
    assert content(store, "lease") == OTHER


def test_a_host_of_the_same_name_and_the_same_process_ids_is_another_one(store, monkeypatch) -> None:
    # A process id that no process of this machine has, on another boot: that of another machine, say.
    owner = {"token": "t", "pid": 1 << 30, "since": "then", "renewed": 0.0}
    name, boot, space = claims._host().split(" ")
    for host, is_free in ((f"{name} {boot} {space}", True), (f"{name} another-boot {space}", False)):
        store.put("lease", json.dumps({**owner, "host": host}).encode() + b"\nleft")
        lease = Lease(store, "lease")
        looks: list[float] = []

        def sleep(seconds: float, looks: list[float] = looks) -> None:
            looks.append(seconds)
            raise InterruptedError

        monkeypatch.setattr(claims.time, "sleep", sleep)
        if is_free:
            assert lease.acquire() == b"left"
            lease.release(remove=True)
        else:
            with pytest.raises(InterruptedError):
                lease.acquire()
        assert bool(looks) != is_free


def test_preparations_of_one_prefix_exclude_each_other_and_keep_what_another_has_finished(
    store: ClaimStore, place: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    chats = write_chats(tmp_path / "chats.jsonl", 60)

    def make(**settings: Any) -> Any:
        settings = {"pack_size": 128, "num_workers": 0, "progress": lambda *made: None} | settings
        return prepare(chats, TokenizerConfig(vocab_size=300), place, **settings)

    store.put("_lease", json.dumps({**json.loads(OTHER), "host": claims._host(), "pid": 1, "renewed": 9e9}).encode())
    monkeypatch.setattr(claims, "_was_renewed", lambda owner: True)
    with pytest.raises(FormatError, match="another process is writing here: process 1 on"):
        make()
    assert set(open_folder(place).names()) == set()
    store.put("_lease", b"{}\n")
    report = make(pack_size=256)
    assert "_preparing" not in open_folder(place).names()
    assert content(store, "_lease") == b"{}\n", "without an owner"
    # Prepared for the same place on another machine, at the same time: it has only to be uploaded.
    monkeypatch.setenv("HARNESS_CACHE", str(tmp_path / "another machine"))
    upload, finish = claims.Lease.acquire, []

    def finished_first(self: Lease, **settings: Any) -> bytes:
        if not finish:
            finish.append(True)
            make(overwrite=True)
        return upload(self, **settings)

    monkeypatch.setattr(claims.Lease, "acquire", finished_first)
    store.delete("report.json")
    store.put("_preparing", b"")
    with pytest.raises(ConfigError, match=r"data\.pack_size was 128 and is 256"):
        make(pack_size=256)
    assert open_dataset(f"{place}/train").fingerprint != report.splits["train"].fingerprint
    assert content(store, "_lease") == b"{}\n", "the refused one has given it up, and left the marker that it found"
    assert content(store, "_preparing") == b""
    make(pack_size=300, overwrite=True)
    assert "_preparing" not in open_folder(place).names()
    assert content(store, "_lease") == b"{}\n"
