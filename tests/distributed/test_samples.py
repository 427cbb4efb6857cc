"""A model's answers at evaluations equal the text that transformers generates from the exported checkpoint."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from chat_models import VOCAB, save_chat_model
from transformers import AutoModelForCausalLM, AutoTokenizer

from harness.errors import ConfigError
from harness.formats import Provenance, open_writer
from harness.megatron.export.folder import export_checkpoint
from harness.plan.settings import SftConfig
from harness.prep import tokenizer_hash
from harness.prep.tokenize.recorded import end_tokens
from harness.recipes import sft
from harness.records import Pack

from .conftest import forked, overrides_of, run_command, run_here
from .test_weights import settings_of

PROMPTS = ["fox", "Pack my box with five dozen", "the lazy dog jumps over the quick brown fox"]
TOKENS = 10
SAMPLES = (
    *(f"trainer.sample_prompts={json.dumps(PROMPTS)}", f"trainer.sample_tokens={TOKENS}", "trainer.steps=3"),
    *("trainer.eval_interval=2", "optimizer.lr=0.01"),
)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_chat_model(tmp_path_factory.mktemp("model"), layers=4, positions=1024, spread=0.3)


@pytest.fixture(scope="module")
def data(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("data")
    rng = np.random.default_rng(0)
    provenance = Provenance(tokenizer_hash=tokenizer_hash(str(model)), counts={"vocab_size": VOCAB})
    with open_writer(folder, format="memmap", pack_size=64, provenance=provenance) as writer:
        for _ in range(18):
            writer.append(Pack(rng.integers(0, VOCAB, 40), np.r_[np.ones(39), 0].astype(np.uint8), [0]))
    return folder


def samples(run: Path) -> list[dict[str, object]]:
    return [json.loads(line) for line in (run / "samples.jsonl").read_text().splitlines()]


def of_transformers(folder: Path, prompt: str) -> list[int]:
    tokenizer, model = AutoTokenizer.from_pretrained(folder), AutoModelForCausalLM.from_pretrained(folder)
    turns = [{"role": "user", "content": prompt}]
    asked = tokenizer.apply_chat_template(turns, add_generation_prompt=True, return_dict=True, return_tensors="pt")
    ends = end_tokens(tokenizer)
    made = model.generate(**asked, do_sample=False, max_new_tokens=TOKENS, eos_token_id=ends, pad_token_id=0)
    answer = made[0, asked["input_ids"].shape[1] :].tolist()
    return answer[: next((at for at, token in enumerate(answer) if token in ends), len(answer))]


def train(model: Path, data: Path, folder: Path, *more: str, ranks: int = 1) -> list[dict[str, object]]:
    overrides = [*SAMPLES, f"data.tokenizer={model}", *settings_of(model), *more]
    if ranks == 1:
        run_here(sft, SftConfig, [*overrides_of(data, folder, *overrides)])
    else:
        code, output = run_command([*forked(ranks), "harness.recipes.sft", *overrides_of(data, folder, *overrides)])
        assert code == 0, output
        assert repr(PROMPTS[0]) in output
    return samples(folder)


@pytest.mark.submission
def test_answers_are_those_of_transformers_and_a_resumed_run_repeats_none(model, data, tmp_path, capsys) -> None:
    found = train(model, data, tmp_path / "run")
    assert [(line["step"], line["prompt"]) for line in found] == [
        (step, prompt) for step in (2, 3) for prompt in PROMPTS
    ]
    assert any(len(line["tokens"]) == TOKENS for line in found)
    assert [line["tokens"] for line in found[:3]] != [line["tokens"] for line in found[3:]]
    # Here the tokenizer is not beside the data of the run, but in `data.tokenizer`.
    assert export_checkpoint(tmp_path / "run", tmp_path / "out").has_tokenizer
    assert [line["tokens"] for line in found[3:]] == [of_transformers(tmp_path / "out", prompt) for prompt in PROMPTS]
    with (tmp_path / "run" / "samples.jsonl").open("a") as file:
        file.write(json.dumps({**found[0], "step": 4}) + "\n")  # of a step after the last checkpoint
    more = train(model, data, tmp_path / "run", "trainer.steps=4", "resume=true")
    assert [line["step"] for line in more] == [2] * 3 + [3] * 3 + [4] * 3
    assert more[:6] == found
    (tmp_path / "run" / "samples.jsonl").write_text("".join(json.dumps(line) + "\n" for line in more[3:]))
    capsys.readouterr()
    train(model, data, tmp_path / "run", "trainer.steps=5", "resume=true")
    assert "samples.jsonl has no records of 1 of the trained steps 2 to 2" in capsys.readouterr().out


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("parallel", "ranks", "more"),
    [
        ("tp2_sp", 2, ()),
        ("cp2", 2, ()),
        ("pp2_vpp2", 2, ("loader.global_batch_size=8",)),
        ("tp2_pp2", 4, ("parallel.static_rows=true",)),
    ],
)
def test_every_layout_gives_the_same_answers(model, data, tmp_path, parallel, ranks, more) -> None:
    expected = train(model, data, tmp_path / "one", *more)
    found = train(model, data, tmp_path / "other", f"parallel={parallel}", *more, ranks=ranks)
    assert found == expected


def test_prompts_that_cannot_be_answered_are_refused(model: Path, data: Path, tmp_path: Path) -> None:
    def refused(*overrides: str) -> str:
        with pytest.raises(ConfigError) as error:
            run_here(sft, SftConfig, overrides_of(data, tmp_path / "run", *SAMPLES, *settings_of(model), *overrides))
        return error.value.what

    assert "the data does not specify one" in refused()
    assert "are longer than the model's" in refused(f"data.tokenizer={model}", "trainer.sample_tokens=1020")
