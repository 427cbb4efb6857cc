"""A pretraining corpus in a real S3 server, read by Megatron-Core's own reader."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.fs as pa_fs
import pytest
from corpora import batches, opened, settings, write_corpus

from harness.errors import ConfigError, FormatError
from harness.loader.corpus import CorpusSource
from harness.megatron.data.shared_indices import SharedIndices
from harness.megatron.job import runtime
from harness.plan import PretrainConfig
from harness.recipes import pretrain as recipe
from tests.samples.small_packs import batch_digest

from ..distributed.conftest import run_here

pytestmark = [pytest.mark.s3, pytest.mark.timeout(600), pytest.mark.submission]
ROOT = Path(__file__).resolve().parents[2]
SMALL = (
    *("model.num_layers=1", "model.hidden_size=32", "model.ffn_hidden_size=64", "model.vocab_size=300"),
    *("loader.global_batch_size=4", "data.sequence_length=64", "trainer.device=cpu", "trainer.record_digests=true"),
    *("trainer.steps=4", "trainer.eval_batches=1"),
)


def pretrain(folder: Path, *overrides: str) -> None:
    run_here(recipe, PretrainConfig, [f"run_dir={folder}", *SMALL, *overrides])


def pretrain_on_two_ranks(folder: Path, *overrides: str) -> tuple[int, str]:
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    command = [sys.executable, *launcher, "-m", "harness.recipes.pretrain", f"run_dir={folder}", *SMALL, *overrides]
    kept = ("PATH", "HOME", "TMPDIR")
    env = {name: value for name, value in os.environ.items() if name in kept or name.startswith(("AWS_", "HARNESS_"))}
    env["OMP_NUM_THREADS"] = "1"
    done = subprocess.run(command, env=env, cwd=ROOT, capture_output=True, text=True, timeout=280, check=False)
    return done.returncode, done.stdout + done.stderr


def digests(folder: Path) -> list[str]:
    return [json.loads(line)["digest"] for line in (folder / "digests.jsonl").read_text().splitlines()]


@pytest.mark.nightly
def test_a_corpus_in_a_bucket_trains_as_the_one_on_disk_and_only_its_index_is_kept(proxy, bucket, place, tmp_path):
    (tmp_path / "here").mkdir()
    one, two = (write_corpus(tmp_path / "here" / name, 120, seed=seed) for name, seed in (("one", 1), ("two", 2)))
    pa_fs.copy_files(str(tmp_path / "here"), place.removeprefix("s3://"), destination_filesystem=bucket)

    def blend(first: str) -> str:
        return f"data.blend=[{{path:{first},weight:0.75}},{{path:{two},weight:0.25}}]"

    pretrain(tmp_path / "local", blend(str(one)))
    kept = f"data.object_storage_cache_path={tmp_path}/kept"
    proxy.clear()
    chunks = "data.object_storage_chunk_bytes=512"
    code, output = pretrain_on_two_ranks(tmp_path / "remote", blend(f"{place}/one"), kept, chunks)
    assert code == 0, output
    assert digests(tmp_path / "remote") == digests(tmp_path / "local")
    assert [path.name for path in (tmp_path / "kept").rglob("*.idx")] == ["one.idx"]
    assert not list(tmp_path.glob("kept/**/*.bin"))
    # Ranges of the `.bin`, each at its use, and not the whole of it.
    asked = [line for line in proxy.requests if line.method == "GET" and line.path.split("?")[0].endswith(".bin")]
    assert len(asked) > 4
    assert all(0 < line.received < 2048 for line in asked)

    with pytest.raises(FormatError, match="no such object") as refused:
        pretrain(tmp_path / "gone", f"data.path={place}/gone", kept)
    assert refused.value.where == f"{place}/gone.idx"


def test_workers_forked_after_a_validation_do_not_share_its_connections(proxy, bucket, place, tmp_path, job) -> None:
    write_corpus(tmp_path / "one", 200, seed=1)
    pa_fs.copy_files(str(tmp_path), place.removeprefix("s3://"), destination_filesystem=bucket)
    remote = {"object_storage_cache_path": str(tmp_path / "kept"), "object_storage_chunk_bytes": 64}
    config = settings(f"{place}/one", path_to_cache=str(tmp_path / "indices"), **remote)
    corpus = opened(config)

    def connections(num_workers: int) -> set[int]:
        proxy.clear()
        assert len(batches(corpus, config, num_workers=num_workers)) == 8
        return {one.client for one in proxy.requests if one.path.split("?")[0].endswith(".bin")}

    # The training process validates, then forks workers.
    own = connections(0)
    first, second = connections(2), connections(2)
    assert len(own) == 1
    assert [len(first), len(second)] == [2, 2]
    assert len(own | first | second) == 5
    assert connections(0) == own, "which still works"


@pytest.fixture
def job() -> Iterator[runtime.Runtime]:
    with runtime.start("cpu") as ranks:
        yield ranks


def built(proxy: Any) -> set[str]:
    """Names of the indices that were sent."""
    sent = {one.path.split("?")[0].rpartition("/")[2] for one in proxy.requests if one.method == "PUT"}
    return {name for name in sent if "Dataset" in name}


@pytest.mark.parametrize("order", [{}, {"block_documents": 8, "window_blocks": 2}], ids=["megatron", "blocks"])
def test_indices_are_built_once_and_shared_through_a_bucket(proxy, bucket, place, tmp_path, monkeypatch, job, order):
    one, two = write_corpus(tmp_path / "one", 80, seed=1), write_corpus(tmp_path / "two", 50, seed=2)
    blend = [CorpusSource(str(one), 0.7), CorpusSource(str(two), 0.3)]
    local = settings(blend=blend, path_to_cache=str(tmp_path / "indices"), **order)
    expected = [batch_digest(batch) for batch in batches(opened(local), local)]
    names = {path.name for path in (tmp_path / "indices").glob("*Dataset-*")}
    shared = replace(local, path_to_cache=place)

    assert [batch_digest(batch) for batch in batches(opened(shared), shared)] == expected
    assert built(proxy) == names
    listed = bucket.get_file_info(pa_fs.FileSelector(place.removeprefix("s3://")))
    assert {one.base_name for one in listed} == names | {"_building"}, "and the lease, without an owner"

    # Another machine copies them, and has nothing to build.
    monkeypatch.setenv("HARNESS_CACHE", str(tmp_path / "other machine"))
    proxy.clear()
    with monkeypatch.context() as patched:
        patched.setattr(np, "save", None)
        assert [batch_digest(batch) for batch in batches(opened(shared), shared)] == expected
    assert built(proxy) == set()
    # An upload that was cut short before the description has no effect but that the rest is built again.
    for name in names:
        if name.endswith("description.txt"):
            bucket.delete_file(f"{place.removeprefix('s3://')}/{name}")
    monkeypatch.setenv("HARNESS_CACHE", str(tmp_path / "third machine"))
    proxy.clear()
    assert [batch_digest(batch) for batch in batches(opened(shared), shared)] == expected
    assert {name for name in names if name.endswith("description.txt")} <= built(proxy)


def test_a_builder_waits_for_another_and_names_it(place, tmp_path, capsys, job) -> None:
    corpus = write_corpus(tmp_path / "one", 80, seed=1)
    shared = settings(corpus, path_to_cache=place)
    first, second = SharedIndices(place), SharedIndices(place)
    at_work, order = threading.Event(), []

    def work(indices: SharedIndices, name: str) -> None:
        def build(fetch: object) -> None:
            order.append(f"{name} begins")
            at_work.set()
            time.sleep(0.2)
            order.append(f"{name} ends")

        indices.run(build, builds=True)

    threads = [threading.Thread(target=work, args=(first, "one"))]
    threads[0].start()
    at_work.wait()
    threads.append(threading.Thread(target=work, args=(second, "two")))
    threads[1].start()
    for thread in threads:
        thread.join()
    assert order == ["one begins", "one ends", "two begins", "two ends"]
    assert f"building indices: waiting for process {os.getpid()} on" in capsys.readouterr().out
    for name in ("fast_cache_load", "defer_npy_index_mmap"):
        with pytest.raises(ConfigError, match=f"{name} requires all indices on this machine"):
            replace(shared, **{name: True})
    with pytest.raises(ConfigError, match="does not support conditional requests"):
        opened(replace(shared, path_to_cache="msc://profile/indices"))
