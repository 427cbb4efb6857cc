"""More conversations are masked as those of the dataset whose tokenizer they use."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path

import pytest

from harness.errors import FormatError
from harness.formats import load_manifest
from harness.loader import DataConfig, LiveConfig
from harness.loader.datasets import open_live
from harness.prep import ChatTokenizer, TokenizerConfig, as_prepared, prepare
from harness.prep.tokenize.bpe import train_bpe
from harness.storage import open_folder


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("made")
    chat = {"messages": [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello"}]}
    (folder / "chats.jsonl").write_text((json.dumps(chat) + "\n") * 20)
    settings = {"pack_size": 128, "num_workers": 0, "validation_fraction": 0.0}
    prepare(folder / "chats.jsonl", TokenizerConfig(vocab_size=280), folder / "data", **settings)
    return folder / "data"


@pytest.fixture
def data(made: Path, tmp_path: Path) -> Path:
    return shutil.copytree(made, tmp_path / "data")


def record(data: Path, config: TokenizerConfig, **changes: str) -> None:
    """Record how this config masks in the manifest of the training set."""
    tokenizer = ChatTokenizer(config, str(data / "tokenizer"))
    manifest = load_manifest(data / "train")
    assert manifest is not None
    origin = replace(manifest.provenance, mask={**tokenizer.mask_facts(), **changes})
    replace(manifest, provenance=origin).save(open_folder(data / "train"))


@pytest.mark.parametrize(
    "config",
    [
        TokenizerConfig(mask="all"),
        TokenizerConfig(mask="assistant_turns"),
        TokenizerConfig(mask="generation", train_on="last_turn"),
        TokenizerConfig(train_on="marked", history="kept", train_reasoning=False, train_end_of_turn=False),
    ],
)
def test_settings_at_their_defaults_are_those_of_the_dataset(data: Path, config: TokenizerConfig) -> None:
    record(data, config)
    found, dataset = as_prepared(TokenizerConfig(name=str(data / "tokenizer")))
    # The template has marks, and `auto` takes them.
    mask = "generation" if config.mask == "auto" else config.mask
    assert found == replace(config, name=str(data / "tokenizer"), mask=mask)
    assert dataset == data / "train"


def test_live_chunks_are_masked_as_the_dataset_of_their_tokenizer(data: Path, tmp_path: Path) -> None:
    record(data, TokenizerConfig(mask="all"))
    live = LiveConfig(path=str(tmp_path / "live"), tokenizer=TokenizerConfig(name=str(data / "tokenizer")))
    opened = open_live(DataConfig(live=live))
    assert opened.tokenizer is not None
    assert opened.tokenizer.mask_rule == "all"
    assert opened.describe().endswith(f", mask all as of {data / 'train'}")


def test_other_settings_tokenizers_and_datasets_without_a_record_change_nothing(data: Path, tmp_path: Path) -> None:
    named = TokenizerConfig(name=str(data / "tokenizer"))
    record(data, TokenizerConfig(mask="all"))
    for asked in ({"mask": "assistant_turns"}, {"train_on": "marked"}, {"chat_template": "chatml"}):
        assert as_prepared(replace(named, **asked)) == (replace(named, **asked), None)
    # Beside the same dataset, but not its tokenizer.
    train_bpe(["Hello"], data / "other", vocab_size=270)
    assert as_prepared(replace(named, name=str(data / "other")))[1] is None
    assert as_prepared(TokenizerConfig(name="org/name")) == (TokenizerConfig(name="org/name"), None)
    assert as_prepared(TokenizerConfig()) == (TokenizerConfig(), None)
    manifest = load_manifest(data / "train")
    assert manifest is not None
    replace(manifest, provenance=replace(manifest.provenance, mask={})).save(open_folder(data / "train"))
    assert as_prepared(named) == (named, None)


@pytest.mark.parametrize("changes", [{"train_on": "everything"}, {"untrained": "reasoning"}, {"untrained": "7"}])
def test_a_record_that_is_not_known_is_refused(data: Path, changes: dict[str, str]) -> None:
    record(data, TokenizerConfig(), **changes)
    with pytest.raises(FormatError, match="uses an unknown mask"):
        as_prepared(TokenizerConfig(name=str(data / "tokenizer")))
