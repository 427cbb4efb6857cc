"""Datasets in a real S3 server: requests, faults and errors."""

from __future__ import annotations

import json
import os
import pickle
import signal
import subprocess
import sys
import textwrap
import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.fs as pa_fs
import pytest
from small_packs import write_packs

from harness.errors import ConfigError, FormatError
from harness.formats import FORMATS, convert_dataset, open_dataset, open_writer, verify_dataset
from harness.formats.inspect import find_datasets, inspect_dataset
from harness.loader import DataConfig, open_datasets
from harness.prep.pipeline import repack_store
from harness.records import Medium, Pack
from harness.storage import ObjectPath
from harness.storage.inputs import list_objects

from .faulty_proxy import Fault

pytestmark = [pytest.mark.s3, pytest.mark.submission]

PACK_SIZE = 1024


def make_packs(count: int) -> list[Pack]:
    rng = np.random.default_rng(count)
    ids = rng.integers(0, 1 << 30, (count, PACK_SIZE)).astype(np.int32)
    mask = np.zeros(PACK_SIZE, np.uint8)
    mask[5:500] = 1
    return [Pack(row, mask, [0, 700]) for row in ids]


PACKS = make_packs(64)


def write(path: str | Path, **options: Any) -> str:
    settings = {"packs_per_shard": 32, "rows_per_group": 8} | options
    write_packs(path, PACKS, pack_size=PACK_SIZE, **settings)
    return str(path)


def stored(bucket: Any, place: str) -> dict[str, int]:
    """Sizes of the objects below a place, without the lease of its writers."""
    root = place.removeprefix("s3://")
    found = bucket.get_file_info(pa_fs.FileSelector(root, recursive=True, allow_not_found=True))
    sizes = {one.path[len(root) + 1 :]: one.size for one in found if one.type == pa_fs.FileType.File}
    return {name: size for name, size in sizes.items() if name != "_lease"}


def puts(proxy: Any) -> list[str]:
    """Paths of the files that were sent, without the lease and the marker of their writer."""
    sent = [one.path.split("?")[0] for one in proxy.requests if one.method == "PUT"]
    return [path for path in sent if not path.endswith(("/_lease", "/_writing"))]


def fault(proxy: Any, action: str, **settings: Any) -> Any:
    found = Fault(action, **settings)
    proxy.faults.append(found)
    return found


def error_of(work: Callable[[], Any]) -> FormatError:
    with pytest.raises(FormatError) as caught:
        work()
    return caught.value


def test_a_written_dataset_is_found_and_replaced_only_when_asked_to(bucket: Any, place: str) -> None:
    write(place)
    assert find_datasets(place) == [place]
    assert inspect_dataset(place)["packs"] == 64
    assert error_of(lambda: write(place)).what == "the destination already contains a dataset"
    write(place, overwrite=True, packs_per_shard=64)
    assert len(stored(bucket, place)) == 5, "the second shard of the first dataset is gone"


def test_one_pack_costs_its_pages_and_neighbors_one_request(proxy: Any, bucket: Any, place: str) -> None:
    one_file = place + ".parquet"
    write(one_file, rows_per_group=16)
    reader = open_dataset(one_file)
    assert proxy.bytes_read(".parquet") <= 2 << 16, "opening reads the end of the file"
    pack_bytes = bucket.get_file_info(one_file.removeprefix("s3://")).size / 64

    def cost(ids: list[int]) -> tuple[int, float]:
        proxy.clear()
        assert reader.read(ids) == [PACKS[index] for index in ids]
        return sum(one.method == "GET" for one in proxy.requests), proxy.bytes_read(".parquet") / pack_bytes

    requests, packs = cost([37])
    assert requests == 4, "an entry of the table, and three pages"
    assert packs == pytest.approx(1, abs=0.1)
    requests, packs = cost([5, 60, 22])
    assert requests == 12
    assert packs == pytest.approx(3, abs=0.2)
    requests, packs = cost(list(range(32, 48)))
    assert requests == 2, "the row group in one"
    assert packs == pytest.approx(16, abs=0.5)


def test_a_glob_a_bare_object_and_a_folder_of_another_tool_open(bucket: Any, place: str) -> None:
    folder = write(place)
    root = folder.removeprefix("s3://")
    for number in range(2):
        bucket.copy_file(f"{root}/shard_{number:06d}.parquet", f"{root}-bare/part{number}.parquet")
    assert list(open_dataset(f"{folder}-bare")) == PACKS
    assert list(open_dataset(f"{folder}-bare/part?.parquet")) == PACKS
    assert list(open_dataset(f"{folder}/shard_000001.parquet")) == PACKS[32:]
    assert "no file matches" in error_of(lambda: open_dataset(f"{folder}/*.pq")).what


def test_a_prefix_with_shards_or_an_index_of_ours_and_no_manifest_is_refused(bucket: Any, place: str) -> None:
    folder = write(place)
    root = folder.removeprefix("s3://")
    places = [folder, f"{folder}/*.parquet", f"{folder}/shard_000001.parquet"]
    bucket.delete_file(f"{root}/shard_000000.parquet")
    assert "a file of shard 0 is missing" in error_of(lambda: open_dataset(places[1])).what
    bucket.delete_file(f"{root}/manifest.json")
    for missing in ("manifest.json", "manifest.json, index/pack_offsets.npy, index/sequence_lengths.npy"):
        for path in places:
            error = error_of(lambda path=path: open_dataset(path))
            assert f"the dataset is incomplete: {missing}" in error.what
            assert "copy the dataset again" in error.fix
        if missing == "manifest.json":
            bucket.delete_dir(f"{root}/index")
    assert [one.where for one in verify_dataset(folder)] == [folder]


def test_empty_objects_that_stand_for_folders_are_no_files(bucket: Any, place: str) -> None:
    bucket.create_dir(f"{place.removeprefix('s3://')}/sub/deeper", recursive=True)
    write(f"{place}/sub/deeper")
    assert "sub/deeper" not in list_objects(ObjectPath.parse(place))
    assert "" not in list_objects(ObjectPath.parse(f"{place}/sub/deeper"))
    assert list(open_dataset(f"{place}/sub/deeper")) == PACKS


def test_ranks_of_a_machine_download_once(proxy: Any, bucket: Any, place: str, tmp_path: Path) -> None:
    local = write(tmp_path / "data", format="memmap")
    pa_fs.copy_files(local, place.removeprefix("s3://"), destination_filesystem=bucket)
    code = "import sys; from harness.formats import open_dataset; print(int(open_dataset(sys.argv[1])[3].input_ids[7]))"
    ranks = [subprocess.Popen([sys.executable, "-c", code, place], stdout=subprocess.PIPE, text=True) for _ in range(3)]
    assert [rank.communicate(timeout=60)[0].strip() for rank in ranks] == [str(PACKS[3].input_ids[7])] * 3
    num_bytes = (Path(local) / "shard_000000" / "input_ids.npy").stat().st_size
    assert proxy.bytes_read("shard_000000/input_ids.npy") == num_bytes


def test_the_cache_keeps_to_its_bound(bucket: Any, place: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    local = write(tmp_path / "data", format="memmap", packs_per_shard=16)
    pa_fs.copy_files(local, place.removeprefix("s3://"), destination_filesystem=bucket)
    shard_bytes = sum(path.stat().st_size for path in (Path(local) / "shard_000000").iterdir())
    monkeypatch.setenv("HARNESS_CACHE_BYTES", str(int(2.5 * shard_bytes)))

    def kept() -> int:
        files = (path for path in (tmp_path / "cache").rglob("*") if path.is_file())
        return sum(path.stat().st_size for path in files)

    for pack_id in (0, 16, 32, 48, 0):
        reader = open_dataset(place)
        assert reader[pack_id] == PACKS[pack_id]
        reader.close()
        assert kept() < 2.6 * shard_bytes
    reader = open_dataset(place)
    assert list(reader) == PACKS, "what is open at a time is kept beyond the bound"
    assert kept() > 3.9 * shard_bytes


def test_a_local_copy_that_differs_from_the_manifest_is_refused(bucket: Any, place: str, tmp_path: Path) -> None:
    local = write(tmp_path / "data", format="binidx")
    data = bytearray((Path(local) / "shard_000000.bin").read_bytes())
    data[4321] ^= 1
    (Path(local) / "shard_000000.bin").write_bytes(data)
    pa_fs.copy_files(local, place.removeprefix("s3://"), destination_filesystem=bucket)
    error = error_of(lambda: open_dataset(place)[0])
    assert "shard_000000.bin was copied with the hash" in error.what
    assert error.where == f"{place}/shard_000000"
    assert list((tmp_path / "cache").glob("*.partial")) == []
    assert any("has the hash" in problem.what for problem in verify_dataset(place))


@pytest.mark.parametrize(
    ("action", "settings"),
    [("status", {"times": 2}), ("reset", {"after": 20}), ("truncate", {"after": 20})],
    ids=["503-twice", "reset", "truncated"],
)
def test_a_transient_fault_is_survived_by_readers_and_writers(
    proxy: Any, place: str, action: str, settings: dict[str, int]
) -> None:
    reader = open_dataset(write(place))
    reader[40]
    planted = fault(proxy, action, path="shard_000000", **settings)
    assert reader[0] == PACKS[0]
    assert planted.times == 0, "the fault happened"
    planted = fault(proxy, "status", method="PUT", path="shard_000001", times=2)
    assert list(open_dataset(write(place, overwrite=True))) == PACKS
    assert planted.times == 0


def test_a_store_that_stalls_or_breaks_for_good_is_an_error(proxy, place, monkeypatch) -> None:
    reader = open_dataset(write(place))
    reader[40]
    monkeypatch.setenv("HARNESS_STORAGE_TIMEOUT_S", "1.5")
    threads = threading.active_count()
    for action in ("stall", "truncate"):
        proxy.faults.clear()
        fault(proxy, action, path="shard_000000", times=99, after=20)
        error = error_of(lambda: reader[0])
        assert "did not answer" in error.what
        assert f"{place}/shard_000000.parquet" in error.where
    # The proxy has a thread for each connection.
    assert [one for one in threading.enumerate()[threads:] if "process_request_thread" not in one.name] == []
    proxy.faults.clear()
    monkeypatch.setenv("HARNESS_STORAGE_TIMEOUT_S", "60")
    assert reader[0] == PACKS[0], "the reader is as good as before"


def test_a_server_that_dies_in_the_middle_of_a_read_and_comes_back_is_waited_for(proxy, gateway, place) -> None:
    reader = open_dataset(write(place))
    reader[40]
    restart = threading.Timer(0.5, gateway.start_gateway)

    def kill() -> None:
        gateway.kill_gateway()
        restart.start()

    fault(proxy, "reset", path="shard_000000", after=20, then=kill)
    try:
        assert reader[0] == PACKS[0]
    finally:
        restart.join()
    assert sum("shard_000000" in one.path for one in proxy.requests if one.method == "GET") >= 2


def test_a_write_that_fails_leaves_no_dataset(bucket: Any, place: str) -> None:
    def write_some(path: str) -> None:
        with open_writer(path, pack_size=PACK_SIZE, packs_per_shard=8) as writer:
            for pack in PACKS[:20]:
                writer.append(pack)
            raise RuntimeError("enough")

    single = place + ".parquet"
    for path in (place, single):
        with pytest.raises(RuntimeError, match="enough"):
            write_some(path)
    assert stored(bucket, place) == {}
    assert error_of(lambda: open_dataset(single)).what == "there is no dataset"


@pytest.mark.parametrize("format", FORMATS)
def test_every_format_is_written_shard_by_shard_and_read_back_from_one_local_copy(
    proxy, bucket, place, tmp_path, format
):
    write(place, format=format)
    local = open_dataset(write(tmp_path / "local", format=format))
    remote = open_dataset(place)
    assert list(remote) == PACKS
    assert remote.fingerprint == local.fingerprint
    assert remote.manifest.shards == local.manifest.shards
    assert verify_dataset(place) == []
    assert puts(proxy)[-1].endswith("/manifest.json"), "the manifest comes last"
    assert place in remote.where(40)
    proxy.clear()
    assert open_dataset(place)[33] == list(pickle.loads(pickle.dumps(remote)))[33] == PACKS[33]
    gets = [one.path for one in proxy.requests if one.method == "GET" and "shard_000001" in one.path]
    assert not gets or format == "parquet", "the second reader downloads nothing of that shard again"
    names = {path.relative_to(tmp_path / "local").as_posix() for path in (tmp_path / "local").rglob("*.*")}
    assert set(stored(bucket, place)) == names


@pytest.mark.parametrize("format", ["memmap", "parquet"])
def test_a_killed_write_continues_after_its_last_whole_shard_from_another_machine(proxy, bucket, place, format) -> None:
    code = textwrap.dedent("""
        import os, sys
        from harness.formats import open_writer
        from harness.records import Pack
        with open_writer(sys.argv[1], format=sys.argv[2], pack_size=4, packs_per_shard=2, resume_key="a") as writer:
            for number in range(5):
                writer.append(Pack([number], [0], [0]))
            os.kill(os.getpid(), 9)
    """)
    done = subprocess.run([sys.executable, "-c", code, place, format], check=False, timeout=60)
    assert done.returncode == -9
    before = stored(bucket, place)
    assert "manifest.json" not in before
    assert "a write is in progress or was interrupted" in error_of(lambda: open_dataset(place)).what
    packs = [Pack([number], [0], [0]) for number in range(7)]

    def write_rest(key: str) -> int:
        options = {"format": format, "pack_size": 4, "packs_per_shard": 2, "resume_key": key}
        with open_writer(place, **options) as writer:
            begun = writer.num_packs
            for pack in packs[begun:]:
                writer.append(pack)
        return begun

    begun = proxy.requests and len(proxy.requests)
    assert write_rest("a") == 4
    sent = {one.path.split("?")[0].rpartition("/")[2] for one in proxy.requests[begun:] if one.method == "PUT"}
    assert not any("000001" in name for name in sent), "whole shards are not sent again"
    assert list(open_dataset(place)) == packs
    assert verify_dataset(place) == []
    after = stored(bucket, place)
    assert any(name.endswith(".part") for name in before)
    assert not any(name.endswith(".part") or "writing" in name for name in after)


@pytest.mark.parametrize("format", FORMATS)
def test_media_are_read_by_ranges_or_from_the_local_copies_of_their_shards(proxy, bucket, place, tmp_path, format):
    rng = np.random.default_rng(0)
    media = [Medium("image", 0, 2, rng.bytes(300_000)), Medium("audio", 4, 1, rng.bytes(5))]
    packs = [
        Pack([9, 9, 4, 4, 9, 4], [0] * 6, [0, 3], (replace(media[0], data=bytes([number]) * 300_000), media[1]))
        for number in range(5)
    ]
    packs[2:4] = [Pack([1, 2], [0, 0], [0])] * 2
    options = {"format": format, "pack_size": 6, "packs_per_shard": 2, "resume_key": "a"}
    write_packs(place, packs, **options)
    write_packs(tmp_path / "local", packs, **options)
    remote = open_dataset(place)
    assert remote.manifest.fingerprint == open_dataset(tmp_path / "local").fingerprint
    assert verify_dataset(place) == []
    assert list(pickle.loads(pickle.dumps(remote))) == packs
    assert set(stored(bucket, place)) == {
        path.relative_to(tmp_path / "local").as_posix() for path in (tmp_path / "local").rglob("*.*")
    }
    proxy.clear()
    sound = (replace(media[1], start=1),)
    assert open_dataset(place).read_media([1, 0, 1]) == [sound, packs[0].media[:1], sound]
    gets = [one for one in proxy.requests if one.method == "GET" and ".media" in one.path]
    assert len(gets) == (1 if format == "parquet" else 0)
    if format == "virtual":
        repack_store(place, f"{place}-plan", pack_size=4, seed=1)
        assert sum(len(pack.media) for pack in open_dataset(f"{place}-plan")) == 6
        repack_store(place, tmp_path / "plan", pack_size=4, seed=1)
        assert list(open_dataset(tmp_path / "plan")) == list(open_dataset(f"{place}-plan"))


def test_an_interrupted_write_of_something_else_is_replaced(bucket: Any, place: str) -> None:
    def write_some() -> None:
        with open_writer(place, format="memmap", pack_size=PACK_SIZE, packs_per_shard=8, resume_key="one") as writer:
            for pack in PACKS[:20]:
                writer.append(pack)
            raise RuntimeError("enough")

    with pytest.raises(RuntimeError, match="enough"):
        write_some()
    assert len([name for name in stored(bucket, place) if name.endswith(".part")]) == 2
    with open_writer(place, format="memmap", pack_size=PACK_SIZE, packs_per_shard=8, resume_key="two") as writer:
        assert writer.num_packs == 0
        for pack in PACKS:
            writer.append(pack)
    assert list(open_dataset(place)) == PACKS


def test_a_place_with_something_else_in_it_is_not_written_to(bucket: Any, place: str) -> None:
    with bucket.open_output_stream(place.removeprefix("s3://") + "/notes.txt") as file:
        file.write(b"hello")
    assert "the destination contains other files, such as notes.txt" in error_of(lambda: write(place)).what
    with pytest.raises(ConfigError, match="a single file of npy cannot be written to object storage"):
        write(place + ".npy", format="npy")


def test_missing_objects_and_buckets_are_errors_with_their_names(place: str) -> None:
    for path in (place, place + ".parquet"):
        assert error_of(lambda path=path: open_dataset(path)).what == "there is no dataset"
    for path in ("s3://no-such-bucket/data", "s3://no-such-bucket/data.parquet"):
        assert error_of(lambda path=path: open_dataset(path)).what == "no such bucket: no-such-bucket"
        assert error_of(lambda path=path: write(path)).what == "no such bucket: no-such-bucket"


def test_wrong_credentials_are_named_and_not_shown(place, monkeypatch, capfd) -> None:
    write(place)
    reader = open_dataset(place)
    secret, key = os.environ["AWS_SECRET_ACCESS_KEY"], os.environ["AWS_ACCESS_KEY_ID"]
    manifest = json.dumps(reader.manifest, default=vars)
    shown = [manifest, repr(reader), repr(reader.__dict__), pickle.dumps(reader).decode("latin1")]
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "another-secret-value")
    for work in (lambda: open_dataset(place), lambda: write(place + ".parquet")):
        error = error_of(work)
        assert "the secret key, or this machine's clock, is wrong" in error.what
        shown += [str(error), repr(error), repr(error.__cause__)]
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "another-key-value")
    error = error_of(lambda: open_dataset(place))
    assert error.what == "object storage does not know the access key"
    assert "AWS_ACCESS_KEY_ID" in error.fix
    monkeypatch.setenv("AWS_ENDPOINT_URL", f"http://{key}:{secret}@127.0.0.1:9")
    with pytest.raises(ConfigError, match="credentials do not belong in AWS_ENDPOINT_URL") as refused:
        open_dataset(place)
    captured = capfd.readouterr()
    shown += [str(error), str(refused.value), captured.out, captured.err]
    for text in shown:
        assert not any(one in text for one in (secret, key, "another-secret-value", "another-key-value"))


def test_a_dataset_is_converted_to_and_from_object_storage(place: str, tmp_path: Path) -> None:
    local = write(tmp_path / "data", format="binidx")
    up = convert_dataset(local, place, format="parquet")
    down = convert_dataset(place, tmp_path / "back", format="memmap")
    across = convert_dataset(place, place + "-2", format="binidx")
    assert up.fingerprint == down.fingerprint == across.fingerprint
    with pytest.raises(ConfigError, match="the same"):
        convert_dataset(place, place + "/", format="parquet")


def test_a_prepared_folder_is_found_with_its_two_datasets(place: str) -> None:
    train, validation = write(f"{place}/train"), write(f"{place}/validation")
    assert find_datasets(place) == [train, validation]
    data = open_datasets(DataConfig(path=place))
    assert data.train.path == train
    assert data.validation.path == validation


def test_a_forked_child_and_its_child_connect_anew(place: str) -> None:
    reader = open_dataset(write(place))
    reader[0]
    child = os.fork()
    if child == 0:
        signal.alarm(60)
        is_read = reader[63] == PACKS[63] and reader[1] == PACKS[1]
        grandchild = os.fork()
        if grandchild == 0:
            signal.alarm(60)
            os._exit(0 if reader[32] == PACKS[32] else 1)
        os._exit(os.waitstatus_to_exitcode(os.waitpid(grandchild, 0)[1]) or not is_read)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


def test_a_profile_is_honored_or_refused_by_name(place: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(place)
    keys = [f"aws_{name}={os.environ[f'AWS_{name.upper()}']}" for name in ("access_key_id", "secret_access_key")]
    (tmp_path / "credentials").write_text("\n".join(["[team]", *keys]))
    (tmp_path / "config").write_text(
        f"[profile team]\nregion=us-east-1\nendpoint_url={os.environ['AWS_ENDPOINT_URL']}\n"
    )
    for name in ("ENDPOINT_URL", "ACCESS_KEY_ID", "SECRET_ACCESS_KEY", "REGION"):
        monkeypatch.delenv(f"AWS_{name}")
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(tmp_path / "credentials"))
    monkeypatch.setenv("AWS_CONFIG_FILE", str(tmp_path / "config"))
    monkeypatch.setenv("AWS_PROFILE", "team")
    assert open_dataset(place)[7] == PACKS[7]
    monkeypatch.setenv("AWS_PROFILE", "nobody")
    assert "nobody" in error_of(lambda: open_dataset(place)).what
    monkeypatch.setitem(sys.modules, "boto3", None)
    with pytest.raises(ConfigError, match="credentials from the profile nobody need boto3, which is not installed"):
        open_dataset(place)
