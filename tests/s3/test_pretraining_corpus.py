"""A pretraining corpus in a real S3 server, read by Megatron-Core's own reader."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.fs as pa_fs
import pytest

from harness.errors import ConfigError
from harness.indexed import IndexedWriter
from harness.plan import PretrainConfig
from recipes import pretrain as recipe

from ..distributed.conftest import run_here

pytestmark = [pytest.mark.s3, pytest.mark.timeout(600)]
ROOT = Path(__file__).resolve().parents[2]
SMALL = (
    "model.num_layers=1",
    "model.hidden_size=32",
    "model.ffn_hidden_size=64",
    "model.vocab_size=300",
    "loader.global_batch_size=4",
    "data.sequence_length=64",
    "trainer.device=cpu",
    "trainer.record_digests=true",
    "trainer.steps=4",
    "trainer.eval_batches=1",
)


def write(prefix: Path, seed: int) -> Path:
    rng = np.random.default_rng(seed)
    with IndexedWriter(prefix) as writer:
        for length in rng.integers(20, 150, 60):
            writer.append(rng.integers(0, 300, length), np.array([length]))
    return prefix


def pretrain(folder: Path, *overrides: str) -> None:
    run_here(recipe, PretrainConfig, [f"run_dir={folder}", *SMALL, *overrides])


def pretrain_on_two_ranks(folder: Path, *overrides: str) -> tuple[int, str]:
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    command = [sys.executable, *launcher, "-m", "recipes.pretrain", f"run_dir={folder}", *SMALL, *overrides]
    kept = ("PATH", "HOME", "TMPDIR")
    env = {name: value for name, value in os.environ.items() if name in kept or name.startswith(("AWS_", "HARNESS_"))}
    env["OMP_NUM_THREADS"] = "1"
    done = subprocess.run(command, env=env, cwd=ROOT, capture_output=True, text=True, timeout=280, check=False)
    return done.returncode, done.stdout + done.stderr


def digests(folder: Path) -> list[str]:
    return [json.loads(line)["digest"] for line in (folder / "digests.jsonl").read_text().splitlines()]


@pytest.mark.nightly
def test_a_corpus_in_a_bucket_trains_as_the_one_on_disk_and_only_its_index_is_kept(
    proxy: Any, bucket: Any, place: str, tmp_path: Path
) -> None:
    (tmp_path / "here").mkdir()
    one, two = write(tmp_path / "here" / "one", 1), write(tmp_path / "here" / "two", 2)
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

    with pytest.raises(ConfigError, match=r"gone.idx is not in the bucket") as refused:
        pretrain(tmp_path / "gone", f"data.path={place}/gone", kept)
    assert refused.value.where == f"{place}/gone.idx"
