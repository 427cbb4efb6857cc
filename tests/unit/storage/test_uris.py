"""Addresses in object storage, and credentials that must never be shown."""

from __future__ import annotations

import subprocess
import sys

import pytest
from obstore.exceptions import GenericError

from harness.errors import ConfigError, FormatError
from harness.formats import open_dataset
from harness.storage.bucket import Verdict, explain, judge
from harness.storage.connections import ObjectPath, join_path, s3_endpoint


def test_an_address_is_parsed_and_joined() -> None:
    place = ObjectPath.parse("s3://bucket/a/b.parquet")
    assert (place.scheme, place.bucket, place.key, place.name) == ("s3", "bucket", "a/b.parquet", "b.parquet")
    assert str(ObjectPath.parse("gs://bucket/a/") / "c") == "gs://bucket/a/c"
    assert str(ObjectPath.parse("s3://bucket") / "c") == "s3://bucket/c"
    account = ObjectPath.parse("abfs://data@account.dfs.core.windows.net/x")
    assert account.bucket == "data@account.dfs.core.windows.net"
    assert ObjectPath.parse("s3://bucket/shard_?.parquet").key == "shard_?.parquet"
    assert join_path("s3://bucket/a/", "train") == "s3://bucket/a/train"
    assert join_path("a", "train") == "a/train"


@pytest.mark.parametrize(
    "uri", ["s3://", "s3:///key", "s3://bucket/a//b", "s3://bucket/../b", "s3://bucket/./b", "http://host/x"]
)
def test_a_malformed_address_is_refused(uri: str) -> None:
    with pytest.raises(ConfigError):
        ObjectPath.parse(uri)


@pytest.mark.parametrize(
    "uri",
    [
        "s3://AKIDEXAMPLE:hush@bucket/key",
        "s3://hush@bucket/key",
        "s3://bucket/key?secret_key=hush",
        "gs://hush:hush@bucket/key",
        "abfs://data:hush@account.dfs.core.windows.net/key",
        "abfs://data@account.dfs.core.windows.net/key?sv=1&sig=hush",
        "https://user:hush@host/key",
    ],
)
def test_credentials_in_an_address_are_refused_and_not_shown(uri: str) -> None:
    with pytest.raises(ConfigError) as caught:
        open_dataset(uri)
    assert "hush" not in str(caught.value)
    assert "AKIDEXAMPLE" not in str(caught.value)


@pytest.mark.parametrize(
    ("message", "verdict"),
    [
        ("AWS Error NETWORK_CONNECTION during GetObject operation: curlCode: 28, Timeout was reached", Verdict.PASSING),
        ("AWS Error SLOW_DOWN during GetObject operation (HTTP status 503)", Verdict.PASSING),
        ("Server returned non-2xx status code: 404 Not Found: <Error><Code>NoSuchBucket</Code>", Verdict.NO_BUCKET),
        ("Server returned non-2xx status code: 404 Not Found: ContainerNotFound", Verdict.NO_BUCKET),
        ("Server returned non-2xx status code: 404 Not Found: ", Verdict.MISSING),
        ("Server returned non-2xx status code: 403 Forbidden: ", Verdict.DENIED),
        ("Error performing GET http://169.254.169.254/latest/api/token in 1 s - HTTP error", Verdict.DENIED),
        ("Server returned non-2xx status code: 411 Length Required: ", Verdict.REFUSED),
        ("Server returned non-2xx status code: 503 Service Unavailable: ", Verdict.PASSING),
        ("HTTP error: request or response body error", Verdict.PASSING),
    ],
)
def test_errors_of_a_store_are_classified(message: str, verdict: Verdict) -> None:
    assert judge(GenericError(message)) is verdict


def test_a_signed_address_in_an_error_is_not_shown() -> None:
    error = explain(
        GenericError("GET https://b.x/k?sig=hush&X-Amz-Signature=hush in 1 s"), ObjectPath.parse("az://b@x/k")
    )
    assert "hush" not in str(error)


def test_an_azure_container_without_an_account_is_refused_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("AZURE_STORAGE_ACCOUNT", raising=False)
    with pytest.raises(ConfigError, match="no storage account for the container data"):
        open_dataset("abfs://data/x.parquet")


@pytest.mark.parametrize("value", ["soon", "0", "-1", "nan", "1e9"])
def test_a_malformed_time_limit_is_refused(monkeypatch: pytest.MonkeyPatch, value: str) -> None:
    monkeypatch.setenv("HARNESS_STORAGE_TIMEOUT_S", value)
    with pytest.raises(ConfigError, match="HARNESS_STORAGE_TIMEOUT_S"):
        open_dataset("s3://bucket/data")


def test_a_dead_endpoint_is_an_error_after_attempts(monkeypatch: pytest.MonkeyPatch) -> None:
    settings = {"AWS_ENDPOINT_URL": "http://127.0.0.1:9", "AWS_ACCESS_KEY_ID": "a", "AWS_SECRET_ACCESS_KEY": "b"}
    for name, value in (settings | {"HARNESS_STORAGE_TIMEOUT_S": "1"}).items():
        monkeypatch.setenv(name, value)
    message = r"object storage did not answer at http://127\.0\.0\.1:9: .* after [2-9] retries"
    with pytest.raises(FormatError, match=message) as caught:
        open_dataset("s3://bucket/data")
    assert "AWS_ENDPOINT_URL" in caught.value.fix


def test_the_address_of_a_server_has_three_names_of_which_those_of_aws_come_first(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name in ("AWS_ENDPOINT_URL", "AWS_ENDPOINT_URL_S3", "AWS_S3_ENDPOINT_URL"):
        monkeypatch.delenv(name, raising=False)
    assert s3_endpoint() == ""
    for name in ("AWS_S3_ENDPOINT_URL", "AWS_ENDPOINT_URL", "AWS_ENDPOINT_URL_S3"):
        monkeypatch.setenv(name, f"http://{name.lower()}")
        assert s3_endpoint() == f"http://{name.lower()}"


def test_clients_are_imported_only_when_an_address_is_opened() -> None:
    code = "import sys, harness.formats; sys.exit(bool({'pyarrow', 'obstore', 'boto3'} & sys.modules.keys()))"
    assert subprocess.run([sys.executable, "-c", code], check=False, timeout=60).returncode == 0
