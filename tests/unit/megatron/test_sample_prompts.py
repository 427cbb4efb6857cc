"""Sample prompts are answered with the tokenizer of the data, whatever rule made its mask."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
from stock_templates import tokenizer_for

from harness.errors import ConfigError
from harness.formats import load_manifest
from harness.loader import DataConfig, open_datasets
from harness.loader.datasets import BlendSource
from harness.megatron.run.sampling import find_tokenizer, generate
from harness.plan import ModelConfig
from harness.plan.settings import SftConfig, TrainerConfig
from harness.prep import PrepareConfig, TokenizerConfig, prepare
from harness.prep.packing import PackingConfig
from harness.prep.sources.config import SourceConfig
from harness.storage import open_folder

from .conftest import one_rank

# Without generation marks, as most published templates.
PLAIN = (
    "{% for m in messages %}<|{{ m['role'] }}|>{{ m['content'] }}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}{# <|user|> <|assistant|> #}"
)
MARKED = PLAIN.replace("{{ m['content'] }}<|end|>", "{% generation %}{{ m['content'] }}<|end|>{% endgeneration %}")


def prepared(folder: Path, *, mask: str, template: str) -> Path:
    chats = folder / "chats.jsonl"
    turns = [[("user", f"What is {n} + 1?"), ("assistant", str(n + 1))] for n in range(60)]
    lines = [{"messages": [{"role": role, "content": text} for role, text in chat]} for chat in turns]
    folder.mkdir(exist_ok=True)
    chats.write_text("".join(json.dumps(line) + "\n" for line in lines))
    prepare(
        PrepareConfig(
            source=SourceConfig(kind="files", path=str(chats)),
            tokenizer=TokenizerConfig(name=str(tokenizer_for(template, folder / "own")), mask=mask),
            data=PackingConfig(path=str(folder / "data"), pack_size=128, num_workers=0),
        )
    )
    return folder / "data"


def found(*paths: Path) -> tuple[str, set[str]]:
    """Return the text of the prompt, and the texts of the tokens that end an answer."""
    data = DataConfig(path=str(paths[0])) if len(paths) == 1 else DataConfig(blend=[BlendSource(str(p)) for p in paths])
    config = SftConfig(data=data, trainer=TrainerConfig(sample_prompts=["Hi"], sample_tokens=8))
    tokenizer, ends = find_tokenizer(config, open_datasets(data))
    return tokenizer.decode(tokenizer.prompt({"role": "user", "content": "Hi"})), {
        tokenizer.decode([token]) for token in ends
    }


@pytest.mark.parametrize(("mask", "template"), [("generation", MARKED), ("assistant_turns", PLAIN), ("all", PLAIN)])
def test_the_prompt_is_that_of_the_template_under_every_rule(tmp_path: Path, mask: str, template: str) -> None:
    path = prepared(tmp_path, mask=mask, template=template)
    assert found(path) == ("<|user|>Hi<|end|><|assistant|>", {"<|end|>", "</s>"})


def record(dataset: Path, *ends: str) -> None:
    """Record these end tokens in a dataset's manifest."""
    manifest = load_manifest(dataset)
    assert manifest is not None
    facts = replace(manifest.provenance, mask={"rule": "generation", "end_tokens": json.dumps(ends)})
    replace(manifest, provenance=facts).save(open_folder(dataset))


def test_an_answer_ends_at_the_tokens_that_the_datasets_record(tmp_path: Path) -> None:
    first = prepared(tmp_path / "a", mask="all", template=PLAIN)
    second = prepared(tmp_path / "b", mask="all", template=PLAIN)
    record(first / "train", "<|user|>")
    assert found(first)[1] == {"<|user|>", "</s>"}
    record(second / "train", "<|end|>")
    assert found(first, second)[1] == {"<|user|>", "<|end|>", "</s>"}


def test_prompts_are_answered_alike_whether_rows_are_padded_to_less_than_all_of_them_or_to_more() -> None:
    model, answers = ModelConfig(num_layers=1, hidden_size=16, ffn_hidden_size=16, init_std=0.3), []
    for size in (None, 16, 64):
        with one_rank(model, vocab_size=32, pad_rows_to=size) as step:
            answers.append(generate(step, [[1, 2, 3] * 4, [5] * 9], max_tokens=3, ends=()))
    assert [len(answer) for answer in answers[0]] == [3, 3]
    assert answers[1:] == answers[:1] * 2


def test_a_prompt_with_tokens_that_the_model_has_not_is_refused_before_the_run(tmp_path: Path) -> None:
    data = DataConfig(path=str(prepared(tmp_path, mask="all", template=PLAIN)))
    trainer = TrainerConfig(sample_prompts=["Hi"], sample_tokens=8)
    config = SftConfig(data=data, trainer=trainer, model=ModelConfig(vocab_size=40))
    with pytest.raises(ConfigError, match=r"a sample prompt contains token \d+, but the model has 40 tokens"):
        find_tokenizer(config, open_datasets(data))
