"""Chats with sounds in live chunks, as the example of Megatron-SWIFT has them, on two ranks that are killed."""

from __future__ import annotations

import base64
import itertools
import json
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
from harness.recipes.parity import ParityConfig

from harness.config import compose_config
from harness.parity.reference import make_model
from tests.distributed.conftest import ROOT, environment, kill_tree, read_metrics, run_command
from tests.samples.media_models import save_media_model, sound


def write_model(folder: Path) -> Path:
    """Save a small model of Qwen3-Omni's thinker with random weights, its tokenizer and its processor."""
    sizes = compose_config("parity", ParityConfig).models["qwen3_omni_moe_thinker"]
    save_media_model(folder, "qwen3_omni_moe", mel=sizes["audio_config"]["num_mel_bins"])
    token = json.loads((folder / "config.json").read_text())["thinker_config"]["audio_token_id"]
    text = {**sizes["text_config"], "vocab_size": token + 8}
    make_model("qwen3_omni_moe_thinker", {**sizes, "audio_token_id": token, "text_config": text}, folder)
    return folder


def write_chats(path: Path, count: int) -> Path:
    rng = np.random.default_rng(0)
    with path.open("w") as file:
        for number in range(count):
            turns = [
                {"role": "user", "content": "<audio>What is being said?</audio>"},
                {"role": "assistant", "content": f"Number {number}."},
            ]
            data = base64.b64encode(sound(int(rng.integers(4000, 16000)), seed=number)).decode()
            file.write(json.dumps({"messages": turns, "audios": [data]}) + "\n")
    return path


@pytest.mark.nightly
def test_ranks_that_are_killed_train_every_sound_of_a_stream_as_an_undisturbed_run_does(tmp_path: Path) -> None:
    model, chats = write_model(tmp_path / "model"), write_chats(tmp_path / "chats.jsonl", 120)
    settings = [
        *(f"model.init_from={model}", "model.train_encoder=true", f"data.live.tokenizer.name={model}"),
        *("data.live.pack_size=256", "data.live.open_packs=2", "model.aux_loss=0"),
        *("schedule.max_tokens_per_rank=256", "loader.global_batch_size=2", "loader.num_workers=0"),
        *("trainer.device=cpu", "trainer.steps=10", "trainer.epochs=null", "trainer.checkpoint_interval=3"),
        *("optimizer.lr=1e-3", "trainer.record_digests=true"),
    ]
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    metrics = {}
    for schedule, name in itertools.product(("as_packed", "cost_balanced"), ("whole", "killed")):
        stream, run = tmp_path / schedule / name / "live", tmp_path / schedule / name / "run"
        produce = [sys.executable, "-m", "harness.cli", "live", "produce", str(chats), str(stream)]
        code, output = run_command([*produce, "chunks.rows=10", "chunks.max_waiting=64"])
        assert code == 0, output
        own = [f"data.live.path={stream}", f"run_dir={run}", f"schedule={schedule}"]
        train = [*launch, "-m", "harness.recipes.sft", *settings, *own]
        if name == "killed":
            with (tmp_path / "log.txt").open("wb") as log:
                first = subprocess.Popen(train, cwd=ROOT, env=environment(), stdout=log, stderr=log)
            while not (run / "metrics.jsonl").exists() or len(read_metrics(run)) < 5:
                assert first.poll() is None, (tmp_path / "log.txt").read_text()[-3000:]
                time.sleep(0.1)
            kill_tree(first)
            train.append("resume=true")
        code, output = run_command(train, timeout_s=900)
        assert code == 0, output
        steps = [(step["step"], step["loss"], step["grad_norm"]) for step in read_metrics(run)]
        assert len(steps) == 10
        assert metrics.setdefault(schedule, steps) == steps
    # The same packs are a step, whichever ranks train their sequences.
    assert np.allclose(metrics["as_packed"], metrics["cost_balanced"], rtol=1e-5, atol=0)
