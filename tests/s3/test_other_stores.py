"""Writers, readers and leases over the stores of `obstore` other than S3: one in memory, and Azure's emulator."""

from __future__ import annotations

import shutil
import socket
import subprocess
import threading
from collections.abc import Iterator
from email.utils import formatdate
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, ClassVar

import pyarrow.fs as pa_fs
import pytest
from live_streams import some_packs, train, wait_until, write_stream
from obstore.store import MemoryStore

from harness.errors import FormatError
from harness.formats import open_dataset, open_writer, verify_dataset
from harness.storage import ObjectPath, bucket, claims, open_folder
from harness.storage.bucket import list_below
from harness.storage.claims import ClaimStore, Lease
from harness.storage.inputs import list_objects

pytestmark = pytest.mark.submission

# Of the emulator, for everybody.
ACCOUNT = "devstoreaccount1"
KEY = "Eby8vdM02xNOcqFlqUwJPLlmEtlCDXJ1OUzFT50uSRZ6IFsuFq2UVErCz4I6tq/K1SZFPTOtr/KBHBeksoGMGw=="


@pytest.fixture(scope="session")
def emulator(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    program = shutil.which("azurite-blob")
    if program is None:
        pytest.skip("no azurite-blob: npm install --global azurite")
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{one.getsockname()[1]}"
    folder = str(tmp_path_factory.mktemp("azurite"))
    command = [program, "--silent", "--skipApiVersionCheck", "--disableTelemetry", "--location", folder]
    server = subprocess.Popen([*command, "--blobHost", "127.0.0.1", "--blobPort", address.rpartition(":")[2]])
    try:
        wait_until(lambda: server.poll() is not None or listens(address))
        local = {"blob_storage_authority": address, "dfs_storage_authority": address}
        schemes = {"blob_storage_scheme": "http", "dfs_storage_scheme": "http"}
        pa_fs.AzureFileSystem(ACCOUNT, account_key=KEY, **local, **schemes).create_dir("box")
        yield address
    finally:
        server.kill()
        server.wait()


def listens(address: str) -> bool:
    host, port = address.split(":")
    try:
        socket.create_connection((host, int(port)), timeout=1).close()
    except OSError:
        return False
    return True


@pytest.fixture(params=["gs://bucket", "az://box@account", pytest.param("abfs://box", marks=pytest.mark.s3)])
def place(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> str:
    monkeypatch.setenv("HARNESS_CACHE", str(tmp_path / "cache"))
    if request.param == "abfs://box":
        monkeypatch.setenv("AZURE_STORAGE_ACCOUNT", ACCOUNT)
        monkeypatch.setenv("AZURE_STORAGE_KEY", KEY)
        monkeypatch.setenv("AZURE_STORAGE_ENDPOINT", f"http://{request.getfixturevalue('emulator')}/{ACCOUNT}")
    else:
        store = MemoryStore()
        for module in (bucket, claims):
            monkeypatch.setattr(module, "connect", lambda place: store)
    return f"{request.param}/{tmp_path.name}"


@pytest.mark.parametrize("format", ["parquet", "memmap"])
def test_datasets_are_written_by_one_at_a_time_and_read(place: str, format: str) -> None:
    packs = some_packs(20)
    with open_writer(place, format=format, pack_size=64, packs_per_shard=8) as writer:
        writer.append(packs[0])
        with pytest.raises(FormatError, match="another process is writing here"), open_writer(place, pack_size=64):
            pass
        for pack in packs[1:]:
            writer.append(pack)
    assert list(open_dataset(place)) == packs
    assert verify_dataset(place) == []
    assert "_lease" in list_objects(ObjectPath.parse(place))
    assert "_lease" not in open_folder(place).names()


def test_large_uploads_are_complete_or_absent(place: str) -> None:
    folder, data = open_folder(place), bytes(range(256)) * (17 << 12)
    folder.write("whole", [data[: 5 << 20], data[5 << 20 :]])

    def pieces() -> Iterator[bytes]:
        yield data
        raise RuntimeError("enough")

    with pytest.raises(RuntimeError, match="enough"):
        folder.write("half", pieces())
    assert folder.read("whole", 1 << 30) == data
    assert {name: stamp.num_bytes for name, stamp in list_objects(ObjectPath.parse(place)).items()} == {
        "whole": len(data)
    }


def test_conditions_and_leases_hold(place: str) -> None:
    store = ClaimStore(ObjectPath.parse(place))
    assert store.get("one") is None
    etag = store.put("one", b"a", only_if="")
    assert etag
    assert store.put("one", b"b", only_if="") is None
    assert store.put("one", b"c", only_if="other") is None
    assert store.put("gone", b"c", only_if=etag) is None
    second = store.put("one", b"d", only_if=etag)
    assert second not in (None, etag)
    assert store.put("one", b"e", only_if=etag) is None
    assert store.put("one", b"d", only_if=etag) == second, "what a lost answer was about"
    assert (store.get("one"), set(list_below(store.place))) == ((b"d", second), {"one"})
    lease = Lease(store, "lease")
    assert lease.acquire() == b""
    with pytest.raises(FormatError, match="another process is writing here"):
        Lease(store, "lease").acquire()
    lease.write(b"left")
    lease.release(remove=False)
    following = Lease(store, "lease")
    assert following.acquire() == b"left"
    following.release(remove=True)
    store.delete("one")
    store.delete("one")
    assert set(list_below(store.place)) == {"lease"}


def test_live_chunks_train_as_those_of_a_folder(place: str, tmp_path: Path) -> None:
    rows = some_packs(12)
    write_stream(tmp_path / "live", rows, [4, 8])
    write_stream(place, rows, [4, 8])
    remote: Any = train([place])
    assert remote.digests == train(tmp_path / "live").digests


class Google(BaseHTTPRequestHandler):
    """Answers to conditional requests as Google documents them for its XML interface."""

    objects: ClassVar[dict[str, tuple[int, bytes]]] = {}

    def do_PUT(self) -> None:
        data = self.rfile.read(int(self.headers["Content-Length"]))
        generation = self.objects.get(self.path, (0, b""))[0]
        if int(self.headers.get("x-goog-if-generation-match", generation)) != generation:
            self.answer(412)
            return
        self.objects[self.path] = (generation + 1, data)
        self.answer(200, generation + 1)

    def do_GET(self) -> None:
        if self.path in self.objects:
            self.answer(200, *self.objects[self.path])
        else:
            self.answer(200 if "list-type" in self.path else 404, data=b"<ListBucketResult></ListBucketResult>")

    def answer(self, status: int, generation: int = 0, data: bytes = b"") -> None:
        self.send_response(status)
        facts = {"ETag": '"always the same"', "Last-Modified": formatdate(0, usegmt=True), "Content-Length": len(data)}
        for name, value in {**facts, "x-goog-generation": generation}.items():
            self.send_header(name, str(value))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, *_: object) -> None:
        pass


def test_conditions_of_google_are_generations(monkeypatch: pytest.MonkeyPatch) -> None:
    server = ThreadingHTTPServer(("127.0.0.1", 0), Google)
    threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True).start()
    monkeypatch.setenv("GOOGLE_BASE_URL", f"http://127.0.0.1:{server.server_port}")
    monkeypatch.setenv("GOOGLE_BEARER_TOKEN", "a token")
    try:
        store = ClaimStore(ObjectPath.parse("gs://bucket/data"))
        assert store.get("one") is None
        assert store.put("one", b"a", only_if="") == "1"
        assert store.put("one", b"b", only_if="") is None
        assert store.put("one", b"c", only_if="1") == "2"
        assert store.put("one", b"d", only_if="1") is None
        assert store.get("one") == (b"c", "2")
    finally:
        server.shutdown()
        server.server_close()
