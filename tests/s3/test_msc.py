"""Packs and corpora through NVIDIA's multi-storage-client, in front of a real S3 server."""

from __future__ import annotations

import json
import os
import pickle
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pyarrow.fs as pa_fs
import pytest
from corpora import batches, opened, settings, write_corpus
from live_streams import some_packs
from small_packs import write_packs

from harness.errors import ConfigError, FormatError
from harness.formats import open_dataset, verify_dataset
from harness.megatron.job import runtime

pytest.importorskip("multistorageclient", reason="pip install '.[msc]'")
pytestmark = pytest.mark.s3


@pytest.fixture
def profile(place: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """A profile whose root is a place of this test."""
    options = {
        "base_path": place.removeprefix("s3://"),
        "endpoint_url": os.environ["AWS_ENDPOINT_URL"],
        "region_name": "us-east-1",
        "request_checksum_calculation": "when_required",
        "response_checksum_validation": "when_required",
    }
    credentials = {"access_key": os.environ["AWS_ACCESS_KEY_ID"], "secret_key": os.environ["AWS_SECRET_ACCESS_KEY"]}
    values = {
        "storage_provider": {"type": "s3", "options": options},
        "credentials_provider": {"type": "S3Credentials", "options": credentials},
    }
    name = place.rpartition("/")[2].replace("_", "-")
    (tmp_path / "msc.yaml").write_text(json.dumps({"profiles": {name: values}}))
    monkeypatch.setenv("MSC_CONFIG", str(tmp_path / "msc.yaml"))
    return f"msc://{name}"


@pytest.mark.parametrize("format", ["parquet", "memmap"])
def test_packs_are_written_and_read_as_in_the_bucket_itself(profile: str, place: str, format: str) -> None:
    packs = some_packs(20)
    write_packs(f"{profile}/packs", packs, format=format, pack_size=64, packs_per_shard=8)
    reader = open_dataset(f"{profile}/packs")
    assert list(reader) == packs
    assert list(pickle.loads(pickle.dumps(reader))) == packs
    assert verify_dataset(f"{profile}/packs") == []
    assert open_dataset(f"{place}/packs").fingerprint == reader.fingerprint
    child = os.fork()
    if child == 0:
        os._exit(0 if list(reader) == packs else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


def test_missing_profiles_and_objects_are_named(profile: str) -> None:
    with pytest.raises(FormatError, match='Profile "nope" not found'):
        open_dataset("msc://nope/packs")
    with pytest.raises(FormatError, match="there is no dataset"):
        open_dataset(f"{profile}/none")


@pytest.fixture
def job() -> Iterator[runtime.Runtime]:
    with runtime.start("cpu") as ranks:
        yield ranks


def test_a_corpus_is_read_by_megatrons_own_reader(profile, place, bucket, tmp_path, job) -> None:
    (tmp_path / "here").mkdir()
    local = settings(write_corpus(tmp_path / "here" / "one", 80, seed=1), path_to_cache=str(tmp_path / "indices"))
    pa_fs.copy_files(str(tmp_path / "here"), place.removeprefix("s3://"), destination_filesystem=bucket)
    kept = str(tmp_path / "kept")
    remote = settings(f"{profile}/one", object_storage_cache_path=kept, object_storage_chunk_bytes=512)
    expected, found = batches(opened(local), local), batches(opened(remote), remote)
    for one, other in zip(expected, found, strict=True):
        assert np.array_equal(one.rows[0].tokens, other.rows[0].tokens)
    with pytest.raises((ConfigError, FormatError), match="no such object"):
        opened(settings(f"{profile}/gone", object_storage_cache_path=kept))
