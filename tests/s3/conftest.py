"""A real S3 server for each test worker, behind a proxy that counts requests and injects faults."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from harness.storage import ObjectPath
from harness.storage.claims import ClaimStore

from .faulty_proxy import FaultyProxy
from .gateway import ACCESS_KEY, SECRET_KEY, Gateway, missing_programs

BUCKET = "harness-tests"
OTHER = json.dumps({"token": "other", "host": "elsewhere", "pid": 7, "since": "then"}).encode() + b"\n"


@pytest.fixture(scope="session")
def gateway(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    if missing := missing_programs():
        pytest.skip(f"no {', '.join(missing)}: apt-get install --no-install-recommends radosgw ceph-mon ceph-osd")
    server = Gateway(tmp_path_factory.mktemp("gateway"))
    try:
        server.start()
        yield server
    finally:
        server.stop()


@pytest.fixture(scope="session")
def session_proxy(gateway: Any) -> Iterator[Any]:
    proxy = FaultyProxy(gateway.port)
    yield proxy
    proxy.close()


@pytest.fixture(scope="session")
def bucket(gateway: Any) -> Any:
    """PyArrow's filesystem of the server, without the proxy."""
    import pyarrow.fs as pa_fs

    os.environ["AWS_REQUEST_CHECKSUM_CALCULATION"] = "when_required"
    files = pa_fs.S3FileSystem(
        endpoint_override=f"127.0.0.1:{gateway.port}",
        scheme="http",
        region="us-east-1",
        access_key=ACCESS_KEY,
        secret_key=SECRET_KEY,
        allow_bucket_creation=True,
    )
    files.create_dir(BUCKET)
    return files


@pytest.fixture
def proxy(
    session_proxy: Any, gateway: Any, bucket: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> Iterator[Any]:
    """The proxy without faults, and an environment that leads to it."""
    settings = {
        "AWS_ENDPOINT_URL": f"http://127.0.0.1:{session_proxy.port}",
        "AWS_ACCESS_KEY_ID": ACCESS_KEY,
        "AWS_SECRET_ACCESS_KEY": SECRET_KEY,
        "AWS_REGION": "us-east-1",
        "AWS_EC2_METADATA_DISABLED": "true",
        "HARNESS_STORAGE_TIMEOUT_S": "6",
        "HARNESS_CACHE": str(tmp_path / "cache"),
    }
    for name, value in settings.items():
        monkeypatch.setenv(name, value)
    session_proxy.clear()
    yield session_proxy
    session_proxy.clear()


@pytest.fixture
def place(request: pytest.FixtureRequest, proxy: Any) -> str:
    """An address that only this test uses, behind the proxy."""
    return f"s3://{BUCKET}/{request.node.name.replace('[', '-').replace(']', '')}"


@pytest.fixture
def store(place: str) -> ClaimStore:
    """The objects of `place`, with conditional requests."""
    return ClaimStore(ObjectPath.parse(place))


def content(store: ClaimStore, name: str) -> bytes:
    return store.get(name)[0]
