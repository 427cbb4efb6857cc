"""Chats with sounds in live chunks, as the example of Megatron-SWIFT has them, on two ranks that are killed."""

from __future__ import annotations

import base64
import itertools
import json
import sys
from pathlib import Path

import numpy as np
import pytest
from harness.recipes.parity import ParityConfig

from harness.config import compose_config
from harness.parity.reference import make_model
from tests.distributed.conftest import forked, kill_after, launcher, read_metrics, run_command, train
from tests.samples.media_models import picture, save_media_model, sound


def write_model(folder: Path, family: str = "qwen3_omni_moe_thinker") -> Path:
    """Save a small model of Qwen3-Omni's thinker or Qwen2.5-VL, with random weights, a tokenizer and a processor."""
    sizes = compose_config("parity", ParityConfig).models[family]
    if family == "qwen2_5_vl":
        save_media_model(folder, family, patch=sizes["vision_config"]["patch_size"])
        name, config = "image_token_id", json.loads((folder / "config.json").read_text())
    else:
        save_media_model(folder, "qwen3_omni_moe", mel=sizes["audio_config"]["num_mel_bins"])
        name, config = "audio_token_id", json.loads((folder / "config.json").read_text())["thinker_config"]
    text = {**sizes["text_config"], "vocab_size": config[name] + 8}
    make_model(family, {**sizes, name: config[name], "text_config": text}, folder)
    return folder


def write_chats(path: Path, count: int, kind: str = "audio", text: str = "What is being said?") -> Path:
    rng = np.random.default_rng(0)
    with path.open("w") as file:
        for number in range(count):
            turns = [
                {"role": "user", "content": f"<{kind}>{text}</{kind}>"},
                {"role": "assistant", "content": f"Number {number}."},
            ]
            length = int(rng.integers(4000, 16000))
            made = sound(length, seed=number) if kind == "audio" else picture(length // 200, 40, seed=number)
            file.write(json.dumps({"messages": turns, f"{kind}s": [base64.b64encode(made).decode()]}) + "\n")
    return path


# Besides 2 data-parallel ranks.
LAYOUTS = {
    "cp2": ("parallel.context_parallel_size=2",),
    "pp2": ("parallel.pipeline_parallel_size=2",),
    "cp2_ep2": ("parallel.context_parallel_size=2", "parallel.expert_parallel_size=2"),
    "pp2_ep2": ("parallel.pipeline_parallel_size=2", "parallel.expert_parallel_size=2"),
}


@pytest.mark.nightly
@pytest.mark.parametrize(("family", "kind"), [("qwen3_omni_moe_thinker", "audio"), ("qwen2_5_vl", "image")])
def test_balanced_steps_of_a_stream_train_on_every_layout_what_packs_train_where_they_are_read(
    tmp_path: Path, family: str, kind: str
) -> None:
    # No two conversations fit one pack, whatever multiple of tokens a layout pads them to.
    model, text = write_model(tmp_path / "model", family), "0123456789" * 7
    chats = write_chats(tmp_path / "chats.jsonl", 60, kind, text)
    settings = [
        *(f"model.init_from={model}", "model.train_encoder=true", f"data.live.tokenizer.name={model}"),
        *("data.live.pack_size=184", "data.live.open_packs=2", "model.aux_loss=0"),
        *("schedule.max_tokens_per_rank=368", "loader.global_batch_size=8", "trainer.device=cpu", "trainer.steps=4"),
        *("trainer.epochs=null", "optimizer.lr=1e-3", "trainer.checkpoint_interval=100"),
    ]
    produce = [sys.executable, "-m", "harness", "live", "produce", str(chats)]
    found = {}
    for name in ("as_packed", *(name for name in LAYOUTS if kind == "audio" or "ep2" not in name)):
        stream, run = tmp_path / name / "live", tmp_path / name / "run"
        code, output = run_command([*produce, str(stream), "chunks.rows=7", "chunks.max_waiting=64"])
        assert code == 0, output
        own = [f"data.live.path={stream}", f"run_dir={run}", *LAYOUTS.get(name, ())]
        own.append("schedule=as_packed" if name == "as_packed" else "schedule=cost_balanced")
        steps = train(run, [*settings, *own], ranks=4 if name in LAYOUTS else 2, start=forked)
        found[name] = [(step["loss"], step["grad_norm"]) for step in steps]
        assert len(steps) == 4
        assert np.allclose(found[name], found["as_packed"], rtol=1e-6, atol=0), found


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
    metrics = {}
    for schedule, name in itertools.product(("as_packed", "cost_balanced"), ("whole", "killed")):
        stream, run = tmp_path / schedule / name / "live", tmp_path / schedule / name / "run"
        produce = [sys.executable, "-m", "harness", "live", "produce", str(chats), str(stream)]
        code, output = run_command([*produce, "chunks.rows=10", "chunks.max_waiting=64"])
        assert code == 0, output
        own = [f"data.live.path={stream}", f"run_dir={run}", f"schedule={schedule}"]
        train = [*launcher(2), "harness.recipes.sft", *settings, *own]
        if name == "killed":
            kill_after(5, train, run)
            train.append("resume=true")
        code, output = run_command(train, timeout_s=900)
        assert code == 0, output
        steps = [(step["step"], step["loss"], step["grad_norm"]) for step in read_metrics(run)]
        assert len(steps) == 10
        assert metrics.setdefault(schedule, steps) == steps
    # The same packs are a step, whichever ranks train their sequences.
    assert np.allclose(metrics["as_packed"], metrics["cost_balanced"], rtol=1e-5, atol=0)
