"""`harness sft MODEL CHATS`: one command from chats to a model, which continues where it was interrupted."""

from __future__ import annotations

import json
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from harness.cli import end_to_end
from harness.cli.end_to_end import plan_layout
from harness.config import compose_config
from harness.plan import SftConfig
from harness.prep import PrepareConfig
from harness.train import read_metrics
from tests.samples.chat_models import save_qwen3
from tests.samples.warm_python import warm_python

QUESTION, ANSWER = "What is {} + 2?", "It is {}."
SETTINGS = ["trainer.device=cpu", "optimizer.lr=1e-3", "data.validation_fraction=0.1", "data.pack_size=256"]
SETTINGS += ["data.num_workers=0"]  # each would import what the stage has


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """A folder with a small Qwen3 of random weights, one without weights, and 60 conversations."""
    folder = tmp_path_factory.mktemp("sft")
    save_qwen3(folder / "model", texts=[QUESTION, ANSWER])
    shutil.copytree(folder / "model", folder / "bare", ignore=shutil.ignore_patterns("*.safetensors"))
    chats = [
        [{"role": "user", "content": QUESTION.format(n)}, {"role": "assistant", "content": ANSWER.format(n + 2)}]
        for n in range(60)
    ]
    (folder / "chats.jsonl").write_text("".join(json.dumps({"messages": turns}) + "\n" for turns in chats))
    return folder


def command(folder: Path, out: Path, *settings: str) -> list[str]:
    arguments = [str(folder / "model"), str(folder / "chats.jsonl"), str(out), *SETTINGS, *settings]
    return [warm_python(), "-m", "harness", "sft", *arguments]


def run(*arguments: str) -> tuple[int, str]:
    done = subprocess.run(arguments, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False)
    return done.returncode, done.stdout


@pytest.mark.submission
def test_a_killed_command_continues_with_its_checkpoint_to_a_model_and_a_report_and_is_done_once(
    folder, tmp_path, monkeypatch, harness
) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    out = tmp_path / "out"
    line = command(folder, out, "trainer.steps=400", "trainer.checkpoint_interval=2", "trainer.keep_checkpoints=2")
    process = subprocess.Popen(
        [sys.executable, *line[1:]], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, start_new_session=True
    )
    while not list(out.glob("run/checkpoints/step-*/run.json")):
        assert process.poll() is None, process.stdout and process.stdout.read()
        time.sleep(0.05)
    process.send_signal(signal.SIGKILL)
    # Its stages get SIGTERM, checkpoint and end; the output closes with the last of them.
    process.stdout.read()
    process.wait()
    done = len(read_metrics(out / "run" / "metrics.jsonl"))
    assert done < 400

    again, model = command(folder, out, f"trainer.steps={done + 2}"), out / f"model-step-{done + 2}"
    code, printed = run(*again)
    assert code == 0, printed
    assert "already prepared" in printed
    assert "resuming after step" in printed
    assert [step.step for step in read_metrics(out / "run" / "metrics.jsonl")] == list(range(1, done + 3))
    assert sorted(path.name for path in out.iterdir()) == ["data", model.name, "report.md", "run"]
    modes = {path.stat().st_mode for path in out.rglob("*") if path.is_file() and path.name[0] != "."}
    assert modes == {(folder / "chats.jsonl").stat().st_mode}  # those of the umask
    end = AutoTokenizer.from_pretrained(model).convert_tokens_to_ids("<|im_end|>")
    assert AutoModelForCausalLM.from_pretrained(model).config.eos_token_id == end
    page = (out / "report.md").read_text()
    assert all(f"\nharness {name} " in page for name in ("prepare", "train", "export"))
    assert len(re.findall(r"^- validation loss: \d\.\d{4} to \d\.\d{4}$", page, re.MULTILINE)) == 1
    # Once it is done, the stages that have nothing to do say so themselves, and no model is exported.
    stages: list[str] = []
    monkeypatch.setattr(end_to_end, "run_command", lambda command: stages.append(command[3]))
    code, printed, _ = harness(*again[3:])
    assert (code, stages) == (0, ["prepare", "train"])
    assert f"{model} is already exported" in " ".join(printed.split())


@pytest.mark.parametrize(
    ("model", "arguments", "message", "fix"),
    [
        ("model", ["data.path=elsewhere"], "harness sft sets data.path itself", "the dataset is OUT/data"),
        ("model", ["source.mix=[]"], "harness sft sets source.mix itself", "CHATS itself may be source.mix=[...]"),
        ("model", ["resume=true"], "harness sft sets resume itself", "the run resumes by itself"),
        ("model", ["data.pack_sise=512"], "data.pack_sise", "did you mean data.pack_size"),
        ("model", ["--cfg"], "harness sft has no flag --cfg", "`train sft` take flags"),
        ("model", ["a", "b"], "a and b are given in the place of OUT", "one folder"),
        ("model", ["trainer.stepz=3"], "trainer.stepz", "did you mean trainer.steps"),
        ("model", ["source.limit=many"], "source.limit", "int"),
        ("bare", ["out"], "the folder has no *.safetensors", "save_pretrained"),
    ],
)
def test_a_mistake_in_any_stage_is_refused_before_the_first(
    folder, tmp_path, monkeypatch, harness, model, arguments, message, fix
) -> None:
    monkeypatch.chdir(tmp_path)
    code, printed, errors = harness("sft", folder / model, folder / "chats.jsonl", *arguments)
    assert (code, printed) == (2, "")
    assert message in errors
    assert fix in errors
    assert list(tmp_path.iterdir()) == []


def test_a_stage_that_fails_ends_the_command_with_its_message_and_code(folder, tmp_path) -> None:
    (tmp_path / "model").symlink_to(folder / "model")  # and no chats
    code, printed = run(*command(tmp_path, tmp_path / "out"))
    assert code == 2
    assert f"{tmp_path / 'chats.jsonl'}" in printed
    assert "`harness prepare` ended with 2; correct the error or choose another OUT" in printed
    assert not (tmp_path / "out" / "run").exists()


def test_a_layout_is_chosen_for_the_gpus_unless_one_is_named(folder, tmp_path, harness) -> None:
    chats, model = folder / "chats.jsonl", folder / "model"
    code, _, errors = harness(
        "prepare", f"source.path={chats}", f"tokenizer.name={model}", f"data.path={tmp_path / 'data'}", *SETTINGS[2:]
    )
    assert code == 0, errors
    settings = [f"model.init_from={model}", f"data.path={tmp_path / 'data'}", "parallel.ranks=4"]
    layout, planned = plan_layout(settings, [80 * 2**30] * 4)
    assert "parallel.distributed_optimizer=true" in layout
    assert "parallel.ranks=4" not in layout
    assert planned == ["plan", "sft", *settings, *layout, "gpu_gib=80.0"]
    named = [*settings, "parallel.tensor_parallel_size=2"]
    assert plan_layout(named, [80 * 2**30] * 4) == ([], ["plan", "sft", *named, "gpu_gib=80.0"])


def test_chats_may_be_a_mix_of_sources(folder, tmp_path) -> None:
    mix = "source.mix=[{path: nowhere.jsonl}]"
    code, printed = run(warm_python(), "-m", "harness", "sft", str(folder / "model"), mix, str(tmp_path / "out"))
    assert (code, printed.startswith(f"$ harness prepare '{mix}' ")) == (2, True)
    assert "where: nowhere.jsonl" in printed


@pytest.mark.parametrize("name", ["a (1)", "a, b", "k=v", "[a]", "it's", "é", "a\\", "{a: 1}", "a&b", '"a"'])
def test_names_with_characters_that_settings_give_a_meaning_are_names(folder, tmp_path, name) -> None:
    model, chats, out = (tmp_path / f"{kind}-{name}" for kind in ("model", "chats", "out"))
    model.symlink_to(folder / "model")
    preparing, training = end_to_end._divide(str(model), str(chats), out, [])
    prepare = compose_config("prepare", PrepareConfig, preparing)
    train = compose_config("sft", SftConfig, training)
    assert (prepare.source.path, prepare.tokenizer.name, prepare.data.path) == (
        str(chats),
        str(model),
        str(out / "data"),
    )
    assert (train.model.init_from, train.data.path, train.run_dir) == (str(model), str(out / "data"), str(out / "run"))


def test_a_model_of_another_run_is_not_taken_for_that_of_this_one(folder, tmp_path, monkeypatch, harness) -> None:
    stages: list[str] = []
    monkeypatch.setattr(end_to_end, "run_command", lambda command: stages.append(command[3]) or 7)
    (tmp_path / "out" / "model-step-7").mkdir(parents=True)
    code, _, errors = harness(*command(folder, tmp_path / "out", "trainer.steps=7")[3:])
    assert (code, stages) == (2, [])
    assert "the model of step 7 is not of the run, which has 0 steps" in errors
    (tmp_path / "out" / "model-step-7").rmdir()
    assert (harness(*command(folder, tmp_path / "out")[3:])[0], stages) == (7, ["prepare"])
