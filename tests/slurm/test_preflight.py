"""A faulty node is named, and the job ends before its first step."""

from __future__ import annotations

import importlib.metadata
import json
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from harness.formats import open_dataset, open_writer

from .cluster import Cluster

pytestmark = [pytest.mark.slurm, pytest.mark.timeout(2400)]
ONE_RANK = "cluster.ranks_per_node=1"


@pytest.fixture
def refused(submit) -> Callable[..., str]:
    """refused(*overrides): the log of a job whose preflight failed."""

    def run(*overrides: str) -> str:
        job = submit("trainer.steps=2", ONE_RANK, *overrides)
        assert job.wait() == "FAILED", job.log
        assert f"preflight: job {job.job_id} does not start" in job.log
        assert job.metrics == []
        assert job.facts["Restarts"] == "0"
        return job.log

    return run


@contextmanager
def mounted(slurm: Cluster, node: str, source: str | Path, target: str | Path, *options: str) -> Iterator[None]:
    """Mount `source` over `target` on one node only."""
    slurm.on(node, "mount", *(options or ["--bind"]), source, target, check=True)
    try:
        yield
    finally:
        slurm.on(node, "umount", "--lazy", target, check=True)


def test_a_node_without_the_dataset_is_named(refused, slurm, data, tmp_path):
    (tmp_path / "empty").mkdir()
    with mounted(slurm, "node2", tmp_path / "empty", data):
        log = refused()
    assert f"preflight: node2: dataset {data}: " in log
    assert "preflight: node1" not in log


def test_a_node_with_another_version_another_dataset_and_little_shared_memory_is_reported_for_each(
    refused, slurm, data, tmp_path
):
    reader = open_dataset(data / "train")
    with open_writer(
        tmp_path / "other" / "train", format="parquet", pack_size=256, provenance=reader.manifest.provenance
    ) as writer:
        for number in range(len(reader) - 1):
            writer.append(reader[number])
    package = importlib.metadata.distribution("megatron-core")
    stored = Path(str(package.locate_file(f"megatron_core-{package.version}.dist-info/METADATA")))
    other = tmp_path / "METADATA"
    other.write_text(stored.read_text().replace(f"\nVersion: {package.version}", "\nVersion: 0.15.0", 1))
    with (
        mounted(slurm, "node2", tmp_path / "other", data),
        mounted(slurm, "node2", other, stored),
        mounted(slurm, "node2", "tmpfs", "/dev/shm", "-t", "tmpfs", "-o", "size=64m,mode=1777"),
    ):
        log = refused()
    assert f"preflight: node2: versions: megatron-core is 0.15.0, on node1 it is {package.version}" in log
    assert "fix:   install the same environment on every node" in log
    assert f"preflight: node2: dataset {data}: fingerprint is " in log
    assert f"on node1 it is {reader.fingerprint}" in log
    assert "preflight: node2: shm: /dev/shm has 64 MiB, loader workers need 1,024" in log
    assert "preflight: node1" not in log


def test_folders_that_are_not_shared_are_reported(refused, slurm, tmp_path):
    for name in ("runs", "weights", "streams/live", "own"):
        (tmp_path / name).mkdir(parents=True)
    (tmp_path / "weights" / "model.safetensors").write_text("never read")
    sizes = {"num_hidden_layers": 2, "hidden_size": 32, "intermediate_size": 64, "vocab_size": 300}
    sizes |= {"max_position_embeddings": 4096, "rms_norm_eps": 1e-5}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2}
    config = {"model_type": "llama", "tie_word_embeddings": True, **sizes, **heads}
    (tmp_path / "weights" / "config.json").write_text(json.dumps(config))
    with (
        mounted(slurm, "node2", tmp_path / "own", tmp_path / "runs"),
        mounted(slurm, "node2", tmp_path / "own", tmp_path / "weights"),
        mounted(slurm, "node2", tmp_path / "own", tmp_path / "streams"),
    ):
        live, weights = tmp_path / "streams" / "live", tmp_path / "weights"
        log = refused(
            *(f"data.live.path={live}", "data.live.pack_size=256", f"model.init_from={weights}"),
            "cluster.preflight.timeout_s=40",
        )
    assert "preflight: node2: run folder: the run's folder is not shared" in log
    assert f"preflight: node2: weights {weights}: files is 0, on node1 it is 2" in log
    assert f"preflight: node2: live chunks {live}: folder is missing, on node1 it is there" in log


def test_a_port_that_was_taken_after_it_was_chosen_is_reported(refused, slurm):
    """The script probes the loopback, and so misses a listener that is on the node's own address only."""
    port = (
        20000
        + (1 + int(slurm.on("login", "sbatch", "--parsable", "--output=/dev/null", "--wrap=true", check=True))) % 12000
    )
    listen = f"import socket, time; s = socket.create_server(('10.79.0.11', {port})); time.sleep(1000)"
    holder = subprocess.Popen(slurm.command("node1", "python3", "-c", listen))
    try:
        log = refused("cluster.preflight.timeout_s=15")
    finally:
        holder.kill()
        holder.wait()
    assert f"preflight: node1: first node: rank 0 cannot listen on port {port}" in log


@pytest.mark.parametrize("node", ["node1", "node2"])  # the first node judges the answers
def test_a_node_that_does_not_answer_is_named(refused, slurm, tmp_path, node):
    """Its Python hangs, as on a file system that does not answer."""
    python = tmp_path / "python"
    python.write_text("#!/bin/sh\nexec sleep 1000\n")
    python.chmod(0o755)
    real = tmp_path / "real" / "python"
    real.parent.mkdir()
    real.write_text(f'#!/bin/sh\nexec {sys.executable} "$@"\n')
    real.chmod(0o755)
    with mounted(slurm, node, python, real):
        log = refused(f"cluster.python={real}", "cluster.preflight.timeout_s=20")
    assert f"preflight: {node}: no answer from the node" in log, log
