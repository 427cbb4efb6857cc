"""Shards as tasks of a real Ray cluster of three nodes, one of which is killed."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from .test_prepare_shards import command, content, receipts, write_source

pytestmark = [pytest.mark.nightly, pytest.mark.timeout(600)]
cluster_utils = pytest.importorskip("ray.cluster_utils", reason="needs the extra ray: make setup-ray")


@pytest.fixture
def cluster(monkeypatch) -> Iterator[cluster_utils.Cluster]:
    monkeypatch.setenv("RAY_ENABLE_UV_RUN_RUNTIME_ENV", "0")
    small = {"num_cpus": 1, "object_store_memory": 80 << 20, "include_dashboard": False}
    made = cluster_utils.Cluster(initialize_head=True, head_node_args={**small, "num_cpus": 1})
    try:
        for _ in range(2):
            made.add_node(**{name: small[name] for name in ("num_cpus", "object_store_memory")})
        made.wait_for_nodes(timeout=120)
        yield made
    finally:
        made.shutdown()


def prepare(path: Path, source: Path, tokenizer: str, address: str, *more: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        command(path, source, tokenizer, "engine=ray", *more),
        env={**os.environ, "RAY_ADDRESS": address},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def test_a_killed_node_costs_only_its_shards_and_does_not_change_the_result(cluster, tmp_path):
    source = write_source(tmp_path / "chats", files=4, records=6000)
    subprocess.run(command(tmp_path / "whole", source, ""), check=True, capture_output=True)
    process = prepare(tmp_path / "d", source, "", cluster.address)
    limit = time.monotonic() + 240
    while len(receipts(tmp_path / "d")) < 5:
        assert process.poll() is None, process.communicate()[0]
        assert time.monotonic() < limit
        time.sleep(0.02)
    node = cluster.worker_nodes.pop()
    for raylet in node.all_processes["raylet"]:
        os.kill(raylet.process.pid, signal.SIGKILL)
    done = len(receipts(tmp_path / "d"))
    output, _ = process.communicate(timeout=300)
    assert process.returncode == 0, output
    assert done < 60
    assert content(tmp_path / "d") == content(tmp_path / "whole")


def test_an_unreachable_cluster_and_bad_records_are_clear_errors(cluster, tmp_path):
    source = write_source(tmp_path / "chats")
    refused = prepare(tmp_path / "d", source, "", cluster.address, "source.on_bad=refuse")
    output, _ = refused.communicate(timeout=300)
    assert refused.returncode == 2
    assert "part-1.jsonl, line 51: not_json" in output
    assert "Traceback" not in output
    nowhere = prepare(tmp_path / "e", source, "", "127.0.0.1:1")
    output, _ = nowhere.communicate(timeout=60)
    assert nowhere.returncode == 2
    assert "the Ray cluster cannot be reached" in output
    assert "Traceback" not in output
