"""Preparations, plans and imports in a real S3 server, and uploads that are compared with what the server stored."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pyarrow.fs as pa_fs
import pytest
from live_streams import write_chats
from typer.testing import CliRunner

from harness.cli.app import app
from harness.errors import ConfigError, FormatError, PrepError
from harness.formats import convert_dataset, open_dataset, verify_dataset
from harness.formats.inspect import find_tokenizer_folder
from harness.prep import TokenizerConfig, prepare
from harness.prep.pipeline import repack_store
from harness.prep.report import PrepareReport
from harness.storage import bucket as bucket_module
from harness.storage import open_folder
from harness.storage.bucket import _PartsDigest

pytestmark = [pytest.mark.s3, pytest.mark.submission]


@pytest.fixture
def chats(tmp_path: Path) -> Path:
    return write_chats(tmp_path / "chats.jsonl", 120)


def prepare_chats(chats: Path | str, path: str | Path, **settings: Any) -> PrepareReport:
    settings = {"pack_size": 128, "num_workers": 0, "progress": lambda *made: None} | settings
    return prepare(chats, TokenizerConfig(vocab_size=400), path, **settings)


def puts(proxy: Any) -> list[str]:
    """Names of the objects that were sent, in order."""
    sent = [one.path.split("?")[0] for one in proxy.requests if one.method == "PUT"]
    return list(dict.fromkeys(path for path in sent if not path.endswith(("/_lease", "/_writing", "/_preparing"))))


@pytest.mark.parametrize("packed_storage", ["parquet", "virtual"])
def test_a_preparation_of_a_bucket_in_a_bucket_equals_one_on_a_disk(
    proxy, bucket, place, chats, tmp_path, packed_storage
) -> None:
    local = prepare_chats(chats, tmp_path / "local", packed_storage=packed_storage)
    source = f"{place}-chats/a.jsonl"
    pa_fs.copy_files(str(chats), source.removeprefix("s3://"), destination_filesystem=bucket)
    report = prepare_chats(source, place, packed_storage=packed_storage)

    assert report.path == place
    assert {name: split.fingerprint for name, split in report.splits.items()} == {
        name: split.fingerprint for name, split in local.splits.items()
    }
    assert puts(proxy)[-1].endswith("/report.json"), "the report comes last"
    for name in ("train", "validation"):
        dataset = open_dataset(f"{place}/{name}")
        assert list(dataset) == list(open_dataset(tmp_path / "local" / name))
        assert dataset.fingerprint == local.splits[name].fingerprint
        assert verify_dataset(f"{place}/{name}") == []
        names = {path.name for path in find_tokenizer_folder(dataset).iterdir()}
        assert names == {path.name for path in (tmp_path / "local" / "tokenizer").iterdir()}
    assert not list((tmp_path / "cache" / "preparations").iterdir()), "the copy on this machine is gone"
    proxy.clear()
    assert prepare_chats(source, place, packed_storage=packed_storage).reused
    assert puts(proxy) == []
    asked = {one.path.split("?")[0] for one in proxy.requests if one.method == "GET"}
    assert source.removeprefix("s3:/") not in asked, "already prepared"


def test_a_preparation_in_a_bucket_is_replaced_only_when_it_is_told_to(bucket: Any, place: str, chats: Path) -> None:
    prepare_chats(chats, place, packed_storage="virtual")
    with pytest.raises(ConfigError, match=r"prepared with other settings: data\.pack_size was 128 and is 256"):
        prepare_chats(chats, place, packed_storage="virtual", pack_size=256)
    report = prepare_chats(chats, place, pack_size=256, overwrite=True)
    names = open_folder(place).names()
    assert "sequences" not in names
    assert "_preparing" not in names
    assert open_dataset(f"{place}/train").fingerprint == report.splits["train"].fingerprint
    with bucket.open_output_stream(f"{place.removeprefix('s3://')}-other/notes.txt") as file:
        file.write(b"hello")
    with pytest.raises(PrepError, match="contains other files, such as notes"):
        prepare_chats(chats, f"{place}-other")


def test_a_killed_upload_continues_and_sends_nothing_twice(proxy: Any, place: str, chats: Path) -> None:
    def kill(folder: str) -> None:
        if folder.endswith("/train/manifest.json"):
            os._exit(9)

    child = os.fork()
    if child == 0:
        open_upload = bucket_module.open_upload
        bucket_module.open_upload = lambda at: kill(str(at)) or open_upload(at)
        prepare_chats(chats, place)
        os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 9
    with pytest.raises(FormatError, match=r"the dataset is incomplete: manifest\.json"):
        open_dataset(f"{place}/train")
    before = puts(proxy)
    assert any(name.endswith("/train/shard_000000.parquet") for name in before)
    proxy.clear()

    report = prepare_chats(chats, place)

    sent = {name.removeprefix("/harness-tests/") for name in puts(proxy)}
    kept = {name.removeprefix("/harness-tests/") for name in before if not name.endswith(("_preparing", ".json"))}
    assert len(kept) > 5
    assert not sent & kept
    assert open_dataset(f"{place}/train").fingerprint == report.splits["train"].fingerprint


def test_sequences_in_a_bucket_are_packed_again_there_and_from_a_disk(proxy, bucket, place, chats, tmp_path) -> None:
    prepare_chats(chats, tmp_path / "local", packed_storage="virtual")
    store = f"{place}/store"
    convert_dataset(tmp_path / "local" / "sequences" / "train", store, format="virtual")
    repack_store(str(tmp_path / "local" / "sequences" / "train"), str(tmp_path / "plan"), pack_size=300)
    expected = open_dataset(tmp_path / "plan")

    done = CliRunner().invoke(app, ["repack", store, f"{place}/plan", "data.pack_size=300"])
    assert done.exit_code == 0, done.output
    repack_store(f"{place}/plan", str(tmp_path / "beside"), pack_size=300)

    for path in (f"{place}/plan", str(tmp_path / "beside")):
        plan = open_dataset(path)
        assert list(plan) == list(expected)
        assert plan.fingerprint == expected.fingerprint
        assert verify_dataset(path) == []
    assert not any("/plan/" in name and "input_ids" in name for name in puts(proxy)), "no token is copied"
    proxy.clear()
    assert open_dataset(f"{place}/plan").fingerprint == expected.fingerprint
    assert not any("/store/shard" in one.path for one in proxy.requests), "the fingerprint is kept on this machine"
    # The prefix moves as a whole; a store that changed is refused.
    pa_fs.copy_files(
        place.removeprefix("s3://"),
        f"{place.removeprefix('s3://')}-2",
        source_filesystem=bucket,
        destination_filesystem=bucket,
    )
    assert list(open_dataset(f"{place}-2/plan")) == list(expected)
    bucket.delete_file(f"{place.removeprefix('s3://')}-2/store/manifest.json")
    with pytest.raises(FormatError, match="the plan's sequence store cannot be read"):
        open_dataset(f"{place}-2/plan")[0]


def test_an_upload_is_compared_with_what_the_store_has(proxy, bucket, place, monkeypatch) -> None:
    folder, data = open_folder(place), os.urandom(11 << 20)
    folder.write("whole", [data])
    assert not any(one.method == "GET" and one.path.endswith("/whole") for one in proxy.requests), "its ETag is enough"

    find_stamp = bucket_module.find_stamp

    def change_and_find(at: Any) -> Any:
        with bucket.open_output_stream(f"{place.removeprefix('s3://')}/{at.name}") as file:
            file.write(data[:-1] + bytes([data[-1] ^ 1]))
        return find_stamp(at)

    with monkeypatch.context() as patched:
        patched.setattr(bucket_module, "find_stamp", change_and_find)
        with pytest.raises(FormatError, match="the object differs from what was uploaded"):
            folder.write("changed", [data])
    # Where the ETag is no hash of the bytes, they are read back.
    monkeypatch.setattr(_PartsDigest, "etag", lambda self: "another kind")
    folder.write("encrypted", [data])
    assert any(one.method == "GET" and one.path.endswith("/encrypted") for one in proxy.requests)
    with monkeypatch.context() as patched:
        patched.setattr(bucket_module, "find_stamp", change_and_find)
        with pytest.raises(FormatError, match="the object differs from what was uploaded"):
            folder.write("changed", [data])
