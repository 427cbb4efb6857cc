"""Chats with an exported model."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path

import pytest
from chat_models import save_chat_model

from harness.errors import ConfigError
from harness.megatron.chat import Chat, exported
from harness.prep.tokenize.recorded import end_tokens


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_chat_model(tmp_path_factory.mktemp("model"), layers=2, positions=128, spread=0.5)


def test_the_most_likely_tokens_are_the_answer_every_time(model: Path, capsys) -> None:
    with exported(model) as folder:
        assert folder == model
    first = Chat(model, max_tokens=12)
    text = first.answer("jumps", live=True)
    assert text
    assert capsys.readouterr().out.strip() == text.strip()
    assert Chat(model, max_tokens=12).answer("jumps") == text
    # The conversation so far is part of the next question.
    assert first.answer("fox") != Chat(model, max_tokens=12).answer("fox")


@pytest.mark.parametrize("is_list", [True, False])
def test_an_answer_ends_at_every_token_that_the_folder_names(model: Path, tmp_path: Path, is_list: bool) -> None:
    chat = Chat(model, max_tokens=12)
    chat.answer("jumps")
    prompt = chat._tokenizer.apply_chat_template(chat._messages[:1], add_generation_prompt=True)
    answer = chat._tokenizer.apply_chat_template(chat._messages, tokenize=False).split("assistant\n")[1]
    tokens = chat._model.generate(
        **chat._tokenizer(chat._tokenizer.decode(prompt["input_ids"]), return_tensors="pt"),
        max_new_tokens=12,
        eos_token_id=None,
    )[0, len(prompt["input_ids"]) :].tolist()
    end = tokens[3]
    folder = tmp_path / "model"
    shutil.copytree(model, folder)
    settings = {"eos_token_id": [end, 277] if is_list else end, "pad_token_id": 0}
    (folder / "generation_config.json").write_text(json.dumps(settings))
    ended = Chat(folder, max_tokens=12)
    # The ends that the template writes count too.
    assert ended._ends["eos_token_id"] == sorted({*([277] if is_list else []), end, *end_tokens(ended._tokenizer)})
    text = ended.answer("jumps")
    assert answer.startswith(text)
    assert text == chat._tokenizer.decode(tokens[: tokens.index(end) + 1], skip_special_tokens=True)


def test_a_seed_determines_the_samples(model: Path) -> None:
    drawn = [Chat(model, max_tokens=12, temperature=1.0, seed=seed).answer("fox") for seed in (1, 1, 2)]
    assert drawn[0] == drawn[1] != drawn[2]


def test_old_turns_are_dropped_and_a_message_that_never_fits_is_refused(model: Path) -> None:
    chat = Chat(model, max_tokens=8)
    for _ in range(9):
        chat.answer("the lazy dog")
    assert 2 <= len(chat._messages) < 18
    with pytest.raises(ConfigError, match="tokens, but there is room for 120"):
        chat.answer("box " * 190)
    with pytest.raises(ConfigError, match="do not fit into 128 positions"):
        Chat(model, max_tokens=128)


def test_a_model_without_a_tokenizer_is_refused(model: Path, tmp_path: Path) -> None:
    for name in ("config.json", "model.safetensors"):
        (tmp_path / name).write_bytes((model / name).read_bytes())
    with pytest.raises(ConfigError, match="no tokenizer with a chat template"):
        Chat(tmp_path)
    with pytest.raises(ConfigError, match="not a run"), exported(tmp_path / "nothing"):
        pass


def test_weights_that_are_cut_short_are_refused_by_name(model: Path, tmp_path: Path) -> None:
    folder = tmp_path / "model"
    shutil.copytree(model, folder)
    os.truncate(folder / "model.safetensors", 500)
    with pytest.raises(ConfigError, match="the model cannot be loaded") as caught:
        Chat(folder)
    assert "harness verify" in caught.value.fix
